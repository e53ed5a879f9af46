"""The ``openai`` package."""

from __future__ import annotations

import asyncio
import json

import openai
from conversation import (
    KEY,
    MODEL,
    UNKNOWN,
    URL,
    WRONG_KEY,
    check_logprobs,
    check_place,
    check_weather,
    raises,
    run,
    step,
)
from pydantic import BaseModel, Field
from shared import (
    ASK_WEATHER,
    COUNTING,
    MESSAGES,
    PLACE,
    QUESTION,
    TIME,
    WEATHER,
    WEATHER_PARAMETERS,
)

# every answer is held to the client's own types
client = openai.OpenAI(
    base_url=f"{URL}/v1", api_key=KEY, max_retries=0, _strict_response_validation=True
)
# its types say that every chunk of a completion has a finish reason and every echoed token a
# log-probability, which OpenAI's own answers do not
lax = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
chat = client.chat.completions


class Place(BaseModel):
    city: str = Field(max_length=24)
    population: int = Field(ge=0, le=99999999)


@step("models")
def models() -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


@step("chat")
def whole() -> None:
    answer = chat.create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=24)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    several = chat.create(
        model=MODEL, messages=MESSAGES, n=3, seed=5, max_tokens=8, stop=["\n"], user="somebody"
    )
    assert [choice.index for choice in several.choices] == [0, 1, 2]


@step("stream")
def stream() -> None:
    options = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
    text = chat.create(**options).choices[0].message.content
    chunks = list(chat.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens > 0
    # closed halfway: the server must not mind
    with chat.create(**options, stream=True) as halfway:
        next(iter(halfway))
    with chat.stream(**options) as built:
        assert built.get_final_completion().choices[0].message.content == text


@step("async")
async def concurrent() -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{URL}/v1", api_key=KEY, max_retries=0, _strict_response_validation=True
    ) as several:

        async def ask() -> str:
            parts = await several.chat.completions.create(
                model=MODEL, messages=MESSAGES, temperature=0, max_tokens=12, stream=True
            )
            return "".join([part.choices[0].delta.content or "" async for part in parts])

        answers = await asyncio.gather(*(ask() for _ in range(6)))
        assert len(set(answers)) == 1 and answers[0], answers


@step("tools")
def tools() -> None:
    answer = chat.create(
        model=MODEL, messages=ASK_WEATHER, tools=[WEATHER, TIME], tool_choice="required",
        max_tokens=120,
    )  # fmt: skip
    assert answer.choices[0].finish_reason in ("tool_calls", "length")
    assert answer.choices[0].message.tool_calls[0].type == "function"
    named = chat.create(
        model=MODEL, messages=ASK_WEATHER, tools=[WEATHER, TIME], max_tokens=120, seed=1,
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
    )  # fmt: skip
    (call,) = named.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    check_weather(call.function.arguments)
    none = chat.create(
        model=MODEL, messages=ASK_WEATHER, tools=[WEATHER], tool_choice="none", max_tokens=8
    )
    assert not none.choices[0].message.tool_calls


@step("tool stream")
def tool_stream() -> None:
    with chat.stream(
        model=MODEL, messages=ASK_WEATHER, tools=[WEATHER], max_tokens=120, seed=1,
        tool_choice="required", parallel_tool_calls=False,
    ) as events:  # fmt: skip
        kinds = {event.type for event in events}
        (call,) = events.get_final_completion().choices[0].message.tool_calls
    assert "tool_calls.function.arguments.delta" in kinds, kinds
    check_weather(call.function.arguments)


@step("tool result")
def tool_result() -> None:
    first = chat.create(
        model=MODEL, messages=ASK_WEATHER, tools=[WEATHER], tool_choice="required",
        parallel_tool_calls=False, max_tokens=120, seed=1,
    )  # fmt: skip
    message = first.choices[0].message
    answer = chat.create(
        model=MODEL,
        messages=[
            *ASK_WEATHER,
            message,
            {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "It is 3 C."},
        ],
        tools=[WEATHER],
        tool_choice="none",
        max_tokens=24,
    )
    assert answer.choices[0].message.content


@step("schema")
def schema() -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}}
    # drawn, and seeded, as this small model may draw line breaks until its tokens are spent
    drawn = {"model": MODEL, "messages": MESSAGES, "seed": 1}
    answer = chat.create(**drawn, response_format=wanted, max_completion_tokens=120)
    check_place(answer.choices[0].message.content)
    parsed = chat.parse(**drawn, response_format=Place, max_tokens=120)
    assert isinstance(parsed.choices[0].message.parsed, Place)
    with chat.stream(**drawn, response_format=Place, max_tokens=120) as events:
        assert isinstance(events.get_final_completion().choices[0].message.parsed, Place)
    chosen = chat.create(
        model=MODEL, messages=MESSAGES, extra_body={"structured_outputs": {"choice": ["a", "b"]}}
    )
    assert chosen.choices[0].message.content in ("a", "b")


