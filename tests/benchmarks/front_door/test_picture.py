"""README's moving picture: each piece of an answer at its time."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.front_door.picture import PICTURE, QUESTION, Lane, Piece, drawing

README = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
SVG = "{http://www.w3.org/2000/svg}"


def shown(picture: str) -> list[tuple[str, str, float]]:
    """The kind of each text, the text, and the part of a round at which it appears."""
    return [
        (
            each.attrib["class"],
            each.text or "",
            float(each.find(f"{SVG}animate").attrib["keyTimes"].split(";")[1]),  # type: ignore[union-attr]
        )
        for each in ElementTree.fromstring(picture).iter(f"{SVG}text")
    ]


def test_pieces_appear_when_they_came() -> None:
    lanes = [
        Lane("first", 0.0, [Piece(0.5, "a <b>"), Piece(0.501, " & c"), Piece(1.4, "d " * 300)]),
        Lane("second", 0.7, [Piece(1.0, "one\ntwo")]),
    ]
    found = shown(drawing(lanes))
    assert [each[:2] for each in found] == [
        ("l", "first"), ("a", "a <b> & c"), ("a", "d " * 300), ("l", "second"), ("a", "one two"),
    ]  # fmt: skip
    begins, half, last, asked, one = (each[2] for each in found)
    assert begins < half < asked < one < last < 1
    assert half / one == pytest.approx(0.5, rel=1e-3) and asked / one == pytest.approx(
        0.7, rel=1e-3
    )


def test_the_picture_of_the_readme_is_a_question_that_was_answered_well() -> None:
    assert f"]({PICTURE.relative_to(PICTURE.parents[2])})" in README and QUESTION in README
    picture = PICTURE.read_text(encoding="utf-8")
    assert len(picture) < 30_000
    found = shown(picture)
    (asked,) = (number for number, each in enumerate(found) if each[1].endswith(QUESTION))
    answer = found[asked + 1 :]
    assert "Paris" in "".join(text for _, text, _ in answer)
    assert all(when > found[asked][2] for _, _, when in answer)
    # jobs of the class batch were under way, and ended later than it
    assert answer[-1][2] < max(when for _, _, when in found[:asked])
    assert len(re.findall('class="l"', picture)) == 4
