"""A small and a large engine, a calibration that looks at one number, and answers with it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from paceline.gateway.settings.calibration import Calibration, Fitted, Side, Signals, num_dense
from paceline.gateway.settings.cascade import CascadeConfig, Mode
from paceline.gateway.settings.config import ModelConfig
from paceline.routing.cascade import CONFIDENCE, FORM, NUM_BUCKETS, Scorer
from tests.gateway.fault_server import Step, scripted
from tests.gateway.helpers import configured, gateway_over

NO_SIGNALS = Signals()
# scores of a calibration's labels; those below 0.5 lose everything
SCORES = [i / 200 for i in range(200)]
LOSSES = [float(score < 0.5) for score in SCORES]


def scorer(mode: Mode, weights: dict[str, float], bias: float, signals: Signals) -> Scorer:
    """A scorer of dense features by name; "last": the last one."""
    names = FORM if mode == "route" else (*FORM, *CONFIDENCE)
    dense = np.zeros(num_dense(mode, signals), np.float32)
    for name, weight in weights.items():
        if name == "last" or name in names:
            dense[-1 if name == "last" else names.index(name)] = weight
    hashed = np.zeros(NUM_BUCKETS + signals.num_values, np.float32)
    hashed[NUM_BUCKETS:] = weights.get("embedding", 0.0)
    return Scorer(bias, hashed, dense)


def calibration(
    folder: Path,
    *,
    modes: Sequence[Mode] = ("route", "cascade", "prefix"),
    first: int = 2,
    small: str = "",
    large: str = "",
    losses: Sequence[float] = tuple(LOSSES),
    labels: Any = "checked",
    signals: Signals = NO_SIGNALS,
    weights: dict[str, float] | None = None,
) -> str:
    """Write a calibration: an answer's score is above 0.5 where the mean of its log-probabilities
    is above -1, and a prompt's where it has no question mark. Its threshold is about 0.5.

    Args:
        weights: of every mode's features by name, instead of these.
    """
    fitted = {
        mode: Fitted(
            scorer(mode, weights or ({"questions": -9.0} if mode == "route" else {
                ("first_" if mode == "prefix" else "") + "logprob_mean": 4.0
            }), 4.0, signals).to_bytes(),
            SCORES[: len(losses)],
            list(losses),
        )
        for mode in modes
    }  # fmt: skip
    found = Calibration(
        small=Side("m", small), large=Side("m", large), prefix_tokens=first, num_labels=400,
        labels=labels,
        signals=signals,
        fitted=fitted,
    )  # fmt: skip
    path = folder / "calibration.json"
    path.write_bytes(msgspec.json.encode(found))
    return str(path)


def places(logprobs: Sequence[float]) -> list[dict[str, Any]]:
    return [
        {
            "token": "x",
            "logprob": each,
            "top_logprobs": [{"token": "x", "logprob": each}, {"token": "y", "logprob": -9.0}],
        }
        for each in logprobs
    ]


def said(text: str, *logprobs: float, reason: str = "stop", **message: Any) -> Step:
    """A whole answer."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text, **message},
        "logprobs": {"content": places(logprobs)} if logprobs else None,
        "finish_reason": reason,
    }
    counts = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    answer = {"id": "x", "created": 1, "model": "m", "choices": [choice], "usage": counts}
    return Step(parts=(json.dumps(answer).encode(),), stream=False)


def told(words: Sequence[str], *logprobs: float, **step: Any) -> Step:
    """A streamed answer, a token a word."""
    chunks = []
    for number, word in enumerate(words):
        last = number == len(words) - 1
        choice: dict[str, Any] = {
            "index": 0,
            "delta": {"content": word},
            "finish_reason": "stop" if last else None,
        }
        if logprobs:
            choice["logprobs"] = {"content": places(logprobs[number : number + 1])}
        head = {"id": "x", "created": 1, "model": "m"}
        chunks.append(b"data: " + json.dumps({**head, "choices": [choice]}).encode() + b"\n\n")
    return Step(parts=(*chunks, b"data: [DONE]\n\n"), **step)


@asynccontextmanager
async def cascade(
    small: Step | tuple[Step, ...], large: Step | tuple[Step, ...], **fields: Any
) -> AsyncIterator[Any]:
    """Engine e1 with the small model, e2 with the large one, which model "chat" is, and a gateway
    over them. ``fields``: of the cascade, and ``gateway`` those of the configuration."""
    more = fields.pop("gateway", {})
    keys = fields.pop("keys", ())
    local_only = fields.pop("local_only", False)
    # as ``calibration`` has it
    fields.setdefault("prefix_tokens", 2)
    models = (
        ModelConfig(
            name="chat", tiers=(("e2:m",),), local_only=local_only,
            cascade=CascadeConfig(small="small", **fields),
        ),
        ModelConfig(name="small", tiers=(("e1:m",),)),
    )  # fmt: skip
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(scripted(*(s if isinstance(s, tuple) else (s,))))
            for s in (small, large)
        ]
        config = configured(*engines, models=models, spend_storage="", **more)
        yield *engines, *await stack.enter_async_context(gateway_over(config, keys))
