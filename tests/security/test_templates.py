"""Templates from checkpoints and requests: the event loop stays free, whatever they do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from paceline.backends.null import NullBackend
from paceline.engine.chat_template import ChatTemplate
from paceline.engine.testing import ByteTokenizer, null_client
from paceline.server import ServerConfig, create_app
from tests.server.helpers import VOCAB, connect

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "x"}]
# half a second of work at least, and stopped after two
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


class Templated(ByteTokenizer):
    """With a checkpoint's chat template."""

    def __init__(self, template: str) -> None:
        self._template = ChatTemplate({"default": template}, {})
        self._source = template

    @property
    def chat_template_source(self) -> str | None:
        return self._source

    def render_chat(self, *args: Any, **kwargs: Any) -> str:
        return self._template.render(*args, **kwargs)


@asynccontextmanager
async def serving(template: str, **config: Any) -> AsyncIterator[httpx.AsyncClient]:
    client = null_client(
        NullBackend(vocab_size=VOCAB, max_model_len=512), tokenizer=Templated(template)
    )
    async with connect(create_app(client, ServerConfig(**config))) as http:
        yield http
    await client.close()


async def turns_while(http: httpx.AsyncClient, body: dict[str, Any]) -> tuple[int, int]:
    """The status, and how often the event loop came round meanwhile."""
    call = asyncio.ensure_future(http.post(CHAT, json=body))
    turns = 0
    while not call.done():
        await asyncio.sleep(0.005)
        turns += 1
    return (await call).status_code, turns


async def test_a_requests_template_runs_beside_the_loop() -> None:
    async with serving("hi", trust_request_chat_template=True) as http:
        body = {"messages": MESSAGES, "chat_template": LOOP, "max_tokens": 1}
        status, turns = await turns_while(http, body)
        # a loop held up for the whole second would come round once
        assert status == 400 and turns >= 3


async def test_arguments_cannot_make_a_template_hold_up_the_loop() -> None:
    template = (
        "{% for i in range(n | default(1)) %}{% for j in range(n) %}{% endfor %}{% endfor %}x"
    )
    async with serving(template) as http:
        await http.post(CHAT, json={"messages": MESSAGES, "max_tokens": 1})
        body = {"messages": MESSAGES, "chat_template_kwargs": {"n": 90_000}, "max_tokens": 1}
        status, turns = await turns_while(http, body)
        assert status == 400 and turns >= 5


async def test_a_checkpoints_template_holds_up_the_loop_once_at_most() -> None:
    """It is harmless until a message has a word in it."""
    template = "x{% if 'bomb' in messages[0].content %}" + LOOP + "{% endif %}"
    bomb = {"messages": [{"role": "user", "content": "a bomb"}], "max_tokens": 1}
    async with serving(template) as http:
        for _ in range(2):
            answer = await http.post(CHAT, json={"messages": MESSAGES, "max_tokens": 1})
            assert answer.status_code == 200
        counts = []
        for _ in range(2):
            status, turns = await turns_while(http, bomb)
            assert status == 400
            counts.append(turns)
        # the first one was a surprise; what was slow is not trusted again
        assert counts[0] < 5 <= counts[1]
        answer = await http.post(CHAT, json={"messages": MESSAGES, "max_tokens": 1})
        assert answer.status_code == 200


async def test_a_quick_template_takes_no_thread() -> None:
    async with serving("{{ messages[0].content }}") as http:
        body = {"messages": MESSAGES, "max_tokens": 1}
        await http.post(CHAT, json=body)
        maker = http._transport.app.state.service.prompts  # type: ignore[attr-defined]

        async def refuse(work: Any) -> Any:
            raise AssertionError("it went to the pool")

        maker._in_pool = refuse
        answer = await http.post(CHAT, json=body)
        assert answer.status_code == 200


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "y" * 5000},
        {"role": "user", "content": "x", "name": "y" * 5000},
        {"role": "assistant", "content": "x", "reasoning": "y" * 5000},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": json.dumps({"a": "y" * 5000})}}],
        },
    ],
)
async def test_whatever_is_long_in_a_message_is_written_beside_the_loop(
    message: dict[str, Any],
) -> None:
    async with serving("{{ messages[0].role }}") as http:
        await http.post(CHAT, json={"messages": MESSAGES, "max_tokens": 1})
        maker = http._transport.app.state.service.prompts  # type: ignore[attr-defined]
        pooled: list[Any] = []
        in_pool = maker._in_pool

        async def count(work: Any) -> Any:
            pooled.append(work)
            return await in_pool(work)

        maker._in_pool = count
        answer = await http.post(CHAT, json={"messages": [message], "max_tokens": 1})
        assert (answer.status_code, len(pooled)) == (200, 1), answer.text


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template": "{{ ''.__class__.__mro__ }}"},
        {"chat_template": "{{ 'a' * 10**10 }}"},
        {"chat_template": "{{ raise_exception('no') }}"},
        {"chat_template_kwargs": {"tokenize": True}},
        {"chat_template_kwargs": {"chat_template": "x"}},
        {"chat_template_kwargs": {"messages": []}},
    ],
)
async def test_hostile_templates_are_the_requests_fault(fields: dict[str, Any]) -> None:
    async with serving("hi", trust_request_chat_template=True) as http:
        body = {"messages": MESSAGES, "max_tokens": 1} | fields
        assert (await http.post(CHAT, json=body)).status_code == 400
        assert (await http.post(CHAT, json={"messages": MESSAGES})).status_code == 200
