"""Flags shared by the commands, and how they become ``EngineSettings``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from paceline.backends.machine.topology import format_list, parse_list
from paceline.cli.flags.arguments import (
    bounded_float,
    bounded_int,
    json_object,
    memory_size,
    size_list,
    size_with_unit,
)
from paceline.cli.flags.scheduling_options import (
    ADMISSION,
    SCHEDULING,
    add_flags,
    given_settings,
    naming_flags,
)
from paceline.cli.flags.settings import EngineSettings
from paceline.core.pooling import CONVERTS, RUNNERS
from paceline.errors import ConfigError

__all__ = [
    "DEFAULT_MODEL",
    "add_admission_options",
    "add_engine_options",
    "add_model_argument",
    "download_progress",
    "engine_settings",
    "resolve_path",
]

# settings with their flags' names
_NAMED_AS_FLAGS: Final = (
    "backend", "device", "dtype", "kv_dtype", "compute", "runner", "convert",
    "matryoshka_dimensions", "isa", "max_model_len", "block_size", "num_blocks",
    "enable_prefix_caching", "gpu_memory_utilization", "threads", "numa", "null_step_time",
    "generation_config", "override_generation_config",
)  # fmt: skip
DEFAULT_MODEL = "smollm2-135m"
LOG_LEVELS = ("debug", "info", "warning", "error")


def add_model_argument(parser: argparse.ArgumentParser, *, positional: bool = True) -> None:
    """Add MODEL, or --model where the positional argument is taken."""
    parser.add_argument(
        "model" if positional else "--model",
        nargs="?" if positional else None,
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help="an alias (see 'paceline pull --list'), a Hugging Face folder, a .gguf file or a hub "
        f"id such as org/name; default {DEFAULT_MODEL}",
    )
    if positional:
        parser.add_argument(
            "--model", dest="model_flag", metavar="MODEL", help="the same as the argument MODEL"
        )


def add_engine_options(parser: argparse.ArgumentParser, *, scheduling: bool = True) -> None:
    """Add all flags of the engine, grouped for --help.

    ``scheduling=False`` is for a single caller: it omits flags that only matter to several.
    """
    default = EngineSettings.of()
    _add_model_options(parser, default)
    _add_cache_options(parser, default)
    if scheduling:
        add_flags(parser.add_argument_group("scheduling"), SCHEDULING, default)
    else:
        parser.set_defaults(max_num_seqs=1)


def add_admission_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags for refusals by a server; offline work refuses nothing."""
    default = EngineSettings.of()
    add_flags(parser.add_argument_group("admission"), ADMISSION, default)


