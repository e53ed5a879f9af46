"""Cost of the server beyond the engine: HTTP, tokenising, detokenising, server-sent events.

Method: the API process as ``paceline serve`` runs it (uvloop, supervised engine process, the
default model's tokenizer and chat template), over the null backend, whose steps take as long as a
step of 64 streams does on a small machine. So the engine's arithmetic is in another process, and
every token is an event of its own. 64 clients in a process of their own send one request after the
other, each over a new connection: a chat of about 200 tokens, with 64 tokens of answer. The figure
is the API process's processor time (user and system, from /proc), of the thread that runs the event
loop and of all others (tokenizer pool, sockets), less that of an idle server.

Costs per request and per token are separated by runs with four times the tokens, in turns with the
others: the growth is the tokens' cost. Of runs of one kind the median counts, of an even number the
cheaper of the two in the middle. Shares come from one more run under cProfile, which makes Python
calls look dearer than they are: they name the largest part, they do not measure it. Built-in
functions count for their callers. Printed, too, are the function calls of a stream, which are the
same on a busy machine.

BASELINE=PATH compares with another checkout of this repository: its server runs next to this one,
both under the same clients (this checkout's), turn by turn, so that other load on the machine
affects both; the server that has no requests at the moment is idle. Every turn starts both again:
the placement of a process's memory alone moves the ratio of two by up to a quarter, which no number
of turns with the same two processes shows. Printed are both and the ratio, this by that, and of all
turns the ratio with its interval.

Prints a table and, last, one JSON line. QUICK=1 takes each run once instead of three times, with
one request a client instead of two; TURNS=N sets how many times each run is taken.

    python -m benchmarks.overhead
"""

from __future__ import annotations

import asyncio
import contextlib
import cProfile
import json
import os
import pstats
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common.client import body_lines, get
from benchmarks.common.server import ReadyServer
from benchmarks.common.statistics import Ratio, paired_ratio
from paceline.bench.machine import machine

STREAMS = 64
TOKENS = 64
# factor on the tokens of long runs
LONGER = 4
# number of short and of long runs, in turns, and requests of a client in one of them
TURNS = int(os.environ.get("TURNS") or (1 if os.environ.get("QUICK") else 3))
ROUNDS = 1 if os.environ.get("QUICK") else 2
STEP_SECONDS = 0.03
# rounds of all streams under cProfile
_PROFILED = 3
IDLE_SECONDS = 2.0
# an id that is a word of its own in the default model's vocabulary (" the")
_WORD = 260
_ROOT = Path(__file__).resolve().parents[1]
_SENTENCE = "The quick brown fox jumps over the lazy dog, and then it sleeps for {} hours. "
# groups of time by file: the first entry that is in its path, or "~" for code without a file
_GROUPS = (
    ("/server/observability/metrics", "metrics and logs"),
    ("/http/exposition", "metrics and logs"),
    ("/logging/", "metrics and logs"),
    ("/cli/terminal/logs", "metrics and logs"),
    ("/engine/text/detokenizer", "detokenise"),
    ("/engine/text/output_processor", "detokenise"),
    ("/engine/text/tokenizer", "detokenise"),
    ("/tokenizers/", "tokenise"),
    ("/server/generation/prompts", "tokenise"),
    ("/engine/text/chat_template", "tokenise"),
    ("/engine/text/template_", "tokenise"),
    ("/engine/", "engine client"),
    ("/zmq/", "engine client"),
    # it writes short answers directly: most of its time is the system's part of that
    ("/paceline/http/connections", "HTTP and sockets"),
    ("/paceline/http/", "build answers"),
    ("/server/", "build answers"),
    ("/msgspec/", "build answers"),
    ("/starlette/", "web framework"),
    ("/fastapi/", "web framework"),
    ("/uvicorn/", "HTTP and sockets"),
    ("/asyncio/", "event loop"),
    ("/contextlib", "event loop"),
    ("~", "event loop"),
)


