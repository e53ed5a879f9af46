"""Lines in, records out."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from paceline.server.batches.answering import URLS
from paceline.server.batches.lines import BatchLine, bounded_lines, find_faults, read_lines


def parse(*lines: Any, **limits: int) -> list[BatchLine]:
    raw = (x if isinstance(x, bytes) else json.dumps(x).encode() + b"\n" for x in lines)
    return list(read_lines(raw, URLS, **limits))


def test_the_three_forms() -> None:
    body = {"model": "m", "messages": []}
    prompt, messages, openai = parse(
        {"prompt": "a", "max_tokens": 3},
        {"messages": [{"role": "user", "content": "b"}], "custom_id": "x"},
        {"custom_id": "y", "method": "POST", "url": "/v1/chat/completions", "body": body},
    )
    assert (prompt.url, prompt.body) == ("/v1/completions", {"prompt": "a", "max_tokens": 3})
    assert messages.url == "/v1/chat/completions"
    assert "custom_id" not in messages.body
    assert (messages.custom_id, openai.custom_id) == ("x", "y")
    assert openai.body == body
    assert (prompt.is_openai, messages.is_openai, openai.is_openai) == (False, False, True)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{", "not valid JSON"),
        (b"[" * 100_000, "nested deeper"),
        (b"\xff\xfe", "not valid JSON"),
        ([1], "must be a JSON object, got list"),
        ({}, "exactly one of"),
        ({"prompt": "a", "messages": []}, "exactly one of"),
        (
            {"prompt": "a", "custom_id": 3},
            "up to 512 characters, got 3",
        ),
        ({"prompt": "a", "stream": True}, "stream"),
        ({"custom_id": "a", "url": "/v1/moderations", "body": {}}, "/v1/moderations"),
        ({"custom_id": "a", "url": "/v1/completions", "method": "GET", "body": {}}, "GET"),
        ({"custom_id": "a", "url": "/v1/completions", "body": []}, "body must be an object"),
    ],
)
def test_a_bad_line_is_an_error_of_its_own(line: Any, words: str) -> None:
    good, bad, after = parse({"prompt": "a"}, line, {"prompt": "b"})
    assert good.error is None and after.error is None
    assert bad.index == 1
    assert bad.error is not None and words in bad.error


def test_blank_lines_count_but_say_nothing() -> None:
    lines = parse(b"\n", {"prompt": "a"}, b"  \n", {"prompt": "b"})
    assert [line.index for line in lines] == [1, 3]


def test_a_custom_id_belongs_to_the_first_line_that_has_it() -> None:
    first, second = parse({"prompt": "a", "custom_id": "x"}, {"prompt": "b", "custom_id": "x"})
    assert first.error is None
    assert second.error == "custom_id 'x' is already that of line 1"
    assert second.key != first.key


def test_equal_lines_are_different_requests() -> None:
    first, second = parse({"prompt": "a"}, {"prompt": "a"})
    assert first.key != second.key


def test_a_bad_line_keeps_its_id_unless_it_is_anothers() -> None:
    bad, twin = parse({"custom_id": "x"}, {"custom_id": "x", "prompt": "a"})
    assert (bad.custom_id, bad.code) == ("x", "invalid_line")
    assert (twin.custom_id, twin.code) == (None, "duplicate_custom_id")


def test_no_line_is_read_whole_that_is_too_long() -> None:
    file = io.BytesIO(b"short\n" + b"x" * 1000 + b"\n" + b"last")
    assert list(bounded_lines(file, 100)) == [b"short\n", b"x" * 101, b"last"]
    exact = io.BytesIO(b"x" * 100 + b"\n" + b"y" * 100)
    assert list(bounded_lines(exact, 100)) == [b"x" * 100 + b"\n", b"y" * 100]
    good = {"prompt": "a" * 50}
    (long, after) = parse(b'{"prompt": "%b"}' % (b"a" * 200), good, max_bytes=100)
    assert long.code == "line_too_long" and "100 bytes" in str(long.error)
    assert after.error is None


def openai(number: int, **changes: Any) -> dict[str, Any]:
    line = {"custom_id": f"{number}", "method": "POST", "url": URLS[0], "body": {}}
    return {key: value for key, value in {**line, **changes}.items() if value is not None}


@pytest.mark.parametrize(
    ("lines", "codes"),
    [
        ([openai(0), openai(1)], []),
        ([], ["empty_file"]),
        ([openai(0), openai(1), openai(2), openai(3)], ["too_many_requests"]),
        ([openai(0), openai(0)], ["duplicate_custom_id"]),
        ([openai(0, custom_id=None)], ["missing_required_parameter"]),
        ([{"prompt": "a"}], ["missing_required_parameter"]),
        ([openai(0, url=URLS[1])], ["mismatched_url"]),
        ([openai(0, url="/v1/moderations")], ["invalid_url"]),
        ([b"{", openai(1, body={"stream": True})], ["invalid_json_line", "invalid_body"]),
    ],
)
def test_faults_of_a_file(lines: list[Any], codes: list[str]) -> None:
    count, faults = find_faults(parse(*lines), URLS[0], 3)
    assert [fault["code"] for fault in faults] == codes
    assert count == len(lines)
    if codes == ["invalid_json_line", "invalid_body"]:
        assert [fault["line"] for fault in faults] == [1, 2]


def test_a_hundred_faults_are_enough() -> None:
    _, faults = find_faults(parse(*[b"{"] * 500), URLS[0], 1000)
    assert len(faults) == 100
