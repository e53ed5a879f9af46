"""Faults that need a network and mounts of their own: links that are down, disks that are full, a
peer that stops inside a block.

    unshare -n -m python -m benchmarks.fleet.isolated        (as root)
    unshare -U -r -n -m python -m benchmarks.fleet.isolated  (otherwise)

``benchmarks.fleet.faults`` runs it so. Two hosts are network namespaces, each with a fleet of two
replicas whose pools share a tier of one gateway, and with a second link for the words between
controller and gateway. A link that is down drops what is sent: nobody is refused, so each side
waits for its own timeouts. The last line is JSON: rows of counts by fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.common.client import exchange
from benchmarks.common.processes import Unavailable
from benchmarks.fleet.blocks import Servers, prompt, source_of, stream
from benchmarks.fleet.live import KEY, Fleet, Streams
from paceline.backends.reference.null import expected_tokens

__all__ = ["command", "main"]

_STEP: Final = 0.05
_TOKENS: Final = 80
_PARTS: Final = 400
_NULL_VOCAB: Final = 259
# seconds for which a replica that is not heard of counts as alive
_LEASE: Final = 20
# the gateway's and the controllers' networks; a host's address ends in 11 or 12
_DATA, _WORDS = "10.77.0", "10.77.1"
SUMS: Final = ("streams", "failed", "lost", "doubled")


def command() -> list[str]:
    """Return this module's command in namespaces of its own. Raises Unavailable."""
    own = ["unshare", *([] if os.geteuid() == 0 else ["-U", "-r"]), "-n", "-m"]
    try:
        tried = subprocess.run([*own, "ip", "link"], capture_output=True, text=True)
    except OSError as error:
        raise Unavailable(f"no namespaces can be made here: {error}") from None
    if tried.returncode:
        raise Unavailable(f"no namespaces can be made here: {tried.stderr.strip()[-200:]}")
    return [*own, sys.executable, "-m", "benchmarks.fleet.isolated"]


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)


def _make_hosts() -> None:
    """Two hosts at two bridges."""
    subprocess.run(["mount", "-t", "tmpfs", "none", "/run"], check=True)
    _ip("link set lo up")
    for bridge, network in (("data", _DATA), ("words", _WORDS)):
        _ip(f"link add {bridge} type bridge")
        _ip(f"addr add {network}.1/24 dev {bridge}")
        _ip(f"link set {bridge} up")
    for host in (1, 2):
        _ip(f"netns add h{host}")
        _ip(f"-n h{host} link set lo up")
        for bridge, network in (("data", _DATA), ("words", _WORDS)):
            _ip(f"link add {bridge}{host} type veth peer name {bridge} netns h{host}")
            _ip(f"link set {bridge}{host} master {bridge} up")
            _ip(f"-n h{host} addr add {network}.1{host}/24 dev {bridge}")
            _ip(f"-n h{host} link set {bridge} up")


@contextlib.contextmanager
def _fleets(folder: Path) -> Iterator[tuple[Fleet, Fleet]]:
    """A gateway, and a fleet on each host; the first one's state lies on a small disk."""
    made: list[Fleet] = []
    null = ("--backend", "null", "--null-step-time", str(_STEP))
    for host in (1, 2):
        own = folder / f"h{host}"
        (own / "state").mkdir(parents=True)
        made.append(Fleet(
            own, replicas=2, pool=f"h{host}", pools=("h1", "h2"), host=f"{_DATA}.1",
            # controllers reach the gateway at its other address
            listens="0.0.0.0",
            serve=(*null, "--host", f"{_DATA}.1{host}"),
            around=("ip", "netns", "exec", f"h{host}"), pool_lines=f"lease = {_LEASE}\n",
        ))  # fmt: skip
    state = made[0].state
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(state)], check=True)
    try:
        # the replicas listen on their hosts' addresses, so they ask for a key
        os.environ["REPLICA_KEY"] = KEY
        key = 'api_key_env = "REPLICA_KEY"\n'
        made[0].gateway_lines = "".join(f'[[pools]]\nname = "h{n}"\n{key}' for n in (1, 2))
        made[0].start_gateway()
        for each in made:
            each.port = made[0].port
            each.gateway_url = f"http://{_WORDS}.1:{each.port}"
            each.more_environ = {"PACELINE_API_KEY": KEY}
            each.start_controller()
        yield made[0], made[1]
    finally:
        for each in made:
            each.close()
        subprocess.run(["umount", "-l", str(state)], check=True)


