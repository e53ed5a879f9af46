"""What all tests of the gateway have in common."""

from __future__ import annotations

import pytest

from paceline.gateway.upstreams import registry


@pytest.fixture(autouse=True)
def quick_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a gateway looks at ten times a second (who hung up, what is late) it looks at fifty
    times, so that no test waits for it."""
    monkeypatch.setattr(registry, "_TICK_SECONDS", 0.02)
