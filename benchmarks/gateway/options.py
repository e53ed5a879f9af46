"""Options of ``make bench NAME=gateway`` from the environment, checked before anything starts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from benchmarks.common.processes import Unavailable
from benchmarks.common.setup import make_venv

__all__ = [
    "LITELLM_HELP",
    "PARTS",
    "ROUTERS",
    "Options",
    "OptionsError",
    "litellm_command",
    "router_pythons",
]

PARTS = ("overhead", "routing", "failover")
# the release whose figures are in docs/lab-log/
_LITELLM = "litellm[proxy]==1.106.2"
# packages by name
ROUTERS: Mapping[str, str] = {
    "sglang-router": "sglang-router==0.3.2",
    "vllm-router": "vllm-router==0.1.17",
}
_INSTALL = "install"
LITELLM_HELP = (
    "LITELLM=install sets LiteLLM's proxy up in an environment of its own, once, in the cache's "
    "peers folder; LITELLM=COMMAND is its `litellm` from anywhere else"
)
_T = TypeVar("_T")


class OptionsError(Exception):
    """A variable has an invalid value; the text names it, and the valid values."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of one run."""

    parts: tuple[str, ...] = PARTS
    # one turn and one time of each
    quick: bool = False
    # path of LiteLLM's command, or "install"; None: it is left out
    litellm: str | None = None
    # whether ROUTERS are set up and measured, too
    routers: bool = False
    # number of times of each fault: with the null backend, and with the model in each format
    times: int = 20
    model_times: int = 5
    # minutes of failover alone, after which no fault begins a second time
    minutes: float = 6.0
    # number of random pools in addition to those with names, and their seed
    pools: tuple[int, int] = (8, 99)

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Options:
        """Read the environment. Raises OptionsError."""

        def read(name: str, default: _T, parse: Callable[[str], _T]) -> _T:
            text = environ.get(name, "").strip()
            return parse(text) if text else default

        quick = bool(environ.get("QUICK"))
        return cls(
            parts=read("PARTS", PARTS, _parts),
            quick=quick,
            litellm=read("LITELLM", None, _litellm),
            routers=read("ROUTERS", False, _routers),
            times=read("TIMES", 1 if quick else 20, lambda text: int(_number("TIMES", text, 1))),
            model_times=read(
                "MODEL_TIMES",
                0 if quick else 5,
                lambda text: int(_number("MODEL_TIMES", text, 0)),
            ),
            minutes=read("MINUTES", 6.0, lambda text: _number("MINUTES", text, 1, whole=False)),
            pools=read("POOLS", (0, 0) if quick else (8, 99), _pools),
        )


def litellm_command(wanted: str | None, folder: Path) -> tuple[str | None, str]:
    """Return the command, or None and the reason why it is left out.

    Args:
        wanted: see ``Options``.
        folder: the cache's folder for its environment.
    """
    if wanted is None:
        return None, f"LITELLM is not set: {LITELLM_HELP}"
    if wanted != _INSTALL:
        return wanted, ""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        python = make_venv(folder, [_LITELLM])
    except Unavailable as error:
        return None, str(error)
    return str(python.with_name("litellm")), ""


def router_pythons(wanted: bool, folder: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """Return, by name, the interpreter of each router's environment, and why others are left out.

    Args:
        folder: the cache's folder, with one of its own for each router.
    """
    if not wanted:
        why = "ROUTERS is not set: ROUTERS=install sets it up in an environment of its own"
        return {}, dict.fromkeys(ROUTERS, why)
    found, missing = {}, {}
    for name, package in ROUTERS.items():
        own = folder / name
        own.mkdir(parents=True, exist_ok=True)
        try:
            found[name] = make_venv(own, [package])
        except Unavailable as error:
            missing[name] = str(error)
    return found, missing


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(part.strip() for part in text.split(","))
    if unknown := [part for part in parts if part not in PARTS]:
        raise OptionsError(f"PARTS may have {', '.join(PARTS)}, got {unknown[0]!r}")
    return parts


def _litellm(text: str) -> str:
    if text == _INSTALL:
        return text
    found = shutil.which(text)
    if found is None:
        raise OptionsError(f"LITELLM={text}: there is no such command. {LITELLM_HELP}")
    return os.path.abspath(found)


def _routers(text: str) -> bool:
    if text != _INSTALL:
        raise OptionsError(f"ROUTERS may be {_INSTALL}, got {text!r}")
    return True


def _number(name: str, text: str, least: float, *, whole: bool = True) -> float:
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        value = least - 1
    if not least <= value < float("inf"):
        kind = "a whole number" if whole else "a number"
        raise OptionsError(f"{name} must be {kind} of at least {least:g}, got {text!r}")
    return value


def _pools(text: str) -> tuple[int, int]:
    count, _, seed = text.partition(",")
    return int(_number("POOLS", count, 0)), int(_number("POOLS", seed, 0)) if seed else 0
