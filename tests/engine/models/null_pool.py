"""A pool of models over null engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from paceline.core.backend import ModelBackend
from paceline.engine.models.client import Start
from paceline.engine.models.ledger import Account
from paceline.engine.models.model import ModelSpec
from paceline.engine.models.pool import ModelPool
from paceline.engine.models.states import ModelStates
from paceline.engine.protocol import EngineClient, Tokenizer
from paceline.engine.testing import null_client


async def null_pool(
    sizes: Mapping[str, int],
    memory: int,
    make: Callable[[str], ModelBackend],
    *,
    specs: Mapping[str, dict[str, Any]] = MappingProxyType({}),
    **states: Any,
) -> ModelPool:
    """Make a pool of null engines on threads, the first in memory; ``await pool.close()`` ends it.

    Args:
        sizes: bytes by model.
        make: makes the backend of a load, by name of the model; what it raises is a failed load.
        specs: further fields of ``ModelSpec``, by model.
        states: arguments of ``ModelStates``.
    """

    def start(name: str) -> Start:
        async def started(tokenizer: Tokenizer | None) -> EngineClient:
            return null_client(make(name), tokenizer=tokenizer, model=name)

        return started

    given = [
        ModelSpec(name=name, account=Account(weights=size), **specs.get(name, {}))
        for name, size in sizes.items()
    ]
    pool = ModelPool(ModelStates(given, memory, **states), {name: start(name) for name in sizes})
    await pool.load(next(iter(sizes)))
    return pool
