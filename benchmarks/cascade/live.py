"""First tokens through a gateway in mode ``prefix``, next to the small model's own.

The small model's server is the real one. A gateway before it holds the first tokens back and then
sends them on (the threshold lets all prompts through), so what it adds to a first token is the time
of the tokens that it holds. The large model is the engine that computes nothing.

Each prompt is asked in turns: plainly, with the log-probabilities that the judge reads, and through
the gateway. A token is as long as the first ones of the same answer are on average, as drafts make
later ones shorter: ``added_tokens`` is what was added, in these, so that the machine's load cancels
out. ``scripted_added_tokens`` is the same of a small model whose tokens come 20 ms apart: what it
has beyond the tokens held, less one, is the gateway's own.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
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
# each prompt is asked so often in each way, and the least time counts
_TIMES: Final = 3
_SCRIPTED_GAP: Final = 0.02
# as a gateway asks for them
_WITH_LOGPROBS: Final = {"logprobs": True, "top_logprobs": 5}
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
    found: list[tuple[float, float, float]] = []
    own: list[float] = []
    for row in rows:
        # after this one all ways find the prompt computed
        await _first_token(direct, SMALL, row)
        turns = []
        for _ in range(_TIMES):
            plain, *_ = await _first_token(direct, SMALL, row)
            _, held, _ = await _first_token(direct, SMALL, row, **_WITH_LOGPROBS)
            through, _, by = await _first_token(gateway, "chat", row)
            if by == "small":
                turns.append((plain, through, held))
        if turns:
            first, through, held = (min(each) for each in zip(*turns, strict=True))
            found.append((first, through, held))
        first, held, _ = await _first_token(scripted, "mock", row)
        through, _, by = await _first_token(gateway, "slow", row)
        if by == "small":
            own.append((FIRST - 1) * (through - first) / held)

    def middle(values: Iterable[float], scale: float = 1e3) -> float:
        return round(scale * statistics.median(values), 1)

    return {
        "prompts": len(found),
        "direct_ms": middle(first for first, *_ in found),
        "prefix_ms": middle(through for _, through, _ in found),
        "added_ms": middle(through - first for first, through, _ in found),
        "held_ms": middle(held for *_, held in found),
        "added_tokens": middle(
            ((FIRST - 1) * (through - first) / held for first, through, held in found), 1.0
        ),
        "scripted_added_tokens": middle(own, 1.0),
        "held_tokens": FIRST,
    }
