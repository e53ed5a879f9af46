"""``paceline doctor``: check what runs on this machine, and what prevents it."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from paceline import __version__
from paceline.cli.flags.arguments import Parser
from paceline.cli.flags.options import DEFAULT_MODEL
from paceline.errors import PacelineError

__all__ = ["Finding", "add_parser", "examine"]

_EPILOG = """\
examples:
  paceline doctor                      this machine, and the default model on it
  paceline doctor ./my-model.gguf
  paceline doctor --json | jq '.findings[] | select(.state == "fault")'

Nothing is downloaded, started or changed. ok: nothing to do; note: works, but could be better;
fault: something will not work. Exit codes: 0 without a fault, 1 with one.
"""

# packages that a server computes, serves and parses with
_PACKAGES: Final = (
    "fastapi", "uvicorn", "httptools", "pyzmq", "msgspec", "jinja2", "tokenizers",
    "llguidance", "numpy",
)  # fmt: skip
# modules of an extra, the extra, and the feature that needs it
_SERVICES: Final = (
    ("redis", "redis", "--rate-limit-storage"),
    ("opentelemetry.exporter.otlp.proto.http", "otel", "--otlp-endpoint"),
    ("matplotlib", "plots", "simulate --plot"),
)
_MIB: Final = 2**20
# approximate bytes of two processes in addition to weights and KV cache
_PROCESSES: Final = 256 * _MIB


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check."""

    # such as "kernels" or "memory"; unique
    name: str
    # "ok", "note" or "fault"
    state: str
    # result, and for a note or a fault what to do
    text: str


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "doctor",
        help="check what runs on this machine",
        description="Check this machine: versions, kernels, formats, memory, services.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "model",
        nargs="?",
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help=f"model whose formats and memory are checked (default {DEFAULT_MODEL})",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    findings = list(examine(args.model))
    faults = sum(finding.state == "fault" for finding in findings)
    if args.json:
        print(json.dumps({"faults": faults, "findings": [asdict(each) for each in findings]}))
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            print(f"{finding.state:5}  {finding.name:{width}}  {finding.text}")
        count = "1 fault" if faults == 1 else f"{faults} faults"
        print(count if faults else "a server can run here")
    return 1 if faults else 0


def examine(model: str) -> Iterator[Finding]:
    """Run all checks in order; an exception in a check is a fault."""
    looks: tuple[tuple[str, Callable[[], Finding]], ...] = (
        ("versions", _versions),
        ("processor", _processor),
        ("kernels", _kernels),
        ("torch", _torch),
        ("gpu", _gpu),
        ("memory", _memory),
        ("model", lambda: _model(model)),
        ("folders", _folders),
        ("sockets", _sockets),
        *((f"service {names[1]}", _service(*names)) for names in _SERVICES),
    )
    for name, look in looks:
        try:
            yield look()
        except (PacelineError, OSError) as error:
            yield Finding(name, "fault", str(error))


def _versions() -> Finding:
    found, missing = [f"paceline {__version__}", f"python {platform.python_version()}"], []
    for package in _PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            missing.append(package)
    if missing:
        text = f"not installed: {', '.join(missing)}; install paceline again"
        return Finding("versions", "fault", text)
    return Finding("versions", "ok", ", ".join(found))


def _processor() -> Finding:
    from paceline.backends.machine.placement import choose_placement

    place, cores = choose_placement(None), os.cpu_count() or 1
    load = os.getloadavg()[0]
    threads = place.why or ("1 thread" if place.threads == 1 else f"{place.threads} threads")
    text = f"{platform.machine()}, {cores} processors; would compute: {threads}"
    if load > cores / 2:
        return Finding(
            "processor", "note", f"{text}; {load:.1f} of them are busy now and would be shared"
        )
    return Finding("processor", "ok", text)


def _kernels() -> Finding:
    from paceline.backends.native import unavailable_reason, variants

    reason = unavailable_reason()
    if reason is not None:
        if find_spec("torch") is None:
            return Finding("kernels", "fault", f"{reason}; or pip install 'paceline[torch]'")
        return Finding("kernels", "note", f"{reason}; until then PyTorch computes, more slowly")
    best, *others = variants()
    also = f", also {', '.join(others)}" if others else ""
    return Finding("kernels", "ok", f"native, level {best}{also}")


