"""Replicas on the nodes of a real Ray cluster on this host, under streams."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fleet.faults import actors
from benchmarks.fleet.live import Streams, running_fleet
from tests.docs.pages import ROOT
from tests.docs.test_operate_fleet import PAGE, follow_page

ray = pytest.importorskip(
    "ray",
    reason='Ray is not installed here: pip install "paceline[ray]" in an environment of its own',
)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    memory = 80 << 20
    # or replicas have what other work leaves over
    os.environ.setdefault("RAY_worker_niceness", "0")
    found = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "object_store_memory": memory, "include_dashboard": False},
    )
    for zone in ("a", "b"):
        found.add_node(num_cpus=2, object_store_memory=memory, labels={"zone": zone})
    yield found
    found.shutdown()


async def test_a_fleet_on_ray_survives_its_parts(cluster: Any, tmp_path: Path) -> None:
    with running_fleet(
        tmp_path, replicas=2, fleet_lines=f'ray = "{cluster.address}"',
        pool_lines="resources = {CPU = 1}\n",
    ) as fleet:  # fmt: skip
        await fleet.settled()
        assert len(actors()) == 2
        async with Streams(fleet, 8, tokens=60).running() as streams:
            await streams.parts(40)
            killed = fleet.records()[0]
            killed.end(kill=True)
            await fleet.settled([killed.name])
            await streams.parts(40)
            # an actor's end is not its replica's: another one takes over
            names = {each.name for each in fleet.records()}
            before = actors()
            for pid in before:
                os.kill(pid, signal.SIGKILL)
            await fleet.until(lambda s: len(actors() - before) == 2)
            assert {each.name for each in fleet.records()} == names
            # the next controller finds the actors
            fleet.kill_controller()
            await streams.parts(40)
            fleet.serve = (*fleet.serve, "--max-num-seqs", "77")
            fleet.start_controller()
            await fleet.until(
                lambda s: s["is_settled"] and not {m["name"] for m in s["members"]} & names
            )
        counts = streams.counts()
        assert counts["failed"] == counts["lost"] == counts["doubled"] == 0, streams.errors()
        down = fleet.run("down")
        assert down.returncode == 0, down.stderr
        await fleet.until(lambda s: not actors())
        assert not fleet.records() and not actors()


def test_the_page_is_followed_with_ray(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fleet in ten minutes, with one line more in its file."""
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    )
    text, line = PAGE.read_text(), 'state_dir = "state"\n'
    assert text.count(line) == 1
    page = tmp_path / "fleet.md"
    page.write_text(text.replace(line, f'{line}ray = "{cluster.address}"\n'))
    follow_page(page, tmp_path, os.environ["PATH"], 240.0)


async def test_what_no_node_has_is_named(cluster: Any, tmp_path: Path) -> None:
    with running_fleet(
        tmp_path, replicas=1, fleet_lines=f'ray = "{cluster.address}"',
        pool_lines="resources = {CPU = 64}\nstart_timeout = 60\n",
    ) as fleet:  # fmt: skip
        await fleet.until(lambda s: any("lacks" in m["trouble"] for m in s["members"]))
        shown = fleet.run("status").stdout
        assert "every node lacks CPU (it needs 64, and" in shown, shown


async def test_a_cluster_that_is_not_there(tmp_path: Path) -> None:
    with running_fleet(tmp_path, replicas=1, fleet_lines='ray = "127.0.0.1:1"') as fleet:
        assert fleet.controller is not None and fleet.controller.wait(120) == 2
        assert "there is no Ray cluster at" in fleet.log()
