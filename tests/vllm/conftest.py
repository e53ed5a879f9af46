"""A paced scheduler over the recorded interface, on a clock that tests move."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import fake
from tests.vllm.loop import Loop
from tests.vllm.serving import Engine


@pytest.fixture(scope="module")
def paced_class() -> Iterator[Any]:
    """``PacedScheduler`` with the fake as vLLM."""
    with fake.installed():
        from paceline.vllm import PacedScheduler

        yield PacedScheduler


@pytest.fixture(autouse=True)
def channel_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sockets lie in the test's own folder."""
    monkeypatch.setenv("PACELINE_VLLM_CHANNEL", str(tmp_path))
    return tmp_path


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.channel.close()
    assert not made.channel.path.exists()


@pytest.fixture(autouse=True)
def shut_down() -> Iterator[None]:
    yield
    while Loop.made:
        Loop.made.pop().scheduler.shutdown()
