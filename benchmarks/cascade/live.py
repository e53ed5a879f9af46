"""First tokens in mode ``prefix``, next to those of the small model without it.

The small model's server is the real one. A gateway before it holds the first tokens back and then
sends them on (the threshold lets all prompts through), so what it adds to a first token is the time
of the tokens that it holds. The large model is the engine that computes nothing.

Each prompt is asked in turns: of the small model by its own name through the same gateway, of its
server with the log-probabilities that the judge reads, and in mode ``prefix``. A token is as long
as the first ones of the same answer are on average, as drafts make later ones shorter:
``added_tokens`` is what was added, in these, so that the machine's load cancels out. The sums over
a prompt's turns are compared, and not their least times: the least of a sum of two times is more
than the sum of their least ones. ``scripted_added_tokens`` is the same of a small model whose
tokens come 20 ms apart: what it has beyond the tokens held, less one, is the gateway's own. Both
have the middle 95 % of what resampled prompts give.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from benchmarks.cascade.collect import SMALL, folder
from benchmarks.cascade.judging import FIRST
from benchmarks.common.client import exchange, get
from benchmarks.common.server import PacelineServer, ReadyServer
from paceline.bench.calibrate.fitting import Measured, calibrate
from paceline.gateway.settings.calibration import Fitted, Side, digest_of

__all__ = ["first_tokens"]

_PROMPTS: Final = 20
# each prompt is asked so often in each way
_TIMES: Final = 3
_SCRIPTED_GAP: Final = 0.02
# resampled sets of prompts
_DRAWS: Final = 1000
# seconds of one prompt's turns: to the first token from the server, of the small model through the
# gateway and in mode ``prefix``, and of the tokens that are held
_Turns = list[tuple[float, float, float, float]]
# as a gateway asks for them
_WITH_LOGPROBS: Final[Mapping[str, Any]] = {"logprobs": True, "top_logprobs": 5}
_MAX_TOKENS: Final = 32
_CONFIG: Final = """
spend_storage = ""
[[engines]]
name = "small"
url = "http://127.0.0.1:{small}"
[[engines]]
name = "large"
url = "http://127.0.0.1:{large}"
[[models]]
name = "small"
tiers = [["small:{model}"]]
[[models]]
name = "scripted"
tiers = [["large:mock"]]
"""
_CASCADE: Final = """
[[models]]
name = "{name}"
tiers = [["large:mock"]]
[models.cascade]
small = "{small}"
mode = "prefix"
max_loss = 0.9
prefix_tokens = {first}
calibration = "{file}"
"""


async def _first_token(
    port: int, model: str, row: Measured, **more: Any
) -> tuple[float, float, str]:
    """Return seconds to the first text, from there to the last of the tokens that are held, and who
    answered. Chunks without log-probabilities count as a token each."""
    body = row.label.body(model) | {"stream": True, "max_tokens": _MAX_TOKENS, "ignore_eos": True}
    began, first, held, count = time.monotonic(), 0.0, 0.0, 0
    async with exchange(port, "/v1/chat/completions", body | more) as answer:
        by = answer.headers.get(b"x-paceline-cascade", b"").decode().partition(";")[0]
        async for line in answer.lines():
            if not line.startswith(b"data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                if choice["delta"].get("content"):
                    first = first or time.monotonic()
                    # drafts that were accepted come several in a chunk
                    count += len((choice.get("logprobs") or {}).get("content") or "x")
                    if count >= FIRST:
                        held = held or time.monotonic()
    return first - began, held - first, by


def first_tokens(rows: Sequence[Measured]) -> dict[str, Any]:
    """Return milliseconds to the first token of both ways, in turns, and what one token takes.
    Raises Unavailable if a server does not start."""
    root = folder()
    with (
        PacelineServer(SMALL, log=root / "server.log") as small,
        ReadyServer(
            (sys.executable, "-m", "benchmarks.gateway.mock", str(_SCRIPTED_GAP)),
            r"^mock ready: http://127.0.0.1:(\d+)/v1", root / "mock.log", seconds=30.0,
        ) as large,
    ):  # fmt: skip
        listed = json.loads(asyncio.run(get(small.port, "/v1/models"))[1])["data"][0]
        made = calibrate(rows, Side(SMALL, digest_of(listed)), Side("mock", ""), FIRST)
        # every prompt stays small: what is measured is the holding back
        fitted = {
            mode: Fitted(each.weights, each.scores, [0.0] * len(each.losses))
            for mode, each in made.fitted.items()
        }
        for name, side in (("chat", made.small), ("slow", Side("mock", ""))):
            told = msgspec.structs.replace(made, fitted=fitted, small=side)
            (root / f"live-{name}.json").write_bytes(msgspec.json.encode(told))
        config = root / "live.toml"
        config.write_text(
            _CONFIG.format(small=small.port, large=large.port, model=SMALL)
            + "".join(
                _CASCADE.format(name=name, small=of, first=FIRST, file=root / f"live-{name}.json")
                for name, of in (("chat", "small"), ("slow", "scripted"))
            )
        )
        argv = (sys.executable, "-m", "paceline.cli.main", "gateway", str(config), "--port", "0")
        ready = r"^paceline gateway ready: http://127.0.0.1:(\d+)/v1"
        with ReadyServer(argv, ready, root / "gateway.log", seconds=60.0) as gateway:
            return asyncio.run(_in_turns(rows[:_PROMPTS], small.port, large.port, gateway.port))


async def _in_turns(
    rows: Sequence[Measured], direct: int, scripted: int, gateway: int
) -> dict[str, Any]:
    """Ask each prompt in every way."""
    found: list[_Turns] = []
    own: list[_Turns] = []
    for row in rows:
        # after this one all ways find the prompt computed
        await _first_token(direct, SMALL, row)
        found.append(await _turns_of(row, (direct, SMALL), (gateway, "small", "chat"), _TIMES))
        own.append(await _turns_of(row, (scripted, "mock"), (gateway, "scripted", "slow"), 1))
    found, own = ([each for each in part if each] for part in (found, own))

    def middle(values: Iterable[float]) -> float:
        return round(1e3 * statistics.median(values), 1)

    turns = [turn for each in found for turn in each]
    return {
        "prompts": len(found),
        "direct_ms": middle(direct for direct, *_ in turns),
        "plain_ms": middle(plain for _, plain, *_ in turns),
        "prefix_ms": middle(prefix for *_, prefix, _ in turns),
        "added_ms": middle(prefix - plain for _, plain, prefix, _ in turns),
        "held_ms": middle(held for *_, held in turns),
        "added_tokens": _in_tokens(found),
        "scripted_added_tokens": _in_tokens(own),
        "held_tokens": FIRST,
    }


async def _turns_of(
    row: Measured, server: tuple[int, str], gateway: tuple[int, str, str], times: int
) -> _Turns:
    """Return the turns of one prompt that the small model answered.

    Args:
        server: port of the small model's server, and its name there.
        gateway: port, and the names of the small model and of the cascade there.
    """
    port, plain_name, name = gateway
    found = []
    for _ in range(times):
        plain, *_ = await _first_token(port, plain_name, row)
        direct, held, _ = await _first_token(*server, row, **_WITH_LOGPROBS)
        prefix, _, by = await _first_token(port, name, row)
        if by == "small":
            found.append((direct, plain, prefix, held))
    return found


def _in_tokens(found: Sequence[_Turns]) -> list[float]:
    """Return what was added in tokens: the median over the prompts, and its interval."""
    each = [
        (FIRST - 1) * sum(prefix - plain for _, plain, prefix, _ in turns)
        / sum(held for *_, held in turns)
        for turns in found
    ]  # fmt: skip
    draw = np.random.default_rng(0)
    drawn = np.median(draw.choice(each, (_DRAWS, len(each))), axis=1)
    told = (np.median(each), *np.quantile(drawn, (0.025, 0.975)))
    return [round(float(value), 1) for value in told]
