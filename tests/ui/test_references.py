"""The chart of a fixed recording is the one that is known, in every way to look at it."""

from __future__ import annotations

import pytest

from tests.server.live_process import LiveServer
from tests.ui.conftest import OpenPage
from tests.ui.references import (
    CASES,
    CONTEXT,
    FOLDER,
    PICTURES,
    chart,
    differing,
    letters,
    replayed,
)

# share of pixels: edges between two colours may fall otherwise in another browser
_MOST = 0.005


@pytest.mark.parametrize(
    "case",
    CASES,
)
def test_the_chart_is_the_one_that_is_known(
    server: LiveServer, open_page: OpenPage, case: str
) -> None:
    page = open_page(f"{server.url}/ui/server", **CONTEXT)
    replayed(page, server.url, case)
    assert letters(page) == (FOLDER / f"{case}.txt").read_text()
    if case in PICTURES:
        found = chart(page)
        assert differing(found, (FOLDER / f"{case}.png").read_bytes()) <= _MOST
        # and it can tell one way to look at it from another
        other = next(name for name in PICTURES if name != case)
        assert differing(found, (FOLDER / f"{other}.png").read_bytes()) > _MOST