def _add_model_options(parser: argparse.ArgumentParser, default: EngineSettings) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--backend",
        choices=("torch", "null"),
        default="torch",
        help="null needs no model: its tokens can be computed by hand, for testing clients",
    )
    group.add_argument(
        "--device", default=default.load.device, help="auto, cpu, cuda or cuda:N (default auto)"
    )
    group.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "int8", "q4", "gguf"),
        default=default.load.dtype,
        help="format of the weights; auto takes the fastest one measured on this processor's "
        "level that passes the accuracy gate and rounds no more than the file, and the ready line "
        "says why; int8, q4 and gguf need --compute native; gguf keeps each matrix of a GGUF file "
        "in its own format, which needs the least memory and is faster than q4 for one request "
        "and slower for many (default auto)",
    )
    group.add_argument(
        "--kv-dtype",
        choices=("auto", "float32", "bfloat16", "int8"),
        default=default.load.kv_dtype,
        help="format of the KV cache; int8 holds nearly twice the tokens of bfloat16 in the same "
        "memory; other than auto needs --compute native; auto: that of 32- or 16-bit weights, "
        "else the fastest measured with the weights' format (default auto)",
    )
    group.add_argument(
        "--compute",
        choices=("auto", "torch", "native"),
        default=default.load.compute,
        help="native computes whole steps in the C++ library, on the CPU; auto takes it if it can "
        f"serve the model, and the log says why (default {default.load.compute})",
    )
    group.add_argument(
        "--runner",
        choices=RUNNERS,
        default=default.load.runner,
        help="what the model is used for: generate answers tokens, pooling answers vectors for "
        "/v1/embeddings, /rerank, /score and /classify; auto decides by the model's files "
        f"(docs/use/embeddings.md; default {default.load.runner})",
    )
    group.add_argument(
        "--convert",
        choices=CONVERTS,
        default=default.load.convert,
        help="task of a pooling model whose files do not name one: embed or classify (default "
        f"{default.load.convert})",
    )
    group.add_argument(
        "--matryoshka-dimensions",
        type=size_list,
        default=default.load.matryoshka_dimensions,
        metavar="N[,N...]",
        help="sizes to which a request may cut embeddings (dimensions), for a model that was "
        "trained for it but whose config.json does not say so",
    )
    group.add_argument(
        "--isa",
        default=default.load.isa,
        metavar="LEVEL",
        help="highest level of the native kernels to use, such as avx2; a level that does not run "
        "here is refused with the names of those that do. The environment variable PACELINE_ISA "
        "does the same for every command (default: the fastest that runs, see "
        "docs/operate/processors.md)",
    )
    group.add_argument(
        "--packed-cache",
        type=size_with_unit,
        default=default.load.packed_cache_bytes,
        help="with native compute, keep packed weights in the cache folder, up to this size (such "
        "as 20GiB) for all models: the next start reads them instead of packing again; next to a "
        "server with --dtype q4 of a model in 16 bits, four bits that lose less are made and kept "
        "(docs/use/models.md; default: none)",
    )
    group.add_argument(
        "--tensor-parallel-size",
        "-tp",
        type=_one_device,
        metavar="1",
        help="only 1: an engine computes on one device; see --numa for sockets",
    )
    group.add_argument(
        "--revision",
        metavar="NAME",
        help="branch, tag or commit of a model on the hub (default main)",
    )
    group.add_argument(
        "--offline",
        action="store_true",
        help="fetch nothing: a model that is not on this disk is an error (default: as "
        "$HF_HUB_OFFLINE says, for the hub)",
    )
    group.add_argument(
        "--tokenizer",
        metavar="MODEL",
        help="folder or .gguf file whose tokenizer and chat template replace the model's",
    )
    group.add_argument(
        "--chat-template",
        metavar="FILE",
        help="file with a chat template in Jinja, or the template itself, instead of the model's",
    )
    group.add_argument(
        "--generation-config",
        default="auto",
        metavar="FOLDER",
        help="where the sampling defaults of requests are from: auto, the model's files or the "
        "catalogue; vllm, none; or a folder with a generation_config.json (default auto)",
    )
    group.add_argument(
        "--override-generation-config",
        type=json_object,
        action=_Merged,
        default={},
        help='sampling defaults that win over these, such as {"temperature": 0.2}; fields of '
        "a request win over all",
    )
    group.add_argument(
        "--max-model-len",
        type=bounded_int(1),
        help="context length: prompt + output tokens of one request; default: as many as the model "
        "and the KV cache allow",
    )
    group.add_argument(
        "--threads",
        type=bounded_int(1),
        help="threads that compute the model; default: one for each core that this process may "
        "use, on one socket (--numa)",
    )
    group.add_argument(
        "--numa",
        type=_numa,
        default=default.load.numa,
        metavar="auto|off|NODES",
        help="on a machine with several sockets: auto keeps the model on the NUMA nodes of the "
        "socket with most usable cores, unless --threads is larger; off uses all nodes; NODES are "
        "numbers such as 0 or 0-1,4; memory is taken from the same nodes, then from others "
        "(default auto)",
    )
    group.add_argument(
        "--null-step-time",
        type=bounded_float(0.0, 60.0),
        default=default.null_step_time,
        metavar="SECONDS",
        help="duration of a step of the null backend (default 0)",
    )


class _Merged(argparse.Action):
    """Joins the objects of a flag that is given several times; later fields win."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, getattr(namespace, self.dest) | values)


def _one_device(text: str) -> int:
    if text != "1":
        raise argparse.ArgumentTypeError(
            f"{text!r}: a model is not split across devices here; start a server for each device "
            "(--device cuda:0, cuda:1, ...; --numa 0, 1, ... for the sockets of a machine)"
        )
    return 1


def _numa(text: str) -> str:
    if text in ("auto", "off"):
        return text
    try:
        nodes = format_list(parse_list(text))
    except ValueError:
        nodes = ""
    if not nodes:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be auto, off or NUMA nodes such as 0 or 0-1,4"
        )
    return nodes


def _add_cache_options(parser: argparse.ArgumentParser, default: EngineSettings) -> None:
    group = parser.add_argument_group("KV cache")
    group.add_argument(
        "--block-size",
        type=bounded_int(1),
        default=default.load.block_size,
        help=f"tokens per block (default {default.load.block_size})",
    )
    group.add_argument(
        "--num-blocks",
        type=bounded_int(1),
        help="blocks of the KV cache; or give --kv-cache-memory; default: by free memory",
    )
    group.add_argument(
        "--kv-cache-memory",
        type=memory_size,
        help="size of the KV cache, such as 512MiB, or 2 for 2GiB",
    )
    group.add_argument(
        "--gpu-memory-utilization",
        type=bounded_float(0.01, 1.0),
        metavar="SHARE",
        help="share of the memory that is free at start, on a CPU too, that weights and KV cache "
        "may take together; default: a quarter of it for the KV cache on a CPU",
    )
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="reuse what an earlier request has computed of the same prompt (default on)",
    )
    group.add_argument(
        "--prefix-cache-memory",
        type=memory_size,
        help="memory for cached prefixes that no request uses; above it the oldest is evicted, "
        "even if the KV cache has blocks that were never used; default: the size of the model's "
        "files, at least 256MiB; on GPUs, where all memory is taken at start, the whole cache",
    )


def resolve_path(
    model: str, *, refresh: bool = False, revision: str | None = None, offline: bool = False
) -> tuple[str, str]:
    """Return ``(name, path)`` of a model argument, downloading an alias or a hub model that is not
    here yet, unless ``offline``; ``refresh``: also when the hub has a newer one. Progress is
    written to standard error.

    Raises CheckpointError or UnknownModelError that says what to do next.
    """
    from paceline.checkpoints.hub.resolve import resolve_model

    with download_progress() as progress:
        resolved = resolve_model(
            model,
            cache_dir=None,
            offline=offline,
            refresh=refresh,
            revision=revision,
            progress=progress,
        )
    return resolved.name, str(resolved.path)


# a template that llama.cpp has by this name, and which needs no file
_CHATML: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat_template(text: str | None) -> str | None:
    """Return the source of --chat-template's file, or the source itself. Raises ConfigError."""
    if text is None or "{{" in text or "{%" in text:
        return text
    if text == "chatml":
        return _CHATML
    try:
        return Path(text).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--chat-template {text} is no file that can be read ({error}), not a template, and "
            "not chatml, which is the only one known by name"
        ) from None


