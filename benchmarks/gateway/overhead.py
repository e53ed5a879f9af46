"""Latency that a gateway adds to a request, and its cost: direct access, a bare relay of bytes (the
least cost in Python on this machine), this gateway, LiteLLM's proxy, sglang-router and vllm-router
in turns, before the same engine that computes nothing.

The measured gateway is pinned to one core; engine and callers share the others.

* added time: requests in an open loop (Poisson), streamed, first content since they were due; the
  median and the 99th percentile less those of direct access in the same turn;
* requests a second per core: answers that are not streamed, by processor seconds of the gateway;
* microseconds of processor per relayed chunk: streams of many chunks that come one by one, less
  the cost of their requests. The cost of an idle gateway (polls) is subtracted from both.
"""

from __future__ import annotations

import functools
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.processes import Command, Process, Unavailable, free_port
from benchmarks.common.server import ReadyServer
from benchmarks.common.unmeasured import Unmeasured

__all__ = [
    "Side",
    "cpu_seconds",
    "gateway_core",
    "mock_engine",
    "overhead",
    "pinned",
    "run_load",
]

# requests a second of the runs for added time (all sides can serve the first), and for processor
# time
_RATES = (10.0, 200.0)
_CPU_RATE = 600.0
_CHUNK_TOKENS = 60
_CHUNK_RATE = 20.0
# rates for sides that cannot serve these
_SLOW_RATES = {"litellm": (60.0, 3.0)}
_GAP = 0.02
_IDLE_SECONDS = 4.0
_START_SECONDS = 120.0


@dataclass
class Side:
    """A target that callers send to."""

    name: str
    port: int
    model: str
    # None: direct access
    pid: int | None = None
    # processor seconds per second without requests
    idle: float = 0.0


def overhead(
    turns: int,
    seconds: float,
    litellm: str | None,
    routers: Mapping[str, Path],
    log_dir: Path,
    unmeasured: Unmeasured,
) -> dict[str, Any]:
    """Return all figures that could be measured; ``unmeasured`` gets the others.

    Args:
        litellm: its ``litellm`` command; None: it is left out.
        routers: by name, the interpreter of each one's environment.
    """
    with ExitStack() as stack:
        fast = stack.enter_context(mock_engine(0.0, log_dir))
        slow = stack.enter_context(mock_engine(_GAP, log_dir))
        sides = {"direct": Side("direct", fast.port, "mock")}
        gateway = stack.enter_context(_paceline(fast.port, log_dir / "gateway.log"))
        sides["paceline"] = Side("paceline", gateway.port, "mock", gateway.pid)
        relay = stack.enter_context(_paceline(slow.port, log_dir / "relay.log"))
        relays = {"paceline": Side("paceline", relay.port, "mock", relay.pid)}
        for engine, found_sides in ((fast, sides), (slow, relays)):
            bare = stack.enter_context(_bare(engine.port, log_dir / f"bare-{engine.port}.log"))
            found_sides["bare"] = Side("bare", bare.port, "mock", bare.pid)
        others: dict[str, Callable[[int, Path], _Other]] = {}
        if litellm is not None:
            others["litellm"] = functools.partial(_litellm, litellm)
        for name, python in routers.items():
            others[name] = functools.partial(_router, name, python)
        skipped = {}
        for name, start in others.items():
            try:
                with ExitStack() as both:
                    ports = [
                        both.enter_context(
                            start(engine.port, log_dir / f"{name}-{engine.port}.log")
                        )
                        for engine in (fast, slow)
                    ]
                    stack.push(both.pop_all())
            except Unavailable as error:
                skipped[name] = {"skipped": str(error)}
                print(f"  {name} is left out: {error}", file=sys.stderr, flush=True)
                continue
            for found_sides, other in zip((sides, relays), ports, strict=True):
                found_sides[name] = Side(name, other.port, "mock", other.pid)
        _idle([*sides.values(), *relays.values()])
        found = _turns(sides, turns, seconds, unmeasured)
        found["idle_share"] = {n: round(s.idle, 4) for n, s in sides.items() if s.pid is not None}
        found |= _processor(sides, turns, seconds, unmeasured)
        found |= _relay(relays, found, turns, seconds, unmeasured)
        return found | skipped


