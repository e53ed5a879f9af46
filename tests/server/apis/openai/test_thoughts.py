"""A model that thinks, in every API: thoughts are told apart from the answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from paceline.backends.reference.null import NullBackend
from paceline.engine.testing import ByteTokenizer, null_client
from paceline.server import ServerConfig, create_app
from tests.server.apis.test_anthropic import typed_events
from tests.server.helpers import VOCAB, chat_body, connect, events

CHAT = "/v1/chat/completions"
THOUGHTS, ANSWER = "Let me see. ", "Four."
SCRIPT = f"<think>\n{THOUGHTS}\n</think>\n\n{ANSWER}"


class Thinker(NullBackend):
    """Says ``SCRIPT`` whatever it is asked, one character a token."""

    def _sample(self, length: int, state: Any) -> int:
        if state.constraint is not None:
            return super()._sample(length, state)
        place = length - state.num_prompt_tokens
        return SCRIPT.encode()[place] if place < len(SCRIPT) else ByteTokenizer.IM_END


class ThinkingTokenizer(ByteTokenizer):
    """Its template knows thoughts, and shows whether thinking was turned on."""

    opens = False

    @property
    def chat_template_source(self) -> str | None:
        return "{% if enable_thinking %}{{ '</think>' }}"

    def render_chat(self, messages: Any, *, template_kwargs: Any = None, **fields: Any) -> str:
        self.asked = dict(template_kwargs or {})
        text = super().render_chat(messages, **fields)
        return text + "<think>\n" if self.opens else text


@pytest.fixture(scope="module")
def tokenizer() -> ThinkingTokenizer:
    return ThinkingTokenizer()


@pytest.fixture(scope="module")
async def http(
    anyio_backend: str, tokenizer: ThinkingTokenizer
) -> AsyncIterator[httpx.AsyncClient]:
    backend = Thinker(vocab_size=VOCAB, max_model_len=512, step_time=0.001)
    client = null_client(backend, tokenizer=tokenizer)
    async with connect(create_app(client, ServerConfig(served_model_names=("tiny",)))) as http:
        yield http
    await client.close()


async def message(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await http.post(CHAT, json=chat_body(**fields))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["choices"][0]["message"]
    return found


async def test_chat(http: httpx.AsyncClient) -> None:
    answer = (await http.post(CHAT, json=chat_body())).json()
    said = answer["choices"][0]["message"]
    assert said["content"] == ANSWER
    assert said["reasoning"] == said["reasoning_content"] == THOUGHTS.strip()
    details = answer["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": SCRIPT.index("</think>") + len("</think>")}
    hidden = await message(http, include_reasoning=False)
    assert hidden["content"] == ANSWER and hidden["reasoning"] is None
    assert "reasoning_content" not in hidden


@pytest.mark.parametrize("wants_ids", [False, True])
async def test_chat_stream(http: httpx.AsyncClient, wants_ids: bool) -> None:
    body = chat_body(stream=True, return_token_ids=wants_ids)
    chunks = events((await http.post(CHAT, json=body)).text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    for name in ("reasoning", "reasoning_content"):
        assert "".join(delta.get(name, "") for delta in deltas) == THOUGHTS.strip()
    assert "".join(delta.get("content", "") for delta in deltas) == ANSWER
    if wants_ids:
        ids = [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", ())]
        assert bytes(i for i in ids if i < 256).decode() == SCRIPT


@pytest.mark.parametrize("cut", [3, 9, 17, 24, 30, len(SCRIPT) - 2])
async def test_an_answer_goes_on_within_its_thoughts(http: httpx.AsyncClient, cut: int) -> None:
    before = SCRIPT.encode()[:cut]
    body = chat_body(stream=True, resume_output_ids=list(before))
    chunks = events((await http.post(CHAT, json=body)).text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    thoughts = "".join(delta.get("reasoning", "") for delta in deltas)
    text = "".join(delta.get("content", "") for delta in deltas)
    assert THOUGHTS.strip().endswith(thoughts) and ANSWER.endswith(text)
    if cut < SCRIPT.index("</think>"):
        assert thoughts and text == ANSWER
    else:
        assert not thoughts and text


async def test_a_prompt_that_opens_the_thoughts(
    http: httpx.AsyncClient, tokenizer: ThinkingTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "opens", True)
    monkeypatch.setattr(f"{__name__}.SCRIPT", SCRIPT.removeprefix("<think>\n"))
    said = await message(http)
    assert (said["reasoning"], said["content"]) == (THOUGHTS.strip(), ANSWER)


@pytest.fixture
async def opened(anyio_backend: str) -> AsyncIterator[httpx.AsyncClient]:
    """A model that begins within its thoughts; its template says nothing of them."""
    client = null_client(Thinker(vocab_size=VOCAB, max_model_len=512))
    config = ServerConfig(served_model_names=("tiny",), reasoning_parser="deepseek_r1")
    async with connect(create_app(client, config)) as http:
        yield http
    await client.close()


async def check_all_apis(http: httpx.AsyncClient, messages: Any, thoughts: str) -> None:
    """What is thought and said in each API, whole and streamed, of a conversation that may end with
    the beginning of the answer."""
    goes_on = messages[-1]["role"] == "assistant"
    body: dict[str, Any] = {"messages": messages, "continue_final_message": goes_on}
    said = (await http.post(CHAT, json=body)).json()["choices"][0]["message"]
    assert (said["reasoning"], said["content"]) == (thoughts or None, ANSWER)
    chunks = events((await http.post(CHAT, json=body | {"stream": True})).text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == thoughts
    assert "".join(delta.get("content", "") for delta in deltas) == ANSWER
    # there a last message by the assistant always goes on
    body = {"messages": messages, "max_tokens": 100}
    blocks = (await http.post("/v1/messages", json=body)).json()["content"]
    wanted = [thoughts] * bool(thoughts) + [ANSWER]
    assert [block.get("thinking") or block["text"] for block in blocks] == wanted
    told = typed_events((await http.post("/v1/messages", json=body | {"stream": True})).text)
    deltas = [event["delta"] for event in told if event["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == thoughts
    assert "".join(delta.get("text", "") for delta in deltas) == ANSWER


@pytest.mark.parametrize("begin", ["", "<think>\n"])
async def test_thoughts_without_their_first_mark(
    opened: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, begin: str
) -> None:
    monkeypatch.setattr(f"{__name__}.SCRIPT", begin + SCRIPT.removeprefix("<think>\n"))
    asked = [{"role": "user", "content": "2 + 2?"}]
    await check_all_apis(opened, asked, THOUGHTS.strip())
    body: dict[str, Any] = {"messages": asked, "stream": False}
    said = (await opened.post("/api/chat", json=body)).json()["message"]
    assert (said["thinking"], said["content"]) == (THOUGHTS.strip(), ANSWER)
    thought, text = (await opened.post("/v1/responses", json={"input": "2 + 2?"})).json()["output"]
    assert thought["content"][0]["text"] == THOUGHTS.strip()
    assert text["content"][0]["text"] == ANSWER


@pytest.mark.parametrize("by_name", [False, True])
async def test_a_message_goes_on_within_its_thoughts(
    http: httpx.AsyncClient,
    opened: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    by_name: bool,
) -> None:
    client = opened if by_name else http
    asked = [{"role": "user", "content": "What does <think> do?"}]
    monkeypatch.setattr(f"{__name__}.SCRIPT", f" see.\n</think>\n\n{ANSWER}")
    await check_all_apis(
        client, [*asked, {"role": "assistant", "content": "<think>\nLet me"}], " see."
    )
    monkeypatch.setattr(f"{__name__}.SCRIPT", ANSWER)
    for before in ("<think>Hm.</think>\n\n4 is ", "4 is "):
        await check_all_apis(client, [*asked, {"role": "assistant", "content": before}], "")


async def test_a_grammar_leaves_no_place_for_thoughts(
    http: httpx.AsyncClient, tokenizer: ThinkingTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "opens", True)
    said = await message(http, structured_outputs={"choice": ["yes"]})
    assert (said["reasoning"], said["content"]) == (None, "yes")


async def test_effort_none_turns_it_off(
    http: httpx.AsyncClient, tokenizer: ThinkingTokenizer
) -> None:
    await message(http, reasoning_effort="none")
    assert tokenizer.asked == {"reasoning_effort": "none", "enable_thinking": False}
    await message(http, reasoning_effort="high")
    assert tokenizer.asked == {"reasoning_effort": "high"}


async def test_responses(http: httpx.AsyncClient) -> None:
    answer = (await http.post("/v1/responses", json={"input": "2 + 2?"})).json()
    thought, said = answer["output"]
    assert thought["type"] == "reasoning" and thought["status"] == "completed"
    assert thought["content"] == [{"type": "reasoning_text", "text": THOUGHTS.strip()}]
    assert said["content"][0]["text"] == ANSWER
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > len(THOUGHTS)
    stream = await http.post("/v1/responses", json={"input": "2 + 2?", "stream": True})
    told = typed_events(stream.text)
    deltas = [event["delta"] for event in told if event["type"].endswith("reasoning_text.delta")]
    assert "".join(deltas) == THOUGHTS.strip()
    kinds = [event["type"] for event in told]
    done = kinds.index("response.reasoning_text.done")
    assert done < kinds.index("response.output_text.delta")
    again = {"input": [*answer["output"], {"role": "user", "content": "and?"}]}
    assert (await http.post("/v1/responses", json=again)).status_code == 200


async def test_messages(http: httpx.AsyncClient, tokenizer: ThinkingTokenizer) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 100}
    plain = await http.post("/v1/messages", json=body)
    assert tokenizer.asked == {"enable_thinking": False}
    assert "x-paceline-ignored-fields" not in plain.headers
    body["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    answer = await http.post("/v1/messages", json=body)
    assert tokenizer.asked == {"enable_thinking": True}
    assert answer.headers["x-paceline-ignored-fields"] == "thinking.budget_tokens"
    assert answer.json()["content"] == [
        {"type": "thinking", "thinking": THOUGHTS.strip(), "signature": ""},
        {"type": "text", "text": ANSWER},
    ]
    told = typed_events((await http.post("/v1/messages", json=body | {"stream": True})).text)
    deltas = [event["delta"] for event in told if event["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == THOUGHTS.strip()
    assert "".join(delta.get("text", "") for delta in deltas) == ANSWER
    starts = [event["content_block"]["type"] for event in told if "content_block" in event]
    assert starts == ["thinking", "text"]
    body["thinking"] = {"type": "sometimes"}
    assert (await http.post("/v1/messages", json=body)).status_code == 400


@pytest.mark.parametrize("think", [None, True, "high"])
async def test_ollama(
    http: httpx.AsyncClient, tokenizer: ThinkingTokenizer, think: bool | str | None
) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "think": think}
    said = (await http.post("/api/chat", json=body | {"stream": False})).json()["message"]
    assert (said["thinking"], said["content"]) == (THOUGHTS.strip(), ANSWER)
    assert tokenizer.asked.get("enable_thinking") is (None if think is None else True)
    lines = (await http.post("/api/generate", json={"prompt": "a", "think": think})).text
    told = [json.loads(line) for line in lines.splitlines()]
    assert "".join(line.get("thinking", "") for line in told) == THOUGHTS.strip()
    assert "".join(line["response"] for line in told) == ANSWER
    shown = (await http.post("/api/show", json={"model": "tiny"})).json()
    assert "thinking" in shown["capabilities"]


@pytest.mark.parametrize("parser", ["none", "mistral"])
async def test_the_parser_is_a_setting(anyio_backend: str, parser: str) -> None:
    backend = Thinker(vocab_size=VOCAB, max_model_len=512)
    client = null_client(backend, tokenizer=ThinkingTokenizer())
    async with connect(create_app(client, ServerConfig(reasoning_parser=parser))) as http:
        assert (await message(http))["content"] == SCRIPT
    await client.close()


async def test_a_model_that_does_not_think_says_so(anyio_backend: str) -> None:
    client = null_client(NullBackend(vocab_size=VOCAB, max_model_len=512))
    async with connect(create_app(client, ServerConfig())) as http:
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
        enabled = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
        for path, more in (("/v1/messages", enabled), ("/api/chat", {"think": True})):
            asked = {k: v for k, v in body.items() if k == "messages" or path != "/api/chat"}
            answer = await http.post(path, json=asked | more)
            assert answer.status_code == 400 and "has no thinking" in answer.text
        plain = (await http.post(CHAT, json=body)).json()
        assert "completion_tokens_details" not in plain["usage"]
    await client.close()
