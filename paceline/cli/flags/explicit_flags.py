"""Flags with another value than their default, for the page's operations tab.

For a value that is a URL only scheme, host and port are given: the rest may be a secret.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.flags.arguments import memory_size, shown_bytes, size_with_unit
from paceline.core.slo import Slo

if TYPE_CHECKING:
    from paceline.server.settings.config import GivenSetting

__all__ = ["given_flags"]

# the default as a help text states it
_DEFAULT = re.compile(r"\(default:? ([^()]*(?:\([^()]*\)[^()]*)*)\)|; default:? (.*)$", re.DOTALL)
# scheme and host; the part before @ may be a password
# destinations whose values are secrets
_SECRET = frozenset({"api_key"})
_URL = re.compile(r"([A-Za-z][\w+.-]*)://(?:[^/?#]*@)?([^/?#]*)")


def given_flags(
    parser: argparse.ArgumentParser, args: argparse.Namespace
) -> tuple[GivenSetting, ...]:
    """Return those of the parser's command, in the order of its --help."""
    from paceline.server.settings.config import GivenSetting

    found = []
    for action in parser._actions:
        if action.dest == argparse.SUPPRESS or not hasattr(args, action.dest):
            continue
        value = getattr(args, action.dest)
        if value != action.default:
            found.append(
                GivenSetting(_name(action, value), _shown(value, action), _default(action))
            )
    return tuple(found)


def _name(action: argparse.Action, value: Any) -> str:
    if not action.option_strings:
        return str(action.metavar or action.dest)
    if isinstance(action, argparse.BooleanOptionalAction) and value is False:
        return next(name for name in action.option_strings if name.startswith("--no-"))
    return action.option_strings[0]


def _default(action: argparse.Action) -> str:
    if action.nargs == 0 or isinstance(action.default, bool):
        # a flag without a value is off by default, unless its opposite is
        return "on" if isinstance(action, argparse.BooleanOptionalAction) and action.default else ""
    if action.default not in (None, [], {}):
        return _shown(action.default, action)
    said = _DEFAULT.search(action.help or "")
    return "" if said is None else " ".join((said[1] or said[2]).split())


def _shown(value: Any, action: argparse.Action | None = None) -> str:
    if action is not None and action.dest in _SECRET:
        return f"{len(value)} not shown"
    if action is not None and action.type in (memory_size, size_with_unit):
        return shown_bytes(value)
    if isinstance(value, bool):
        return ""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Slo):
        return _targets(value)
    if isinstance(value, list | tuple):
        return " ".join(map(_shown, value))
    if isinstance(value, dict):
        return json.dumps(value)
    text = str(value)
    url = None if isinstance(value, Path) else _URL.match(text)
    return text if url is None else f"{url[1]}://{url[2]}"


def _targets(slo: Slo) -> str:
    """Format targets as --slo-class takes them."""
    told = [
        f"{field.name}:{1e3 * seconds:g}"
        for field in fields(slo)
        if isinstance(seconds := getattr(slo, field.name), float)
    ]
    return f"{slo.slo_class}=" + ",".join([*told, *["best-effort"] * slo.best_effort])
