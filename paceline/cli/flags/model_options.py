"""Flags of a server of several models: which they are, where they lie, what they may take.

::

    --model NAME=PATH[,keep-alive=5m][,pin][,weight=2][,alias=OTHER][,fallback=OTHER]
            [,cpus=0-3][,FLAG[=VALUE]...]

FLAG is any of the engine's flags, without its dashes; a comma within a value is written ``\\,``.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paceline.backends.machine.topology import allowed_cpus, format_list, parse_list
from paceline.cli.flags.arguments import Parser, bounded_float, bounded_int, memory_size
from paceline.cli.flags.options import (
    DEFAULT_MODEL,
    add_admission_options,
    add_engine_options,
)
from paceline.errors import ConfigError

__all__ = [
    "GivenModel",
    "add_models_options",
    "check_names",
    "given_models",
    "model_arguments",
]

_COMMA: Final = re.compile(r"(?<!\\),")
# flags of the server's that each model may have of its own
_OF_MODELS: Final = frozenset(
    {
        "tool_call_parser", "reasoning_parser", "default_chat_template_kwargs", "enable_lora",
        "lora_modules", "max_loras", "max_cpu_loras", "max_lora_rank", "lora_memory", "lora_dtype",
    }
)  # fmt: skip
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)(s|m|h)?")
_UNITS: Final = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenModel:
    """A model of the command line or of ``--models-dir``."""

    # as a model is named on the command line: alias, path or hub id
    model: str
    # empty: as the model is called
    name: str = ""
    aliases: tuple[str, ...] = ()
    keep_alive: float | None = None
    pinned: bool = False
    weight: float = 1.0
    # answers in its place while it is not in memory; empty: none
    fallback: str = ""
    # processors that it computes on alone; None: all, in turns with others
    cpus: frozenset[int] | None = None
    # flags of its own
    flags: tuple[str, ...] = ()
    # found in ``--models-dir``, where a broken file stops nothing
    found: bool = False


def add_models_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments MODEL and the flags for several of them."""
    parser.set_defaults(models=(), model_flags=())
    parser.add_argument(
        "model",
        nargs="*",
        action=_Positional,
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help="an alias (see 'paceline pull --list'), a Hugging Face folder, a .gguf file or a hub "
        f"id such as org/name; several are served together; default {DEFAULT_MODEL}",
    )
    group = parser.add_argument_group("several models")
    group.add_argument(
        "--model",
        dest="model_flag",
        action=_Flag,
        metavar="MODEL",
        help="the same as the argument MODEL; or NAME=MODEL with ,keep-alive=5m ,pin ,weight=2 "
        ",alias=OTHER ,fallback=OTHER ,cpus=0-3 and any flag of the engine's for this model alone, "
        "such as ,dtype=q4 (docs/operate/several-models.md)",
    )
    group.add_argument(
        "--models-dir",
        type=Path,
        metavar="DIR",
        help="serve every .gguf file and model folder in DIR, each loaded when a request names it",
    )
    group.add_argument(
        "--memory",
        type=memory_size,
        help="memory for all models together, such as 12GiB: those that no request uses make room; "
        "default: 80%% of what is free at start",
    )
    group.add_argument(
        "--models-max",
        type=bounded_int(1),
        metavar="N",
        help="most models in memory at once; default: as many as fit",
    )
    group.add_argument(
        "--keep-alive",
        type=_duration,
        metavar="DURATION",
        help="time without requests after which a model is unloaded, such as 5m; -1: never; "
        "default: 5m where not all models fit into the memory, else never",
    )
    group.add_argument(
        "--models-autoload",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="load a model when a request names it; without, POST /models/load does it, or a "
        "request with ?autoload=true (default on)",
    )
    group.add_argument(
        "--model-switch-wait",
        type=bounded_float(0.0),
        metavar="SECONDS",
        help="most seconds that a request for a model without room waits until one in use takes no "
        "more requests; default: ten times the load, at least 5",
    )


class _Positional(argparse.Action):
    """Keeps the first MODEL as ``model``, and all of them as ``models``."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if not isinstance(values, str):
            namespace.models = tuple(values)
            namespace.model = values[0]


class _Flag(argparse.Action):
    """Keeps the last ``--model`` as ``model_flag``, and all of them as ``model_flags``."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        namespace.model_flag = values
        namespace.model_flags = (*namespace.model_flags, values)


def _duration(text: str) -> float:
    if text.startswith("-"):
        return math.inf
    found = _DURATION.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} must be a duration such as 30s, 5m or 1h")
    return float(found[1]) * _UNITS[found[2] or ""]