def _idle(sides: Sequence[Side]) -> None:
    """Measure the cost of each side without requests."""
    pids = {side.pid: cpu_seconds(side.pid) for side in sides if side.pid is not None}
    began = time.monotonic()
    time.sleep(_IDLE_SECONDS)
    for side in sides:
        if side.pid is not None:
            side.idle = (cpu_seconds(side.pid) - pids[side.pid]) / (time.monotonic() - began)


def _turns(
    sides: dict[str, Side], turns: int, seconds: float, unmeasured: Unmeasured
) -> dict[str, Any]:
    added: dict[str, dict[str, list[float]]] = {}

    def turn(side: Side, rate: float, direct: dict[str, Any]) -> None:
        run = run_load(side, rate, seconds, 8, stream=True)
        print(f"  first content {rate:g}/s {side.name:9} {run}", file=sys.stderr)
        if side.name == "direct":
            direct |= run
            return
        if not direct:
            raise Unavailable("direct access was not measured in this turn")
        for name in ("p50", "p99"):
            more = 1000.0 * (run[f"first_{name}"] - direct[f"first_{name}"])
            row = added.setdefault(f"{side.name} {rate:g}/s", {})
            row.setdefault(name, []).append(more)

    for _ in range(turns):
        for rate in _RATES:
            direct: dict[str, Any] = {}
            for side in sides.values():
                if side.name not in _SLOW_RATES or rate == _RATES[0]:
                    with unmeasured.part(f"added time, {side.name} at {rate:g}/s"):
                        turn(side, rate, direct)
    told = {
        name: {
            kind: {"median": round(statistics.median(values), 3), "lowest": round(min(values), 3)}
            for kind, values in kinds.items()
        }
        for name, kinds in added.items()
    }
    return {"added_ms": told}


def _processor(
    sides: dict[str, Side], turns: int, seconds: float, unmeasured: Unmeasured
) -> dict[str, Any]:
    per_core: dict[str, list[float]] = {}

    def turn(name: str, pid: int, side: Side) -> None:
        before = cpu_seconds(pid)
        rate = _SLOW_RATES.get(name, (_CPU_RATE, _CHUNK_RATE))[0]
        run = run_load(side, rate, seconds, 2, stream=False)
        spent = cpu_seconds(pid) - before - side.idle * run["seconds"]
        print(f"  whole answers {name:9} {run} {spent:.2f} s", file=sys.stderr)
        per_core.setdefault(name, []).append(run["requests"] / spent)

    for _ in range(turns):
        for name, side in sides.items():
            if side.pid is not None:
                with unmeasured.part(f"requests a core, {name}"):
                    turn(name, side.pid, side)
    return {"rps_per_core": {n: round(statistics.median(v), 1) for n, v in per_core.items()}}


def _relay(
    sides: dict[str, Side],
    found: dict[str, Any],
    turns: int,
    seconds: float,
    unmeasured: Unmeasured,
) -> dict[str, Any]:
    cost: dict[str, list[float]] = {}

    def turn(name: str, side: Side) -> None:
        assert side.pid is not None, "a gateway"
        if name not in found["rps_per_core"]:
            raise Unavailable("the price of its requests was not measured")
        before = cpu_seconds(side.pid)
        rate = _SLOW_RATES.get(name, (_CPU_RATE, _CHUNK_RATE))[1]
        run = run_load(side, rate, seconds, _CHUNK_TOKENS, stream=True)
        spent = cpu_seconds(side.pid) - before - side.idle * run["seconds"]
        spent -= run["requests"] / found["rps_per_core"][name]
        print(f"  chunks        {name:9} {run} {spent:.2f} s", file=sys.stderr)
        cost.setdefault(name, []).append(1e6 * spent / run["chunks"])

    for _ in range(turns):
        for name, side in sides.items():
            with unmeasured.part(f"microseconds a chunk, {name}"):
                turn(name, side)
    return {"relay_us_per_chunk": {n: round(statistics.median(v), 1) for n, v in cost.items()}}


def run_load(
    side: Side, rate: float, seconds: float, tokens: int, *, stream: bool
) -> dict[str, Any]:
    argv: Sequence[str] = (
        *pinned(_others()), sys.executable, "-m", "benchmarks.gateway.load",
        str(side.port), side.model, str(rate), str(seconds), str(tokens),
        "stream" if stream else "whole",
    )  # fmt: skip
    try:
        out = subprocess.run(argv, capture_output=True, check=True, timeout=seconds + 120).stdout
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"its callers did not end within {error.timeout:g} s") from None
    result: dict[str, Any] = json.loads(out)
    if result["failed"] or not result["requests"]:
        raise Unavailable(f"{result['failed']} requests failed of {rate * seconds:.0f}")
    return result


