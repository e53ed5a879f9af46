"""``resume_output_ids``: an answer that goes on behind what an engine has made of it before."""

from __future__ import annotations

from typing import Any, NamedTuple

import httpx
import pytest

from tests.server.helpers import chat_body, events

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES = {
    CHAT: chat_body(max_tokens=24, temperature=1.0, seed=5, frequency_penalty=0.5),
    COMPLETIONS: {
        "prompt": "One, two,",
        "max_tokens": 24,
        "temperature": 1.0,
        "seed": 5,
        "min_tokens": 9,
        "stop": ["q"],
    },
}


def text_of(choice: dict[str, Any]) -> str:
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return str(text or "")


@pytest.mark.parametrize("url", BODIES)
async def test_it_goes_on_behind_them(http: httpx.AsyncClient, url: str) -> None:
    body = BODIES[url] | {"return_token_ids": True}
    uncut = (await http.post(url, json=body)).json()
    (choice,) = uncut["choices"]
    ids = choice["token_ids"]
    told = {"stream": True, "stream_options": {"include_usage": True}}
    for cut in range(len(ids)):
        resumed = body | {"resume_output_ids": ids[:cut]}
        answer = (await http.post(url, json=resumed)).json()
        (rest,) = answer["choices"]
        assert rest["token_ids"] == ids[cut:]
        assert text_of(choice).endswith(text_of(rest))
        assert rest["finish_reason"] == choice["finish_reason"]
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert answer["usage"][name] == uncut["usage"][name]
        chunks = events((await http.post(url, json=resumed | told)).text)
        streamed = [i for chunk in chunks for c in chunk["choices"] for i in c.get("token_ids", ())]
        assert streamed == ids[cut:] and chunks[-1]["usage"]["completion_tokens"] == len(ids)


async def test_each_choice_goes_on_behind_its_own(http: httpx.AsyncClient) -> None:
    body = BODIES[COMPLETIONS] | {"n": 2, "return_token_ids": True, "stop": None}
    whole = (await http.post(COMPLETIONS, json=body)).json()
    first, second = whole["choices"]
    for cut in (0, 1, 7, 23):
        ids = [first["token_ids"][: cut // 2], second["token_ids"][:cut]]
        answer = (await http.post(COMPLETIONS, json=body | {"resume_output_ids": ids})).json()
        for choice, uncut, before in zip(answer["choices"], (first, second), ids, strict=True):
            assert before + choice["token_ids"] == uncut["token_ids"]
        assert answer["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    ended = body | {"resume_output_ids": [None, second["token_ids"][:9]], "stream": True}
    chunks = events((await http.post(COMPLETIONS, json=ended)).text)
    told = [choice for chunk in chunks for choice in chunk["choices"]]
    assert {choice["index"] for choice in told} == {1}
    assert [i for c in told for i in c["token_ids"]] == second["token_ids"][9:]


FUNCTION = {
    "name": "look",
    "parameters": {
        "type": "object",
        "properties": {"place": {"enum": ["north-north-west", "south-by-south"]}},
        "required": ["place"],
    },
}


async def test_a_call_goes_on_where_it_was_cut(http: httpx.AsyncClient) -> None:
    body = chat_body(
        tools=[{"type": "function", "function": FUNCTION}],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=120,
        stream=True,
        return_token_ids=True,
    )
    uncut = _told(events((await http.post(CHAT, json=body)).text))
    assert '"place"' in uncut.so_far[-1].arguments and uncut.reason == "tool_calls"
    arguments, name = uncut.so_far[-1][1:]
    for cut, told, named in uncut.so_far[:-1]:
        text = (await http.post(CHAT, json=body | {"resume_output_ids": uncut.ids[:cut]})).text
        rest = _told(events(text))
        assert uncut.ids[:cut] + rest.ids == uncut.ids
        # what had been told of the call by then, and the rest of it
        assert told + rest.so_far[-1].arguments == arguments
        assert named + rest.so_far[-1].name == name == "look"
        assert rest.reason == "tool_calls"


class _SoFar(NamedTuple):
    num_ids: int
    arguments: str
    name: str


class _Told(NamedTuple):
    ids: list[int]
    # after each chunk, what was told of calls
    so_far: list[_SoFar]
    reason: str | None


def _told(chunks: list[dict[str, Any]]) -> _Told:
    ids: list[int] = []
    so_far = [_SoFar(0, "", "")]
    reason = None
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        ids.extend(choice.get("token_ids") or [])
        _, arguments, name = so_far[-1]
        for call in choice["delta"].get("tool_calls") or []:
            arguments += call["function"].get("arguments") or ""
            name += call["function"].get("name") or ""
        so_far.append(_SoFar(len(ids), arguments, name))
        reason = choice["finish_reason"] or reason
    return _Told(ids, so_far[1:], reason)


async def test_ids_alone(http: httpx.AsyncClient) -> None:
    body: dict[str, Any] = {"token_ids": [70, 71], "sampling_params": {"max_tokens": 9}}
    url = "/inference/v1/generate"
    (whole,) = (await http.post(url, json=body)).json()["choices"]
    body["resume_output_ids"] = whole["token_ids"][:4]
    (rest,) = (await http.post(url, json=body)).json()["choices"]
    assert whole["token_ids"][4:] == rest["token_ids"]


@pytest.mark.parametrize(
    ("url", "fields", "words"),
    [
        (CHAT, {"n": 2}, "must hold lists of tokens, got 70"),
        (CHAT, {"n": 2, "resume_output_ids": [[70]]}, "holds 1 lists of tokens for n=2"),
        (CHAT, {"n": 2, "resume_output_ids": [None, None]}, "all 2 choices have ended"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "needs stream=true"),
        (COMPLETIONS, {"echo": True}, "with echo"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, "with 2 prompts"),
        (COMPLETIONS, {"resume_output_ids": [1, 1000]}, "resume_output_ids"),
        (COMPLETIONS, {"resume_output_ids": "abc"}, "resume_output_ids must be a list"),
        (COMPLETIONS, {"resume_output_ids": [70] * 24}, "holds 24 tokens, and max_tokens=24"),
        (COMPLETIONS, {"resume_output_ids": [70] * 9 + [113]}, "has the stop string 'q'"),
    ],
)
async def test_what_cannot_be_gone_on_from(
    http: httpx.AsyncClient, url: str, fields: dict[str, Any], words: str
) -> None:
    response = await http.post(url, json=BODIES[url] | {"resume_output_ids": [70, 71]} | fields)
    assert response.status_code == 400, response.text
    assert words in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == "resume_output_ids"
