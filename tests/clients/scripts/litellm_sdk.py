"""The ``litellm`` package, as users of its ``hosted_vllm`` and ``openai`` providers call it."""

from __future__ import annotations

import os

# else it downloads its table of prices at import
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import asyncio

import litellm
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
from shared import ASK_WEATHER, COUNTING, MESSAGES, PLACE, QUESTION, WEATHER

litellm.suppress_debug_info = True
PROVIDERS = ("hosted_vllm", "openai")
FORCED = {"type": "function", "function": {"name": "get_weather"}}


def options(provider: str = "hosted_vllm", **fields: object) -> dict[str, object]:
    """The arguments of a call."""
    return {
        "model": f"{provider}/{MODEL}", "api_base": f"{URL}/v1", "api_key": KEY,
        "num_retries": 0, "messages": MESSAGES, "max_tokens": 24, "temperature": 0,
    } | fields  # fmt: skip


@step("chat")
def whole() -> None:
    for provider in PROVIDERS:
        answer = litellm.completion(**options(provider))
        assert "Paris" in answer.choices[0].message.content
        assert answer.usage.completion_tokens > 0


@step("stream")
def stream() -> None:
    for provider in PROVIDERS:
        text = litellm.completion(**options(provider)).choices[0].message.content
        chunks = list(
            litellm.completion(
                **options(provider, stream=True, stream_options={"include_usage": True})
            )
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
        assert litellm.stream_chunk_builder(chunks).usage.completion_tokens > 0


@step("async")
async def concurrent() -> None:
    answers = await asyncio.gather(*(litellm.acompletion(**options()) for _ in range(4)))
    assert len({answer.choices[0].message.content for answer in answers}) == 1


@step("tools")
def tools() -> None:
    for provider in PROVIDERS:
        answer = litellm.completion(
            **options(
                provider, messages=ASK_WEATHER, tools=[WEATHER], tool_choice=FORCED, max_tokens=120
            )
        )
        (call,) = answer.choices[0].message.tool_calls
        check_weather(call.function.arguments)


@step("tool stream")
def tool_stream() -> None:
    chunks = list(
        litellm.completion(
            **options(
                messages=ASK_WEATHER, tools=[WEATHER], tool_choice="required", max_tokens=120,
                parallel_tool_calls=False, stream=True,
            )
        )
    )  # fmt: skip
    (call,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    check_weather(call.function.arguments)


@step("tool result")
def tool_result() -> None:
    forced = options(messages=ASK_WEATHER, tools=[WEATHER], tool_choice=FORCED, max_tokens=120)
    message = litellm.completion(**forced).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "It is 3 C."}
    answer = litellm.completion(
        **options(messages=[*ASK_WEATHER, message, result], tools=[WEATHER], tool_choice="none")
    )
    assert answer.choices[0].message.content


@step("schema")
def schema() -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}}
    for provider in PROVIDERS:
        # drawn, so that this goes through too; seeded, as this small model may draw line breaks
        # between two fields until its tokens are spent
        drawn = options(provider, response_format=wanted, max_tokens=120, temperature=1, seed=1)
        answer = litellm.completion(**drawn)
        check_place(answer.choices[0].message.content)


@step("logprobs")
def logprobs() -> None:
    answer = litellm.completion(**options(logprobs=True, top_logprobs=2, max_tokens=5))
    content = answer.choices[0].logprobs.content
    check_logprobs([entry.logprob for entry in content])
    assert all(len(entry.top_logprobs) == 2 for entry in content)


@step("completions")
def completions() -> None:
    fields = options("text-completion-openai", prompt=COUNTING)
    del fields["messages"]
    assert litellm.text_completion(**fields).choices[0].text


@step("responses")
def responses() -> None:
    answer = litellm.responses(
        model=f"openai/{MODEL}", input=QUESTION, api_base=f"{URL}/v1", api_key=KEY,
        max_output_tokens=16,
    )  # fmt: skip
    assert answer.output[0].content[0].text


@step("errors")
def errors() -> None:
    raises(
        litellm.NotFoundError,
        lambda: litellm.completion(**options() | {"model": f"hosted_vllm/{UNKNOWN}"}),
        UNKNOWN,
    )
    raises(litellm.BadRequestError, lambda: litellm.completion(**options(temperature=1000)), "1000")
    raises(
        litellm.AuthenticationError,
        lambda: litellm.completion(**options() | {"api_key": WRONG_KEY}),
        "API key",
    )


if __name__ == "__main__":
    run()