def _torch() -> Finding:
    # importing torch takes seconds, so only its presence is checked
    if find_spec("torch") is None:
        text = "not installed; --compute torch and GPUs need it: pip install 'paceline[torch]'"
        return Finding("torch", "note", text)
    return Finding("torch", "ok", f"{version('torch')}, loaded only where it computes")


def _gpu() -> Finding:
    from paceline.backends.machine.cpu import may_have_cuda

    if may_have_cuda():
        return Finding("gpu", "ok", "may be present; --device cuda uses it through PyTorch")
    return Finding("gpu", "ok", "not found; --device auto takes the processor")


def _memory() -> Finding:
    from paceline.backends.machine.cpu import CPU_SHARE, available_memory

    free = available_memory()
    pool = int(free * CPU_SHARE)
    text = f"{free / _MIB:.0f} MiB free; the KV cache would take up to {pool / _MIB:.0f} of them"
    if free < 2 * _PROCESSES:
        return Finding("memory", "fault", f"{text}; a server itself needs {_PROCESSES // _MIB}")
    return Finding("memory", "ok", text)


def _model(name: str) -> Finding:
    from paceline.backends.loading.formats import choose_formats
    from paceline.backends.machine.cpu import available_memory
    from paceline.checkpoints.gguf.shards import gguf_files
    from paceline.checkpoints.hub.catalogue import ALIASES
    from paceline.checkpoints.hub.resolve import default_cache_dir, find_local, resolve_model
    from paceline.checkpoints.open import open_checkpoint

    if name in ALIASES and find_local(name, default_cache_dir()) is None:
        return Finding("model", "note", f"{name} is not downloaded yet: paceline pull {name}")
    path = resolve_model(name, offline=True).path
    config = open_checkpoint(path).config
    files = gguf_files(path) if path.is_file() else tuple(path.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    formats = choose_formats(
        config,
        compute="auto",
        dtype="auto",
        kv_dtype="auto",
        block_size=16,
        device="cpu",
        torch_dtype=lambda wanted: "float32" if wanted == "auto" else wanted,
    )
    text = (
        f"{name}, {size / _MIB:.0f} MiB: --compute {formats.compute} in {formats.dtype}, "
        f"KV cache {formats.kv_dtype}"
    )
    if size > available_memory():
        return Finding("model", "fault", f"{text}; its files are larger than the free memory")
    return Finding("model", "ok", f"{text} ({formats.why})")


def _folders() -> Finding:
    from paceline.checkpoints.hub.resolve import default_cache_dir

    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    parts = []
    for what, folder in (("models", default_cache_dir()), ("batches", Path(state) / "paceline")):
        # the nearest folder that exists
        place = next(each for each in (folder, *folder.parents) if each.exists())
        if not os.access(place, os.W_OK):
            text = f"{what} cannot be stored in {folder}: this user may not write to {place}"
            return Finding("folders", "fault", text)
        free = shutil.disk_usage(place).free
        parts.append(f"{what} in {folder} ({free / 2**30:.1f} GiB free)")
    return Finding("folders", "ok", "; ".join(parts))


def _sockets() -> Finding:
    import resource

    with socket.socket() as trial:
        try:
            trial.bind(("127.0.0.1", 8000))
        except OSError:
            text = "port 8000 is taken: --port gives another"
            return Finding("sockets", "note", text)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < 4096 + 256:
        text = f"{hard} open files at most, so {hard - 256} connections: raise the hard limit"
        return Finding("sockets", "note", text)
    return Finding("sockets", "ok", "port 8000 is free, open files suffice for 4096 connections")


def _service(module: str, extra: str, flag: str) -> Callable[[], Finding]:
    def look() -> Finding:
        try:
            there = find_spec(module) is not None
        except ModuleNotFoundError:
            there = False
        if there:
            return Finding(f"service {extra}", "ok", f"installed, for {flag}")
        text = f"not installed; {flag} needs it: pip install 'paceline[{extra}]'"
        return Finding(f"service {extra}", "note", text)

    return look
