"""Anthropic's SDK against a live server."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import pytest

from tests.server.helpers import chat_prompt, expected_text
from tests.server.live_process import LiveServer, live_server

TOOLS: list[anthropic.types.ToolUnionParam] = [
    {
        "name": "weather",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    }
]
HI: list[anthropic.types.MessageParam] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("sdk") / "log") as live:
        yield live


@pytest.fixture(scope="module")
def sdk(server: LiveServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def test_a_message(sdk: anthropic.Anthropic) -> None:
    message = sdk.messages.create(model="null", max_tokens=8, messages=HI)
    (block,) = message.content
    assert block.type == "text" and block.text == expected_text(chat_prompt("hi"), 8)[1]
    assert message.stop_reason == "max_tokens"
    counted = sdk.messages.count_tokens(model="null", messages=HI)
    assert counted.input_tokens == len(chat_prompt("hi"))


def test_a_stream(sdk: anthropic.Anthropic) -> None:
    with sdk.messages.stream(model="null", max_tokens=8, messages=HI) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == expected_text(chat_prompt("hi"), 8)[1]
    assert final.usage.output_tokens == 8


def test_tools(sdk: anthropic.Anthropic) -> None:
    with sdk.messages.stream(
        model="null", max_tokens=300, messages=HI, tools=TOOLS, tool_choice={"type": "any"}
    ) as stream:
        message = stream.get_final_message()
    assert message.stop_reason == "tool_use"
    use = message.content[0]
    assert use.type == "tool_use" and use.input in ({"city": "Oslo"}, {"city": "Rome"})
    result: anthropic.types.ToolResultBlockParam = {
        "type": "tool_result",
        "tool_use_id": use.id,
        "content": "12 degrees",
    }
    answer = sdk.messages.create(
        model="null",
        max_tokens=4,
        messages=[
            *HI,
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": [result]},
        ],
        tools=TOOLS,
    )
    assert answer.usage.output_tokens == 4


def test_errors(sdk: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="nobody"):
        sdk.messages.create(model="nobody", max_tokens=1, messages=HI)
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        sdk.messages.create(model="null", max_tokens=1, messages=HI, extra_body={"temperature": -1})
