"""The architectures that Hugging Face folders may have, one module each.

A new one is a new module with an ``ARCHITECTURE``; no other file names it. See docs/use/models.md.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Final

from paceline.checkpoints.architectures.base import Architecture

__all__ = ["ARCHITECTURES", "Architecture"]


def _find() -> dict[str, Architecture]:
    found: dict[str, Architecture] = {}
    for name in sorted(module.name for module in pkgutil.iter_modules(__path__)):
        if name != "base":
            architecture: Architecture = import_module(f"{__name__}.{name}").ARCHITECTURE
            found[architecture.model_type] = architecture
    return found


# architectures by model_type
ARCHITECTURES: Final[Mapping[str, Architecture]] = MappingProxyType(_find())
