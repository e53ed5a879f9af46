from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError, InvalidRequestError
from paceline.quantize.text import CHAT, LENGTH, WINDOWS, calibration_windows


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


def as_text(choice: str, tokenizer: Characters) -> list[str]:
    windows = calibration_windows(tokenizer, choice)
    assert windows.shape == (WINDOWS, LENGTH)
    return ["".join(map(chr, window)) for window in windows.tolist()]


def test_pieces_are_spread_over_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    text = "".join(f"{index:06} " for index in range(4 * WINDOWS * LENGTH // 7))
    path.write_text(text)
    pieces = as_text(str(path), Characters())
    assert pieces[0] == text[:LENGTH]
    starts = [text.index(piece) for piece in pieces]
    steps = {after - before for before, after in pairwise(starts)}
    assert steps == {(len(text) - LENGTH) // (WINDOWS - 1)}


def test_own_text_has_chat_prose_and_code_in_every_part() -> None:
    pieces = as_text(CHAT, Characters())
    for third in (pieces[:8], pieces[8:16], pieces[16:]):
        joined = "".join(third)
        assert "<assistant>" in joined and "def " in joined
    # without a template the conversations are there too
    assert "<assistant>" not in "".join(as_text(CHAT, Characters(template=False)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"too short", rf"has 9 tokens, at least {WINDOWS * LENGTH} are needed"),
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
