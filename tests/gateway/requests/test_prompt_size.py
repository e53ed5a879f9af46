"""How long prompts are taken for, and what is refused for that: only what is certainly too long."""

from __future__ import annotations

import base64
import json
import random
from typing import Any, Final

import pytest

from paceline.gateway import ModelConfig
from paceline.gateway.requests.prompt_size import BytesPerToken, PromptSize, least_tokens, measure
from tests.gateway.fault_server import Step, scripted
from tests.gateway.helpers import ANY, CHAT, chat, configured, gateway_over, refused

DATA: Final = base64.b64encode(random.Random(1).randbytes(120_000)).decode()
LINES: Final = base64.encodebytes(random.Random(1).randbytes(120_000)).decode()
URL: Final = "data:image/png;base64," + DATA
TEXT: Final = {"type": "text", "text": "what is this?"}
MESSAGES: Final = "/v1/messages"
RESPONSES: Final = "/v1/responses"
EMBEDDINGS: Final = "/v1/embeddings"
PROSE: Final = "The quick brown fox jumps over the lazy dog, and nobody has asked it why. "


def user(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def source(data: str = DATA, kind: str = "image/png") -> dict[str, str]:
    return {"type": "base64", "media_type": kind, "data": data}


MEDIA: Final = {
    "picture": (CHAT, user(TEXT, {"type": "image_url", "image_url": {"url": URL}})),
    "picture as a text": (CHAT, user(TEXT, {"type": "image_url", "image_url": URL})),
    "sound": (
        CHAT, user(TEXT, {"type": "input_audio", "input_audio": {"data": DATA, "format": "wav"}}),
    ),
    "document": (CHAT, user(TEXT, {"type": "file", "file": {"filename": "a", "file_data": URL}})),
    "film": (CHAT, user(TEXT, {"type": "video_url", "video_url": {"url": URL}})),
    "drawing": (
        CHAT,
        user({"type": "image_url",
              "image_url": {"url": "data:image/svg+xml;utf8,<svg>" + "<g x='1'/>" * 9000}}),
    ),
    "Ollama's": (CHAT, {"messages": [{"role": "user", "content": "?", "images": [DATA, DATA]}]}),
    "Gemini's": (CHAT, user({"inlineData": {"mimeType": "image/png", "data": DATA}})),
    "of a tool": (
        MESSAGES,
        user({"type": "tool_result", "tool_use_id": "x",
              "content": [{"type": "image", "source": source()}]}),
    ),
    "picture, Messages": (MESSAGES, user({"type": "image", "source": source()})),
    "in lines": (MESSAGES, user({"type": "image", "source": source(LINES)})),
    "document, Messages": (
        MESSAGES, user({"type": "document", "source": source(kind="application/pdf")}),
    ),
    "picture, Responses": (
        RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]},
    ),
    "document, Responses": (
        RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_data": URL}]}]},
    ),
    "screen, Responses": (
        RESPONSES,
        {"input": [{"type": "computer_call_output", "call_id": "x",
                    "output": {"type": "computer_screenshot", "image_url": URL}}]},
    ),
    "thoughts, Responses": (
        RESPONSES, {"input": [{"type": "reasoning", "summary": [], "encrypted_content": DATA}]},
    ),
    "vectors": (EMBEDDINGS, {"input": [URL]}),
}  # fmt: skip


