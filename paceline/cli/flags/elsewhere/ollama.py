"""Ollama's environment variables, as ``paceline serve`` takes them, and flags of ``ollama run``."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Collection, Mapping
from typing import Final

from paceline.cli.flags.elsewhere.llama_server import KV_TYPES
from paceline.cli.flags.elsewhere.rows import Note, Row, Taken, already, boolean, refused
from paceline.errors import ConfigError

__all__ = ["RUN", "VARIABLES", "of_environment"]

_PORT: Final = "11434"
_ONE_MODEL: Final = (
    "no effect: where there are several models, --keep-alive and --models-max say it"
)
_HOST: Final = re.compile(
    r"(?:(?P<scheme>https?)://)?(?P<host>\[[^\]]*\]|[^:/]*)(?::(?P<port>\d+))?/?"
)


def _host(value: str) -> Taken:
    match = _HOST.fullmatch(value.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{value!r} is not an address like 0.0.0.0:{_PORT}")
    if match["scheme"] == "https":
        raise argparse.ArgumentTypeError(
            f"{value!r} asks for HTTPS: give --host, --port, --ssl-certfile and --ssl-keyfile"
        )
    host, port = (match["host"] or "127.0.0.1").strip("[]"), match["port"] or _PORT
    return Taken(("--host", host, "--port", port), f"--host {host} --port {port}")


def _number(flag: str) -> Callable[[str], Taken]:
    def take(value: str) -> Taken:
        if not value.strip().isdigit():
            raise argparse.ArgumentTypeError(f"{value!r} is not a whole number")
        number = str(int(value))
        return Taken() if number == "0" else Taken((flag, number), f"{flag} {number}")

    return take


def _origins(value: str) -> Taken:
    origins = [each.strip() for each in value.split(",") if each.strip()]
    return Taken(
        tuple(word for each in origins for word in ("--cors-origin", each)),
        f"--cors-origin {' '.join(origins)}",
    )


def _kv_type(value: str) -> Taken:
    kind = KV_TYPES.get(value.strip().lower())
    if kind is None:
        raise argparse.ArgumentTypeError(f"{value!r} is not one of {', '.join(KV_TYPES)}")
    return Taken(("--kv-dtype", kind), f"--kv-dtype {kind}")


def _debug(value: str) -> Taken:
    if value.strip().lower() in ("", "0", "false"):
        return Taken()
    return Taken(("--log-level", "debug"), "--log-level debug")


def _library(value: str) -> Taken:
    level = value.strip().lower()
    if not level.startswith("cpu"):
        return Taken(("--device", "cuda"), "--device cuda")
    isa = level.removeprefix("cpu").strip("_")
    if not isa or isa == "avx":
        return Taken(("--device", "cpu"), "--device cpu")
    return Taken(("--device", "cpu", "--isa", isa), f"--device cpu --isa {isa}")


def _noted(here: str) -> Callable[[str], Taken]:
    return lambda value: Taken(note=here)


# variable -> what it becomes, and its row in the documents
VARIABLES: Final[Mapping[str, tuple[Callable[[str], Taken], str]]] = {
    "OLLAMA_HOST": (_host, f"`--host` and `--port`, {_PORT} where it names none"),
    "OLLAMA_CONTEXT_LENGTH": (_number("--max-model-len"), "`--max-model-len`"),
    "OLLAMA_NUM_PARALLEL": (_number("--max-num-seqs"), "`--max-num-seqs`"),
    "OLLAMA_MAX_QUEUE": (_number("--max-num-waiting"), "`--max-num-waiting`"),
    "OLLAMA_ORIGINS": (_origins, "`--cors-origin` for each"),
    "OLLAMA_KV_CACHE_TYPE": (_kv_type, "`--kv-dtype`; `q8_0` is int8"),
    "OLLAMA_DEBUG": (_debug, "`--log-level debug`"),
    "OLLAMA_LLM_LIBRARY": (_library, "`cpu_avx2` is `--device cpu --isa avx2`"),
    **{
        name: (_noted(here), here)
        for names, here in (
            ("OLLAMA_FLASH_ATTENTION",
             "always the case: one kind of attention, which keeps no scores"),
            ("OLLAMA_KEEP_ALIVE OLLAMA_MAX_LOADED_MODELS OLLAMA_LOAD_TIMEOUT", _ONE_MODEL),
            ("OLLAMA_MODELS", "no effect: name a .gguf file or a folder; PACELINE_CACHE is ours"),
            ("OLLAMA_SCHED_SPREAD OLLAMA_GPU_OVERHEAD OLLAMA_VULKAN",
             "no effect: the whole model is on one device (--device)"),
            ("OLLAMA_NO_CLOUD", "always the case: nothing is sent anywhere"),
            ("OLLAMA_NOPRUNE OLLAMA_NOHISTORY OLLAMA_MULTIUSER_CACHE OLLAMA_NEW_ENGINE",
             "no effect"),
        )
        for name in names.split()
    },
}  # fmt: skip


def of_environment(
    environment: Mapping[str, str], given: Collection[str] = ()
) -> tuple[list[str], tuple[Note, ...]]:
    """Return arguments that stand before those of the command line, which win, and what to log. A
    variable whose flags are all ``given`` there is left out. Raises ConfigError that names the
    variable."""
    args: list[str] = []
    notes: list[Note] = []
    for name, (take, _) in VARIABLES.items():
        value = environment.get(name)
        if not value:
            continue
        try:
            taken = take(value)
        except argparse.ArgumentTypeError as error:
            raise ConfigError(f"{name} in the environment: {error}") from None
        flags = {word for word in taken.args if word.startswith("--")}
        if flags and flags <= set(given):
            continue
        args += taken.args
        if taken.note:
            notes.append(Note(f"{name}={value}", taken.note))
    return args, tuple(notes)


RUN: Final = (
    # a prompt may follow
    boolean("--think", Taken(("--think=true",)), Taken(("--think=false",)),
            meaning="whether a model that can reason does so first; no levels"),
    already("--keepalive", "no effect: the model is loaded for this conversation", "1"),
    already("--nowordwrap", "always the case"),
    already("--insecure", "no effect: models come with checksums"),
    Row(("--verbose",), "`--stats`", lambda *_: Taken(("--stats",)), "0"),
    refused("--format", "paceline serve takes response_format"),
    refused("--hidethinking", "thoughts are a part of the text in a terminal; paceline serve "
            "returns them apart", "?"),
)  # fmt: skip
