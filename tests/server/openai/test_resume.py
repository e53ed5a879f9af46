"""``resume_output_ids``: an answer that goes on behind what an engine has made of it before."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.helpers import chat_body, events

pytestmark = pytest.mark.anyio

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
        (CHAT, {"n": 2}, "is not served with n=2"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "with tools"),
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
