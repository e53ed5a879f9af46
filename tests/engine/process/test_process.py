"""What becomes of requests, processes and files when an engine process is hurt."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import zmq

from paceline.core.outputs import RequestUpdate, TokenLogprobs
from paceline.core.request import FinishReason
from paceline.core.sampling_params import SamplingParams
from paceline.engine.process import process as process_module
from paceline.engine.process.client import ProcessEngineClient
from paceline.engine.process.forks import ForkServer
from paceline.engine.process.messages import (
    Abort,
    Add,
    Outputs,
    Refused,
    Shutdown,
    decode_client_message,
    decode_engine_message,
    encode,
)
from paceline.engine.testing import ByteTokenizer
from paceline.engine.types import EngineStats, GenerationRequest
from paceline.errors import (
    CheckpointError,
    ConfigError,
    EngineDeadError,
    NeverFitsError,
    QueueFullError,
    RequestError,
)
from tests.engine.null_engine import ARGV
from tests.engine.process.test_client import collect, is_healthy, make, start_process, until


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where socket directories of this test are made, short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="pl") as made:
        monkeypatch.setattr(tempfile, "tempdir", made)
        yield Path(made)


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def busy(client: ProcessEngineClient, number: int = 3) -> list[asyncio.Task[Any]]:
    """Long requests under way."""
    tasks = [
        asyncio.create_task(collect(client, make(f"r{i}", max_tokens=1900))) for i in range(number)
    ]
    await until(lambda: client.stats.scheduler.num_running == number)
    return tasks


async def all_dead(tasks: list[asyncio.Task[Any]], message: str) -> None:
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, EngineDeadError)
        assert message in str(result)


class TestDeath:
    async def test_kill_9(self, directory: Path) -> None:
        client = await start_process(step_time=0.002)
        deaths: list[EngineDeadError] = []
        client.on_dead = deaths.append
        tasks = await busy(client)
        os.kill(client.pid, signal.SIGKILL)
        await asyncio.wait_for(
            all_dead(tasks, "the engine process was killed by SIGKILL"), timeout=2.0
        )
        assert len(deaths) == 1
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            client.check_health()
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await collect(client, make("late"))
        await client.close()
        assert list(directory.iterdir()) == []

    async def test_kill_while_idle_is_noticed(self) -> None:
        client = await start_process()
        dead = asyncio.Event()
        client.on_dead = lambda error: dead.set()
        os.kill(client.pid, signal.SIGKILL)
        await asyncio.wait_for(dead.wait(), timeout=2.0)
        await client.close()

    async def test_sigterm_ends_the_engine_with_a_word(self) -> None:
        client = await start_process(step_time=0.002)
        tasks = await busy(client)
        os.kill(client.pid, signal.SIGTERM)
        await asyncio.wait_for(all_dead(tasks, "told to (SIGTERM)"), timeout=2.0)
        await until(lambda: not is_alive(client.pid))
        await client.close()

    async def test_sigterm_wakes_an_idle_engine(self) -> None:
        client = await start_process()
        await asyncio.sleep(0.2)
        started = time.monotonic()
        os.kill(client.pid, signal.SIGTERM)
        await until(lambda: not is_alive(client.pid))
        assert time.monotonic() - started < 0.7
        await client.close()

    async def test_sigint_is_the_parents_affair(self) -> None:
        client = await start_process()
        os.kill(client.pid, signal.SIGINT)
        assert (await collect(client, make())).finished
        await client.close()

    async def test_a_failing_step_says_why(self, capfd: pytest.CaptureFixture[str]) -> None:
        client = await start_process(fail_at_step=5)
        with pytest.raises(EngineDeadError, match=r"step 5 failed: RuntimeError\('the matrix is"):
            await collect(client, make(max_tokens=50))
        await until(lambda: not is_alive(client.pid))
        with pytest.raises(EngineDeadError, match="matrix"):
            client.check_health()
        await client.close()
        assert "Traceback" in capfd.readouterr().err

    async def test_a_stopped_engine_is_a_stalled_one(self) -> None:
        client = await start_process(step_time=0.002, stall_timeout=0.4)
        tasks = await busy(client, 2)
        client.check_health()
        os.kill(client.pid, signal.SIGSTOP)
        await until(lambda: not is_healthy(client))
        with pytest.raises(EngineDeadError, match=r"has sent nothing for \d\.\d s"):
            client.check_health()
        os.kill(client.pid, signal.SIGCONT)
        await until(lambda: is_healthy(client))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.close()

    async def test_an_idle_engine_stays_healthy(self) -> None:
        client = await start_process(stall_timeout=1.5)
        await asyncio.sleep(2.2)
        client.check_health()
        await client.close()

    async def test_close_ends_a_stopped_engine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("paceline.engine.process.client._CLOSE_GRACE", 0.3)
        monkeypatch.setattr("paceline.engine.process.client._TERM_GRACE", 0.2)
        client = await start_process()
        os.kill(client.pid, signal.SIGSTOP)
        await client.close()
        assert not is_alive(client.pid)


class TestStart:
    @pytest.mark.parametrize(
        ("on_load", "error", "message"),
        [
            ("bad checkpoint", CheckpointError, "model.gguf is truncated: 10 of 20 bytes"),
            ("bug", EngineDeadError, "ZeroDivisionError: loading divided by zero"),
            ("exit", EngineDeadError, "ended unexpectedly with exit code 7"),
        ],
    )
    async def test_failing_to_load_is_told(
        self, on_load: str, error: type[Exception], message: str, directory: Path
    ) -> None:
        with pytest.raises(error, match=message):
            await start_process(on_load=on_load)
        assert list(directory.iterdir()) == []

    async def test_too_slow_a_start_is_ended(self, directory: Path) -> None:
        with pytest.raises(EngineDeadError, match="not ready within 1 s"):
            await ProcessEngineClient.start(
                ARGV, b'{"on_load": "hang"}', ByteTokenizer, ready_timeout=0.8
            )
        assert list(directory.iterdir()) == []

    async def test_a_failing_tokenizer_ends_the_start_at_once(self) -> None:
        def load() -> ByteTokenizer:
            raise CheckpointError("tokenizer.json is no JSON")

        started = time.monotonic()
        with pytest.raises(CheckpointError, match=r"tokenizer\.json is no JSON"):
            await ProcessEngineClient.start(ARGV, b'{"on_load": "hang"}', load)
        assert time.monotonic() - started < 5

    async def test_neither_fork_nor_end_holds_up_the_event_loop(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        loop, waits = asyncio.get_running_loop(), []

        def passes() -> bool:
            """Whether the event loop goes on while a thread waits for it."""
            passed = threading.Event()
            loop.call_soon_threadsafe(passed.set)
            return passed.wait(2.0)

        class Forks(ForkServer):
            def take(self) -> None:
                waits.append(passes())

        client = await ProcessEngineClient.start(ARGV, b"{}", ByteTokenizer, forks=Forks(("none",)))
        remove = shutil.rmtree

        def rmtree(path: Path, *, ignore_errors: bool) -> None:
            waits.append(passes())
            remove(path, ignore_errors=ignore_errors)

        monkeypatch.setattr(shutil, "rmtree", rmtree)
        await client.close()
        assert waits == [True, True]

    async def test_no_such_program(self, directory: Path) -> None:
        with pytest.raises(EngineDeadError, match="could not be started"):
            await ProcessEngineClient.start(["/no/such/program"], b"{}", ByteTokenizer)
        assert list(directory.iterdir()) == []

    async def test_sockets_are_private_and_removed(self, directory: Path) -> None:
        client = await start_process()
        (made,) = directory.iterdir()
        assert stat.S_IMODE(made.stat().st_mode) == 0o700
        assert {entry.name for entry in made.iterdir()} == {"inbox", "outbox", "in-flight"}
        tables = [
            line.split()
            for name in ("tcp", "tcp6")
            for line in Path(f"/proc/{client.pid}/net/{name}").read_text().splitlines()[1:]
        ]
        inodes = {
            os.readlink(fd)[8:-1]
            for fd in Path(f"/proc/{client.pid}/fd").iterdir()
            if os.readlink(fd).startswith("socket:")
        }
        assert inodes
        assert not inodes & {fields[9] for fields in tables}
        await client.close()
        assert not is_alive(client.pid)
        assert list(directory.iterdir()) == []

    async def test_long_temporary_directories_fall_back_or_say_so(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        long = tmp_path / ("x" * 100)
        long.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(long))
        client = await start_process()
        assert list(long.iterdir()) == []
        await client.close()
        monkeypatch.setattr("zmq.IPC_PATH_MAX_LEN", 20)
        with pytest.raises(ConfigError, match="socket paths may have 20 bytes"):
            await start_process()

    async def test_nothing_on_stdin(self) -> None:
        done = await asyncio.to_thread(
            subprocess.run, ARGV, stdin=subprocess.DEVNULL, capture_output=True, timeout=20
        )
        assert done.returncode == 1
        assert b"started by its client" in done.stderr


PARENT = """
import asyncio, os, sys
sys.path[:0] = {path!r}
import tempfile
tempfile.tempdir = {directory!r}
from tests.engine.process.test_client import collect, make, start_process

