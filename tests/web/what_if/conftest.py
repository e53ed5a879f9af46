"""An engine that tells of its steps, and callers whose apps end with the test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from paceline.backends.reference.null import NullBackend
from paceline.engine.local import LocalEngineClient
from paceline.engine.testing import null_client
from paceline.server.settings.config import WhatIfConfig
from tests.server.helpers import VOCAB
from tests.web.what_if.helpers import Ask, Asker, configured


@pytest.fixture
async def engine() -> AsyncIterator[LocalEngineClient]:
    client = null_client(NullBackend(vocab_size=VOCAB, step_time=0.002), timeline=True)
    yield client
    await client.close()


@pytest.fixture
async def ask(engine: LocalEngineClient) -> AsyncIterator[Ask]:
    made: list[Asker] = []

    def make(config: WhatIfConfig | None = None, **more: Any) -> Asker:
        made.append(Asker(engine, config or configured(), **more))
        return made[-1]

    yield make
    for each in made:
        await each.service.end_side_work()
        await each.http.aclose()