def given_models(args: argparse.Namespace) -> tuple[GivenModel, ...]:
    """Return the models, the first for requests that name none; () where there is one, and nothing
    of several. Raises ConfigError."""
    flagged = [_parse(text) for text in args.model_flags]
    if len(args.models) <= 1 and args.models_dir is None and not any(m.name for m in flagged):
        for flag in ("memory", "models_max", "keep_alive", "model_switch_wait", "models_autoload"):
            if getattr(args, flag) not in (None, True):
                name = f"no-{flag}" if flag == "models_autoload" else flag
                raise ConfigError(
                    f"--{name.replace('_', '-')} is for several models: give --models-dir, or "
                    "--model NAME=MODEL"
                )
        return ()
    given = [*map(_parse, args.models), *flagged]
    if args.models_dir is not None:
        given += _found_in(args.models_dir)
        if not given:
            raise ConfigError(
                f"--models-dir {args.models_dir} has no .gguf file and no model folder"
            )
    if args.served_model_name:
        raise ConfigError(
            "--served-model-name is for one model: --model NAME=MODEL,alias=OTHER names several"
        )
    if args.kv_port is not None:
        raise ConfigError("--kv-port is for one model: start a server of its own for it")
    if args.enable_lora:
        raise ConfigError(
            "adapters are those of one of several models: give their flags to that one, as in "
            "--model NAME=MODEL,enable-lora,lora-modules=sql=PATH"
        )
    return tuple(given)


def _parse(text: str) -> GivenModel:
    name, is_named, rest = text.partition("=")
    if not is_named or Path(text).exists():
        return GivenModel(model=text)
    model, *options = (part.replace("\\,", ",") for part in _COMMA.split(rest))
    if not model or not _may_name(name):
        raise ConfigError(f"--model {text}: give NAME=MODEL, with a name that has no * or \\")
    aliases: list[str] = []
    flags: list[str] = []
    keep_alive, pinned, weight, fallback, cpus = None, False, 1.0, "", None
    for option in options:
        flag, has_value, value = option.partition("=")
        try:
            if flag == "keep-alive":
                keep_alive = _duration(value)
            elif flag == "weight":
                weight = bounded_float(0.001, 1000.0)(value)
            elif flag == "alias":
                if not _may_name(value):
                    raise argparse.ArgumentTypeError(f"{value!r} must be a name without * or \\")
                aliases.append(value)
            elif flag == "fallback":
                fallback = value
            elif flag == "cpus":
                cpus = _cpus(value)
            elif flag == "pin" and not has_value:
                pinned = True
            else:
                flags.append(f"--{flag}{has_value}{value}")
        except argparse.ArgumentTypeError as error:
            raise ConfigError(f"--model {name}: {flag}: {error}") from None
    return GivenModel(
        model=model, name=name, aliases=tuple(aliases), keep_alive=keep_alive, pinned=pinned,
        weight=weight, fallback=fallback, cpus=cpus, flags=tuple(flags),
    )  # fmt: skip


def _cpus(text: str) -> frozenset[int]:
    usable = allowed_cpus()
    if usable is None:
        raise argparse.ArgumentTypeError("this system does not bind processes to processors")
    try:
        cpus = parse_list(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not cpus or not cpus <= usable:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be of the processors that this server may use, {format_list(usable)}"
        )
    return cpus


def _may_name(text: str) -> bool:
    return bool(text) and text == text.strip() and not any(each in text for each in "*\\")


def _found_in(folder: Path) -> list[GivenModel]:
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise ConfigError(f"--models-dir {folder} cannot be read: {error}") from None
    return [
        GivenModel(model=str(path), name=path.stem if path.is_file() else path.name, found=True)
        for path in entries
        if not path.name.startswith(".") and _may_be_model(path)
    ]


def _may_be_model(path: Path) -> bool:
    """Return whether a file or folder is one model: of several files the first counts."""
    if path.is_dir():
        return (path / "config.json").exists() or any(path.glob("*.gguf"))
    part = re.search(r"-(\d+)-of-\d+\.gguf$", path.name)
    return path.suffix == ".gguf" and (part is None or int(part[1]) == 1)


def model_arguments(
    parser: Parser, args: argparse.Namespace, given: GivenModel
) -> argparse.Namespace:
    """Return the server's arguments with those of one model in their place. Raises ConfigError."""
    own = copy(args)
    allowed = _engine_flags()
    for flag in given.flags:
        action = parser._option_string_actions.get(flag.partition("=")[0])
        if action is None:
            raise ConfigError(f"--model {given.name}: there is no flag {flag.partition('=')[0]}")
        if action.dest not in allowed | _OF_MODELS:
            raise ConfigError(
                f"--model {given.name}: {flag.partition('=')[0]} is the server's, not a model's"
            )
    # flags of other servers were replaced before
    _, left = argparse.ArgumentParser.parse_known_args(parser, [*given.flags], own)
    if left:
        raise ConfigError(f"--model {given.name}: {' '.join(left)} takes no value here")
    own.model, own.model_flag = given.model, None
    if given.model == "null":
        own.backend, own.model = "null", DEFAULT_MODEL
    return own


def _engine_flags() -> frozenset[str]:
    scratch = argparse.ArgumentParser(add_help=False)
    add_engine_options(scratch)
    add_admission_options(scratch)
    return frozenset(action.dest for action in scratch._actions)


def check_names(names: Sequence[str], fallbacks: Sequence[str] = ()) -> None:
    """Raise ConfigError where a name stands for two models, or a fallback for none."""
    if unknown := set(fallbacks) - {*names, ""}:
        raise ConfigError(f"--model: fallback={min(unknown)} names no model of this server")
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"--model: {min(twice)} names {names.count(min(twice))} models")
