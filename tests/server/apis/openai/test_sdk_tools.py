"""The official SDK's tools, schemas and responses against a live server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Literal

import openai
import pytest
from pydantic import BaseModel

from tests.server.helpers import chat_prompt, expected_text
from tests.server.live_process import LiveServer, live_server

MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("sdk") / "log"
    with live_server(log, process=True) as live:
        yield live


@pytest.fixture(scope="module")
def sdk(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


class Place(BaseModel):
    kind: Literal["city", "river"]
    size: int


def test_a_parsed_answer(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.parse(
        model="null", messages=MESSAGES, response_format=Place, max_tokens=200
    )
    assert isinstance(answer.choices[0].message.parsed, Place)


def test_tool_calls(sdk: openai.OpenAI) -> None:
    tools: list[openai.types.chat.ChatCompletionToolUnionParam] = [
        {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
    ]
    answer = sdk.chat.completions.create(
        model="null", messages=MESSAGES, tools=tools, tool_choice="required", max_tokens=300
    )
    calls = answer.choices[0].message.tool_calls or []
    assert answer.choices[0].finish_reason == "tool_calls" and calls
    assert calls[0].type == "function" and calls[0].function.name == "weather"
    with sdk.chat.completions.stream(
        model="null", messages=MESSAGES, tools=tools, tool_choice="required", max_tokens=300
    ) as stream:
        final = stream.get_final_completion()
    streamed = final.choices[0].message.tool_calls or []
    assert [call.function.arguments for call in streamed] == [
        call.function.arguments for call in calls if call.type == "function"
    ]
    assert json.loads(streamed[0].function.arguments)["city"] in ("Oslo", "Rome")


def test_responses(sdk: openai.OpenAI) -> None:
    response = sdk.responses.create(model="null", input="hi", max_output_tokens=8)
    assert response.output_text == expected_text(chat_prompt("hi"), 8)[1]
    assert response.status == "incomplete"
    assert sdk.responses.retrieve(response.id).output_text == response.output_text
    parsed = sdk.responses.parse(model="null", input="hi", text_format=Place, max_output_tokens=200)
    assert isinstance(parsed.output_parsed, Place)
    with sdk.responses.stream(model="null", input="hi", max_output_tokens=8) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created" and kinds[-1] == "response.incomplete"
    assert "response.output_text.delta" in kinds
    sdk.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(response.id)
