"""Cost of the page at /ui to the engine, to streams, and to the browser that shows it.

Three parts (PARTS=tap,viewers,page chooses):

**tap** is ``benchmarks.timeline_tap``: the cost of reporting a step compared with deciding it, with
256 running. ``core_share`` is that plus the cost of keeping the frames in the process that answers
HTTP, as a share of a core, at 200 steps a second.

**viewers**: ``paceline serve`` over the null backend, a step in 10 ms, and 32 streams without end.
For two seconds eight pages follow the timeline, of which four never read, and for two seconds none
do, in turns. The 99th percentile of the time between tokens of all watched stretches is compared
with that of all others, with an interval from a bootstrap over pairs of neighbours. A second after
pages come or go counts for neither. The viewers are a process of their own.

**page**: Debian's Chromium, without a GPU, draws the live timeline of an engine with 256 running
requests that makes 100 steps a second and has about as many arrivals. ``frames_per_s`` are frames
drawn, ``frame_ms_p95`` is the time of scripts for one, from the browser's call to their return.
``heap_mb_per_min`` is the growth of the heap between collections, after a warm-up in which the
page's memory has filled; QUICK is too short for that, so its figure includes the filling.
``bytes_gz`` is the compressed size of all that a first visit loads.

Prints a table and, last, one JSON line. QUICK=1 is short.

    python -m benchmarks.ui
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import os
import re
import selectors
import shutil
import socket
import sys
import tempfile
import time
from bisect import bisect_left
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from benchmarks import timeline_tap
from benchmarks.common.client import Timing, complete
from benchmarks.common.processes import Unavailable
from benchmarks.common.server import PacelineServer, ReadyServer
from benchmarks.common.statistics import percentile, pooled_ratio
from benchmarks.common.unmeasured import Unmeasured
from paceline.bench.machine import machine
from paceline.web.routes import ui_router

QUICK = bool(os.environ.get("QUICK"))
PARTS = tuple((os.environ.get("PARTS") or "tap,viewers,page").split(","))
RUNNING: Final = 256
# for the viewers' part
STREAMS: Final = 32
STEP_SECONDS: Final = 0.01
TOKENS = 300 if QUICK else 1000
# pairs of neighbours, watched and not; seconds of each, and before it
PAIRS = 6 if QUICK else 80
WATCHED_SECONDS: Final = 2.0
SETTLING_SECONDS: Final = 1.0
WARMING_SECONDS = 3.0 if QUICK else 20.0
VIEWERS: Final = 8
STALLED: Final = 4
# for the page's part
STEPS_A_SECOND: Final = 100
WARM_SECONDS = 10.0 if QUICK else 50.0
SECONDS = 15.0 if QUICK else 60.0
_ARGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
# runs before the page's own scripts, and records their time in each frame
_WATCH: Final = """
globalThis.frameTimes = [];
const ask = requestAnimationFrame.bind(globalThis);
globalThis.requestAnimationFrame = (draw) => ask((time) => {
  const began = performance.now();
  draw(time);
  frameTimes.push(performance.now() - began);
});
"""
# bound of each figure: the most, or the least
_ASKED: Final = {
    "tap_share_of_schedule": ("most", 0.10),
    "core_share": ("most", 0.02),
    "viewers_itl_p99_ratio": ("most", 1.03),
    "frames_per_s": ("least", 55.0),
    "bytes_gz": ("most", 150_000),
    "heap_mb_per_min": ("most", 5.0),
}


def tap() -> dict[str, Any]:
    found = timeline_tap.measure(RUNNING, blocks=4 if QUICK else 16)
    seconds = 1e-6 * (found["tap_us_per_step"] + found["feed_us_per_step"])
    return {
        "tap_us_per_step": found["tap_us_per_step"],
        "tap_share_of_schedule": found["tap_share_of_schedule"],
        "feed_us_per_step": found["feed_us_per_step"],
        "core_share": round(seconds * timeline_tap.STEPS_A_SECOND, 5),
    }


# ------------------------------------------------------------------ viewers


def watch(port: int, told: Connection) -> None:
    """Follow the timeline on ``VIEWERS`` connections, and read all but ``STALLED`` of them, while
    the last message on ``told`` is true; each message is answered when it has taken effect."""
    selector = selectors.DefaultSelector()
    selector.register(told, selectors.EVENT_READ)
    opened: list[socket.socket] = []
    while True:
        for key, _ in selector.select():
            if key.fileobj is not told:
                if not key.data.recv(1 << 16):
                    # the server closed it
                    selector.unregister(key.data)
                continue
            try:
                wanted = told.recv()
            except EOFError:
                return
            if not wanted:
                for connection in opened:
                    if connection in selector.get_map():
                        selector.unregister(connection)
                    connection.close()
                opened = []
            # viewers stay connected over two watched stretches in a row
            elif not opened:
                opened = [_viewer(port) for _ in range(VIEWERS)]
                for connection in opened[STALLED:]:
                    selector.register(connection, selectors.EVENT_READ, connection)
            told.send(len(opened))
            # the other sockets of this round may be closed now
            break


def _viewer(port: int) -> socket.socket:
    connection = socket.socket()
    # small, so that a connection that is not read soon has an effect on the server
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", port))
    connection.sendall(
        b"GET /ui/api/timeline?seconds=60&follow=1 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    )
    if not connection.recv(15).startswith(b"HTTP/1.1 200"):
        raise RuntimeError("a viewer was refused")
    return connection


async def _streams(port: int, viewers: Connection) -> dict[bool, list[list[float]]]:
    """Return seconds between tokens of each stretch that was watched, and that was not."""
    timings: list[Timing] = []
    over = False

    async def one(number: int) -> None:
        while not over:
            # spread the ends of the streams
            tokens = TOKENS - (number * TOKENS // STREAMS if not timings else 0)
            prompt = list(range(20 + number))
            timings.append(await complete(port, "null", prompt, max(2, tokens), timeout=120.0))

    async def switch(wanted: bool) -> tuple[float, float]:
        viewers.send(wanted)
        await asyncio.to_thread(viewers.recv)
        await asyncio.sleep(SETTLING_SECONDS)
        began = time.monotonic()
        await asyncio.sleep(WATCHED_SECONDS)
        return began, time.monotonic()

    # a garbage collection would delay all streams, which is not the server's fault
    gc.disable()
    running = [asyncio.ensure_future(one(number)) for number in range(STREAMS)]
    stretches: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    try:
        await asyncio.sleep(WARMING_SECONDS)
        for pair in range(PAIRS):
            # alternate which of the two comes first
            for watched in (True, False) if pair % 2 else (False, True):
                stretches[watched].append(await switch(watched))
            if pair % 10 == 9:
                print(f"{pair + 1} of {PAIRS} pairs", flush=True)
    finally:
        over = True
        await asyncio.gather(*running)
        gc.enable()
    for timing in timings:
        if timing.error:
            raise Unavailable(timing.error)
    gaps = sorted(
        (event, gap)
        for timing in timings
        for event, gap in zip(timing.events[1:], timing.gaps, strict=True)
    )
    times = [event for event, _ in gaps]
    return {
        watched: [
            [gap for _, gap in gaps[bisect_left(times, began) : bisect_left(times, ended)]]
            for began, ended in found
        ]
        for watched, found in stretches.items()
    }


def viewers() -> dict[str, Any]:
    flags = ("--backend", "null", "--null-step-time", str(STEP_SECONDS))
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with (
        tempfile.TemporaryDirectory(prefix="bench-ui-") as folder,
        PacelineServer(*flags, log=Path(folder) / "log") as server,
    ):
        process = context.Process(target=watch, args=(server.port, there), daemon=True)
        process.start()
        there.close()
        try:
            found = asyncio.run(_streams(server.port, here))
        finally:
            here.close()
            process.join(10)
            process.terminate()
    ratio = pooled_ratio(found[True], found[False], 0.99)
    sides = [[gap for each in found[side] for gap in each] for side in (True, False)]
    return {
        "viewers_itl_p99_ratio": [round(value, 4) for value in ratio],
        "itl_p99_ms": [round(1e3 * percentile(side, 0.99), 3) for side in sides],
        "itl_gaps": [len(side) for side in sides],
    }


# ------------------------------------------------------------------ the page


def serve_page() -> int:
    """Run the page's server: a feed that gets the messages of a busy engine's process."""
    import uvloop

    from paceline.backends.reference.null import NullBackend
    from paceline.engine.testing import null_client
    from paceline.server import ServerConfig, serve

    async def main() -> int:
        client = null_client(NullBackend(num_blocks=RUNNING * 64, max_model_len=4096))
        engine = timeline_tap.Side(RUNNING, told=True, clock=time.monotonic)

        async def run() -> None:
            due = time.monotonic()
            while True:
                engine.run(1)
                if engine.messages and client.on_timeline is not None:
                    client.on_timeline(b"".join(engine.messages))
                    engine.messages.clear()
                due = max(due + 1.0 / STEPS_A_SECOND, time.monotonic() - 0.1)
                await asyncio.sleep(max(0.0, due - time.monotonic()))

        def ready(host: str, port: int) -> None:
            print(f"ready {port}", flush=True)

        running = asyncio.ensure_future(run())
        try:
            return await serve(client, ServerConfig(), port=0, on_ready=ready, page=ui_router)
        finally:
            running.cancel()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


def page() -> dict[str, Any]:
    chromium = shutil.which("chromium")
    if chromium is None:
        raise Unavailable("there is no chromium on the path: scripts/test-services installs it")
    from playwright.sync_api import sync_playwright

    argv = (sys.executable, "-m", "benchmarks.ui", "page-server")
    with (
        tempfile.TemporaryDirectory(prefix="bench-ui-") as folder,
        ReadyServer(argv, r"^ready (\d+)", Path(folder) / "log", seconds=60) as server,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=chromium, args=_ARGS)
        opened = browser.new_page(viewport={"width": 1600, "height": 900})
        opened.add_init_script(_WATCH)
        opened.goto(f"http://127.0.0.1:{server.port}/ui/timeline")
        # polled, as the page's policy forbids the functions to wait for
        deadline = time.monotonic() + 60.0
        while not opened.evaluate("globalThis.pacelineTimeline?.history.count > 100"):
            if time.monotonic() > deadline:
                raise Unavailable("the page shows no steps")
            opened.wait_for_timeout(100)
        debugger = opened.context.new_cdp_session(opened)

        def heap() -> float:
            debugger.send("HeapProfiler.collectGarbage")
            return float(debugger.send("Runtime.getHeapUsage")["usedSize"]) / 2**20

        opened.wait_for_timeout(1e3 * WARM_SECONDS)
        before = heap()
        state = (
            "[pacelineTimeline.painter().frames, pacelineTimeline.history.count,"
            " Math.max(...pacelineTimeline.history.lanes)]"
        )
        opened.evaluate("frameTimes.length = 0")
        frames, steps, _ = opened.evaluate(state)
        began = time.monotonic()
        opened.wait_for_timeout(1e3 * SECONDS)
        seconds = time.monotonic() - began
        frames_after, steps_after, lanes = opened.evaluate(state)
        times = opened.evaluate("frameTimes")
        grown = heap() - before
        browser.close()
    return {
        "frames_per_s": round((frames_after - frames) / seconds, 1),
        "frame_ms_p50": round(percentile(times, 0.5), 2),
        "frame_ms_p95": round(percentile(times, 0.95), 2),
        "heap_mb_per_min": round(60.0 * grown / seconds, 2),
        "steps_per_s": round((steps_after - steps) / seconds, 1),
        "lanes": lanes,
        **first_visit(),
    }


def first_visit() -> dict[str, int]:
    """Return the bytes of the page, of all files that it names, and of those that these import."""
    from paceline.web.assets import BUILT_IN, load_assets

    assets = load_assets(BUILT_IN)
    assert assets is not None, "they are part of the package"
    named = re.findall(rb'"v/[^/]+/([^"]+)"', assets.page.body)
    wanted, seen = [name.decode() for name in named], set[str]()
    while wanted:
        name = wanted.pop()
        if name in seen:
            continue
        seen.add(name)
        for found in re.findall(rb'from "(\.[^"]+)"', assets.files[name].body):
            wanted.append(os.path.normpath(os.path.join(os.path.dirname(name), found.decode())))
    return {
        "bytes_gz": len(assets.page.packed) + sum(len(assets.files[name].packed) for name in seen),
        "bytes_of_all_files": len(assets.page.body)
        + sum(len(asset.body) for asset in assets.files.values()),
    }


def judged(results: dict[str, Any]) -> dict[str, bool]:
    """Return whether each figure is within its bound; for a ratio, the end of its interval."""
    found = {}
    for name, (sense, bound) in _ASKED.items():
        if name in results:
            value = results[name][2] if isinstance(results[name], list) else results[name]
            found[name] = value <= bound if sense == "most" else value >= bound
    return found


def main() -> int:
    results: dict[str, Any] = {}
    unmeasured = Unmeasured()
    for name, part in (("tap", tap), ("viewers", viewers), ("page", page)):
        if name in PARTS:
            print(f"-- {name}", flush=True)
            with unmeasured.part(name):
                results |= part()
    met = judged(results)
    print()
    for name, value in results.items():
        asked = ""
        if name in met:
            sense, bound = _ASKED[name]
            asked = f"asked: at {sense} {bound:g}{'' if met[name] else '  NOT MET'}"
        print(f"  {name:24}{value!s:>26}  {asked}")
    print()
    about = {"bench": "ui", "machine": machine(), "quick": QUICK, "met": met}
    print(json.dumps({**about, "results": results, "unmeasured": unmeasured.reasons}))
    return unmeasured.exit_code


if __name__ == "__main__":
    sys.exit(serve_page() if sys.argv[1:] == ["page-server"] else main())
