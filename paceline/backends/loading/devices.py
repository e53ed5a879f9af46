"""Choice of the device that computes a model, and of the threads and NUMA nodes next to it."""

from __future__ import annotations

import logging
from dataclasses import replace

from paceline.backends.loading.settings import BackendSettings
from paceline.backends.machine.cpu import NO_TORCH, has_torch, may_have_cuda
from paceline.backends.machine.placement import Placement, choose_placement
from paceline.backends.machine.topology import bind, format_list
from paceline.errors import ConfigError

__all__ = ["bind_placement", "choose_device", "place_threads"]

_log = logging.getLogger(__name__)


def choose_device(name: str) -> str:
    """Return "cpu", or PyTorch's name of another device. PyTorch is loaded only if one may exist.

    Args:
        name: "auto", "cpu", "cuda" or "cuda:N".

    Raises ConfigError for a device that this machine does not have.
    """
    if name == "cpu" or (name == "auto" and not may_have_cuda()):
        return "cpu"
    if not has_torch():
        if name != "auto":
            raise ConfigError(f"--device {name} is PyTorch's to use, and {NO_TORCH}")
        _log.warning("device=cpu: there are signs of a GPU, but %s", NO_TORCH)
        return "cpu"
    from paceline.backends.torch.machine import choose_device as choose

    return str(choose(name))


def place_threads(settings: BackendSettings, device: str) -> Placement:
    """Choose where to compute; ``numa_fallback`` takes "auto" where ``numa`` is unavailable."""
    # a GPU has a node of its own, which is not looked up here
    auto = "auto" if device == "cpu" else "off"
    try:
        nodes = auto if settings.numa == "auto" else settings.numa
        return choose_placement(settings.threads, nodes)
    except ConfigError as error:
        if not settings.numa_fallback:
            raise
        _log.warning("numa_fallback numa=%s reason=%s", settings.numa, error)
    return choose_placement(settings.threads, auto)


def bind_placement(placement: Placement, *, whole_process: bool) -> Placement:
    """Apply a placement as far as the system allows it, and return the result."""
    if placement.cpus is None:
        if placement.why:
            _log.info("threads=%d numa_nodes=none: %s", placement.threads, placement.why)
        return placement
    cpus = format_list(placement.cpus)
    refusal = bind(placement.cpus, whole_process=whole_process)
    if refusal:
        _log.warning(
            "numa_unbound threads=%d numa_nodes=%s cpus=%s reason=%s",
            placement.threads, placement.nodes or "none", cpus, refusal,
        )  # fmt: skip
        why = f"NUMA nodes {placement.nodes} could not be bound to ({refusal})"
        if placement.why:
            why = f"{placement.why}, but it could not be bound ({refusal})"
        return replace(placement, nodes="", cpus=None, why=why)
    _log.info(
        "threads=%d numa_nodes=%s cpus=%s%s",
        placement.threads, placement.nodes or "none", cpus, placement.why and f": {placement.why}",
    )  # fmt: skip
    return placement
