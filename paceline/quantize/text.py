"""The calibration text: what runs through a model while its weights are rounded.

The text of the package is chat, prose and code, some 110 kB. Chat goes through the model's own
template, and pieces of it begin where conversations do: the tokens before an answer, which decide
how it begins, then stand where a served model sees them, behind the template's first token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from paceline.errors import ConfigError, InvalidRequestError

__all__ = ["CHAT", "FILE_LENGTH", "LENGTH", "TOKENS", "Reader", "calibration_windows", "own_text"]

# the choice that stands for the package's own text
CHAT: Final = "chat"
# tokens that see each other, in the package's text and in a file, and how many are taken of either
LENGTH: Final = 128
FILE_LENGTH: Final = 512
TOKENS: Final = 16_384
_FOLDER: Final = Path(__file__).with_name("calibration")


class Reader(Protocol):
    """The part of the model's tokenizer, ``engine.text.tokenizer.HFTokenizer``, that is used."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def render_chat(
        self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True
    ) -> str: ...


def calibration_windows(tokenizer: Reader, choice: str) -> torch.Tensor:
    """Return TOKENS tokens of a text, in pieces that are spread evenly over it: [pieces, length].

    Half of the pieces of the package's own text begin with a conversation, a quarter each is prose
    and code.

    Args:
        choice: CHAT, or the path of a text file in UTF-8.

    Raises ConfigError for a file that cannot be read or has too few tokens.
    """
    if choice != CHAT:
        tokens = tokenizer.encode(_read(Path(choice)))
        return torch.tensor(_spread(tokens, TOKENS // FILE_LENGTH, FILE_LENGTH))
    count = TOKENS // LENGTH // 4
    pieces = _begun(tokenizer, 2 * count)
    for name in ("prose.txt", "code.txt"):
        tokens = tokenizer.encode(_read(_FOLDER / name), add_special_tokens=False)
        pieces += _spread(tokens, count, LENGTH)
    return torch.tensor(pieces)


def own_text() -> str:
    """Return the package's text without a template: prose, code, and chat as it is stored."""
    return "\n\n".join(_read(_FOLDER / name) for name in ("prose.txt", "code.txt", "chat.jsonl"))


def _spread(tokens: Sequence[int], count: int, length: int) -> list[Sequence[int]]:
    """Return pieces of a text. Raises ConfigError where it is too short for as many."""
    if len(tokens) < count * length:
        raise ConfigError(
            f"the calibration text has {len(tokens)} tokens, at least {count * length} are needed: "
            f"{count} pieces of {length}"
        )
    between = (len(tokens) - length) / (count - 1)
    starts = [int(index * between) for index in range(count)]
    return [tokens[start : start + length] for start in starts]


def _begun(tokenizer: Reader, count: int) -> list[Sequence[int]]:
    """Return pieces that begin with a conversation, the following ones behind it."""
    chats = [tokenizer.encode(text, add_special_tokens=False) for text in _conversations(tokenizer)]
    pieces: list[Sequence[int]] = []
    for index in range(count):
        first, piece = index * len(chats) // count, list[int]()
        while len(piece) < LENGTH:
            piece += chats[first % len(chats)]
            first += 1
        pieces.append(piece[:LENGTH])
    return pieces


def _conversations(tokenizer: Reader) -> Iterator[str]:
    for line in _read(_FOLDER / "chat.jsonl").splitlines():
        messages = json.loads(line)["messages"]
        try:
            yield tokenizer.render_chat(messages, add_generation_prompt=False) + "\n"
        except InvalidRequestError:
            # a base model has no template, and some templates refuse a system message
            yield "\n\n".join(message["content"] for message in messages) + "\n\n"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the calibration text cannot be read: {error}") from None