@step("logprobs")
def logprobs() -> None:
    answer = chat.create(
        model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=3, max_tokens=6, temperature=0
    )
    content = answer.choices[0].logprobs.content
    check_logprobs([entry.logprob for entry in content])
    assert all(len(entry.top_logprobs) == 3 for entry in content)
    assert content[0].token == content[0].top_logprobs[0].token
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content
    text = lax.completions.create(
        model=MODEL, prompt=QUESTION, logprobs=2, max_tokens=4, echo=True, temperature=0
    )
    told = text.choices[0].logprobs
    assert told.token_logprobs[0] is None and told.text_offset[0] == 0
    check_logprobs(told.token_logprobs[1:])
    # as evaluation harnesses score a prompt
    prompt = lax.completions.create(
        model=MODEL, prompt=QUESTION, logprobs=1, max_tokens=0, echo=True, temperature=0
    )
    (choice,) = prompt.choices
    assert (choice.text, choice.finish_reason) == (QUESTION, "length")
    assert prompt.usage.completion_tokens == 0
    assert choice.logprobs.tokens == told.tokens[: len(choice.logprobs.tokens)]
    check_logprobs(choice.logprobs.token_logprobs[1:])


@step("completions")
def completions() -> None:
    answer = client.completions.create(model=MODEL, prompt=["One, two,", "A, B,"], max_tokens=4)
    assert [choice.index for choice in answer.choices] == [0, 1]
    parts = lax.completions.create(model=MODEL, prompt=COUNTING, max_tokens=4, stream=True)
    assert "".join(part.choices[0].text for part in parts)


@step("responses")
def responses() -> None:
    first = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=24)
    assert first.output_text and first.usage.output_tokens > 0
    assert client.responses.retrieve(first.id).output_text == first.output_text
    second = client.responses.create(
        model=MODEL, input="And of Italy?", previous_response_id=first.id, max_output_tokens=16
    )
    assert second.previous_response_id == first.id
    kinds = [
        event.type
        for event in client.responses.create(
            model=MODEL, input=QUESTION, max_output_tokens=8, stream=True
        )
    ]
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")
    parsed = client.responses.parse(
        model=MODEL, input=QUESTION, text_format=Place, max_output_tokens=120,
        extra_body={"seed": 1},
    )  # fmt: skip
    assert isinstance(parsed.output_parsed, Place)
    called = client.responses.create(
        model=MODEL, input=ASK_WEATHER[0]["content"], tool_choice="required",
        tools=[{"type": "function", "name": "get_weather", "parameters": WEATHER_PARAMETERS,
                "strict": True}],
        parallel_tool_calls=False, max_output_tokens=120, extra_body={"seed": 1},
    )  # fmt: skip
    check_weather(called.output[0].arguments)
    client.responses.delete(first.id)
    raises(openai.NotFoundError, lambda: client.responses.retrieve(first.id))


@step("errors")
def errors() -> None:
    error = raises(
        openai.NotFoundError, lambda: chat.create(model=UNKNOWN, messages=MESSAGES), UNKNOWN
    )
    assert (error.param, error.type) == ("model", "NotFoundError")
    error = raises(
        openai.BadRequestError,
        lambda: chat.create(model=MODEL, messages=MESSAGES, temperature=1000),
        "1000",
    )
    assert error.param == "temperature" and error.request_id
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
    raises(
        openai.BadRequestError,
        lambda: chat.create(model=MODEL, messages=MESSAGES, response_format=schema),
        "schema/not",
    )
    long = [{"role": "user", "content": "word " * 60_000}]
    raises(openai.BadRequestError, lambda: chat.create(model=MODEL, messages=long), "context")
    raises(
        openai.BadRequestError,
        lambda: list(chat.create(model=MODEL, messages=MESSAGES, stream=True, n=0)),
        "n must be",
    )
    raises(
        openai.BadRequestError,
        lambda: client.embeddings.create(model=MODEL, input="x"),
        "embeddings",
    )
    stranger = client.with_options(api_key=WRONG_KEY)
    raises(openai.AuthenticationError, lambda: stranger.models.list(), "API key")
    assert json.loads(json.dumps(error.body))["code"] == 400


if __name__ == "__main__":
    run()