@pytest.mark.parametrize(("path", "body"), MEDIA.values(), ids=MEDIA)
async def test_media_are_no_text(path: str, body: dict[str, Any]) -> None:
    """Neither for a context, nor for the model of long prompts, nor for a limit of tokens."""
    models = (
        ModelConfig(name="m", tiers=(("e1:m",),), length_over={"2000": "long"}),
        ModelConfig(name="long", tiers=(("e2:m",),)),
    )
    fields = {"rate_limit_tokens": "8000/300day", "models": models}
    async with (
        scripted(ANY, max_model_len=4096) as one,
        scripted(ANY) as long,
        gateway_over(configured(one, long, **fields)) as (_, client),
    ):
        for written in (json.dumps(body), json.dumps(body).replace("/", r"\/")):
            data = '{"model": "m", "max_tokens": 50, ' + written[1:]
            headers = {"content-type": "application/json"}
            answer = await client.post(path, content=data, headers=headers)
            assert answer.status_code == 200, answer.text
        assert len(one.bodies) == 2 and not long.bodies


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        # as a tokenizer of today counts them, about
        (" " * 60_000, 940),
        ("\t" * 20_000, 1000),
        ("".join(" " * 24 + "return value\n" for _ in range(1500)), 4501),
        ("".join("\t" * 6 + "return value\n" for _ in range(1500)), 4501),
        (("=" * 79 + "\n") * 1000, 3000),
        (("| " + "-" * 30 + " | " + "-" * 30 + " |\n") * 400, 3000),
        ("word " * 6000, 6000),
        (DATA[:20_000], 14_000),
    ],
)
async def test_what_is_only_estimated_is_no_refusal(text: str, tokens: int) -> None:
    async with (
        scripted(ANY, max_model_len=8192) as one,
        gateway_over(configured(one)) as (_, client),
    ):
        for path, body in (
            (CHAT, chat(messages=[{"role": "user", "content": text}])),
            ("/v1/completions", {"prompt": text}),
            (RESPONSES, {"input": text}),
            (MESSAGES, {"max_tokens": 5, **user({"type": "text", "text": text})}),
        ):
            answer = await client.post(path, json={"model": "m", **body})
            assert answer.status_code == 200, answer.text
        size = measure({"prompt": json.dumps(text).encode()})
        assert size.text / 4 < 2.5 * tokens


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "system", "content": PROSE * 14_000}, {"role": "user"}]},
        user({"type": "text", "text": PROSE * 14_000}),
        {"system": PROSE * 14_000, "messages": []},
        {"instructions": PROSE * 14_000, "input": "hi"},
        {"prompt": ["hi", PROSE * 14_000]},
        {"prompt": [100_000] * 5000},
    ],
)
async def test_a_prompt_that_is_certainly_too_long_is_not_sent(body: dict[str, Any]) -> None:
    path = "/v1/completions" if "prompt" in body else CHAT
    async with (
        scripted(ANY, max_model_len=4096) as one,
        gateway_over(configured(one)) as (_, client),
    ):
        answer = await client.post(path, json=body)
        assert answer.status_code == 400 and "at least" in answer.text and not one.bodies


@pytest.mark.parametrize(
    ("path", "body"),
    [
        # a template may leave them out, and engines may cut a prompt
        (CHAT, {"tools": [{"type": "function", "function": {"description": PROSE * 2000}}]}),
        (CHAT, {"messages": [{"role": "tool", "content": PROSE * 2000}]}),
        (CHAT, {"messages": [{"role": "assistant", "content": PROSE * 2000 + "</think>hm"}]}),
        (CHAT, {"messages": [{"role": "assistant", "content": "", "reasoning": PROSE * 2000}]}),
        (CHAT, {"truncate_prompt_tokens": -1, **user({"type": "text", "text": PROSE * 2000})}),
        (RESPONSES, {"truncation": "auto", "input": PROSE * 2000}),
        # each of several has a context of its own
        (EMBEDDINGS, {"input": [PROSE] * 2000}),
        ("/v1/completions", {"prompt": [PROSE] * 2000}),
        ("/v1/completions", {"prompt": [[100_000] * 1000] * 8}),
        ("/v1/completions", {"prompt": [100_000] * 4000}),
        (EMBEDDINGS, {"input": [100_000] * 4000}),
        ("/v1/rerank", {"query": "?", "documents": [PROSE] * 2000}),
    ],
)
async def test_what_may_fit_is_asked(path: str, body: dict[str, Any]) -> None:
    async with (
        scripted(ANY, max_model_len=4096) as one,
        gateway_over(configured(one, kinds={"e1": "vllm"})) as (_, client),
    ):
        answer = await client.post(path, json={"model": "m", **body})
        assert answer.status_code == 200, answer.text


