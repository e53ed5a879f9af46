"""The ``langchain-openai`` package."""

from __future__ import annotations

import asyncio

import openai
from conversation import (
    KEY,
    MODEL,
    UNKNOWN,
    URL,
    WRONG_KEY,
    check_logprobs,
    check_weather,
    raises,
    run,
    step,
)
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict, Field
from shared import ASK_WEATHER, COUNTING, QUESTION


def model(**fields: object) -> ChatOpenAI:
    return ChatOpenAI(
        **{
            "model": MODEL, "base_url": f"{URL}/v1", "api_key": KEY, "max_retries": 0,
            "temperature": 0, "max_tokens": 24,
        }
        | fields
    )  # fmt: skip


class Place(BaseModel):
    """A place."""

    city: str = Field(max_length=24)
    population: int = Field(ge=0, le=99999999)


class Weather(BaseModel):
    # without it the model may add arguments of its own
    model_config = ConfigDict(extra="forbid")
    city: str = Field(max_length=20)
    unit: str = Field(pattern="^(celsius|fahrenheit)$")


@tool(args_schema=Weather)
def get_weather(city: str, unit: str) -> str:
    """The weather in a city."""
    return f"It is 3 {unit} in {city}."


@step("chat")
def whole() -> None:
    answer = model().invoke([("system", "Answer briefly."), ("human", QUESTION)])
    assert answer.content and answer.usage_metadata["output_tokens"] > 0
    assert answer.response_metadata["finish_reason"] in ("stop", "length")


@step("stream")
def stream() -> None:
    text = model().invoke(QUESTION).content
    parts = list(model(stream_usage=True).stream(QUESTION))
    assert "".join(part.content for part in parts) == text
    assert any(part.usage_metadata for part in parts)


@step("async")
async def concurrent() -> None:
    answers = await asyncio.gather(*(model().ainvoke(QUESTION) for _ in range(4)))
    assert len({answer.content for answer in answers}) == 1


@step("tools")
def tools() -> None:
    forced = model(max_tokens=120).bind_tools([get_weather], tool_choice="any")
    answer = forced.invoke(ASK_WEATHER[0]["content"])
    assert answer.tool_calls[0]["name"] == "get_weather"
    check_weather(answer.tool_calls[0]["args"])


@step("tool stream")
def tool_stream() -> None:
    forced = model(max_tokens=120).bind_tools([get_weather], tool_choice="get_weather")
    whole = None
    for part in forced.stream(ASK_WEATHER[0]["content"]):
        whole = part if whole is None else whole + part
    check_weather(whole.tool_calls[0]["args"])


@step("tool result")
def tool_result() -> None:
    question = HumanMessage(ASK_WEATHER[0]["content"])
    forced = model(max_tokens=120).bind_tools([get_weather], tool_choice="get_weather")
    called = forced.invoke([question])
    result: ToolMessage = get_weather.invoke(called.tool_calls[0])
    answer = (
        model().bind_tools([get_weather], tool_choice="none").invoke([question, called, result])
    )
    assert answer.content


@step("schema")
def schema() -> None:
    for method in ("json_schema", "function_calling"):
        structured = model(max_tokens=120, temperature=1).with_structured_output(
            Place, method=method
        )
        assert isinstance(structured.invoke(QUESTION), Place)


@step("logprobs")
def logprobs() -> None:
    answer = model(logprobs=True, top_logprobs=2, max_tokens=5).invoke(QUESTION)
    content = answer.response_metadata["logprobs"]["content"]
    check_logprobs([entry["logprob"] for entry in content])


@step("completions")
def completions() -> None:
    text = OpenAI(
        model=MODEL, base_url=f"{URL}/v1", api_key=KEY, max_retries=0, max_tokens=8
    ).invoke(COUNTING)
    assert text


@step("responses")
def responses() -> None:
    answer = model(use_responses_api=True).invoke(QUESTION)
    assert answer.text
    parts = list(model(use_responses_api=True).stream(QUESTION))
    assert "".join(part.text for part in parts)


@step("errors")
def errors() -> None:
    raises(openai.NotFoundError, lambda: model(model=UNKNOWN).invoke(QUESTION), UNKNOWN)
    raises(openai.BadRequestError, lambda: model(temperature=1000).invoke(QUESTION), "1000")
    raises(openai.AuthenticationError, lambda: model(api_key=WRONG_KEY).invoke(QUESTION))
    raises(openai.BadRequestError, lambda: list(model(temperature=1000).stream(QUESTION)), "1000")


if __name__ == "__main__":
    run()
