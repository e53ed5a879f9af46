"""Calls in what a model says, in every API: whole and streamed answers say the same."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from paceline.backends.reference.null import NullBackend
from paceline.engine.testing import ByteTokenizer, null_client
from paceline.server import ServerConfig, create_app
from paceline.server.apis.openai import chat_deltas
from tests.server.apis.test_anthropic import typed_events
from tests.server.helpers import VOCAB, chat_body, connect, events

CHAT, RESPONSES, MESSAGES, OLLAMA = (
    "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"
)  # fmt: skip
USER = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("look", "go")]


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


LOOK, GO = call("look", '{"at": "a\nb"}'), call("go", '"{}"')
BROKEN, OTHER = call("look", '{"at": {}'), call("Alice", "{}")
# what the model says, and that as text and calls in order
SCRIPTS: dict[str, tuple[str, list[str | tuple[str, Any]]]] = {
    "around": (
        f"I see.\n{LOOK}\n Then {GO}\nDone. ",
        ["I see.\n", ("look", {"at": "a\nb"}), "\n Then ", ("go", {}), "\nDone. "],
    ),
    "together": (f"{LOOK}\n{GO}", [("look", {"at": "a\nb"}), ("go", {})]),
    "broken": (f"{GO}{BROKEN} So.", [("go", {}), f"{BROKEN} So."]),
    "not offered": (OTHER, [OTHER]),
    "a mark": ("The <tool_call> tag  calls.", ["The <tool_call> tag  calls."]),
}
CUT = f"Well. {GO} And {LOOK}"


class Speaker(NullBackend):
    """Says ``script`` whatever it is asked, one character a token."""

    script = ""

    def _sample(self, length: int, state: Any) -> int:
        place = length - state.num_prompt_tokens
        said = self.script.encode()
        return said[place] if place < len(said) else ByteTokenizer.IM_END


@pytest.fixture(scope="module")
def speaker() -> Speaker:
    return Speaker(vocab_size=VOCAB, max_model_len=2048, step_time=0.0005)


@pytest.fixture(scope="module")
async def http(anyio_backend: str, speaker: Speaker) -> AsyncIterator[httpx.AsyncClient]:
    client = null_client(speaker)
    async with connect(create_app(client, ServerConfig(served_model_names=("tiny",)))) as http:
        yield http
    await client.close()


Answer = tuple[list[str | tuple[str, Any]], str]


def merged(parts: list[str | tuple[str, Any]]) -> list[str | tuple[str, Any]]:
    """Adjacent texts are one."""
    found: list[str | tuple[str, Any]] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, str) and isinstance(last, str):
            found[-1] = last + part
        elif part:
            found.append(part)
    return found


async def chat(http: httpx.AsyncClient, most: int, stream: bool) -> Answer:
    """Text, then calls: that is how a chat message has them."""
    body = chat_body(tools=TOOLS, max_tokens=most, stream=stream)
    answer = await http.post(CHAT, json=body)
    if not stream:
        choice = answer.json()["choices"][0]
        said = choice["message"]
        made = [(c["function"]["name"], c["function"]["arguments"]) for c in said["tool_calls"]]
        text, reason = said["content"] or "", choice["finish_reason"]
    else:
        chunks = [chunk["choices"][0] for chunk in events(answer.text)]
        deltas = [chunk["delta"] for chunk in chunks]
        text = "".join(delta.get("content") or "" for delta in deltas)
        parts = [part for delta in deltas for part in delta.get("tool_calls", ())]
        # each of them all at once
        made = [(part["function"]["name"], part["function"]["arguments"]) for part in parts]
        assert [part["index"] for part in parts] == list(range(len(parts)))
        reason = chunks[-1]["finish_reason"]
    return merged([text, *((name, json.loads(arguments)) for name, arguments in made)]), reason


async def responses(http: httpx.AsyncClient, most: int, stream: bool) -> Answer:
    tools = [{"type": "function", "name": tool["function"]["name"]} for tool in TOOLS]
    body = {"input": "hi", "tools": tools, "max_output_tokens": most, "stream": stream}
    answer = await http.post(RESPONSES, json=body)
    told = typed_events(answer.text)[-1]["response"] if stream else answer.json()
    parts: list[str | tuple[str, Any]] = []
    for item in told["output"]:
        if item["type"] == "message":
            parts += [part["text"] for part in item["content"]]
        else:
            assert item["status"] == "completed"
            parts.append((item["name"], json.loads(item["arguments"])))
    return parts, told["status"]


async def messages(http: httpx.AsyncClient, most: int, stream: bool) -> Answer:
    tools = [{"name": tool["function"]["name"], "input_schema": {}} for tool in TOOLS]
    body = {"messages": USER, "tools": tools, "max_tokens": most, "stream": stream}
    answer = await http.post(MESSAGES, json=body)
    if not stream:
        told = answer.json()
        blocks, stop = told["content"], told["stop_reason"]
    else:
        blocks, stop = [], ""
        for event in typed_events(answer.text):
            if event["type"] == "content_block_start":
                blocks.append(event["content_block"])
            elif event["type"] == "content_block_delta":
                delta, block = event["delta"], blocks[event["index"]]
                block["text"] = block.get("text", "") + delta.get("text", "")
                if "partial_json" in delta:
                    block["input"] = json.loads(delta["partial_json"])
            elif event["type"] == "message_delta":
                stop = event["delta"]["stop_reason"]
    return [b["text"] if b["type"] == "text" else (b["name"], b["input"]) for b in blocks], stop


async def ollama(http: httpx.AsyncClient, most: int, stream: bool) -> Answer:
    body = {"messages": USER, "tools": TOOLS, "options": {"num_predict": most}, "stream": stream}
    lines = [json.loads(line) for line in (await http.post(OLLAMA, json=body)).text.splitlines()]
    text = "".join(line["message"]["content"] for line in lines)
    made = [call["function"] for line in lines for call in line["message"].get("tool_calls", ())]
    return merged([text, *((c["name"], c["arguments"]) for c in made)]), lines[-1]["done_reason"]


DIALECTS = {chat: True, responses: False, messages: False, ollama: True}


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.__name__)
async def test_answers(http: httpx.AsyncClient, speaker: Speaker, dialect: Any, name: str) -> None:
    speaker.script, parts = SCRIPTS[name]
    if DIALECTS[dialect]:
        # text and calls are apart there
        parts = merged(sorted(parts, key=lambda part: not isinstance(part, str)))
    whole, streamed = await dialect(http, 400, False), await dialect(http, 400, True)
    assert whole == streamed == (parts, whole[1])
    called = any(not isinstance(part, str) for part in parts)
    reasons = ("tool_calls", "tool_use") if called else ("stop", "end_turn")
    assert whole[1] in (*reasons, "completed" if dialect is responses else "stop")


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.__name__)
async def test_a_call_that_is_cut_off_is_text(
    http: httpx.AsyncClient, speaker: Speaker, dialect: Any
) -> None:
    speaker.script = CUT
    begun, ended = CUT.index(LOOK), len(CUT) - len("\n</tool_call>")
    for most in (3, begun - 2, begun + 7, begun + 25, ended - 1):
        whole, streamed = await dialect(http, most, False), await dialect(http, most, True)
        assert whole == streamed
        parts, reason = whole
        assert reason in ("length", "max_tokens", "incomplete")
        said = "".join(part for part in parts if isinstance(part, str))
        assert [part for part in parts if not isinstance(part, str)] == [("go", {})][: most > 6]
        assert said == CUT[:most].replace(GO, "")
    # its JSON is whole
    assert ("look", {"at": "a\nb"}) in (await dialect(http, ended, False))[0]


@pytest.mark.parametrize("dialect", ["responses", "messages"])
async def test_a_long_call_is_no_silence(
    http: httpx.AsyncClient, speaker: Speaker, monkeypatch: pytest.MonkeyPatch, dialect: str
) -> None:
    """Empty parts come of what is open while a call is written, or a gateway thinks it stalled."""
    monkeypatch.setattr(chat_deltas, "_LONG_QUIET", -1.0)
    speaker.script = f"Well.{LOOK}"
    body: dict[str, Any] = {"stream": True}
    if dialect == "responses":
        body |= {"input": "hi", "tools": [{"type": "function", "name": "look"}]}
        told = typed_events((await http.post(RESPONSES, json=body)).text)
        kind = "response.output_text.delta"
        said = [event["delta"] for event in told if event["type"] == kind]
    else:
        body |= {"messages": USER, "max_tokens": 200, "tools": [{"name": "look"}]}
        told = typed_events((await http.post(MESSAGES, json=body)).text)
        said = [event["delta"]["text"] for event in told if "text" in event.get("delta", ())]
    assert "".join(said) == "Well." and said[-1] == ""
