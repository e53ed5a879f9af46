"""The ``anthropic`` package."""

from __future__ import annotations

import asyncio

import anthropic
from conversation import (
    KEY,
    MODEL,
    UNKNOWN,
    URL,
    WRONG_KEY,
    check_place,
    check_weather,
    raises,
    run,
    step,
)
from shared import ASK_WEATHER, MESSAGES, PLACE, WEATHER_PARAMETERS

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
# this version has no argument for it
COLD = {"temperature": 0}
TOOL = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": WEATHER_PARAMETERS,
}
FORCED = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}


@step("chat")
def whole() -> None:
    answer = client.messages.create(
        model=MODEL, messages=MESSAGES, max_tokens=24, extra_body=COLD, system="Answer briefly."
    )
    assert answer.content[0].text and answer.stop_reason in ("end_turn", "max_tokens")
    assert answer.usage.input_tokens > 0 and answer.usage.output_tokens > 0
    stopped = client.messages.create(
        model=MODEL, messages=MESSAGES, max_tokens=64, extra_body=COLD, stop_sequences=["Paris"]
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "Paris")
    counted = client.messages.count_tokens(model=MODEL, messages=MESSAGES)
    assert counted.input_tokens > 5


@step("stream")
def stream() -> None:
    options = {"model": MODEL, "messages": MESSAGES, "max_tokens": 24, "extra_body": COLD}
    text = client.messages.create(**options).content[0].text
    with client.messages.stream(**options) as parts:
        assert "".join(parts.text_stream) == text
        final = parts.get_final_message()
    assert final.content[0].text == text and final.usage.output_tokens > 0


@step("async")
async def concurrent() -> None:
    async with anthropic.AsyncAnthropic(base_url=URL, api_key=KEY, max_retries=0) as several:

        async def ask() -> str:
            answer = await several.messages.create(
                model=MODEL, messages=MESSAGES, max_tokens=12, extra_body=COLD
            )
            return answer.content[0].text

        assert len(set(await asyncio.gather(*(ask() for _ in range(4))))) == 1


@step("tools")
def tools() -> None:
    answer = client.messages.create(
        model=MODEL, messages=ASK_WEATHER, tools=[TOOL], tool_choice=FORCED, max_tokens=120
    )
    (block,) = [block for block in answer.content if block.type == "tool_use"]
    assert block.name == "get_weather" and answer.stop_reason == "tool_use"
    check_weather(block.input)


@step("tool stream")
def tool_stream() -> None:
    with client.messages.stream(
        model=MODEL, messages=ASK_WEATHER, tools=[TOOL], tool_choice=FORCED, max_tokens=120
    ) as events:
        kinds = {event.type for event in events}
        final = events.get_final_message()
    assert "input_json" in kinds, kinds
    check_weather(final.content[0].input)


@step("tool result")
def tool_result() -> None:
    first = client.messages.create(
        model=MODEL, messages=ASK_WEATHER, tools=[TOOL], tool_choice=FORCED, max_tokens=120
    )
    call = first.content[0]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "It is 3 C."}
    answer = client.messages.create(
        model=MODEL,
        messages=[
            *ASK_WEATHER,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result]},
        ],
        tools=[TOOL],
        tool_choice={"type": "none"},
        max_tokens=24,
    )
    assert answer.content[0].type == "text"


@step("schema")
def schema() -> None:
    answer = client.messages.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=120,
        extra_body={"output_config": {"format": {"type": "json_schema", "schema": PLACE}}},
    )
    check_place(answer.content[0].text)


@step("errors")
def errors() -> None:
    def ask(**fields: object) -> object:
        body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4} | fields
        return client.messages.create(**body)

    error = raises(anthropic.NotFoundError, lambda: ask(model=UNKNOWN), UNKNOWN)
    assert error.body["error"]["type"] == "not_found_error"
    error = raises(anthropic.BadRequestError, lambda: ask(extra_body={"temperature": 1000}), "1000")
    assert error.body["error"]["type"] == "invalid_request_error"
    raises(anthropic.BadRequestError, lambda: ask(messages=[]), "messages")
    stranger = client.with_options(api_key=WRONG_KEY)
    raises(
        anthropic.AuthenticationError,
        lambda: stranger.messages.create(model=MODEL, messages=MESSAGES, max_tokens=4),
        "API key",
    )


if __name__ == "__main__":
    run()
