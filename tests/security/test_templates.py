"""Templates from checkpoints and requests: the event loop never waits, whatever they do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from paceline.backends.reference.null import NullBackend
from paceline.engine.testing import ByteTokenizer, null_client
from paceline.engine.text.chat_template import ChatTemplate
from paceline.engine.text.template_process import TemplateLimits, TemplateProcess
from paceline.server import ServerConfig, create_app
from tests.server.helpers import VOCAB, connect

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "x"}]
# until it is stopped
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
# a single call, within which no Python thread gets a turn
ONE_CALL = "{{ ('f' * 4000000) | int(base=16) // (('e' * 2000000) | int(base=16)) > 0 }}"


class Templated(ByteTokenizer):
    """With a checkpoint's chat template."""

    def __init__(self, template: str) -> None:
        limits = TemplateLimits(cpu_seconds=0.5)
        self.processes = (TemplateProcess(limits), TemplateProcess(limits))
        self._template = ChatTemplate(
            {"default": template}, {}, renderer=self.processes[0], callers=self.processes[1]
        )
        self._source = template

    @property
    def chat_template_source(self) -> str | None:
        return self._source

    @property
    def renders_quickly(self) -> bool:
        return self._template.is_known

    def render_chat(self, *args: Any, **kwargs: Any) -> str:
        return self._template.render(*args, **kwargs)


@asynccontextmanager
async def serving(template: str, **config: Any) -> AsyncIterator[httpx.AsyncClient]:
    tokenizer = Templated(template)
    client = null_client(NullBackend(vocab_size=VOCAB, max_model_len=512), tokenizer=tokenizer)
    async with connect(create_app(client, ServerConfig(**config))) as http:
        yield http
    await client.close()
    for process in tokenizer.processes:
        process.close()


async def turns_while(http: httpx.AsyncClient, body: dict[str, Any]) -> tuple[int, int]:
    """The status, and how often the event loop came round meanwhile."""
    call = asyncio.ensure_future(http.post(CHAT, json=body))
    turns = 0
    while not call.done():
        await asyncio.sleep(0.001)
        turns += 1
    return (await call).status_code, turns


# in the half second that an attack has; a loop that waits for it comes round a few times
FREE = 25


@pytest.mark.parametrize("attack", [LOOP, ONE_CALL])
async def test_a_requests_template_never_holds_up_the_loop(attack: str) -> None:
    async with serving("hi", trust_request_chat_template=True) as http:
        body = {"messages": MESSAGES, "chat_template": attack, "max_tokens": 1}
        for _ in range(2):
            status, turns = await turns_while(http, body)
            assert status == 400 and turns > FREE


async def test_arguments_cannot_make_a_template_hold_up_the_loop() -> None:
    template = "{{ keys | unique | list | length }}"
    keys = [i * (2**61 - 1) for i in range(1, 30_000)]
    async with serving(template) as http:
        body = {"messages": MESSAGES, "chat_template_kwargs": {"keys": keys}, "max_tokens": 1}
        status, turns = await turns_while(http, body)
        assert status == 400 and turns > FREE


@pytest.mark.parametrize("attack", [LOOP, ONE_CALL])
async def test_a_checkpoints_template_never_holds_up_the_loop(attack: str) -> None:
    """It is harmless until a message has a word in it."""
    template = "x{% if 'bomb' in messages[0].content %}" + attack + "{% endif %}"
    bomb = {"messages": [{"role": "user", "content": "a bomb"}], "max_tokens": 1}
    async with serving(template) as http:
        for _ in range(2):
            answer = await http.post(CHAT, json={"messages": MESSAGES, "max_tokens": 1})
            assert answer.status_code == 200
            status, turns = await turns_while(http, bomb)
            assert status == 400 and turns > FREE


async def test_what_callers_choose_keeps_no_plain_conversation_waiting() -> None:
    async with serving("hi", trust_request_chat_template=True) as http:
        await http.post(CHAT, json={"messages": MESSAGES, "max_tokens": 1})
        attack = {"messages": MESSAGES, "chat_template": LOOP, "max_tokens": 1}
        attacks = [asyncio.ensure_future(http.post(CHAT, json=attack)) for _ in range(3)]
        await asyncio.sleep(0.1)
        answer = await http.post(CHAT, json={"messages": MESSAGES, "max_tokens": 1})
        assert answer.status_code == 200 and not any(call.done() for call in attacks[1:])
        assert [a.status_code for a in await asyncio.gather(*attacks)] == [400] * 3


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
    """Also where a template is known to end."""
    client = null_client(NullBackend(vocab_size=VOCAB, max_model_len=8192))
    async with connect(create_app(client, ServerConfig())) as http:
        maker = http._transport.app.state.service.prompts  # type: ignore[attr-defined]
        pooled: list[Any] = []
        in_pool = maker._in_pool

        async def count(work: Any) -> Any:
            pooled.append(work)
            return await in_pool(work)

        maker._in_pool = count
        body = {"messages": MESSAGES, "max_tokens": 1}
        assert (await http.post(CHAT, json=body)).status_code == 200 and not pooled
        answer = await http.post(CHAT, json={"messages": [message], "max_tokens": 1})
        assert (answer.status_code, len(pooled)) == (200, 1), answer.text
    await client.close()


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
