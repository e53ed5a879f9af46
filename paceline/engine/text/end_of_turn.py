"""Texts that end a model's answer, even if its file does not mark their tokens.

A GGUF names one end of sequence, and often types the token that ends a turn as plain text. So the
texts that are known to end turns count as ends, as in llama.cpp, and so does the token that the
chat template writes after an assistant's message.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any, Final

from paceline.checkpoints.gguf.tokenizer import CONTROL, USER_DEFINED
from paceline.errors import InvalidRequestError, RequestFailedError

__all__ = ["end_texts", "harmony_ends", "has_marks", "kinds_of", "turn_end"]

# the texts that llama.cpp (src/llama-vocab.cpp) takes for ends of generation, and <|end_of_text|>
_KNOWN: Final = frozenset(
    {
        "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>",
        "<|end_of_text|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "</s>", "<EOT>",
        "_<EOT>", "[EOT]", "[EOS]", "<eos>", "<turn|>", "<|tool_response>", "<end_of_utterance>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
    }
)  # fmt: skip
# if all of a group are tokens, the text ends a message, and the answer goes on
_ENDS_A_MESSAGE: Final = (
    ({"<|return|>", "<|call|>", "<|end|>"}, "<|end|>"),
    ({"<|calls|>", "<|flush|>", "<|end|>"}, "<|end|>"),
    ({"<|tool_response>", "</s>"}, "</s>"),
)
_HARMONY: Final = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>", "<|end|>")
# form of the marks of turns
_MARK: Final = re.compile(r"<[^<>\n]{1,64}>|\[[^\[\]\n]{1,64}\]")
_PROBES: Final = ("Qxaz", "Qxbz", "Qxcz")


def end_texts(tokens: Collection[str], named: Collection[str]) -> frozenset[str]:
    """Return the texts of a vocabulary that end an answer.

    Args:
        named: the ends that the file names, and the one with which the chat template ends a turn.
    """
    ends = _KNOWN.intersection(tokens) | set(named)
    return frozenset(ends - {end for group, end in _ENDS_A_MESSAGE if ends >= group})


def harmony_ends(find: Callable[[str], int | None]) -> tuple[frozenset[int], frozenset[int]]:
    """Return the ids that end an answer, and those that only end a message, of a vocabulary that
    marks messages as gpt-oss does; none for others. ``find`` returns a token's id."""
    ids = [find(text) for text in ("<|return|>", "<|call|>", "<|end|>", "<|channel|>")]
    if None in ids:
        return frozenset(), frozenset()
    ends, call, message, _ = (token_id for token_id in ids if token_id is not None)
    return frozenset({ends, call}), frozenset({message})


def kinds_of(ends: Collection[str], tokens: Collection[str]) -> dict[str, int]:
    """Return types of GGUF tokens that override the file's: ends are control tokens; harmony's
    marks in prompts are single tokens."""
    kinds = dict.fromkeys(ends, CONTROL)
    if "<|end|>" in tokens and {"<|return|>", "<|call|>"} <= set(ends):
        kinds |= dict.fromkeys((mark for mark in _HARMONY if mark in tokens), USER_DEFINED)
    return kinds


def has_marks(source: str, tokens: Collection[str]) -> bool:
    """Return whether a chat template writes tokens of which one could end a turn."""
    marks = set(_MARK.findall(source))
    # a mark that is put together from parts may be any
    made = any(char in mark for mark in marks for char in "{'\"")
    return made or not marks.intersection(tokens) <= _KNOWN


def turn_end(render: Callable[[list[dict[str, Any]]], str], tokens: Collection[str]) -> str | None:
    """Return the token that the chat template writes after an assistant's message; None: it writes
    none, or refuses a plain conversation."""
    roles = ("user", "assistant", "user")
    try:
        text = render([{"role": r, "content": c} for r, c in zip(roles, _PROBES, strict=True)])
    except (InvalidRequestError, RequestFailedError):
        return None
    _, answer, again = _PROBES
    found = _MARK.match(text.partition(answer)[2].partition(again)[0].lstrip())
    return found[0] if found is not None and found[0] in tokens else None
