"""What the server costs beyond the engine: HTTP, tokenising, detokenising, server-sent events.

Method: the API process as ``paceline serve`` runs it (uvloop, supervised engine process, the
default model's tokenizer and chat template), over the null backend, whose steps take as long as a
step of 64 streams does on a small machine. So the engine's arithmetic is in another process, and
every token is an event of its own. 64 clients in a process of their own ask one request after the
other, each over a new connection: a chat of about 200 tokens, 64 tokens back. What is counted is
the API process's processor time (user and system, from /proc), of the thread that runs the event
loop and of all others (tokenizer pool, sockets), less what an idle server spends.

Per request and per token are separated by runs with twice the tokens, in turns with the others:
what grows is the token's. Shares come from one more run under cProfile, which makes Python calls
look dearer than they are: they name the largest part, they do not measure it. Built-in functions
count for whoever calls them.

Prints a table and, last, one JSON line. QUICK=1 takes a quarter of the requests.

    python -m benchmarks.overhead
"""

from __future__ import annotations

import asyncio
import contextlib
import cProfile
import json
import os
import pstats
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks.faults.callers import get
from benchmarks.peers.http_client import body_lines

STREAMS = 64
TOKENS = 64
# short and long runs in turns, so many of each, and requests of a client in one of them
TURNS = 1 if os.environ.get("QUICK") else 2
ROUNDS = 1 if os.environ.get("QUICK") else 2
STEP_SECONDS = 0.03
IDLE_SECONDS = 2.0
# an id that is a word of its own in the default model's vocabulary (" the")
_WORD = 260
_ROOT = Path(__file__).resolve().parents[1]
_SENTENCE = "The quick brown fox jumps over the lazy dog, and then it sleeps for {} hours. "
# the first that a file's path holds, or "~" for what has no file, says where its time goes
_GROUPS = (
    ("/server/metrics", "metrics and logs"),
    ("/logging/", "metrics and logs"),
    ("/cli/logs", "metrics and logs"),
    ("/engine/detokenizer", "detokenise"),
    ("/engine/output_processor", "detokenise"),
    ("/engine/tokenizer", "detokenise"),
    ("/tokenizers/", "tokenise"),
    ("/server/prompts", "tokenise"),
    ("/engine/chat_template", "tokenise"),
    ("/engine/template_", "tokenise"),
    ("/engine/", "engine client"),
    ("/zmq/", "engine client"),
    ("/server/", "build answers"),
    ("/msgspec/", "build answers"),
    ("/starlette/", "web framework"),
    ("/fastapi/", "web framework"),
    ("/uvicorn/", "HTTP protocol"),
    ("/asyncio/", "event loop"),
    ("/contextlib", "event loop"),
    ("~", "event loop"),
)


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one run, seconds of processor time of the API process."""

    loop: float
    others: float
    requests: int
    tokens: int
    events: int = 0

    @property
    def total(self) -> float:
        return self.loop + self.others

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Cost)))


async def _serve(on_ready: Callable[[], None]) -> int:
    """The server's half: as ``cli.serve`` wires it, less the model."""
    from paceline.checkpoints.resolve import default_cache_dir, find_local
    from paceline.engine.client import ProcessEngineClient
    from paceline.engine.supervisor import SupervisedEngineClient
    from paceline.engine.tokenizer import load_tokenizer
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
    """The engine's half."""
    from paceline.backends.null import NullBackend
    from paceline.engine.core import EngineCore
    from paceline.engine.loop import engine_info
    from paceline.engine.process import engine_main
    from paceline.engine.testing import null_core
    from paceline.engine.types import EngineInfo

    def build(config: bytes) -> tuple[EngineCore, EngineInfo]:
        settings: dict[str, Any] = json.loads(config)
        core = null_core(NullBackend(max_model_len=4096, num_blocks=8192, **settings))
        return core, engine_info(core, "null")

    return engine_main(build)


