from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError, InvalidRequestError
from paceline.quantize import text
from paceline.quantize.text import CHAT, FILE_LENGTH, LENGTH, TOKENS, calibration_windows


class Characters:
    """A tokenizer whose tokens are characters."""

    def __init__(self, template: bool = True) -> None:
        self._template = template

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) for character in text]

    def render_chat(
        self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        if not self._template:
            raise InvalidRequestError("no chat template")
        assert not add_generation_prompt
        return "".join(f"<{message['role']}>{message['content']}" for message in messages)


def as_text(choice: str, tokenizer: Characters, length: int = LENGTH) -> list[str]:
    windows = calibration_windows(tokenizer, choice)
    assert windows.shape == (TOKENS // length, length)
    return ["".join(map(chr, window)) for window in windows.tolist()]


def test_pieces_are_spread_over_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    whole = "".join(f"{index:06} " for index in range(4 * TOKENS // 7))
    path.write_text(whole)
    pieces = as_text(str(path), Characters(), FILE_LENGTH)
    starts = [whole.index(piece) for piece in pieces]
    assert starts[0] == 0 and starts[-1] == len(whole) - FILE_LENGTH
    steps = {after - before for before, after in pairwise(starts)}
    assert max(steps) - min(steps) <= 1


def test_half_of_the_own_text_begins_with_conversations() -> None:
    pieces = as_text(CHAT, Characters())
    half = len(pieces) // 2
    assert all(piece.startswith(("<user>", "<system>")) for piece in pieces[:half])
    assert len(set(pieces)) == len(pieces)
    prose, code = pieces[half : 3 * half // 2], pieces[3 * half // 2 :]
    assert "def " in "".join(code) and "def " not in "".join(prose)
    # without a template the conversations are there too
    assert "<user>" not in "".join(as_text(CHAT, Characters(template=False)))


def test_short_conversations_are_followed_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    said = [f"question {index}?" for index in range(40)]
    monkeypatch.setattr(text, "_conversations", lambda tokenizer: iter(said))
    assert as_text(CHAT, Characters())[0] == "".join(said)[:LENGTH]
    # the last ones are followed by the first
    assert "question 39?question 0?" in "".join(as_text(CHAT, Characters()))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"too short", rf"has 9 tokens, at least {TOKENS} are needed"),
        (b"\xff\xfe", "cannot be read"),
        (None, r"cannot be read: .*No such file"),
    ],
)
def test_a_text_that_does_not_do(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "own.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        calibration_windows(Characters(), str(path))