async def test_what_may_be_too_long_goes_where_there_is_room_for_it() -> None:
    async with (
        scripted(ANY, max_model_len=1000) as short,
        scripted(ANY, max_model_len=100_000) as long,
        gateway_over(configured(short, long)) as (gateway, client),
    ):
        body = chat(messages=[{"role": "user", "content": PROSE * 100}])
        for _ in range(4):
            answer = await client.post(CHAT, json=body)
            assert answer.headers["x-paceline-attempts"] == "1"
        assert len(long.bodies) == 4
        # where that takes none, the other one may know better
        gateway.upstreams.by_name["e2"].draining = True
        assert (await client.post(CHAT, json=body)).status_code == 200
        short.script[:] = [refused(400)]
        assert (await client.post(CHAT, json=body)).status_code == 400
        assert len(short.bodies) == 2


async def test_an_engine_that_cuts_prompts_gets_none_that_may_be_too_long() -> None:
    contexts = {"models": [{"name": "m", "context_length": 1000}]}
    async with (
        scripted(ANY, pages={"/api/version": {}, "/api/ps": contexts}) as engine,
        gateway_over(configured(engine, kinds={"e1": "ollama"})) as (_, client),
    ):
        for text, status in ((PROSE * 100, 400), (" " * 20_000, 200), (PROSE * 10, 200)):
            answer = await client.post(
                CHAT, json=chat(messages=[{"role": "user", "content": text}])
            )
            assert answer.status_code == status
        _, body = MEDIA["picture"]
        assert (await client.post(CHAT, json=chat(**body))).status_code == 200


def counted(tokens: int) -> Step:
    usage = {"prompt_tokens": tokens, "completion_tokens": 1}
    body = {"id": "x", "choices": [], "usage": usage}
    return Step(parts=(json.dumps(body).encode(),), stream=False)


@pytest.mark.parametrize(("bytes_per_token", "num_bytes", "goes_to"), [(2, 8000, 1), (6, 14000, 0)])
async def test_how_long_prompts_are_is_learned(
    bytes_per_token: int, num_bytes: int, goes_to: int
) -> None:
    models = (
        ModelConfig(name="m", tiers=(("e1:m",),), length_over={"3000": "long"}),
        ModelConfig(name="long", tiers=(("e2:m",),)),
    )
    text = PROSE * 200
    async with (
        scripted(counted(5000 // bytes_per_token)) as one,
        scripted(ANY) as long,
        gateway_over(configured(one, long, models=models, rate_limit_tokens="99999/300day")) as (
            gateway, client
        ),
    ):  # fmt: skip
        teaching = chat(messages=[{"role": "user", "content": text[:5000]}], max_tokens=1)
        for _ in range(8):
            assert (await client.post(CHAT, json=teaching)).status_code == 200
        of = gateway._bytes_per_token.of("m")
        assert abs(of - bytes_per_token) < 0.3
        one.script[:] = [ANY]
        await client.post(CHAT, json=chat(messages=[{"role": "user", "content": text[:num_bytes]}]))
        assert len(long.bodies) == goes_to
        # nothing is learned from pictures, nor from prompts that are little beside a template
        _, picture = MEDIA["picture"]
        for body in (picture, user(TEXT)):
            one.script[:] = [counted(9000)]
            await client.post(CHAT, json=chat(max_tokens=1, **body))
        assert gateway._bytes_per_token.of("m") == of


def test_what_is_learned_has_bounds() -> None:
    learned = BytesPerToken()
    assert learned.of("m") == 4.0
    for tokens, bound in ((1, 8.0), (10**9, 1.0)):
        for _ in range(200):
            learned.learn(("m",), PromptSize(10_000.0), tokens)
        assert learned.of("m") == bound
    assert learned.of("n") == 4.0


def test_text_that_looks_like_data_is_text() -> None:
    """Who calls it a text has it counted."""
    for name, value in (("prompt", DATA), ("input", DATA), ("input", [DATA]), ("prompt", [URL])):
        size = measure({name: json.dumps(value).encode()})
        assert size.media == 0 and size.text > 100_000
    for body in (
        user({"type": "text", "text": DATA}),
        {"messages": [{"role": "user", "content": URL}]},
    ):
        size = measure({"messages": json.dumps(body["messages"]).encode()})
        assert size.media == 0 and size.text > 100_000
    assert least_tokens(CHAT, {"messages": b'"\xff"'}) == 0
