"""Signals that cost a request of their own, or a field: agreement, perplexity, embeddings."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.gateway.cascade.signals import embedding_of, request_of_embedding
from paceline.gateway.settings.calibration import Signals
from paceline.gateway.settings.cascade import CascadeConfig, check_cascade
from paceline.gateway.settings.config import ModelConfig
from tests.gateway.cascade.helpers import calibration, cascade, said
from tests.gateway.cascade.test_cascade import LARGE, SURE, asked, by, content, metric
from tests.gateway.fault_server import Step
from tests.gateway.helpers import CHAT, configured, gateway_over, is_clean, refused, until

THREE = Signals(samples=3)
SMALL = said("small", *SURE)


def choices(*texts: str) -> Step:
    found = [
        {"index": i, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        for i, text in enumerate(texts)
    ]
    counts = {"prompt_tokens": 10, "completion_tokens": 15, "total_tokens": 25}
    answer = {"id": "x", "created": 1, "model": "m", "choices": found, "usage": counts}
    return Step(parts=(json.dumps(answer).encode(),), stream=False)


def agreeing(folder: Path) -> str:
    """A calibration by which an answer is good where more than half of the others agree."""
    return calibration(folder, signals=THREE, weights={"last": 8.0, "questions": -9.0})


def with_prompt_logprob(step: Step, logprob: float) -> Step:
    answer = json.loads(step.parts[0])
    answer["prompt_logprobs"] = [None, {"5": {"logprob": logprob, "rank": 1}}]
    return Step(parts=(json.dumps(answer).encode(),), stream=False)


# the fault server gives its steps to the two requests in turn: the answer itself is asked for first
@pytest.mark.parametrize(
    ("others", "who"),
    [(("Small.", "small", "other"), "small"), (("no", "other", "more"), "escalated")],
)
async def test_further_answers_tell_whether_the_first_one_is_sure(
    tmp_path: Path, others: tuple[str, ...], who: str
) -> None:
    path = calibration(tmp_path, signals=THREE, weights={"last": 12.0, "log_length": -4.0})
    steps = (SMALL, choices(*others))
    async with cascade(steps, LARGE, calibration=path, samples=3) as (one, _, gateway, http):
        response = await http.post(CHAT, json=asked(seed=5))
        drawn, first = sorted(one.bodies, key=lambda body: -body.get("n", 1))
        assert drawn["n"] == 3 and drawn["temperature"] == 0.7 and "logprobs" not in drawn
        # a seed would make them all alike
        assert "seed" not in drawn and first["seed"] == 5 and first["logprobs"] is True
        assert by(response) == who
        told = (await http.get("/metrics")).text
        wasted = 15 + 5 * (who == "escalated")
        assert metric(told, "paceline:gateway_cascade_wasted_tokens_total", model="chat") == wasted
        await until(lambda: is_clean(gateway))


async def test_without_further_answers_the_prompt_decides(tmp_path: Path) -> None:
    steps = (SMALL, refused(500))
    path = calibration(tmp_path, signals=THREE)
    async with cascade(steps, LARGE, calibration=path, samples=3) as (*_, gateway, http):
        question = asked(messages=[{"role": "user", "content": "Why?"}])
        assert by(await http.post(CHAT, json=question)) == "escalated"
        await until(lambda: is_clean(gateway))


@pytest.mark.parametrize(("logprob", "who"), [(-0.5, "small"), (-9.0, "escalated")])
async def test_perplexity_of_the_prompt(tmp_path: Path, logprob: float, who: str) -> None:
    path = calibration(tmp_path, signals=Signals(perplexity=True), weights={"last": 1.0})
    small = with_prompt_logprob(SMALL, logprob)
    async with cascade(small, LARGE, calibration=path, perplexity=True) as (one, two, _, http):
        response = await http.post(CHAT, json=asked())
        assert one.bodies[0]["prompt_logprobs"] == 0 and by(response) == who
        # the caller asked for none
        assert "prompt_logprobs" not in response.json()
        assert all("prompt_logprobs" not in body for body in two.bodies)


async def test_a_caller_may_ask_for_what_no_calibration_knows(tmp_path: Path) -> None:
    small = with_prompt_logprob(SMALL, -0.5)
    async with cascade(small, LARGE, calibration=calibration(tmp_path)) as (*_, http):
        response = await http.post(CHAT, json=asked(prompt_logprobs=0))
        assert by(response) == "small" and "prompt_logprobs" in response.json()


async def test_further_answers_end_before_the_large_model_is_asked(tmp_path: Path) -> None:
    steps = (Step(parts=(b"{", b"}"), stream=False, then="cut"), Step(delay=30.0))
    large = Step(parts=LARGE.parts, stream=False, delay=0.3)
    path = calibration(tmp_path, signals=THREE)
    async with cascade(steps, large, calibration=path, samples=3) as (one, two, gateway, http):
        call = asyncio.ensure_future(http.post(CHAT, json=asked()))
        await until(lambda: bool(two.bodies))
        assert not gateway.upstreams.by_name["e1"].running and len(one.bodies) <= 2
        assert content(await call) == "large"
        await until(lambda: is_clean(gateway))


async def test_a_refused_perplexity_leaves_log_probabilities_to_later_requests(
    tmp_path: Path,
) -> None:
    path = calibration(tmp_path, signals=Signals(perplexity=True), weights={"last": 1.0})
    refusal = Step(status=400, parts=(b'{"error":{"message":"prompt_logprobs: too long"}}',),
                   stream=False)  # fmt: skip
    steps = (refusal, SMALL, with_prompt_logprob(SMALL, -0.5))
    async with cascade(steps, LARGE, calibration=path, perplexity=True) as (one, _, _, http):
        first = await http.post(CHAT, json=asked())
        assert by(first) == "small" and 'why="score"' in first.headers["x-paceline-cascade"]
        await http.post(CHAT, json=asked())
        assert [body.get("prompt_logprobs") for body in one.bodies] == [0, None, 0]


def vector(*values: float) -> Step:
    data = {"object": "list", "data": [{"index": 0, "embedding": list(values)}], "model": "m"}
    return Step(parts=(json.dumps(data | {"usage": {"prompt_tokens": 3}}).encode(),), stream=False)


def embedding(path: str, *tiers: str) -> tuple[ModelConfig, ...]:
    """Models of a cascade whose prompts are embedded by the engines of ``tiers``."""
    decided = CascadeConfig(small="small", mode="route", calibration=path, embeddings="vectors")
    return (
        ModelConfig(name="chat", tiers=(("e2:m",),), cascade=decided),
        ModelConfig(name="small", tiers=(("e1:m",),)),
        ModelConfig(name="vectors", tiers=tuple((tier,) for tier in tiers)),
    )


@pytest.mark.parametrize(
    ("answer", "who", "why"),
    [
        (vector(3.0, 4.0), "small", "score"),
        (vector(-3.0, -4.0), "routed", "score"),
        (vector(3.0), "routed", "no embedding"),
        (refused(500), "routed", "no embedding"),
    ],
)
async def test_embedding_of_the_prompt(tmp_path: Path, answer: Step, who: str, why: str) -> None:
    signals = Signals(embeddings="vectors", num_values=2)
    path = calibration(tmp_path, signals=signals, weights={"embedding": 9.0}, modes=("route",))
    models = embedding(path, "e3:m")
    async with three(SMALL, LARGE, answer, models=models) as (*_, third, http):
        response = await http.post(CHAT, json=asked())
        assert third.bodies[0] == {"input": "hi", "model": "m"}
        header = response.headers["x-paceline-cascade"]
        assert f'why="{why}"' in header
        assert content(response) == ("small" if who == "small" else "large")


async def test_another_models_vector_says_nothing(tmp_path: Path) -> None:
    signals = Signals(embeddings="vectors", num_values=2)
    path = calibration(tmp_path, signals=signals, weights={"embedding": 9.0}, modes=("route",))
    models = embedding(path, "e3:m", "e4:m")
    engines = (SMALL, LARGE, refused(503), vector(3.0, 4.0))
    async with three(*engines, models=models) as (*_, other, http):
        response = await http.post(CHAT, json=asked())
        assert 'why="no embedding"' in response.headers["x-paceline-cascade"]
        assert not other.bodies


async def test_a_prompt_that_may_not_leave_is_not_embedded_in_a_cloud(tmp_path: Path) -> None:
    signals = Signals(embeddings="vectors", num_values=2)
    path = calibration(tmp_path, signals=signals, weights={"embedding": 9.0}, modes=("route",))
    models = (
        ModelConfig(
            name="chat", tiers=(("e2:m",),), local_only=True,
            cascade=CascadeConfig(
                small="small", mode="route", calibration=path, embeddings="vectors",
            ),
        ),
        ModelConfig(name="small", tiers=(("e1:m",),)),
        ModelConfig(name="vectors", tiers=(("e3:m",),)),
    )  # fmt: skip
    engines, clouds = (SMALL, LARGE, vector(3.0, 4.0)), {"e3": {"cloud": True}}
    async with three(*engines, models=models, engine_fields=clouds) as (*_, cloud, http):
        response = await http.post(CHAT, json=asked())
        assert 'why="no embedding"' in response.headers["x-paceline-cascade"]
        assert content(response) == "large" and not cloud.bodies


def three(*steps: Step, models: tuple[ModelConfig, ...], **fields: Any) -> Any:
    from contextlib import AsyncExitStack, asynccontextmanager

    from tests.gateway.fault_server import scripted

    @asynccontextmanager
    async def opened() -> Any:
        async with AsyncExitStack() as stack:
            engines = [await stack.enter_async_context(scripted(step)) for step in steps]
            config = configured(*engines, models=models, spend_storage="", **fields)
            _, http = await stack.enter_async_context(gateway_over(config))
            yield *engines, http

    return opened()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"samples": 9}, "samples must be 0 to 8, got 9"),
        ({"samples": 2, "mode": "prefix", "calibration": "x"}, "samples needs mode cascade"),
        ({"perplexity": True, "mode": "route", "calibration": "x"}, "perplexity needs mode"),
        ({"samples": 2, "shadow": 0.1, "calibration": "x"}, "samples go with no shadow"),
    ],
)
def test_settings_that_cannot_be_meant(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_cascade("chat", CascadeConfig(small="small", **fields))


async def test_a_calibration_with_other_signals_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="was made with samples = 3, and the file says 0"):
        async with cascade(SMALL, LARGE, calibration=agreeing(tmp_path)):
            pass


def test_a_vector_is_scaled_and_a_long_prompt_cut() -> None:
    assert embedding_of(b'{"data": [{"embedding": [3, 4]}]}') == [0.6, 0.8]
    for data in (b"", b'{"data": []}', b'{"data": [{"embedding": [0, 0]}]}'):
        assert embedding_of(data) == []
    assert request_of_embedding("a" * 3000, "m")["input"] == "a" * 2000
    assert request_of_embedding("", "m")["input"] == " "
