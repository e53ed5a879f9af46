"""Scheduling policies of other installed packages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from paceline.core.policies import POLICIES
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["GROUP", "OTHER_NAMES", "listed_policies", "load_policy", "policy_names"]

GROUP = "paceline.policies"
# names of tutorials
OTHER_NAMES: Final = {"fifo": "fcfs"}


def _found() -> dict[str, EntryPoint]:
    # imported here: it takes longer to import than most of this package
    from importlib.metadata import entry_points

    return {entry.name: entry for entry in entry_points(group=GROUP)}


def policy_names() -> tuple[str, ...]:
    """Return the built-in policies, then those of other packages, without loading any."""
    return (*POLICIES, *(name for name in _found() if name not in POLICIES))


def listed_policies(text: str | None) -> list[str | None]:
    """Return the policies of a list with commas; None stands for the engine's own."""
    return [OTHER_NAMES.get(name, name) for name in text.split(",")] if text else [None]


def load_policy(name: str) -> None:
    """Register ``name`` with ``core.policies.make_policy``; built-in names cannot be replaced.

    Raises:
        ConfigError: the package that offers it cannot be loaded.
    """
    if name in POLICIES:
        return
    entry = _found().get(name)
    if entry is None:
        return
    try:
        POLICIES[name] = entry.load()
    except Exception as error:
        raise ConfigError(f"scheduling policy {name!r} ({entry.value}): {error!r}") from error
