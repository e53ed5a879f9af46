"""``prediction`` in chat: the same answer in fewer steps, and a usage that says what came of it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from paceline.backends.reference.null import NullBackend
from paceline.engine.testing import null_client
from paceline.server import ServerConfig, create_app
from tests.server.helpers import VOCAB, chat_body, connect, events, metric, scrape

CHAT = "/v1/chat/completions"
OFF = {"method": "off"}
# lower-case letters, so that text and tokens are the same
LETTERS = {"allowed_token_ids": list(range(97, 123)), "max_tokens": 60, "ignore_eos": True}
FORM = {"structured_outputs": {"regex": "[a-z]{60}"}, "max_tokens": 60}


def _client(config: dict[str, Any] | None = None) -> httpx.AsyncClient:
    backend = NullBackend(vocab_size=VOCAB, max_model_len=512)
    client = null_client(backend, pipeline_depth=2, speculative_config=config)
    return connect(create_app(client, ServerConfig()))


async def _ask(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await http.post(CHAT, json=chat_body("edit this", **fields))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def _said(answer: dict[str, Any]) -> list[str]:
    return [choice["message"]["content"] for choice in answer["choices"]]


def _expect(content: Any) -> dict[str, Any]:
    return {"prediction": {"type": "content", "content": content}}


@pytest.mark.parametrize("fields", [LETTERS, FORM], ids=["plain", "grammar"])
async def test_the_answer_is_the_same_and_the_usage_tells_what_was_right(
    fields: dict[str, Any],
) -> None:
    async with _client() as http:
        plain = await _ask(http, **fields)
        (text,) = _said(plain)
        assert len(text) == 60
        assert "completion_tokens_details" not in plain["usage"]
        # one letter that is another, and a tail that never comes
        guess = text[:30] + "*" + text[31:] + "more"
        answer = await _ask(http, **fields, **_expect(guess), explain=True)
        assert _said(answer) == [text]
        assert answer["usage"]["completion_tokens"] == 60
        details = answer["usage"]["completion_tokens_details"]
        assert set(details) == {"accepted_prediction_tokens", "rejected_prediction_tokens"}
        assert 40 <= details["accepted_prediction_tokens"] < 60
        assert 1 <= details["rejected_prediction_tokens"] <= 12
        (told,) = answer["usage"]["timeline"]
        counts = told["speculation"]["prediction"]
        assert counts["accepted_tokens"] == details["accepted_prediction_tokens"]
        wrong = counts["verified_tokens"] - counts["accepted_tokens"]
        assert wrong == details["rejected_prediction_tokens"]
        text_of_metrics = await scrape(http)
        for name, count in (
            ("vllm:spec_decode_num_accepted_tokens_total", counts["accepted_tokens"]),
            ("vllm:spec_decode_num_accepted_tokens_per_pos_total", counts["accepted_tokens"]),
            ("paceline:spec_decode_draft_tokens_total", counts["verified_tokens"]),
            ("paceline:spec_decode_accepted_tokens_total", counts["accepted_tokens"]),
        ):
            assert metric(text_of_metrics, name) == count, name


async def test_parts_streams_and_several_choices() -> None:
    async with _client() as http:
        plain = await _ask(http, **LETTERS, n=2)
        text = _said(plain)[0]
        parts = [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}]
        both = await _ask(http, **LETTERS, n=2, **_expect(parts))
        assert _said(both) == _said(plain)
        details = both["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] > 80
        stream = chat_body("edit this", **LETTERS, **_expect(parts), stream=True)
        stream["stream_options"] = {"include_usage": True}
        found = events((await http.post(CHAT, json=stream)).text)
        said = "".join(c["delta"].get("content") or "" for e in found for c in e["choices"])
        assert said == text
        details = found[-1]["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] > 40
        assert details["rejected_prediction_tokens"] == 0


async def test_a_stop_string_in_what_was_expected() -> None:
    async with _client() as http:
        text = _said(await _ask(http, **LETTERS))[0]
        stopped = await _ask(http, **LETTERS, **_expect(text), stop=[text[20:24]])
        assert _said(stopped) == [text[: text.index(text[20:24])]]
        details = stopped["usage"]["completion_tokens_details"]
        assert 0 < details["accepted_prediction_tokens"] < 30


@pytest.mark.parametrize(
    ("config", "fields"),
    [(OFF, {}), (None, {"speculation": {"max_tokens": 0}}), (None, {"prediction": None})],
)
async def test_nothing_is_guessed_where_it_is_not_wanted(
    config: dict[str, Any] | None, fields: dict[str, Any]
) -> None:
    async with _client(config) as http:
        text = _said(await _ask(http, **LETTERS))[0]
        answer = await _ask(http, **LETTERS | _expect(text) | fields, explain=True)
        assert _said(answer) == [text]
        zero = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
        if "prediction" in fields:
            assert "completion_tokens_details" not in answer["usage"]
        else:
            assert answer["usage"]["completion_tokens_details"] == zero
        assert answer["usage"]["timeline"][0]["speculation"] == {}
        assert metric(await scrape(http), "vllm:spec_decode_num_drafts_total") == 0