@dataclass(frozen=True, slots=True)
class Cost:
    """Processor time of the API process in one run, seconds."""

    loop: float
    others: float
    requests: int
    tokens: int
    events: int = 0

    @property
    def total(self) -> float:
        return self.loop + self.others


async def _serve(on_ready: Callable[[], None]) -> int:
    """Run the server's half, wired as in ``cli.serve.command``, without the model."""
    from paceline.checkpoints.hub.resolve import default_cache_dir, find_local
    from paceline.engine.process.client import ProcessEngineClient
    from paceline.engine.supervision.supervisor import SupervisedEngineClient
    from paceline.engine.text.tokenizer import load_tokenizer
    from paceline.server import ServerConfig, serve

    found = find_local("smollm2-135m", default_cache_dir())
    if found is None:
        raise SystemExit("the default model is not here: run make model")
    tokenizer = load_tokenizer(found)
    argv = (sys.executable, "-m", "benchmarks.overhead", "engine")
    settings = json.dumps({"vocab_size": tokenizer.vocab_size, "step_time": STEP_SECONDS}).encode()

    async def start(before: ProcessEngineClient | None, number: int) -> ProcessEngineClient:
        return await ProcessEngineClient.start(argv, settings, lambda: tokenizer)

    def ready(host: str, port: int) -> None:
        print(f"ready {port}", flush=True)
        on_ready()

    client = await SupervisedEngineClient.start(start)
    return await serve(client, ServerConfig(), port=0, on_ready=ready)


def _engine() -> int:
    """Run the engine's half."""
    from paceline.backends.reference.null import NullBackend
    from paceline.engine.core import EngineCore
    from paceline.engine.process.loop import engine_info
    from paceline.engine.process.process import engine_main
    from paceline.engine.testing import null_core
    from paceline.engine.types import EngineInfo

    def build(config: bytes) -> tuple[EngineCore, EngineInfo]:
        settings: dict[str, Any] = json.loads(config)
        core = null_core(NullBackend(max_model_len=4096, num_blocks=8192, **settings))
        return core, engine_info(core, "null")

    return engine_main(build)


@contextlib.contextmanager
def server(checkout: Path = _ROOT, profile: Path | None = None) -> Iterator[tuple[int, int]]:
    """Run a server process of a checkout; yield its pid and port. ``profile``: file for cProfile's
    results when it ends."""
    flags = () if profile is None else (str(profile),)
    argv = (sys.executable, "-m", "benchmarks.overhead", "serve", *flags)
    with (
        tempfile.TemporaryDirectory() as folder,
        ReadyServer(argv, r"^ready (\d+)", Path(folder) / "log", seconds=60, cwd=checkout) as found,
    ):
        yield found.pid, found.port
        found.close(grace=30.0)


def cpu_seconds(pid: int) -> tuple[float, float]:
    """Return the processor seconds of the main thread, and of all others."""
    main = others = 0.0
    for task in Path(f"/proc/{pid}/task").iterdir():
        seconds = int((task / "schedstat").read_text().split()[0]) / 1e9
        if int(task.name) == pid:
            main = seconds
        else:
            others += seconds
    return main, others


async def _chat(port: int, number: int, tokens: int, *, stream: bool) -> int:
    """Send one request; return the number of events with text."""
    text = "".join(_SENTENCE.format(number * 100 + index) for index in range(9))
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
            # without this the null backend would return many tokens that are no text
            "logit_bias": {str(_WORD): 100},
            "stream": stream,
        }
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    try:
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head.split(b"\r\n", 1)[0]:
            raise RuntimeError(head.decode() + (await reader.read()).decode())
        lines = body_lines(reader, b"chunked" in head)
        return sum([line.startswith(b"data: {") async for line in lines])
    finally:
        writer.close()


async def _load(port: int, tokens: int, rounds: int, *, stream: bool) -> int:
    """Send all requests of a run; return the number of events."""

    async def client(number: int) -> int:
        asked = [number + STREAMS * round_ for round_ in range(rounds)]
        return sum([await _chat(port, each, tokens, stream=stream) for each in asked])

    return sum(await asyncio.gather(*(client(number) for number in range(STREAMS))))


