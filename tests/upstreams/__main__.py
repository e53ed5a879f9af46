"""The gateway before llama.cpp's server and vLLM's CPU build, two of each with the default model.

Both are set up as for ``make bench NAME=peers``, once, in the cache. Prints a table
of what was found, by check and kind; ends with 1 where the gateway did something else than it
should. A kind that cannot be set up here is reported absent with the reason. ``paced`` is vLLM with
Paceline's scheduler inside, without a gateway; its checks are those of ``paced``. VLLM=0.31.0 takes
another version, in a folder of its own.

    python -m tests.upstreams [llama.cpp | vllm | paced ...]
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common.ours import our_places
from benchmarks.common.processes import Process, Unavailable, free_port
from benchmarks.common.setup import Peer
from benchmarks.peers.llama_cpp import LlamaCpp
from benchmarks.peers.vllm_cpu import VERSION, VllmCpu
from paceline.gateway.settings.config import EngineKind
from tests.upstreams import paced
from tests.upstreams.checks import CHECKS, CheckFailedError, Pair

# seconds that one check may take
_CHECK_SECONDS = 180.0
# by the gateway's name of a kind, beside what peers are started with: flags, and the environment
_FLAGS: Mapping[EngineKind, Sequence[str]] = {"llama.cpp": ("--metrics",), "vllm": ()}
_ENVIRONMENT: Mapping[EngineKind, Sequence[tuple[str, str]]] = {
    "llama.cpp": (),
    "vllm": (("VLLM_CPU_KVCACHE_SPACE", "1"),),
}


@contextmanager
def _pair(kind: EngineKind, peer: Peer, folder: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        found: list[tuple[Process, int]] = []
        for name in ("a", "b"):
            port = free_port()
            command = peer.server(port)
            command = replace(
                command,
                argv=(*command.argv, *_FLAGS[kind]),
                env=(*command.env, *_ENVIRONMENT[kind]),
            )
            process = stack.enter_context(Process(command, folder / f"{kind}-{name}.log"))
            found.append((process, port))
            model = _wait(process, port, command.start_seconds)
        (first, one), (second, two) = found
        yield Pair(kind, first, second, (one, two), model)


def _wait(process: Process, port: int, seconds: float) -> str:
    """Until it lists its model and answers; the model's name."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not process.alive:
            raise Unavailable(f"it ended: {process.tail()}")
        try:
            listed = httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=5.0)
            if listed.status_code == 200:
                model: str = listed.json()["data"][0]["id"]
                body: dict[str, Any] = {"model": model, "prompt": "hi", "max_tokens": 2}
                url = f"http://127.0.0.1:{port}/v1/completions"
                if httpx.post(url, json=body, timeout=120.0).status_code == 200:
                    return model
        except httpx.HTTPError:
            pass
        time.sleep(0.3)
    raise Unavailable(f"it gave no token within {seconds:g} s: {process.tail()}")


async def _run(pair: Pair) -> tuple[dict[str, str], int]:
    found: dict[str, str] = {}
    failed = 0
    for name, check in CHECKS.items():
        try:
            async with asyncio.timeout(_CHECK_SECONDS):
                found[name] = await check(pair)
        except (CheckFailedError, httpx.HTTPError, TimeoutError, AssertionError) as error:
            found[name] = f"FAILED: {type(error).__name__} {error}"[:160]
            failed += 1
        print(f"  {pair.kind:10} {name:45} {found[name]}", file=sys.stderr, flush=True)
    return found, failed


def _paced(peer: VllmCpu, folder: Path) -> int:
    """The checks of vLLM with our scheduler inside, printed; how many failed."""
    peer.setup()
    plain = paced.plain_answers(peer, folder)
    with paced.paced_server(peer, folder) as (port, model):

        async def run() -> int:
            failed = 0
            base = f"http://127.0.0.1:{port}"
            async with httpx.AsyncClient(base_url=base, timeout=_CHECK_SECONDS) as client:
                server = paced.Server(client, model, plain)
                for name, check in paced.CHECKS.items():
                    try:
                        found = await check(server)
                    except Exception as error:
                        found = f"FAILED: {type(error).__name__} {error}"[:300]
                        failed += 1
                    print(f"paced      {name:45} {found}", flush=True)
            return failed

        failed = asyncio.run(run())
    try:
        found = paced.simulated(folder)
    except Exception as error:
        found = f"FAILED: {type(error).__name__} {error}"[:300]
        failed += 1
    print(f"paced      {'recording simulated':45} {found}", flush=True)
    return failed


def main() -> int:
    # ended from outside, it ends what it started: finally clauses run
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    places, _ = our_places()
    vllm = VllmCpu(places, os.environ.get("VLLM", VERSION))
    peers: Mapping[EngineKind, Peer] = {"llama.cpp": LlamaCpp(places), "vllm": vllm}
    wanted = [kind for kind in peers if kind in sys.argv[1:] or not sys.argv[1:]]
    for unknown in {*sys.argv[1:]} - {*peers, "paced"}:
        print(f"there is no {unknown}; there are {', '.join(peers)}, paced", file=sys.stderr)
        return 2
    columns: dict[str, Mapping[str, str]] = {}
    absent: dict[str, str] = {}
    failed = 0
    with tempfile.TemporaryDirectory(prefix="upstreams-") as made:
        for kind in wanted:
            try:
                peers[kind].setup()
                with _pair(kind, peers[kind], Path(made)) as pair:
                    columns[kind], bad = asyncio.run(_run(pair))
                    failed += bad
            except Unavailable as error:
                absent[kind] = str(error)
        if "paced" in sys.argv[1:] or not sys.argv[1:]:
            try:
                failed += _paced(vllm, Path(made))
            except Unavailable as error:
                absent["paced"] = str(error)
    if columns:
        print("| | " + " | ".join(columns) + " |")
        print("|---" * (len(columns) + 1) + "|")
    for name in CHECKS if columns else ():
        print(f"| {name} | " + " | ".join(column[name] for column in columns.values()) + " |")
    for kind, why in absent.items():
        print(f"{kind} is absent: {why}")
    return 1 if failed or absent else 0


if __name__ == "__main__":
    sys.exit(main())
