"""The client against a real server of this project, over the null backend."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest

from paceline.client import AsyncClient, Client, Finished, Resumed, Target, TextDelta
from tests.server.live_process import LiveServer, eventually, live_server

HI = [{"role": "user", "content": "hi"}]
OPTIONS = {"max_tokens": 60, "temperature": 1.0, "seed": 5}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("live") / "log"
    with live_server(log, backend={"step_time": 0.002}) as server:
        yield server


class Cutting:
    """A proxy that passes ``cut`` bytes of the first answer on, and all of the others."""

    def __init__(self, port: int, cut: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._port = port
        self._cuts = [cut]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            left = self._cuts.pop() if self._cuts else 2**30
            with peer, socket.create_connection(("127.0.0.1", self._port)) as server:
                peer.settimeout(0.05)
                try:
                    while True:
                        server.sendall(peer.recv(65536))
                except TimeoutError:
                    pass
                while left > 0 and (data := server.recv(4096)):
                    peer.sendall(data[:left])
                    left -= len(data)

    def close(self) -> None:
        self._listener.close()


def test_a_cut_stream_is_the_uncut_one(server: LiveServer) -> None:
    uncut = Client([Target(server.url, "null")]).chat(HI, **OPTIONS).result()
    assert uncut.usage is not None and uncut.usage.completion_tokens == 60
    positions = []
    for cut in range(100, 12_000, 1900):
        proxy = Cutting(server.port, cut)
        with Client([Target(proxy.url, "null")]).chat(HI, **OPTIONS) as stream:
            events = list(stream)
        proxy.close()
        assert events[-1] == uncut, cut
        assert "".join(e.text for e in events if isinstance(e, TextDelta)) == uncut.text
        positions += [e.position for e in events if isinstance(e, Resumed)]
    assert len(positions) >= 4 and positions == sorted(positions)


def test_completions_with_asyncio(server: LiveServer) -> None:
    async def ask() -> Finished:
        client = AsyncClient([Target(f"{server.url}/v1", "null")])
        return await client.complete("One, two,", max_tokens=9).result()

    finished = asyncio.run(ask())
    assert finished.reason == "length" and finished.usage is not None
    assert finished.usage.completion_tokens == 9


class Point(msgspec.Struct):
    kind: bool
    flat: bool


def test_an_answer_of_a_type(server: LiveServer) -> None:
    parsed = Client([Target(server.url, "null")]).chat(HI, parse=Point, max_tokens=400).result()
    assert isinstance(parsed.parsed, Point)


def test_closing_stops_the_server(server: LiveServer) -> None:
    stream = Client([Target(server.url, "null")]).chat(HI, max_tokens=4000, ignore_eos=True)
    assert next(stream) and server.running() == 1
    stream.close()
    eventually(lambda: server.running() == 0)
