"""The calibration text: what runs through a model while its weights are rounded.

The text of the package is chat, prose and code in equal parts, some 110 kB. Chat goes through the
model's own template, so that the tokens between turns, which decide how an answer begins, are seen
where a served model sees them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from paceline.errors import ConfigError, InvalidRequestError

__all__ = ["CHAT", "LENGTH", "WINDOWS", "Reader", "calibration_windows", "own_text"]

# the choice that stands for the package's own text
CHAT: Final = "chat"
# tokens that see each other, and how many such pieces of the text are taken
LENGTH: Final = 512
WINDOWS: Final = 24
_FOLDER: Final = Path(__file__).with_name("calibration")


class Reader(Protocol):
    """The part of the model's tokenizer, ``engine.text.tokenizer.HFTokenizer``, that is used."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def render_chat(
        self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True
    ) -> str: ...


def calibration_windows(tokenizer: Reader, choice: str) -> torch.Tensor:
    """Return WINDOWS pieces of a text, spread evenly over it: token ids [WINDOWS, LENGTH].

    Args:
        choice: CHAT, or the path of a text file in UTF-8.

    Raises ConfigError for a file that cannot be read or has too few tokens.
    """
    tokens = _chat_tokens(tokenizer) if choice == CHAT else tokenizer.encode(_read(Path(choice)))
    needed = WINDOWS * LENGTH
    if len(tokens) < needed:
        raise ConfigError(
            f"the calibration text has {len(tokens)} tokens, at least {needed} are needed: "
            f"{WINDOWS} pieces of {LENGTH}"
        )
    between = (len(tokens) - LENGTH) // (WINDOWS - 1)
    return torch.tensor([tokens[i * between : i * between + LENGTH] for i in range(WINDOWS)])


def own_text() -> str:
    """Return the package's text without a template: prose, code, and chat as it is stored."""
    return "\n\n".join(_read(_FOLDER / name) for name in ("prose.txt", "code.txt", "chat.jsonl"))


def _chat_tokens(tokenizer: Reader) -> list[int]:
    pieces = [list(_conversations(tokenizer)), *(_paragraphs(f) for f in ("prose.txt", "code.txt"))]
    # all three kinds in every part of the text, so that evenly spread pieces have all
    texts: list[str] = []
    longest = max(len(part) for part in pieces)
    for index in range(longest):
        for part in pieces:
            texts += part[index * len(part) // longest : (index + 1) * len(part) // longest]
    return [token for text in texts for token in tokenizer.encode(text, add_special_tokens=False)]


def _conversations(tokenizer: Reader) -> Iterator[str]:
    for line in _read(_FOLDER / "chat.jsonl").splitlines():
        messages = json.loads(line)["messages"]
        try:
            yield tokenizer.render_chat(messages, add_generation_prompt=False) + "\n"
        except InvalidRequestError:
            # a base model has no template, and some templates refuse a system message
            yield "\n\n".join(message["content"] for message in messages) + "\n\n"


def _paragraphs(name: str) -> list[str]:
    return [f"{piece}\n\n" for piece in _read(_FOLDER / name).split("\n\n")]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the calibration text cannot be read: {error}") from None
