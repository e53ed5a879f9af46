"""First tokens through a gateway in mode ``prefix``, next to the small model's own.

The small model's server is the real one. A gateway before it holds the first tokens back and then
sends them on (the threshold lets all prompts through), so what it adds to a first token is the time
of the tokens that it holds. The large model is the engine that computes nothing.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from benchmarks.cascade.collect import SMALL, folder
from benchmarks.cascade.judging import FIRST
from benchmarks.common.client import exchange, get
from benchmarks.common.server import PacelineServer, ReadyServer
from paceline.bench.calibrate.fitting import Measured, calibrate
from paceline.gateway.settings.calibration import Fitted, Side, digest_of

__all__ = ["first_tokens"]

_PROMPTS: Final = 20
_MAX_TOKENS: Final = 48
_CONFIG: Final = """
spend_storage = ""
[[engines]]
name = "small"
url = "http://127.0.0.1:{small}"
[[engines]]
name = "large"
url = "http://127.0.0.1:{large}"
[[models]]
name = "chat"
tiers = [["large:mock"]]
[models.cascade]
small = "small"
mode = "prefix"
max_loss = 0.9
prefix_tokens = {first}
calibration = "{file}"
[[models]]
name = "small"
tiers = [["small:{model}"]]
"""


async def _first_token(port: int, model: str, row: Measured) -> tuple[float, float, str]:
    """Return seconds to the first text and for each later token, and who answered."""
    body = row.label.body(model) | {"stream": True, "max_tokens": _MAX_TOKENS, "ignore_eos": True}
    began, first, last = time.monotonic(), 0.0, 0.0
    async with exchange(port, "/v1/chat/completions", body) as answer:
        by = answer.headers.get(b"x-paceline-cascade", b"").decode().partition(";")[0]
        async for line in answer.lines():
            if line.startswith(b"data: {"):
                choices = json.loads(line[6:])["choices"]
                if choices and choices[0]["delta"].get("content"):
                    first = first or time.monotonic()
                if choices and choices[0].get("finish_reason"):
                    last = time.monotonic()
    return first - began, (last - first) / (_MAX_TOKENS - 1), by


def first_tokens(rows: Sequence[Measured]) -> dict[str, Any]:
    """Return milliseconds to the first token of both ways, in turns, and what one token takes.
    Raises Unavailable if a server does not start."""
    root = folder()
    with (
        PacelineServer(SMALL, log=root / "server.log") as small,
        ReadyServer(
            (sys.executable, "-m", "benchmarks.gateway.mock", "0"),
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
        file = root / "live.json"
        file.write_bytes(msgspec.json.encode(msgspec.structs.replace(made, fitted=fitted)))
        config = root / "live.toml"
        config.write_text(
            _CONFIG.format(small=small.port, large=large.port, first=FIRST, file=file, model=SMALL)
        )
        argv = (sys.executable, "-m", "paceline.cli.main", "gateway", str(config), "--port", "0")
        ready = r"^paceline gateway ready: http://127.0.0.1:(\d+)/v1"
        with ReadyServer(argv, ready, root / "gateway.log", seconds=60.0) as gateway:
            return asyncio.run(_in_turns(rows[:_PROMPTS], small.port, gateway.port))


async def _in_turns(rows: Sequence[Measured], direct: int, gateway: int) -> dict[str, Any]:
    own, through, gaps = [], [], []
    for row in rows:
        # after this one both ways find the prompt computed
        await _first_token(direct, SMALL, row)
        seconds, gap, _ = await _first_token(direct, SMALL, row)
        held, _, by = await _first_token(gateway, "chat", row)
        if by == "small":
            own.append(1e3 * seconds)
            through.append(1e3 * held)
            gaps.append(1e3 * gap)
    added = [b - a for a, b in zip(own, through, strict=True)]
    return {
        "prompts": len(added),
        "direct_ms": round(statistics.median(own), 1),
        "prefix_ms": round(statistics.median(through), 1),
        "added_ms": round(statistics.median(added), 1),
        "token_ms": round(statistics.median(gaps), 1),
        "added_tokens": round(statistics.median(added) / statistics.median(gaps), 1),
        "held_tokens": FIRST,
    }