def _others() -> str:
    """Return the cores that no gateway is pinned to."""
    cores = sorted(os.sched_getaffinity(0))
    return ",".join(map(str, cores[:-1] or cores))


def pinned(cores: str) -> tuple[str, ...]:
    return ("taskset", "-c", cores)


def gateway_core() -> str:
    return str(max(os.sched_getaffinity(0)))


def mock_engine(gap: float, log_dir: Path) -> ReadyServer:
    argv = (*pinned(_others()), sys.executable, "-m", "benchmarks.gateway.mock", str(gap))
    return ReadyServer(argv, r"^mock ready: \S+:(\d+)/v1 ", log_dir / f"mock{gap}.log", seconds=30)


def _paceline(engine: int, log: Path) -> ReadyServer:
    argv = (
        *pinned(gateway_core()), sys.executable, "-m", "paceline.cli.main", "gateway",
        "--engine", f"http://127.0.0.1:{engine}", "--port", "0",
    )  # fmt: skip
    ready = r"^paceline gateway ready: \S+:(\d+)/v1 "
    return ReadyServer(argv, ready, log, seconds=30)


def _bare(engine: int, log: Path) -> ReadyServer:
    argv = (*pinned(gateway_core()), sys.executable, "-m", "benchmarks.gateway.bare", str(engine))
    return ReadyServer(argv, r"^bare ready: \S+:(\d+)/v1 ", log, seconds=30)


def _litellm(command: str, engine: int, log: Path) -> _Other:
    """Start it as its own documentation advises for speed: no database, no logging of requests."""
    port = free_port()
    config = Path(tempfile.mkdtemp(dir=log.parent)) / "config.yaml"
    config.write_text(
        "model_list:\n- model_name: mock\n  litellm_params:\n    model: openai/mock\n"
        f"    api_base: http://127.0.0.1:{engine}/v1\n    api_key: none\n"
        "litellm_settings:\n  set_verbose: false\n  telemetry: false\n"
    )
    argv = (
        *pinned(gateway_core()), command, "--config", str(config), "--port", str(port),
        "--host", "127.0.0.1", "--num_workers", "1",
    )  # fmt: skip
    # it uses the list of prices that is part of it, and it does not start without a key
    env = (
        ("LITELLM_LOCAL_MODEL_COST_MAP", "True"),
        ("LITELLM_LOG", "ERROR"),
        ("LITELLM_MASTER_KEY", "sk-benchmark"),
    )
    return _Other("LiteLLM", argv, env, port, log)


def _router(name: str, python: Path, engine: int, log: Path) -> _Other:
    """Start it in its simplest mode: one worker, round robin, no logging of requests."""
    port = free_port()
    argv = (
        *pinned(gateway_core()), str(python), "-m", f"{name.replace('-', '_')}.launch_router",
        "--worker-urls", f"http://127.0.0.1:{engine}", "--host", "127.0.0.1", "--port", str(port),
        "--policy", "round_robin", "--prometheus-port", str(free_port()), "--log-level", "error",
    )  # fmt: skip
    return _Other(name, argv, (), port, log)


class _Other(Process):
    """Another project's gateway, on the port that it was given. It is ready once it answers: some
    accept connections before they know their engine."""

    def __init__(
        self, name: str, argv: Sequence[str], env: tuple[tuple[str, str], ...], port: int, log: Path
    ) -> None:
        self.port = port
        super().__init__(Command(tuple(argv), env), log)
        deadline = time.monotonic() + _START_SECONDS
        while not self._answers():
            if not self.alive or time.monotonic() > deadline:
                self.close()
                raise Unavailable(f"{name} did not start: {self.tail()}")
            time.sleep(0.2)

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5.0)
        body = json.dumps(
            {"model": "mock", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        )
        headers = {"content-type": "application/json", "authorization": "Bearer sk-benchmark"}
        try:
            connection.request("POST", "/v1/chat/completions", body, headers)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def cpu_seconds(pid: int) -> float:
    """Return the processor seconds of all live threads of a process, to the nanosecond."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9