async def _link_down(fleets: tuple[Fleet, Fleet], link: str, seconds: float) -> None:
    names = [{each.name for each in fleet.records()} for fleet in fleets]
    _ip(f"link set {link} down")
    await asyncio.sleep(seconds)
    _ip(f"link set {link} up")
    for fleet, before in zip(fleets, names, strict=True):
        await fleet.settled()
        after = {each.name for each in fleet.records()}
        # nothing is doubled, and who was cut off for less than the lease is the same
        assert len(after) == 2 and (after == before or seconds > _LEASE), (before, after)


async def _words_down_and_a_replica_killed(fleets: tuple[Fleet, Fleet]) -> None:
    """The controller cannot tell the gateway of the replica that it starts, until it can."""
    fleet = fleets[0]
    record = fleet.records()[0]
    _ip("link set words1 down")
    os.killpg(record.pid, signal.SIGKILL)
    await asyncio.sleep(5.0)
    _ip("link set words1 up")
    await fleet.settled([record.name])


def _fill(path: Path) -> None:
    with contextlib.suppress(OSError), open(path, "ab", buffering=0) as file:
        while True:
            file.write(bytes(4096))


async def _state_full(fleets: tuple[Fleet, Fleet]) -> None:
    """No replica ends for a disk without room; with room again the fleet heals."""
    fleet = fleets[0]
    filler = fleet.state / "filler"
    _fill(filler)
    record, other = fleet.records()
    os.killpg(record.pid, signal.SIGKILL)
    for _ in range(50):
        await asyncio.sleep(0.1)
        # also what the files of the one that was killed took
        _fill(filler)
    names = [each.name for each in fleet.records()]
    assert other.name in names, (names, fleet.log()[-2000:])
    filler.unlink()
    await fleet.settled([record.name])


def repeated(
    name: str, times: int, once: Callable[[], Coroutine[Any, Any, Streams]]
) -> dict[str, Any]:
    """Let a fault happen ``times``; return its counts together, and print them."""
    runs = []
    for _ in range(times):
        found = asyncio.run(once())
        runs.append(found.counts())
        for error in found.errors():
            print(f"  {name}: {error}", file=sys.stderr)
    row = {
        "runs": times,
        **{key: sum(run[key] for run in runs) for key in SUMS},
        "gap_p99_s": round(max(run["gap_p99_s"] for run in runs), 3),
    }
    print(f"  {name}: {row}", file=sys.stderr, flush=True)
    return row


async def _under_streams(fleets: tuple[Fleet, Fleet], fault: Any, streams: int) -> Streams:
    async with Streams(fleets[0], streams, tokens=_TOKENS).running() as found:
        await found.parts(_PARTS)
        await fault(fleets)
        await found.parts(_PARTS)
    return found


FAULTS: Final[dict[str, Any]] = {
    "link down 5 s": lambda fleets: _link_down(fleets, "data1", 5.0),
    "link down 60 s": lambda fleets: _link_down(fleets, "data1", 60.0),
    "gateway and controller apart 5 s": lambda fleets: _link_down(fleets, "words1", 5.0),
    "gateway and controller apart, replica killed": _words_down_and_a_replica_killed,
    "fleet's disk full, replica killed": _state_full,
}


# ---------------------------------------------------------------- blocks


