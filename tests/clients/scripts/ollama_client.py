"""The ``ollama`` package."""

from __future__ import annotations

import asyncio
import json

import ollama
from conversation import KEY, MODEL, UNKNOWN, URL, WRONG_KEY, check_place, raises, run, step
from shared import ASK_WEATHER, COUNTING, MESSAGES, PLACE, WEATHER

HEADERS = {"Authorization": f"Bearer {KEY}"}
client = ollama.Client(host=URL, headers=HEADERS)
COLD = {"temperature": 0, "num_predict": 24}


@step("models")
def models() -> None:
    assert MODEL in [model.model for model in client.list().models]
    assert MODEL in [model.model for model in client.ps().models]
    shown = client.show(MODEL)
    assert "completion" in shown.capabilities and shown.template


@step("chat")
def whole() -> None:
    answer = client.chat(model=MODEL, messages=MESSAGES, options=COLD)
    assert answer.message.content and answer.done
    assert answer.done_reason in ("stop", "length")
    assert answer.prompt_eval_count > 5 and answer.eval_count > 0
    assert 0 < answer.eval_duration <= answer.total_duration
    stopped = client.chat(model=MODEL, messages=MESSAGES, options=COLD | {"stop": ["Paris"]})
    assert "Paris" not in stopped.message.content and stopped.done_reason == "stop"


@step("stream")
def stream() -> None:
    text = client.chat(model=MODEL, messages=MESSAGES, options=COLD).message.content
    parts = list(client.chat(model=MODEL, messages=MESSAGES, options=COLD, stream=True))
    assert len(parts) > 2 and "".join(part.message.content for part in parts) == text
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count > 0


@step("async")
async def concurrent() -> None:
    several = ollama.AsyncClient(host=URL, headers=HEADERS)

    async def ask() -> str:
        answer = await several.chat(model=MODEL, messages=MESSAGES, options=COLD)
        return answer.message.content

    assert len(set(await asyncio.gather(*(ask() for _ in range(4))))) == 1


@step("tools")
def tools() -> None:
    options = {"temperature": 0, "num_predict": 120}
    answer = client.chat(model=MODEL, messages=ASK_WEATHER, tools=[WEATHER], options=options)
    # whether it calls is the model's choice: Ollama's API cannot force a call
    for call in answer.message.tool_calls or ():
        assert isinstance(call.function.arguments, dict)
    assert answer.message.content or answer.message.tool_calls


@step("tool result")
def tool_result() -> None:
    call = {"function": {"name": "get_weather", "arguments": {"city": "Oslo", "unit": "celsius"}}}
    answer = client.chat(
        model=MODEL,
        messages=[
            *ASK_WEATHER,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_name": "get_weather", "content": "It is 3 C."},
        ],
        tools=[WEATHER],
        options=COLD,
    )
    assert answer.done


@step("schema")
def schema() -> None:
    answer = client.chat(model=MODEL, messages=MESSAGES, format=PLACE, options={"num_predict": 120})
    check_place(answer.message.content)
    answer = client.generate(
        model=MODEL, prompt="A town, as JSON.", format="json", options={"num_predict": 200}
    )
    assert answer.done_reason == "length" or isinstance(json.loads(answer.response), dict)


@step("completions")
def completions() -> None:
    answer = client.generate(model=MODEL, prompt=COUNTING, raw=True, options=COLD)
    assert "four" in answer.response, answer.response
    parts = list(client.generate(model=MODEL, prompt=COUNTING, raw=True, options=COLD, stream=True))
    assert "".join(part.response for part in parts) == answer.response
    with_system = client.generate(model=MODEL, prompt="Hello!", system="Be brief.", options=COLD)
    assert with_system.response


@step("errors")
def errors() -> None:
    def ask(**fields: object) -> object:
        body = {"model": MODEL, "messages": MESSAGES, "options": COLD} | fields
        return client.chat(**body)

    assert raises(ollama.ResponseError, lambda: ask(model=UNKNOWN), UNKNOWN).status_code == 404
    hot = {"temperature": 1000}
    assert raises(ollama.ResponseError, lambda: ask(options=hot), "1000").status_code == 400
    raises(ollama.ResponseError, lambda: list(ask(options=hot, stream=True)), "1000")
    raises(ollama.ResponseError, lambda: client.pull("x"), "paceline pull")
    raises(ollama.ResponseError, lambda: client.embed(MODEL, "x"), "embeddings")
    stranger = ollama.Client(host=URL, headers={"Authorization": f"Bearer {WRONG_KEY}"})
    raises(ollama.ResponseError, lambda: stranger.chat(model=MODEL, messages=MESSAGES), "API key")


if __name__ == "__main__":
    run()
