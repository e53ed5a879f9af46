"""Engine processes forked from one: their standard input, their ends, and the server's own end."""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator

import pytest

from paceline.engine.process.forks import ForkedProcess, ForkServer

# echoes the length of a line and ends with it as exit code, or by its own signal
_PROGRAM = """
import os, signal, sys
from paceline.engine.process.forks import is_forked
if is_forked():
    word = sys.stdin.readline().strip()
    if word == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "sleep":
        sys.stdin.read()
    os._exit(len(word))
"""


@pytest.fixture
def forks() -> Iterator[ForkServer]:
    server = ForkServer((sys.executable, "-c", _PROGRAM))
    server.prepare()
    for _ in range(1000):
        if server.is_ready:
            break
        time.sleep(0.01)
    yield server
    server.close()


def _started(forks: ForkServer, word: str) -> ForkedProcess:
    process = forks.take()
    assert process is not None
    process.stdin.write(word.encode() + b"\n")
    return process


def _ended(process: ForkedProcess) -> int:
    """Return the exit code of one that ends by itself, or with its input where it sleeps."""
    process.stdin.close()
    return process.wait()


def test_each_has_a_standard_input_and_an_exit_code_of_its_own(forks: ForkServer) -> None:
    one, two = _started(forks, "one"), _started(forks, "sleep")
    assert one.pid != two.pid
    assert _ended(one) == 3
    # the other one lives on until its input ends
    assert os.getpgid(two.pid) == two.pid
    assert _ended(two) == 5


def test_signals_end_it_as_any_process(forks: ForkServer) -> None:
    assert _ended(_started(forks, "die")) == -signal.SIGKILL
    process = _started(forks, "sleep")
    process.send_signal(signal.SIGTERM)
    assert process.wait() == -signal.SIGTERM
    process.stdin.close()
    # its process may be another's by now: no signal goes there
    process.send_signal(signal.SIGTERM)


def test_engines_live_on_where_the_server_ends_and_another_is_made(forks: ForkServer) -> None:
    process = _started(forks, "sleep")
    forks.close()
    assert forks.take() is None
    # nobody is left to tell its code
    assert _ended(process) == 1
    forks.prepare()
    while (again := forks.take()) is None:
        time.sleep(0.01)
    again.stdin.write(b"four\n")
    assert _ended(again) == 4


def test_a_server_that_was_killed_forks_none(forks: ForkServer) -> None:
    assert forks._process is not None
    forks._process.kill()
    forks._process.wait()
    assert forks.take() is None


def test_the_end_is_noticed_whatever_the_numbers_of_its_descriptors(forks: ForkServer) -> None:
    """As in a server with more than a thousand connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip(f"a process may have {hard} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert _ended(_started(forks, "one")) == 3
    finally:
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_end_is_noticed_while_the_server_hangs(forks: ForkServer) -> None:
    process = _started(forks, "sleep")
    assert forks._process is not None
    forks._process.send_signal(signal.SIGSTOP)
    # the code is not told
    assert _ended(process) == 1


def test_a_fork_without_a_handle_leaves_no_descriptor(
    forks: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(pid: int) -> int:
        raise ProcessLookupError

    monkeypatch.setattr(os, "pidfd_open", refuses)
    before = len(os.listdir("/proc/self/fd"))
    assert forks.take() is None
    gc.collect()
    # the server's socket is closed, too
    assert len(os.listdir("/proc/self/fd")) == before - 1


def test_a_server_that_is_closed_while_it_is_asked_makes_no_process() -> None:
    server = ForkServer(("none",))

    class Closing(socket.socket):
        def sendmsg(self, *given: object) -> int:
            server.close()
            return 1

    own, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        server._socket, server._is_ready = Closing(fileno=own.detach()), True
        assert server.take() is None
