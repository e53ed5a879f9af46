"""Data for operators: a server's state, its keys and their use, its model, and the settings that
differ from the defaults. Read-only.

Of a key only name, scope and limits are shown, never the key or its digest. Imported on first use.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

import paceline
from paceline.http.rate_limits.rates import KeyLimits, Window
from paceline.server.generation.service import Service

__all__ = ["MOST_KEYS", "operations"]

# maximum keys shown at a time: each needs two reads of counters that may be in another process
MOST_KEYS: Final = 100
_OF_ENGINE: Final = (
    "model", "backend", "device", "dtype", "kv_dtype", "choice", "max_model_len", "block_size",
    "num_blocks", "block_bytes", "enable_prefix_caching", "max_num_seqs", "max_num_batched_tokens",
    "max_num_waiting", "policy", "numa_nodes",
)  # fmt: skip
_KINDS: Final = ("requests", "tokens")


async def operations(service: Service, find: str) -> dict[str, Any]:
    """Return plain values for JSON.

    Args:
        find: show only keys whose name contains this.
    """
    info, config = service.client.info, service.config
    names = [key for key in service.keys.named() if find.casefold() in key[0].casefold()]
    own = service.keys.limits()
    running = Counter(entry.request.tenant for entry in service.under_way.entries())
    keys = await asyncio.gather(
        *(
            _key(service, name, scope, running[name], own.get(name, {}))
            for name, scope in names[:MOST_KEYS]
        )
    )
    return {
        "version": paceline.__version__,
        "state": _state(service),
        "models": list(service.rules.listed_models),
        "engine": {name: getattr(info, name) for name in _OF_ENGINE},
        "settings": [asdict(setting) for setting in config.given],
        "limits": _limits(service),
        "keys": keys,
        "num_keys": len(service.keys),
        "num_found": len(names),
    }


def _state(service: Service) -> dict[str, Any]:
    faults = service.client.faults
    return {
        "started": service.created,
        "ready": service.is_ready,
        "draining": service.draining,
        "dead": service.dead,
        "in_flight": service.in_flight,
        "drain_timeout": service.config.drain_timeout,
        "engine_up": faults.up,
        "engine_failures": dict(faults.losses),
        "requests_sent_again": faults.num_resent,
        "requests_lost": faults.num_lost + faults.num_poisoned,
    }


def _limits(service: Service) -> dict[str, Any]:
    """Return the limits of callers without limits of their own, and where they are counted."""
    limiter = service.limiter
    told = {"default": _rates(service.config.limits)}
    if limiter is None:
        return told
    return told | {
        "refused": limiter.refused(),
        "storage": "this server" if limiter.store_up is None else "Redis",
        "storage_up": limiter.store_up,
    }


async def _key(
    service: Service, name: str, scope: str, running: int, own: Mapping[str, Any]
) -> dict[str, Any]:
    limits: dict[str, Any] = {}
    if service.limiter is not None:
        usage = await service.limiter.usage(name)
        limits = _rates(usage.limits)
        for kind, window in usage.windows.items():
            limits[kind] |= _used(window)
        if limits["concurrent"] is not None:
            limits["concurrent"] |= {"used": usage.running}
    tenants = service.metrics.tenants
    return {
        "name": name,
        "scope": scope,
        "limits": limits,
        "own": sorted(own),
        "running": running,
        "served": None if tenants is None else tenants.served(name),
    }


def _rates(limits: KeyLimits) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for kind in _KINDS:
        rate = getattr(limits, kind)
        told[kind] = None if rate is None else {"limit": rate.amount, "rate": str(rate)}
    most = limits.concurrent
    return told | {"concurrent": None if most is None else {"limit": most}}


def _used(window: Window) -> dict[str, Any]:
    return {"used": window.used, "reset_s": round(window.reset_after, 1)}
