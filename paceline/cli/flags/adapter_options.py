"""Flags of ``paceline serve`` for LoRA adapters; most are vLLM's."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from paceline.cli.flags.arguments import Parser, bounded_int, memory_size
from paceline.cli.flags.modelfile import is_modelfile, read_modelfile
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.server.settings.config import AdapterConfig

__all__ = ["adapter_config", "adapter_settings", "add_adapter_options", "lora_module"]

# vLLM's environment variables
_RUNTIME: Final = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
_RESOLVER: Final = "VLLM_LORA_RESOLVER_CACHE_DIR"


class LoraModule(NamedTuple):
    """An adapter as --lora-modules gives it."""

    name: str
    path: str
    pinned: bool = False


def lora_module(text: str) -> LoraModule:
    """Parse name=path, or vLLM's JSON."""
    if text.lstrip().startswith("{"):
        try:
            values: Any = json.loads(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r:.80} is not JSON: {error}") from None
        unknown = sorted(set(values) - {"name", "path", "base_model_name", "pinned"})
        strings = all(isinstance(values.get(key), str) for key in ("name", "path"))
        if unknown or not strings or not isinstance(values.get("pinned", False), bool):
            raise argparse.ArgumentTypeError(
                f"{text!r:.80} must have the strings name and path; pinned is true or false"
                + (f", and {unknown[0]!r} is not known" if unknown else "")
            )
        return LoraModule(values["name"], values["path"], values.get("pinned", False))
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(f"{text!r:.80} must be name=path")
    return LoraModule(name, path)


def add_adapter_options(parser: Parser) -> None:
    group = parser.add_argument_group("adapters")
    group.add_argument(
        "--enable-lora",
        action="store_true",
        help="serve LoRA adapters: requests name one as their model, and one batch may use many",
    )
    group.add_argument(
        "--lora-modules",
        action="extend",
        nargs="+",
        type=lora_module,
        default=[],
        metavar="NAME=PATH",
        help="adapters to load at start: folders of peft, GGUF files, or Ollama's Modelfiles with "
        "FROM and ADAPTER; also as JSON with name, path and pinned, which keeps it in memory",
    )
    group.add_argument(
        "--max-loras",
        type=bounded_int(1),
        help="different adapters of the requests that run at once (default: any number)",
    )
    group.add_argument(
        "--max-cpu-loras",
        type=bounded_int(1),
        help="adapters in memory at once; others are loaded again when a request names them "
        "(default: as many as fit into --lora-memory)",
    )
    group.add_argument(
        "--max-lora-rank",
        type=bounded_int(1),
        help="refuse adapters of a larger rank (default: any rank up to 4096)",
    )
    group.add_argument(
        "--lora-memory",
        type=memory_size,
        metavar="SIZE",
        help="memory for adapters (default: a tenth of what is free at start)",
    )
    group.add_argument(
        "--lora-dtype",
        choices=("auto", "bfloat16", "float32", "int8"),
        help="format of adapters in memory; auto: bfloat16, or float32 with a model in float32; "
        "int8 takes half, with native compute (default auto)",
    )
    group.add_argument(
        "--allow-runtime-lora",
        action="store_true",
        help="serve /v1/load_lora_adapter and /v1/unload_lora_adapter, to keys of scope admin "
        f"where there are keys; needs --lora-root (default: ${_RUNTIME})",
    )
    group.add_argument(
        "--lora-root",
        action="append",
        type=Path,
        default=[],
        metavar="DIR",
        help="folder that requests may load adapters from; may be given several times",
    )
    group.add_argument(
        "--lora-resolve",
        type=Path,
        metavar="DIR",
        help="load an unknown model NAME as the adapter DIR/NAME, if it is there (default: "
        f"${_RESOLVER})",
    )


def adapter_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the engine's settings. Raises ConfigError for flags without --enable-lora, or without
    what they need."""
    given = {
        "--lora-modules": args.lora_modules, "--max-loras": args.max_loras,
        "--max-cpu-loras": args.max_cpu_loras, "--max-lora-rank": args.max_lora_rank,
        "--lora-memory": args.lora_memory, "--lora-dtype": args.lora_dtype,
        "--allow-runtime-lora": args.allow_runtime_lora, "--lora-root": args.lora_root,
        "--lora-resolve": args.lora_resolve,
    }  # fmt: skip
    if not args.enable_lora:
        for flag, value in given.items():
            if value:
                raise ConfigError(f"{flag} has no effect without --enable-lora")
    if args.enable_lora and _allows_runtime(args) != bool(args.lora_root):
        raise ConfigError(
            "--allow-runtime-lora needs --lora-root: the folders that requests may load from"
            if not args.lora_root
            else "--lora-root has no effect without --allow-runtime-lora"
        )
    names = [module.name for module in args.lora_modules]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"--lora-modules names {min(twice)!r} twice")
    return {
        "enable_lora": args.enable_lora, "lora_bytes": args.lora_memory,
        "max_cpu_loras": args.max_cpu_loras, "max_lora_rank": args.max_lora_rank,
        "lora_dtype": args.lora_dtype or "auto", "max_adapters": args.max_loras,
    }  # fmt: skip


def _allows_runtime(args: argparse.Namespace) -> bool:
    named = os.environ.get(_RUNTIME, "").lower() in ("1", "true")
    return args.allow_runtime_lora or named


def adapter_config(args: argparse.Namespace) -> AdapterConfig:
    """Return the server's settings. Raises ConfigError for a folder that is not there."""
    from paceline.server.settings.config import AdapterConfig, AdapterModule

    if not args.enable_lora:
        return AdapterConfig()
    given = args.lora_resolve or os.environ.get(_RESOLVER)
    resolve = Path(given) if given else None
    for flag, folders in (("--lora-root", args.lora_root), ("--lora-resolve", [resolve])):
        for folder in folders:
            if folder is not None and not folder.is_dir():
                raise ConfigError(f"{flag} {folder} is no folder")
    return AdapterConfig(
        modules=tuple(
            AdapterModule(name, _file_of(path, args), pinned)
            for name, path, pinned in args.lora_modules
        ),
        allow_runtime=_allows_runtime(args),
        roots=tuple(Path(os.path.abspath(root)) for root in args.lora_root),
        resolve=None if resolve is None else Path(os.path.abspath(resolve)),
    )


def _file_of(path: str, args: argparse.Namespace) -> str:
    """Return an adapter's path, which may be in a Modelfile. Raises ConfigError for one that is not
    on the model that is served."""
    if not is_modelfile(Path(path)):
        return path
    base, adapter = read_modelfile(Path(path))
    names = {str(args.model), *args.served_model_name}
    plain = base.removesuffix(":latest")
    file = Path(path).parent / Path(base).expanduser()
    if plain not in names and not any(_is_same(file, name) for name in names):
        raise ConfigError(
            f"{path}: FROM {base!r:.80} is not the model that is served "
            f"({', '.join(sorted(names))}): serve it, or give --served-model-name that name"
        )
    return str(adapter)


def _is_same(file: Path, name: str) -> bool:
    return file.exists() and Path(name).exists() and file.samefile(name)
