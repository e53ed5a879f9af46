"""docs/api.md says what the code does: endpoints, and every field of every body."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from paceline.server import fields as fields_module
from paceline.server import responses_request
from paceline.server.anthropic import NO_EFFECT as ANTHROPIC_NO_EFFECT
from paceline.server.anthropic import parse_messages_api
from paceline.server.batches.answering import URLS
from paceline.server.batches.routes import REFUSED as BATCH_REFUSED
from paceline.server.batches.routes import parse_batch
from paceline.server.protocol import RequestRules, parse_chat, parse_completion
from paceline.server.responses_request import parse_responses
from paceline.server.structured import STRUCTURED_KINDS
from paceline.server.token_generate import parse_token_generate
from paceline.server.unserved import NO_EFFECT, REFUSED_IN_CHAT, REFUSED_IN_COMPLETIONS

pytestmark = pytest.mark.anyio

DOC = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
RULES = RequestRules(
    served_model_names=("m",),
    vocab_size=259,
    max_model_len=512,
    max_choices=4,
    max_prompts=4,
    eos_token_ids=frozenset({1}),
    default_sampling={},
    trust_request_chat_template=False,
)
MESSAGES = [{"role": "user", "content": "x"}]


def section(title: str) -> str:
    return DOC.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def documented(title: str) -> dict[str, set[str]]:
    """Field names by status."""
    found: dict[str, set[str]] = {"served": set(), "ignored": set(), "refused": set()}
    for line in section(title).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[1] in found:
            names = re.findall(r"`(\w+)`", cells[0])
            assert names and not found[cells[1]] & set(names), line
            found[cells[1]] |= set(names)
    return found


def asked(parse: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names that parsing a body looks for at its top level."""
    made: list[Any] = []
    original = fields_module.Fields.__init__

    def spy(self: Any, values: dict[str, Any]) -> None:
        original(self, values)
        made.append(self)

    monkeypatch.setattr(fields_module.Fields, "__init__", spy)
    parse()
    names: set[str] = made[0]._asked
    return names


CASES: dict[str, tuple[Callable[[], Any], set[str], set[str]]] = {
    "/v1/chat/completions": (
        lambda: parse_chat({"messages": MESSAGES}, RULES),
        set(NO_EFFECT),
        set(REFUSED_IN_CHAT),
    ),
    "/v1/completions": (
        lambda: parse_completion({"prompt": "x"}, RULES),
        set(NO_EFFECT),
        set(REFUSED_IN_COMPLETIONS),
    ),
    "/v1/responses": (
        lambda: parse_responses({"input": "x"}, RULES, "", before=[], owner=""),
        {*responses_request.NO_EFFECT, "stream_options"},
        set(responses_request.REFUSED),
    ),
    "/v1/messages": (
        lambda: parse_messages_api({"messages": MESSAGES, "max_tokens": 3}, RULES),
        set(ANTHROPIC_NO_EFFECT),
        set(),
    ),
    "/v1/batches": (
        lambda: parse_batch({"input_file_id": "x", "endpoint": URLS[0], "completion_window": "1h"}),
        set(),
        set(BATCH_REFUSED),
    ),
    "/inference/v1/generate": (
        lambda: parse_token_generate({"token_ids": [1]}, RULES),
        set(),
        set(),
    ),
}


@pytest.mark.parametrize("path", CASES)
def test_every_field_is_in_its_table(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parse, ignored, refused = CASES[path]
    told = documented(f"`{path}`")
    assert told["refused"] == refused
    assert told["ignored"] == ignored
    assert told["served"] == asked(parse, monkeypatch) - ignored - refused


async def test_every_endpoint_is_in_the_table(app: FastAPI) -> None:
    served = {
        f"{method.upper()} {path}"
        for path, methods in app.openapi()["paths"].items()
        for method in methods
    }
    assert set(re.findall(r"^\| `(\w+ /\S*)` \|", section("Endpoints"), re.M)) == served


async def test_refused_fields_are_refused_and_ignored_ones_change_nothing(
    http: httpx.AsyncClient,
) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3}),
        ("/v1/completions", {"prompt": "x", "max_tokens": 3}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 3}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 3}),
    ):
        told = documented(f"`{path}`")
        plain = (await http.post(path, json=body)).json()
        for name in sorted(told["refused"]):
            value: Any = {"best_of": 3, "length_penalty": 2, "stream_interval": 3}.get(name, ["x"])
            if name == "spaces_between_special_tokens":
                value = False
            answer = await http.post(path, json={**body, name: value})
            assert answer.status_code == 400 and name in answer.json()["error"]["message"], name
        for name in sorted(told["ignored"]):
            answer = await http.post(path, json={**body, name: "x"})
            assert answer.status_code == 200, (name, answer.text)
            for key in ("choices", "content"):
                assert answer.json().get(key) == plain.get(key)


def test_the_kinds_of_structured_output_are_named() -> None:
    text = section("Structured output")
    assert all(f"`{kind}`" in text for kind in STRUCTURED_KINDS)
