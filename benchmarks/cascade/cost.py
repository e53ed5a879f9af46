"""Cost of one model's cascade to requests of another: processor time of two gateways in turns.

Both have the same file, before the engine that computes nothing; one of them has a cascade in it,
for a model that no request asks for. A turn is one run of each, one after the other, and its ratio
is that of processor seconds a request.
"""

from __future__ import annotations

import statistics
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from benchmarks.common.server import ReadyServer
from benchmarks.gateway.overhead import (
    Side,
    cpu_seconds,
    gateway_core,
    mock_engine,
    pinned,
    run_load,
)

__all__ = ["other_requests"]

_RATE: Final = 500.0
_CONFIG: Final = """
spend_storage = ""
[[engines]]
name = "mock"
url = "http://127.0.0.1:{port}"
[[models]]
name = "mock"
tiers = [["mock:mock"]]
[[models]]
name = "chat"
tiers = [["mock:mock"]]
"""
_CASCADE: Final = '[models.cascade]\nsmall = "mock"\n'


def other_requests(folder: Path, turns: int = 8, seconds: float = 4.0) -> dict[str, Any]:
    """Return microseconds of processor a request of a model without a cascade, at both gateways,
    and the ratio of each turn: median, lowest and highest. Raises Unavailable."""
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        engine = stack.enter_context(mock_engine(0.0, folder))
        sides = []
        for name, cascade in (("without", ""), ("with", _CASCADE)):
            file = folder / f"{name}.toml"
            file.write_text(_CONFIG.format(port=engine.port) + cascade)
            argv = (
                *pinned(gateway_core()), sys.executable, "-m", "paceline.cli.main", "gateway",
                str(file), "--port", "0",
            )  # fmt: skip
            ready = r"^paceline gateway ready: \S+:(\d+)/v1 "
            started = ReadyServer(argv, ready, folder / f"{name}.log", seconds=60.0)
            gateway = stack.enter_context(started)
            sides.append(Side(name, gateway.port, "mock", gateway.pid))
        for how, tokens in (("whole", 2), ("stream", 8)):
            spent: dict[str, list[float]] = {side.name: [] for side in sides}
            for turn in range(turns + 1):
                for side in sides:
                    assert side.pid is not None, "a gateway"
                    before = cpu_seconds(side.pid)
                    run = run_load(side, _RATE, seconds, tokens, stream=how == "stream")
                    # the first turn warms both
                    if turn:
                        took = cpu_seconds(side.pid) - before
                        spent[side.name].append(1e6 * took / run["requests"])
            ratios = [b / a for a, b in zip(spent["without"], spent["with"], strict=True)]
            found[how] = {
                "us": {name: round(statistics.median(each), 1) for name, each in spent.items()},
                "ratio": [
                    round(each, 3) for each in (statistics.median(ratios), min(ratios), max(ratios))
                ],
            }
    return found
