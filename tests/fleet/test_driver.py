"""The driver with replicas in memory and a real gateway; replicas' files; the lock."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from starlette.types import Receive, Scope, Send

from paceline.errors import ConfigError
from paceline.fleet import replica
from paceline.fleet.controller import Members, Seen
from paceline.fleet.driver import STATUS, Driver
from paceline.fleet.gateways import Gateways, SupersededError, _Answer, _Engine
from paceline.fleet.host import FakeHost, Look
from paceline.fleet.lock import ControllerLock
from paceline.fleet.process_host import ProcessHost
from paceline.fleet.replica import Record, last_number, read_records
from paceline.fleet.spec import PoolSettings
from paceline.gateway import GatewayConfig, ModelConfig
from paceline.http.fields import FLEET_HEADER
from paceline.http.keys import ApiKey
from paceline.server.transport.watched import Watched
from tests.gateway.fault_server import PACELINE_METRICS, Step, scripted
from tests.gateway.helpers import GOOD, gateway_over

KEY = "secret-root-0123"
POOL = PoolSettings(name="chat", replicas=2, serve=("--backend", "null"), drain_seconds=0.0)


@asynccontextmanager
async def driving(host: FakeHost, url: str, folder: Path, epoch: int = 1) -> AsyncIterator[Driver]:
    gateways = Gateways((url,), KEY, epoch, time.monotonic)
    driver = Driver(host, gateways, folder, time.monotonic, 60.0)
    try:
        yield driver
    finally:
        await driver.close()


@asynccontextmanager
async def engine_and_gateway() -> AsyncIterator[tuple[str, str]]:
    """The URL of an engine, which stands for every replica, and of a gateway."""
    config = GatewayConfig(poll_interval=0.03, models=(ModelConfig(name="m", tiers=(("@chat",),)),))
    async with (
        scripted(GOOD, metrics=PACELINE_METRICS) as engine,
        gateway_over(config, (ApiKey.of("root", "admin", KEY),)) as (_, client),
    ):
        yield engine.url, str(client.base_url).rstrip("/")


async def settle(driver: Driver) -> None:
    async with asyncio.timeout(30):
        await driver.run(asyncio.Event(), until_settled=True)


async def test_a_pool_comes_up_changes_and_goes(tmp_path: Path) -> None:
    async with engine_and_gateway() as (engine, gateway):
        host = FakeHost(engine)
        async with driving(host, gateway, tmp_path) as driver:
            await driver.start((POOL,))
            await settle(driver)
            assert sorted(host.replicas) == ["chat-1", "chat-2"]
            assert b'"is_settled":true' in (tmp_path / STATUS).read_bytes()
            # a version that does not come up
            other = PoolSettings(name="chat", replicas=2, serve=("--other",), drain_seconds=0.0)
            host.broken = {other.version}
            driver.change((other,))
            while not driver.controllers["chat"].failures:
                await driver.step()
            assert {"chat-1", "chat-2"} <= set(host.replicas) and not driver.is_settled
            assert "it is broken" in driver.controllers["chat"].last_failure
            driver.change((POOL,))
            await settle(driver)
            # given up before, and there again
            host.replicas["chat-99"] = Look("v", engine)
            await driver.step()
            assert "chat-99" not in host.replicas
            # the pool is gone from the file
            driver.change(())
            await settle(driver)
            await driver.say_last_word()
            assert not host.replicas


async def test_an_end_that_is_asked_for_again_and_again_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Stuck(FakeHost):
        async def end(self, name: str, *, kill: bool) -> None:
            """Its process cannot be ended."""

    caplog.set_level("INFO", "paceline.fleet")
    async with driving(Stuck(), "http://127.0.0.1:9", tmp_path) as driver:
        await driver.start((replace(POOL, replicas=1),))
        await driver.step()
        driver.change(())
        now = [time.monotonic()]
        driver._now = lambda: now[0]
        for _ in range(6):
            now[0] += 10.0
            await driver.step()
    told = [r.getMessage() for r in caplog.records if r.getMessage().startswith("kill ")]
    assert told == ["kill name=chat-1 version=-"]


async def test_the_next_controller_adopts_and_the_old_one_gives_up(tmp_path: Path) -> None:
    async with engine_and_gateway() as (engine, gateway):
        host = FakeHost(engine)
        async with driving(host, gateway, tmp_path, epoch=1) as old:
            await old.start((POOL,))
            await settle(old)
            async with driving(host, gateway, tmp_path, epoch=2) as new:
                await new.start((POOL,))
                await settle(new)
                assert sorted(host.replicas) == ["chat-1", "chat-2"]
                with pytest.raises(SupersededError, match="epoch 1"):
                    async with asyncio.timeout(30):
                        while True:
                            await old.step()
                            await asyncio.sleep(0.01)


def test_a_record_knows_its_own_process(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                               start_new_session=True)  # fmt: skip
    started = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19])
    record = Record("chat-7", process.pid, started, "v")
    other = Record("chat-8", process.pid, started - 1, "v")
    assert record.lives() and not other.lives()
    other.end(kill=True)
    assert record.lives(), "another process that has its number now"
    assert record.url(tmp_path) == "" and record.last_words(tmp_path) == ""
    (tmp_path / "chat-7.out").write_text("paceline ready: http://127.0.0.1:40123/v1 (null, ...)")
    (tmp_path / "chat-7.log").write_text("one\nthe reason\n\n")
    assert record.url(tmp_path) == "http://127.0.0.1:40123"
    assert record.last_words(tmp_path) == "the reason"
    record.end(kill=True)
    process.wait()
    assert not record.lives()
    record.forget(tmp_path)
    # the log keeps the number
    assert last_number(tmp_path, "chat") == 7 and last_number(tmp_path, "cha") == 0


def test_an_engine_that_hangs_does_not_outlive_its_replica(tmp_path: Path) -> None:
    # it has the replica's group, and a command line of ours; it tells its number on a pipe
    engine = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(600)"
    code = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {engine!r}, 'paceline'])"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    left = int(process.stdout.readline())
    process.kill()
    process.wait()
    record = Record("chat-7", process.pid, 1, "v")
    record.end(kill=False)
    os.kill(left, 0)
    record.end(kill=True)
    # the pipe ends with the last process that has it
    readable, _, _ = select.select([process.stdout], [], [], 30.0)
    process.stdout.close()
    if not readable:
        os.kill(left, signal.SIGKILL)
        pytest.fail("the engine runs on")


def test_a_replica_without_a_file_is_not_left_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "no space")

    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def starts(*args: Any, **more: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*args, **more))
        return started[0]

    monkeypatch.setattr(replica, "write_private", full)
    monkeypatch.setattr(subprocess, "Popen", starts)
    with pytest.raises(OSError, match="no space"):
        replica.start_replica(
            tmp_path, "chat-1", ("--backend", "null"), "v", exit_unwatched=60.0, resources={},
            environ=os.environ,
        )  # fmt: skip
    # a replica's process is reaped by its record
    started[0].returncode = None
    try:
        assert started[0].wait(30) == -signal.SIGKILL
    finally:
        started[0].kill()


@pytest.mark.parametrize("as_child", [True, False])
def test_a_replica_need_not_be_a_child(tmp_path: Path, as_child: bool) -> None:
    record = replica.start_replica(
        tmp_path, "chat-1", ("--backend", "null"), "v", exit_unwatched=60.0, resources={},
        environ=dict(os.environ), as_child=as_child,
    )  # fmt: skip
    try:
        assert record.lives() and replica.read_records(tmp_path) == [record]
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        assert (str(record.pid) in children) is as_child
        assert os.getpgid(record.pid) == record.pid, "its group is ended with it"
    finally:
        record.end(kill=True)
    until = time.monotonic() + 20.0
    while record.lives():
        assert time.monotonic() < until
        time.sleep(0.01)
    with pytest.raises(OSError, match="not launched"):
        replica.start_replica(
            tmp_path, "chat-2", (), "v", exit_unwatched=60.0, resources={},
            # no Python starts with it
            environ={"PYTHONHOME": str(tmp_path)}, as_child=False,
        )  # fmt: skip
    assert not replica.read_records(tmp_path)[1:]


def test_a_pool_keeps_its_latest_logs(tmp_path: Path) -> None:
    for number in range(1, 61):
        (tmp_path / f"chat-{number}.log").touch()
        if number == 4:
            # it runs on
            (tmp_path / "chat-4.json").touch()
        else:
            Record(f"chat-{number}", 1, 1, "v").forget(tmp_path)
    kept = sorted(int(path.stem[5:]) for path in tmp_path.glob("*.log"))
    assert kept == [4, *range(11, 61)] and last_number(tmp_path, "chat") == 60


async def test_the_word_has_the_role() -> None:
    answer = Step(parts=(b'{"version": 1, "engines": {}}',), stream=False)
    async with scripted(answer) as gateway:
        gateways = Gateways((gateway.url,), KEY, 1, time.monotonic)
        try:
            gateways.tell("chat", Members({"chat-1": "http://a"}, role="prompts"))
            assert await gateways.told("chat", 5.0)
        finally:
            await gateways.close()
        engine = {"name": "chat-1", "url": "http://a", "role": "prompts"}
        assert gateway.bodies[0]["engines"] == [engine]


async def test_a_count_from_before_the_last_word_says_nothing() -> None:
    gateways = Gateways(("http://127.0.0.1:9",), KEY, 1, lambda: 0.0)
    try:
        gateways.tell("chat", Members({"chat-1": "http://a"}))
        (link,) = gateways._links
        link.answer, link.answered_at = _Answer(1, {"chat-1": _Engine(True)}), 0.0
        assert gateways.seen("chat", "chat-1", Seen()).requests == 0
        # a request may have come since
        gateways.tell("chat", Members({"chat-1": "http://a"}, draining=("chat-1",)))
        seen = gateways.seen("chat", "chat-1", Seen())
        assert seen.up and seen.requests is None
        link.answer.version = 2
        assert gateways.seen("chat", "chat-1", Seen()).requests == 0
    finally:
        await gateways.close()


async def test_what_ended_before_is_no_failed_start_and_a_full_disk_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / STATUS).mkdir()
    host = FakeHost()
    host.replicas = {"chat-7": Look(POOL.version, alive=False), "chat-9": Look(POOL.version, "u")}
    async with driving(host, "http://127.0.0.1:9", tmp_path) as driver:
        await driver.start((POOL,))
        await driver.step()
        await driver.step()
        controller = driver.controllers["chat"]
        # the folder does not know the number: the replica came from another controller's host
        assert list(controller.replicas) == ["chat-9", "chat-10"] and not controller.failures
        assert "chat-7" not in host.replicas
        assert [r.levelname for r in caplog.records if "status_not" in r.message] == ["WARNING"]
        # the end keeps what the file says of drains
        driver.change(())
        assert controller.spec.drain_seconds == POOL.drain_seconds and not controller.wanted


async def test_a_host_without_room_says_what_is_missing(tmp_path: Path) -> None:
    from paceline.fleet.controller import Command

    host = ProcessHost(tmp_path, 60.0, {})
    greedy = PoolSettings(name="chat", replicas=1, serve=(), resources={"GPU": 1.0})
    await host.start(Command("start", "chat-1", (), "v"), greedy)
    look = (await host.look())["chat-1"]
    assert look.alive is False and "lacks GPU (it needs 1, and 0 is free)" in look.trouble
    await host.end("chat-1", kill=True)
    assert not await host.look() and not read_records(tmp_path)


def test_one_controller_at_a_time(tmp_path: Path) -> None:
    with ControllerLock(tmp_path) as one, ControllerLock(tmp_path) as two:
        assert two.holder() == 0
        one.take()
        # the clock was set back between the second and the third
        assert [one.next_epoch(ms) for ms in (1000, 5000, 2000, 9000)] == [1000, 5000, 5001, 9000]
        assert two.holder() == os.getpid()
        with pytest.raises(ConfigError, match=f"process {os.getpid()} is this fleet's controller"):
            two.take()
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom paceline.fleet.lock import *\n"
        "with ControllerLock(Path(sys.argv[1])) as lock:\n"
        "    lock.take(); print('taken', flush=True); time.sleep(600)\n"
    )
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert other.stdout is not None and other.stdout.readline() == b"taken\n"
    with ControllerLock(tmp_path) as lock:
        assert lock.holder() == other.pid
        lock.take_over(30.0)
    assert other.wait(30) == -signal.SIGTERM
    other.stdout.close()


async def test_a_replica_knows_whether_it_is_watched() -> None:
    now = [0.0]

    async def app(scope: Scope, receive: Receive, send: Send) -> None: ...

    async def call(*headers: tuple[bytes, bytes]) -> None:
        await watched({"type": "http", "headers": headers}, None, None)  # type: ignore[arg-type]

    watched = Watched(app, 10.0, lambda: now[0])
    now[0] = 9.0
    await call((FLEET_HEADER, b"1"))
    now[0] = 18.0
    await call((b"accept", b"*/*"))
    assert not watched.is_unwatched
    now[0] = 19.0
    assert watched.is_unwatched
