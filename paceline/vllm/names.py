"""Names of vLLM that the plug-in uses, and the versions it was tried with.

vLLM's scheduler is not a public interface. So everything that is used of it is listed here; a
start without one of these names ends with that name. ``scripts/vllm_names.py`` looks for the same
names in the source of a version that is not installed.

This module does not import vLLM.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from typing import Any, Final

from paceline.errors import ConfigError

__all__ = ["ATTRIBUTES", "CACHE_NAMES", "READ", "SCHEDULER_NAMES", "TRIED", "check_names"]

# by `make test-upstreams KINDS=paced`, 0.31 with VLLM=0.31.0, and 0.32 by `make bench NAME=vllm`
TRIED: Final = ("0.31", "0.32")
# methods of the class that are called, or called by vLLM, with the arguments that are used
SCHEDULER_NAMES: Final = {
    "schedule": (),
    "update_from_output": ("scheduler_output", "model_runner_output"),
    "add_request": ("request",),
    "finish_requests": ("request_ids", "finished_status"),
    "_preempt_request": ("request", "timestamp"),
    "_reserve_prefill_lookahead": ("request", "num_computed_tokens", "num_new_tokens"),
}
CACHE_NAMES: Final = {"get_computed_blocks": ("request",), "get_blocks": ("request_id",)}
# attributes of the scheduler that are used
ATTRIBUTES: Final = (
    "requests", "running", "waiting", "max_num_scheduled_tokens", "max_num_running_reqs",
    "max_model_len", "policy",
)  # fmt: skip
# attributes that ``schedule`` must read in each call, so that changing them has an effect
READ: Final = ("running", "waiting", "max_num_scheduled_tokens", "_reserve_prefill_lookahead")
_log: Final = logging.getLogger(__name__)


def check_names(scheduler: Any, base: type, version: str) -> None:
    """Return if vLLM has every name that is used; warn of a version that was not tried. ``base`` is
    vLLM's own class.

    Raises:
        ConfigError: a name is missing. The message has it.
    """
    missing = list(_missing(scheduler, base))
    if missing:
        raise ConfigError(
            f"paceline.vllm does not know this vLLM, {version}: it lacks {', '.join(missing)}. "
            f"Tried versions are {', '.join(f'{each}.*' for each in TRIED)}; without "
            "--scheduler-cls vLLM runs as it is"
        )
    if not version.startswith(tuple(f"{each}." for each in TRIED)):
        tried = ", ".join(f"{each}.*" for each in TRIED)
        _log.warning("vLLM %s has every name that is used, but only %s were tried", version, tried)


def _missing(scheduler: Any, base: type) -> Iterator[str]:
    for name in SCHEDULER_NAMES:
        if not callable(getattr(base, name, None)):
            yield f"Scheduler.{name}"
    for name in ATTRIBUTES:
        if not hasattr(scheduler, name):
            yield f"Scheduler.{name}"
    read = inspect.unwrap(getattr(base, "schedule", _missing)).__code__.co_names
    for name in READ:
        if name not in read:
            yield f"the use of {name} in Scheduler.schedule"
    cache = getattr(scheduler, "kv_cache_manager", None)
    for name in CACHE_NAMES:
        if not callable(getattr(cache, name, None)):
            yield f"KVCacheManager.{name}"
    if not callable(getattr(getattr(cache, "block_pool", None), "get_num_free_blocks", None)):
        yield "BlockPool.get_num_free_blocks"
