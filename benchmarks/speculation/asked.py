"""Options from the environment: the model, turns, lengths and prompts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from paceline.checkpoints.hub.resolve import find_local

Entry = dict[str, Any]

QUICK = bool(os.environ.get("QUICK"))
TURNS = int(os.environ.get("TURNS") or (1 if QUICK else 3))
TOKENS = int(os.environ.get("TOKENS") or (48 if QUICK else 96))
MODEL = os.environ.get("MODEL", "")
DTYPE = os.environ.get("DTYPE", "auto")
SPECULATION = {"method": "auto"}
_CODE = """def area(width, height):
    result = width * height
    return result

def volume(width, height, depth):
    result = width * height * depth
    return result
"""
_NOTE = (
    "Order 4417 from Lindholm Marine: 12 brass valves at 8.50 each, 3 hoses at 21.00 each, to be "
    "sent to Pier 9, Harbour Road, by Friday. Contact: Mara Olsen, 555-0142."
)
GROUPS: dict[str, list[str]] = {
    "code_edit": [
        f"Rename the variable result to total and print the whole file again.\n\n{_CODE}",
        f"Add a type hint int to each argument and print the whole file again.\n\n{_CODE}",
    ],
    "extraction": [
        f"List every item, price and address in this note, word for word.\n\n{_NOTE}",
        f"Copy the sentence that names the contact, then the order number.\n\n{_NOTE}",
    ],
    "rewrite": [
        f"Correct the style of this note and keep all facts.\n\n{_NOTE}",
        f"Write this note as a polite letter.\n\n{_NOTE}",
    ],
    "open_chat": [
        "Why is the sea salty?",
        "Tell me a short story about a lighthouse.",
    ],
}


def model_path() -> Path:
    """Return the model's path. Raises SystemExit if there is none."""
    path = Path(MODEL) if MODEL else find_local("smollm2-135m")
    if path is None:
        raise SystemExit("no model: run make model, or set MODEL")
    return path


def prompt_groups() -> dict[str, list[str]]:
    """Return groups of prompts, from the file that ``PROMPTS`` names if it is set."""
    file = os.environ.get("PROMPTS")
    if not file:
        return GROUPS
    groups: dict[str, list[str]] = json.loads(Path(file).read_text(encoding="utf-8-sig"))
    return groups
