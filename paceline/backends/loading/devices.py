"""Choice of the device that computes a model."""

from __future__ import annotations

import logging

from paceline.backends.machine.cpu import NO_TORCH, has_torch, may_have_cuda
from paceline.errors import ConfigError

__all__ = ["choose_device"]

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
