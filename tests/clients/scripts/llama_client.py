"""llama-server's dialect over plain HTTP, as its documentation's examples and the scripts that grew
from them speak it: no package of its own does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
from conversation import (
    KEY,
    MODEL,
    UNKNOWN,
    URL,
    WRONG_KEY,
    check_logprobs,
    check_place,
    raises,
    run,
    step,
)
from shared import COUNTING, MESSAGES, PLACE

HEADERS = {"Authorization": f"Bearer {KEY}"}
COLD = {"temperature": 0, "n_predict": 24}
client = httpx.Client(base_url=URL, headers=HEADERS, timeout=120.0)


def told(answer: httpx.Response) -> Any:
    body = answer.json()
    if answer.is_error:
        error = body["error"]
        assert {"code", "message", "type"} <= set(error) and error["code"] == answer.status_code
        raise ValueError(f"{error['code']} {error['type']}: {error['message']}")
    return body


def post(path: str, body: dict[str, Any], **more: Any) -> Any:
    return told(client.post(path, json=body, **more))


def stream(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with client.stream("POST", "/completion", json=body | {"stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))


@step("models")
def models() -> None:
    assert told(client.get("/health")) == {"status": "ok"}
    props = told(client.get("/props"))
    params = props["default_generation_settings"]["params"]
    assert props["total_slots"] > 0 and props["chat_template"] and params["temperature"] > 0
    cards = {card["id"]: card for card in told(client.get("/v1/models"))["data"]}
    assert cards[MODEL]["meta"]["n_vocab"] > 1000
    assert cards[MODEL]["meta"]["n_ctx"] == props["default_generation_settings"]["n_ctx"]
    slots = told(client.get("/slots"))
    assert len(slots) == props["total_slots"] and not slots[0]["is_processing"]
    assert told(client.get("/lora-adapters")) == []


@step("chat")
def chat() -> None:
    prompt = post("/apply-template", {"messages": MESSAGES})["prompt"]
    assert MESSAGES[-1]["content"] in prompt
    answer = post("/completion", {"prompt": prompt, **COLD})
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 24, "timings_per_token": True}
    same = post("/v1/chat/completions", body)
    assert same["choices"][0]["message"]["content"] == answer["content"]
    times = same["timings"]
    assert times["predicted_n"] == same["usage"]["completion_tokens"] and times["prompt_ms"] >= 0
    assert times["cache_n"] + times["prompt_n"] == same["usage"]["prompt_tokens"]


@step("stream")
def streamed() -> None:
    whole = post("/completion", {"prompt": COUNTING, "return_tokens": True, **COLD})
    *parts, last = stream({"prompt": COUNTING, "timings_per_token": True, **COLD})
    assert len(parts) > 2 and "".join(part["content"] for part in parts) == whole["content"]
    assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
    assert not any(part["stop"] for part in parts) and last["stop"]
    assert last["timings"]["predicted_n"] == last["tokens_predicted"] == len(whole["tokens"])


@step("async")
async def concurrent() -> None:
    async with httpx.AsyncClient(base_url=URL, headers=HEADERS, timeout=120.0) as several:

        async def ask(slot: int) -> str:
            body = {"prompt": COUNTING, "id_slot": slot, **COLD}
            answer = await several.post("/completion", json=body)
            assert answer.headers["x-paceline-ignored-fields"] == "id_slot"
            return answer.json()["content"]

        assert len(set(await asyncio.gather(*map(ask, range(4))))) == 1


@step("schema")
def schema() -> None:
    body = {"prompt": "A town, as JSON: ", "n_predict": 120}
    check_place(post("/completion", body | {"json_schema": PLACE})["content"])
    grammar = 'root ::= ("red" | "green") " " [0-9]{3}'
    colour, number = post("/completion", body | {"grammar": grammar})["content"].split()
    assert colour in ("red", "green") and len(number) == 3 and number.isdigit()


@step("logprobs")
def logprobs() -> None:
    answer = post("/completion", {"prompt": COUNTING, "n_probs": 3, **COLD})
    rows = answer["completion_probabilities"]
    assert len(rows) == answer["tokens_predicted"]
    check_logprobs([row["logprob"] for row in rows])
    for row in rows:
        top = row["top_logprobs"]
        assert len(top) == 3 and top[0]["id"] == row["id"]
        assert top[0]["logprob"] >= top[1]["logprob"] >= top[2]["logprob"]


@step("completions")
def completions() -> None:
    answer = post("/completion", {"prompt": COUNTING, **COLD})
    assert "four" in answer["content"] and answer["stop_type"] in ("limit", "eos")
    stopped = post("/completion", {"prompt": COUNTING, "stop": ["four"], **COLD})
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", "four")
    assert "four" not in stopped["content"]
    # texts, tokens, and both
    pieces = post("/tokenize", {"content": COUNTING, "with_pieces": True})["tokens"]
    assert "".join(piece["piece"] for piece in pieces) == COUNTING
    tokens = [piece["id"] for piece in pieces]
    assert post("/detokenize", {"tokens": tokens})["content"] == COUNTING
    mixed = [*tokens[:-1], pieces[-1]["piece"]]
    same = post("/completions", {"prompt": [COUNTING, tokens, mixed], **COLD})
    assert [other["content"] for other in same] == [answer["content"]] * 3
    again = post("/completion", {"prompt": COUNTING * 8, **COLD, "n_predict": 0})
    assert again["content"] == "" and again["tokens_predicted"] == 0
    assert post("/completion", {"prompt": COUNTING * 8, **COLD})["tokens_cached"] > 0
    other = post("/completion", {"prompt": COUNTING * 8, "cache_prompt": False, **COLD})
    assert other["tokens_cached"] == 0
    never = [[token, False] for token in post("/tokenize", {"content": " four"})["tokens"]]
    body = {"prompt": COUNTING, "logit_bias": never, **COLD}
    assert " four" not in post("/completion", body)["content"]


@step("errors")
def errors() -> None:
    def ask(path: str = "/completion", **fields: Any) -> Any:
        return post(path, {"prompt": COUNTING, **COLD} | fields)

    raises(ValueError, lambda: ask(model=UNKNOWN), "not_found_error")
    raises(ValueError, lambda: ask(temperature=1000), "invalid_request_error")
    raises(ValueError, lambda: ask(mirostat=2), "Mirostat")
    raises(ValueError, lambda: ask(post_sampling_probs=True), "raw logits")
    theirs = ["top_k", "top_p", "min_p", "temperature"]
    hot = {"temperature": 0.8, "top_p": 0.9, "samplers": theirs}
    raises(ValueError, lambda: ask(**hot), "top_p before temperature")
    assert ask(samplers=theirs)["content"]
    text = {"input_prefix": "def f():", "input_suffix": "return x"}
    raises(ValueError, lambda: ask("/infill", **text), "no tokens for filling in")
    raises(ValueError, lambda: ask("/props"), "flags of paceline serve")
    raises(ValueError, lambda: ask("/slots/0?action=erase"), "no slots")
    wrong = {"Authorization": f"Bearer {WRONG_KEY}"}
    body = {"prompt": COUNTING}
    raises(ValueError, lambda: post("/completion", body, headers=wrong), "authentication_error")


if __name__ == "__main__":
    run()
