"""Twenty-four prompts that have little in common."""

from __future__ import annotations

import inspect
import textwrap

__all__ = ["PROMPTS"]

_CODE = inspect.getsource(textwrap)
_LICENCE = (
    "Permission is hereby granted, free of charge, to any person obtaining a copy of this software "
    "and associated documentation files, to deal in the software without restriction, including "
    "without limitation the rights to use, copy, modify, merge, publish and distribute. "
)

PROMPTS: tuple[str, ...] = (
    "Hello",
    "The capital of France is",
    "1, 1, 2, 3, 5, 8, 13,",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):\n    ",
    "Q: What is the boiling point of water at sea level?\nA:",
    "Translate to French: The weather is nice today.\n",
    "SELECT name, COUNT(*) FROM users WHERE",
    "Die Würde des Menschen ist",
    "人工智能是",
    "🎉 Congratulations 🎉 on your",
    "    \t\n\n  indented and odd   whitespace",
    "The quick brown fox jumps over the lazy dog. " * 6,
    '{"name": "Ada", "age": 36, "languages": ["',
    "<html>\n<head>\n<title>",
    "Dear Sir or Madam,\n\nI am writing to",
    "E = mc^2 means that",
    "List three primary colours:\n1.",
    "AAAAAAAAAAAAAAAAAAAAAAAA",
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nYou are terse.<|im_end|>\n"
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n"
    "<|im_start|>assistant\n",
    _LICENCE * 3,
    _CODE[:2400],
    "Summarise the following text.\n\n" + _CODE[2400:5000] + "\n\nSummary:",
)