@contextlib.contextmanager
def server(profile: Path | None = None) -> Iterator[tuple[int, int]]:
    """A server process; its pid and port. ``profile`` gets what cProfile saw when it ends."""
    flags = [] if profile is None else [str(profile)]
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.overhead", "serve", *flags],
        stdout=subprocess.PIPE,
        cwd=_ROOT,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline().split()
        if not line:
            raise SystemExit("the server did not start")
        yield process.pid, int(line[1])
        process.send_signal(signal.SIGTERM)
        process.wait(30)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def cpu_seconds(pid: int) -> tuple[float, float]:
    """Of the main thread and of all others."""
    main = others = 0.0
    for task in Path(f"/proc/{pid}/task").iterdir():
        seconds = int((task / "schedstat").read_text().split()[0]) / 1e9
        if int(task.name) == pid:
            main = seconds
        else:
            others += seconds
    return main, others


async def _chat(port: int, number: int, tokens: int, *, stream: bool) -> int:
    """One request; how many events with text came."""
    text = "".join(_SENTENCE.format(number * 100 + index) for index in range(9))
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
            # the null backend has no taste: without this it would say much that is no text
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
    """All requests of a run; how many events came."""

    async def client(number: int) -> int:
        asked = [number + STREAMS * round_ for round_ in range(rounds)]
        return sum([await _chat(port, each, tokens, stream=stream) for each in asked])

    return sum(await asyncio.gather(*(client(number) for number in range(STREAMS))))


def measure(pid: int, port: int, tokens: int, *, stream: bool, idle: float) -> Cost:
    """One run. ``idle``: processor seconds a second that the server spends anyway."""
    before, began = cpu_seconds(pid), time.monotonic()
    events = asyncio.run(_load(port, tokens, ROUNDS, stream=stream))
    after, seconds = cpu_seconds(pid), time.monotonic() - began
    return Cost(
        loop=after[0] - before[0] - idle * seconds,
        others=after[1] - before[1],
        requests=STREAMS * ROUNDS,
        tokens=STREAMS * ROUNDS * tokens,
        events=events,
    )


def split(short: Cost, long: Cost) -> tuple[float, float]:
    """Milliseconds a request, without its tokens, and a token."""
    token = (long.total - short.total) / (long.tokens - short.tokens)
    return 1e3 * (short.total - token * short.tokens) / short.requests, 1e3 * token


def shares(profile: Path) -> dict[str, float]:
    """Part of the event loop's time by group, waiting left out."""
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


def group(file: str) -> str:
    return next((name for part, name in _GROUPS if part in file), "other")


def main() -> int:
    results: dict[str, Any] = {}
    with server() as (pid, port):
        asyncio.run(_load(port, 8, 1, stream=True))
        before = cpu_seconds(pid)[0]
        time.sleep(IDLE_SECONDS)
        idle = (cpu_seconds(pid)[0] - before) / IDLE_SECONDS
        for name, stream in (("stream", True), ("whole", False)):
            short = long = Cost(0.0, 0.0, 0, 0)
            for _ in range(TURNS):
                short += measure(pid, port, TOKENS, stream=stream, idle=idle)
                long += measure(pid, port, 2 * TOKENS, stream=stream, idle=idle)
            request, token = split(short, long)
            results[name] = {
                "cpu_ms_per_request_of_64_tokens": round(1e3 * short.total / short.requests, 3),
                "cpu_ms_per_request_without_tokens": round(request, 3),
                "cpu_us_per_token": round(1e3 * token, 1),
                "other_threads_share": round(long.others / long.total, 3),
                "events_per_token": round(long.events / long.tokens, 3),
            }
        status, scraped = asyncio.run(get(port, "/metrics"))
        assert status == 200 and b"vllm:generation_tokens_total" in scraped
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        profile = Path(folder) / "profile"
        with server(profile) as (_, port):
            asyncio.run(_load(port, TOKENS, TURNS * ROUNDS, stream=True))
        results["shares_of_the_event_loop"] = shares(profile)
    for name, figures in results.items():
        print(f"\n{name.replace('_', ' ')}")
        for key, value in figures.items():
            print(f"  {key.replace('_', ' '):36} {value}")
    largest = next(iter(results["shares_of_the_event_loop"]))
    print(f"\nlargest part: {largest}\n")
    results["largest"] = largest
    print(json.dumps({"bench": "overhead", "streams": STREAMS, "results": results}))
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