async def _store_full(times: int, streams: int) -> dict[str, Any]:
    """Engines keep blocks on a disk that has no room for them: answers are as they were."""
    wrong = failed = count = 0
    with Servers("--backend", "null") as servers:
        store = servers.folder / "store"
        store.mkdir()
        for _ in range(times):
            subprocess.run(
                ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(store)], check=True
            )
            try:
                # a pool smaller than the prompts, so that blocks leave it for the disk
                server = servers.start("store", "--kv-store", str(store), "--num-blocks", "256")
                draw = random.Random(count)
                asked = [prompt(draw, 600) for _ in range(streams)]
                # each twice: what was hit once is written when it leaves
                for _ in range(3):
                    got = await asyncio.gather(*(stream(server.port, each, 40) for each in asked),
                                               return_exceptions=True)  # fmt: skip
                    for each, made in zip(asked, got, strict=True):
                        count += 1
                        failed += isinstance(made, BaseException)
                        wrong += not isinstance(
                            made, BaseException
                        ) and made.ids != expected_tokens(each, 40, _NULL_VOCAB)
                async with exchange(server.port, "/metrics") as answer:
                    text = (await answer.body()).decode()
                (up,) = re.findall(r"^paceline:kv_store_up{.*} (\S+)", text, re.M)
                assert float(up) == 0.0, "the store is still on"
                server.close()
            finally:
                subprocess.run(["umount", "-l", str(store)], check=True)
    return {"runs": times, "streams": count, "failed": failed, "lost": wrong, "doubled": 0}


@contextlib.asynccontextmanager
async def _stopping_relay(port: int, after: int) -> AsyncIterator[int]:
    """Pass connections on to a peer, and stop for ever behind ``after`` bytes of its answers."""

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)

    async def back(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        left = after
        while data := await reader.read(1 << 12):
            writer.write(data[:left])
            left -= len(data[:left])
            if not left:
                await asyncio.sleep(3600.0)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(
            forward(reader, other_writer), back(other_reader, writer), return_exceptions=True
        )

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield int(server.sockets[0].getsockname()[1])
        server.close()


async def _peer_stopped(times: int, streams: int) -> dict[str, Any]:
    """A peer stops inside a block, by turns early and late: the prompts are computed instead."""
    wrong = failed = count = 0
    flags = ("--backend", "null", "--null-step-time", "0.005", "--kv-port", "0")
    with Servers(*flags) as servers:
        first, second = servers.start("first"), servers.start("second")
        plain = await source_of(first.port)
        peer = int(plain["kv_source"]["url"].rpartition(":")[2])
        for turn in range(times):
            draw = random.Random(turn)
            asked = [prompt(draw, 600) for _ in range(streams)]
            for each in asked:
                await stream(first.port, each, 1)
            # a block of null takes 128 bytes and its checksum
            async with _stopping_relay(peer, 200 + 333 * (turn + 1)) as at:
                source = await source_of(first.port, at)
                got = await asyncio.gather(
                    *(stream(second.port, each, 40, **source) for each in asked),
                    return_exceptions=True,
                )
            for each, made in zip(asked, got, strict=True):
                count += 1
                failed += isinstance(made, BaseException)
                wrong += not isinstance(made, BaseException) and made.ids != expected_tokens(
                    each, 40, _NULL_VOCAB
                )
    return {"runs": times, "streams": count, "failed": failed, "lost": wrong, "doubled": 0}


OF_BLOCKS: Final[dict[str, Any]] = {
    "store's disk full": _store_full,
    "peer stopped inside a block": _peer_stopped,
}


def main() -> int:
    """Run the faults whose names have ``ONLY`` in them; print their rows."""
    times, streams = int(os.environ.get("FAULTS", "1")), int(os.environ.get("STREAMS", "32"))
    only, rows = os.environ.get("ONLY", ""), {}
    _make_hosts()
    for name, fault in OF_BLOCKS.items():
        if only in name:
            rows[name] = asyncio.run(fault(times, streams))
            print(f"  {name}: {rows[name]}", file=sys.stderr, flush=True)
    chosen = {name: fault for name, fault in FAULTS.items() if only in name}
    if chosen:
        with tempfile.TemporaryDirectory() as folder, _fleets(Path(folder)) as fleets:
            for each in fleets:
                asyncio.run(each.settled())
            for name, fault in chosen.items():
                rows[name] = repeated(name, times, partial(_under_streams, fleets, fault, streams))
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