async def main():
    client = await start_process(step_time=0.002)
    print(client.pid, flush=True)
    await collect(client, make(max_tokens=1900))

asyncio.run(main())
"""


async def test_the_engine_ends_with_its_parent(directory: Path) -> None:
    code = PARENT.format(path=[str(Path(__file__).parents[3])], directory=str(directory))
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    assert is_alive(pid)
    parent.kill()
    await parent.wait()
    await until(lambda: not is_alive(pid))
    await until(lambda: list(directory.iterdir()) == [])


async def test_an_exception_in_the_server_does_not_hide_a_message() -> None:
    client = await start_process()

    def broken(stats: EngineStats) -> None:
        raise ZeroDivisionError("no such metric")

    client.on_stats = broken
    with pytest.raises(EngineDeadError, match=r"could not be handled.*no such metric"):
        await collect(client, make())
    await client.close()


class TestMessages:
    def test_what_goes_in_comes_out(self) -> None:
        sampling = SamplingParams(
            max_tokens=5,
            temperature=0.5,
            logit_bias=((3, -1.5),),
            stop_token_ids=frozenset({1, 2}),
            eos_token_ids=frozenset({7}),
            seed=-(2**63),
            logprobs=2,
        )
        request = GenerationRequest(
            request_id="r",
            prompt_token_ids=[1, 2, 3],
            sampling=sampling,
            arrival_time=1.5,
            n=2,
            stop=("x", "yz"),
            cache_salt="salt",
        )
        for message in (Add(request), Abort(("r/0", "r/1")), Shutdown()):
            assert decode_client_message(encode(message)) == message
        logprobs = (TokenLogprobs(5, float("-inf"), 3, ((6, -0.1), (5, -2.0))),)
        update = RequestUpdate("r/0", (5,), logprobs, FinishReason.STOP, 5, 16, 2.5, 1, None)
        stats = EngineStats(time=3.0, num_steps=4, iteration_tokens=(17, 1))
        outputs = decode_engine_message(encode(Outputs((update,), stats)))
        assert outputs == Outputs((update,), stats)
        assert isinstance(outputs, Outputs)
        assert isinstance(outputs.updates[0], RequestUpdate)
        assert outputs.updates[0].finish_reason is FinishReason.STOP

    @pytest.mark.parametrize(
        "error",
        [NeverFitsError("too long", "max_tokens"), QueueFullError("full", retry_after=2.5)],
    )
    def test_refusals_keep_their_class(self, error: RequestError) -> None:
        message = decode_engine_message(encode(Refused.of("r", error)))
        assert isinstance(message, Refused)
        again = message.error()
        assert type(again) is type(error)
        assert (str(again), vars(again)) == (str(error), vars(error))

    def test_a_step_is_small(self) -> None:
        updates = tuple(
            RequestUpdate(f"chatcmpl-{i:032x}/0", (i,), None, None, None, 0, 12345.678, 0, None)
            for i in range(64)
        )
        assert len(encode(Outputs(updates, EngineStats(time=1.0, num_steps=1)))) < 64 * 80

    @pytest.mark.parametrize("data", [b"", b"\x80\x04K\x01.", b"\x91\xa4nope", b"\xff" * 40])
    def test_anything_else_is_refused(self, data: bytes) -> None:
        with pytest.raises(msgspec.DecodeError):
            decode_client_message(data)
        with pytest.raises(msgspec.DecodeError):
            decode_engine_message(data)


def test_a_wait_for_messages_ends_when_woken_from_a_thread() -> None:
    context = zmq.Context()
    quiet, other = socket.socketpair()
    with quiet, other, context.socket(zmq.PULL) as pull:
        watch = SimpleNamespace(reason="", wake_fd=quiet.fileno())
        inbox = process_module._SocketInbox(pull, cast(Any, watch))
        inbox.wake()
        assert inbox.receive(60.0) == [], "woken before"
        threading.Timer(0.05, inbox.wake).start()
        assert inbox.receive(60.0) == [], "woken while it waits"
        for _ in range(100_000):
            # more than the socket takes
            inbox.wake()
        assert inbox.receive(60.0) == []
        inbox.close()
    context.term()
