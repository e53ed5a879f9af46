"""Which event loop a gateway and a bench run on."""

from __future__ import annotations

import asyncio
import sys

import pytest

from paceline.http.event_loop import new_event_loop


@pytest.mark.parametrize("installed", [True, False])
def test_uvloops_where_it_is_installed(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if installed:
        pytest.importorskip("uvloop")
    else:
        monkeypatch.setitem(sys.modules, "uvloop", None)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        assert type(runner.get_loop()).__module__.startswith("uvloop" if installed else "asyncio")