def chosen_model(args: argparse.Namespace) -> str:
    """Return MODEL from either argument. Raises ConfigError where both are given."""
    model: str = args.model
    flag: str | None = getattr(args, "model_flag", None)
    if flag is None:
        return model
    if model not in (DEFAULT_MODEL, flag):
        raise ConfigError(f"two models are given, {model!r} and --model {flag!r}: leave one out")
    return flag


def _with_whole_prompts(settings: EngineSettings, max_model_len: int) -> EngineSettings:
    """Return settings in which a prompt of that length is one step, as in vLLM. Raises ConfigError
    where a smaller step was asked for."""
    budget = settings.scheduler.max_num_batched_tokens
    if budget >= max_model_len:
        return settings
    usual = EngineSettings.of(model_name="", model_path=None).scheduler.max_num_batched_tokens
    if budget != usual:
        raise ConfigError(
            f"--no-enable-chunked-prefill computes a prompt in one step: --max-model-len "
            f"{max_model_len} needs as large a --max-num-batched-tokens, got {budget}"
        )
    return settings.changed(max_num_batched_tokens=max_model_len)


def engine_settings(
    args: argparse.Namespace, *, log_level: str = "info", log_format: str = "text"
) -> EngineSettings:
    """Return settings from the flags of ``add_model_argument`` and ``add_engine_options``; fetches
    the model when needed."""
    with naming_flags():
        # checked before a model is fetched
        settings = EngineSettings.of(**given_settings(args, (*SCHEDULING, *ADMISSION)))
    if not settings.scheduler.enable_chunked_prefill and args.max_model_len is not None:
        settings = _with_whole_prompts(settings, args.max_model_len)
    model = chosen_model(args)
    if args.backend == "null":
        name, path = "null", None
        if model != DEFAULT_MODEL:
            raise ConfigError(
                f"--backend null runs no model, but {model!r} was given: leave one out"
            )
    else:
        name, path = resolve_path(model, revision=args.revision, offline=args.offline)
    tokenizer = args.tokenizer
    if tokenizer is not None:
        tokenizer = path if tokenizer == model else resolve_path(tokenizer, offline=args.offline)[1]
    return settings.changed(
        tokenizer=tokenizer,
        chat_template=chat_template(args.chat_template),
        model_name=name,
        model_path=path,
        packed_cache_bytes=args.packed_cache,
        kv_cache_bytes=args.kv_cache_memory,
        prefix_cache_bytes=args.prefix_cache_memory,
        **{name: getattr(args, name) for name in _NAMED_AS_FLAGS},
        log_level=log_level,
        log_format=log_format,
    )


@contextmanager
def download_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a ``checkpoints.hub.pip_models.Progress`` that draws one bar per stage on a terminal,
    and prints each stage's name once elsewhere. Draws nothing when it is never called."""
    bar: Any = None
    stage_shown = ""

    def show(stage: str, done: int, total: int) -> None:
        nonlocal bar, stage_shown
        if stage != stage_shown:
            stage_shown = stage
            if bar is not None:
                bar.close()
                bar = None
            if not sys.stderr.isatty():
                size = f" {total / 1e6:.0f} MB" if total else ""
                print(f"paceline: {stage}{size}", file=sys.stderr, flush=True)
            else:
                from tqdm import tqdm

                bar = tqdm(
                    total=total or None, desc=stage, unit="B", unit_scale=True, file=sys.stderr
                )
        if bar is not None:
            bar.update(done - bar.n)

    try:
        yield show
    finally:
        if bar is not None:
            bar.close()