def measure(pid: int, port: int, tokens: int, *, stream: bool, idle: tuple[float, float]) -> Cost:
    """Measure one run. ``idle``: processor seconds per second of a server without requests."""
    before, began = cpu_seconds(pid), time.monotonic()
    events = asyncio.run(_load(port, tokens, ROUNDS, stream=stream))
    after, seconds = cpu_seconds(pid), time.monotonic() - began
    return Cost(
        loop=after[0] - before[0] - idle[0] * seconds,
        others=after[1] - before[1] - idle[1] * seconds,
        requests=STREAMS * ROUNDS,
        tokens=STREAMS * ROUNDS * tokens,
        events=events,
    )


def typical(runs: list[Cost]) -> Cost:
    """Return the median run, or the cheaper of two: disturbance only makes runs dearer."""
    return sorted(runs, key=lambda run: run.total)[(len(runs) - 1) // 2]


def split(short: Cost, long: Cost) -> tuple[float, float]:
    """Return milliseconds per request, without its tokens, and per token."""
    token = (long.total - short.total) / (long.tokens - short.tokens)
    return 1e3 * (short.total - token * short.tokens) / short.requests, 1e3 * token


def shares(profile: Path) -> dict[str, float]:
    """Return shares of the event loop's time by group, without waiting."""
    seconds: Counter[str] = Counter()
    entries = pstats.Stats(str(profile)).stats  # type: ignore[attr-defined]
    for (file, _, _), (_, _, own, _, callers) in entries.items():
        if file == "~" and callers:
            for (caller, _, _), (_, _, own_there, _) in callers.items():
                seconds[group(caller)] += own_there
        else:
            seconds[group(file)] += own
    total = sum(seconds.values())
    return {name: round(value / total, 3) for name, value in seconds.most_common()}


def calls_a_request(profile: Path, requests: int) -> float:
    """Return function calls per request, which do not depend on other load on the machine."""
    entries = pstats.Stats(str(profile)).stats  # type: ignore[attr-defined]
    number: int = sum(calls for _, calls, *_ in entries.values())
    return round(number / requests, 1)


def group(file: str) -> str:
    return next((name for part, name in _GROUPS if part in file), "other")


@dataclass(slots=True)
class Side:
    """One of the servers that are compared."""

    pid: int
    port: int
    # processor seconds per second without requests, split as by ``cpu_seconds``
    idle: tuple[float, float]

    @classmethod
    def warm(cls, pid: int, port: int) -> Side:
        asyncio.run(_load(port, 8, 1, stream=True))
        before = cpu_seconds(pid)
        time.sleep(IDLE_SECONDS)
        after = cpu_seconds(pid)
        idle = (after[0] - before[0]) / IDLE_SECONDS, (after[1] - before[1]) / IDLE_SECONDS
        return cls(pid, port, idle)

    def take_turn(self, runs: Runs, *, stream: bool) -> None:
        run = partial(measure, self.pid, self.port, stream=stream, idle=self.idle)
        runs.short.append(run(TOKENS))
        runs.long.append(run(LONGER * TOKENS))


@dataclass(slots=True)
class Runs:
    """Costs of one side's turns."""

    short: list[Cost] = field(default_factory=list)
    long: list[Cost] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        short, long = typical(self.short), typical(self.long)
        request, token = split(short, long)
        return {
            "cpu_ms_per_request_of_64_tokens": round(1e3 * short.total / short.requests, 3),
            "cpu_ms_per_request_without_tokens": round(request, 3),
            "cpu_us_per_token": round(1e3 * token, 1),
            "other_threads_share": round(long.others / long.total, 3),
            "events_per_token": round(long.events / long.tokens, 3),
        }


def turns_of(checkouts: dict[str, Path], *, stream: bool) -> dict[str, Runs]:
    """Take all runs of a kind of answer, by side."""
    found = {name: Runs() for name in checkouts}
    anew = len(checkouts) > 1
    for each in range(TURNS if anew else 1):
        # alternate the order, as the second side runs with the first one's caches
        order = list(checkouts.items())[:: -1 if each % 2 else 1]
        with contextlib.ExitStack() as stack:
            sides = {
                name: Side.warm(*stack.enter_context(server(checkout))) for name, checkout in order
            }
            for _ in range(1 if anew else TURNS):
                for name, side in sides.items():
                    side.take_turn(found[name], stream=stream)
            status, scraped = asyncio.run(get(sides["this"].port, "/metrics"))
            assert status == 200 and b"vllm:generation_tokens_total" in scraped
    return found


def compare(checkouts: dict[str, Path]) -> dict[str, dict[str, dict[str, float]]]:
    """Return figures by kind of answer and side, and with two sides the ratio of the first."""
    results: dict[str, dict[str, dict[str, float]]] = {}
    for kind, stream in (("stream", True), ("whole", False)):
        taken = turns_of(checkouts, stream=stream)
        # one figure per turn: its short and its long run come from the same process
        runs = [
            [short.total + long.total for short, long in zip(side.short, side.long, strict=True)]
            for side in taken.values()
        ]
        found = {name: side.figures() for name, side in taken.items()}
        if len(found) == 2:
            new, old = found.values()
            found["ratio"] = {
                key: round(value / old[key], 3)
                for key, value in new.items()
                if key.startswith("cpu_") and old[key]
            }
            found["pairs"] = dict(zip(Ratio._fields, paired_ratio(*runs), strict=True))
        results[kind] = found
    return results


def main() -> int:
    checkouts = {"this": _ROOT}
    if os.environ.get("BASELINE"):
        checkouts["baseline"] = Path(os.environ["BASELINE"]).resolve()
        if not (checkouts["baseline"] / "benchmarks" / "overhead.py").is_file():
            raise SystemExit(f"BASELINE={checkouts['baseline']} is no checkout with this benchmark")
    results: dict[str, Any] = dict(compare(checkouts))
    calls: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        for name, checkout in checkouts.items():
            profile = Path(folder) / name
            with server(checkout, profile) as (_, port):
                asyncio.run(_load(port, TOKENS, _PROFILED, stream=True))
            calls[name] = calls_a_request(profile, STREAMS * _PROFILED)
        found = shares(Path(folder) / "this")
    for kind in ("stream", "whole"):
        columns = dict(results[kind])
        pairs = columns.pop("pairs", None)
        print(f"\n{kind:38}" + "".join(f"{name:>10}" for name in columns))
        for key in columns["this"]:
            row = "".join(f"{columns[name].get(key, ''):>10}" for name in columns)
            print(f"  {key.replace('_', ' '):36}{row}")
        if pairs is not None:
            shown = "{median:.3f}, {low:.3f} to {high:.3f}".format(**pairs)
            print(f"  turns by pairs, and the 95 % interval of their mean: {shown}")
    shown = ", ".join(f"{name} {value:.0f}" for name, value in calls.items())
    print(f"\nfunction calls a stream of {TOKENS} tokens: {shown}")
    print("\nshares of the event loop")
    for key, value in found.items():
        print(f"  {key:36}{value:>10}")
    largest = next(iter(found))
    print(f"\nlargest part: {largest}\n")
    results |= {"function_calls_a_stream": calls}
    results |= {"shares_of_the_event_loop": found, "largest": largest}
    about = {"bench": "overhead", "machine": machine(), "streams": STREAMS, "turns": TURNS}
    print(json.dumps({**about, "results": results}))
    return 0


def _serve_main(profile: str | None) -> int:
    import logging

    import uvloop

    logging.basicConfig(level="WARNING")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if profile is None:
            return runner.run(_serve(lambda: None))
        # processor time, so that waiting is not counted; from the first request on
        watching = cProfile.Profile(time.thread_time)
        code = runner.run(_serve(watching.enable))
        watching.disable()
        watching.dump_stats(profile)
        return code


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["engine"]:
            sys.exit(_engine())
        case ["serve", *rest]:
            sys.exit(_serve_main(rest[0] if rest else None))
        case _:
            sys.exit(main())
