"""The socket between vLLM's processes, where one side is busy or fails."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline.vllm import channel
from paceline.vllm.channel import Channel, ask


def test_more_callers_than_the_backlog_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_BACKLOG", 1)
    busy = threading.Event()

    def answer(message: Mapping[str, Any]) -> Any:
        busy.wait(0.2)
        busy.set()
        return message["fate"]

    made = Channel(answer)

    async def all_at_once() -> list[list[Any]]:
        return await asyncio.gather(*(ask({"fate": str(number)}) for number in range(20)))

    try:
        assert asyncio.run(all_at_once()) == [[str(number)] for number in range(20)]
    finally:
        made.close()


def test_fault_in_an_answer_does_not_end_the_channel(caplog: pytest.LogCaptureFixture) -> None:
    asked: list[Any] = []

    def answer(message: Mapping[str, Any]) -> Any:
        asked.append(message)
        if len(asked) == 1:
            # as where the engine's thread changes what is read here
            raise RuntimeError("dictionary changed size during iteration")
        return 3

    made = Channel(answer)
    try:
        with caplog.at_level(logging.ERROR):
            assert asyncio.run(ask({"fate": "t"})) == []
        assert "was not answered" in caplog.text
        assert asyncio.run(ask({"fate": "t"})) == [3] and len(asked) == 2
    finally:
        made.close()


def test_engine_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_LONGEST", 0.2)
    goes_on = threading.Event()
    made = Channel(lambda message: goes_on.wait(10.0))
    began = time.monotonic()
    try:
        assert asyncio.run(ask({"counts": True})) == []
        assert 0.2 <= time.monotonic() - began < 2.0
    finally:
        goes_on.set()
        made.close()


def test_engine_that_was_killed(channel_in: Path) -> None:
    path = channel_in / str(os.getpid()) / "1.sock"
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    began = time.monotonic()
    assert asyncio.run(ask({"fate": "t"})) == []
    assert time.monotonic() - began < 0.1, "it is not asked again"
