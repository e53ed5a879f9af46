"""A real fleet under streams: a replica and the controller are killed, and it is updated."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from benchmarks.fleet.live import COMMAND, Streams, running_fleet


@pytest.mark.slow
async def test_no_stream_notices(tmp_path: Path) -> None:
    with running_fleet(tmp_path, replicas=2, drain_seconds=2.0) as fleet:
        await fleet.settled()
        async with Streams(fleet, 6, tokens=60).running() as streams:
            await streams.parts(60)
            killed = fleet.records()[0]
            killed.end(kill=True)
            fleet.kill_controller()
            await streams.parts(60)
            fleet.serve = (*fleet.serve, "--max-num-seqs", "77")
            fleet.start_controller()
            adopted = {each.name for each in fleet.records()} - {killed.name}
            await fleet.until(
                lambda s: s["is_settled"] and not {m["name"] for m in s["members"]} & adopted
            )
        counts = streams.counts()
        assert counts["failed"] == counts["lost"] == counts["doubled"] == 0, streams.errors()
        assert "replica_adopted" in fleet.log()
        assert "2 of 2 replicas are up" in fleet.run("status").stdout
        again = fleet.run("up")
        assert again.returncode == 2 and "is this fleet's controller already" in again.stderr
        # a file that is broken changes nothing
        before = {each.name for each in fleet.records()}
        fleet.file.write_text("[fleet")
        assert fleet.controller is not None
        fleet.controller.send_signal(signal.SIGHUP)
        await fleet.until(lambda s: "reload_refused" in fleet.log())
        assert fleet.controller.poll() is None
        assert {each.name for each in fleet.records()} == before
        for each in fleet.records():
            assert b"FLEET_KEY" not in Path(f"/proc/{each.pid}/environ").read_bytes()
        fleet.write()
        down = fleet.run("down")
        assert down.returncode == 0 and "all replicas have ended" in down.stdout, down.stderr
        assert not fleet.records()


@pytest.mark.slow
def test_a_replica_that_nothing_watches_ends() -> None:
    done = subprocess.run(
        [*COMMAND, "serve", "--backend", "null", "--port", "0", "--exit-unwatched", "0.5"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0 and "unwatched seconds=0.5" in done.stderr
