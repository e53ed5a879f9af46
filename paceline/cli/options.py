"""Flags shared by the commands, and how they become ``EngineSettings``."""

from __future__ import annotations

import argparse
import difflib
import math
import re
import sys
from collections.abc import Callable, Iterable
from typing import NoReturn

from paceline.cli.plugins import policy_names
from paceline.cli.settings import EngineSettings
from paceline.core.config import PREEMPTION_MODES
from paceline.core.errors import ConfigError

__all__ = [
    "DEFAULT_MODEL",
    "Parser",
    "add_admission_options",
    "add_engine_options",
    "add_model_argument",
    "bounded_float",
    "bounded_int",
    "byte_count",
    "engine_settings",
    "resolve_path",
]

DEFAULT_MODEL = "smollm2-135m"
LOG_LEVELS = ("debug", "info", "warning", "error")

_UNITS = {
    "": 1,
    "B": 1,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line and name the nearest flag."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        # a prefix that is unique today is ambiguous tomorrow, and scripts outlive both
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        if unknown:
            message += _nearest(unknown[1], self._option_string_actions)
        choice = re.match(r"argument .*: invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if choice:
            message += _nearest(choice[1], re.findall(r"[\w-]+", choice[2]))
        print(f"{self.prog}: {message} - see {self.prog} --help", file=sys.stderr)
        sys.exit(2)


def _nearest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def bounded_int(low: int, high: int | None = None) -> Callable[[str], int]:
    """A parser of whole numbers in ``[low, high]``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < low or (high is not None and value > high):
            wanted = f"at least {low}" if high is None else f"between {low} and {high}"
            raise argparse.ArgumentTypeError(f"must be {wanted}, got {value}")
        return value

    return parse


def bounded_float(low: float, high: float = math.inf) -> Callable[[str], float]:
    """A parser of finite numbers in ``[low, high]``."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not (math.isfinite(value) and low <= value <= high):
            wanted = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
            raise argparse.ArgumentTypeError(f"must be {wanted}, got {text}")
        return value

    return parse


def byte_count(text: str) -> int:
    """``2GiB``, ``512 MB`` or plain bytes."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size; examples: 2GiB, 512MiB, 1500MB, 1073741824"
        )
    count = int(float(match[1]) * unit)
    if count < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1 byte, got {text}")
    return count


def add_model_argument(parser: argparse.ArgumentParser, *, positional: bool = True) -> None:
    """MODEL, or --model where the positional place is taken."""
    parser.add_argument(
        "model" if positional else "--model",
        nargs="?" if positional else None,
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help="an alias (see 'paceline pull --list'), a Hugging Face folder, a .gguf file or a hub "
        f"id such as org/name; default {DEFAULT_MODEL}",
    )


def add_engine_options(parser: argparse.ArgumentParser, *, scheduling: bool = True) -> None:
    """Everything that shapes the engine, grouped for --help.

    ``scheduling=False`` is for one caller at a time: no flags for what only several can notice.
    """
    default = EngineSettings(model_name="", model_path=None, backend="null")
    _add_model_options(parser, default)
    _add_cache_options(parser, default)
    # for callers that do not ``add_admission_options``
    parser.set_defaults(
        max_queue=0, max_wait=0.0, queue_timeout=0.0, pressure_threshold=default.pressure_threshold
    )
    if scheduling:
        _add_scheduling_options(parser, default)
        return
    parser.set_defaults(
        max_num_seqs=1,
        max_num_batched_tokens=default.max_num_batched_tokens,
        scheduling_policy=default.policy,
        priority_ageing=default.priority_ageing_s,
        watermark=default.watermark,
        bypass_window=default.bypass_window,
        max_bypasses=default.max_bypasses,
        pipeline_depth=default.pipeline_depth,
        adaptive_token_budget=default.adaptive_token_budget,
        coalesce_window_ms=default.coalesce_window_s * 1e3,
        coalesce_size=default.coalesce_size,
        best_effort_delay=default.best_effort_delay_s,
        best_effort_step_ms=default.best_effort_step_s * 1e3,
        plan_lead_ms=default.plan_lead_s * 1e3,
        background_share=default.background_share,
        future_memory_check=default.future_memory_check,
        pace_admission=default.pace_admission,
        relegate_late=default.relegate_late,
        preemption=default.preemption,
        swap_space=default.swap_bytes,
    )


def _add_model_options(parser: argparse.ArgumentParser, default: EngineSettings) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--backend",
        choices=("torch", "null"),
        default="torch",
        help="null needs no model: tokens computable by hand, to try clients against",
    )
    group.add_argument(
        "--device", default=default.device, help="auto, cpu, cuda or cuda:N (default auto)"
    )
    group.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "int8", "q4"),
        default=default.dtype,
        help="of the weights; auto takes int8 where the file's own weights have 8 bits or fewer "
        "and the native kernels are fast at it, else bfloat16 where the machine is, and the line "
        "that says the server is ready says why; int8 and q4 need --compute native (default auto)",
    )
    group.add_argument(
        "--kv-dtype",
        choices=("auto", "float32", "bfloat16", "int8"),
        default=default.kv_dtype,
        help="of the KV cache; int8 holds nearly twice the tokens of bfloat16 in the same memory; "
        "other than auto needs --compute native; auto: float32 with float32 weights, else bfloat16 "
        "(default auto)",
    )
    group.add_argument(
        "--compute",
        choices=("auto", "torch", "native"),
        default=default.compute,
        help="native computes whole steps in the C++ library, on the CPU; auto takes it where it "
        f"can serve the model, and the log says why (default {default.compute})",
    )
    group.add_argument(
        "--max-model-len",
        type=bounded_int(1),
        metavar="N",
        help="prompt + output tokens of one request; default: as long as the model and the KV "
        "cache allow",
    )
    group.add_argument(
        "--threads",
        type=bounded_int(1),
        metavar="N",
        help="processor threads for the model; default: as many as this process may use",
    )

    group.add_argument(
        "--null-step-time",
        type=bounded_float(0.0, 60.0),
        default=default.null_step_time,
        metavar="SECONDS",
        help="how long a step of the null backend takes (default 0)",
    )


def _add_cache_options(parser: argparse.ArgumentParser, default: EngineSettings) -> None:
    group = parser.add_argument_group("KV cache")
    group.add_argument(
        "--block-size",
        type=bounded_int(1),
        default=default.block_size,
        metavar="N",
        help=f"tokens per block (default {default.block_size})",
    )
    group.add_argument(
        "--num-blocks",
        type=bounded_int(1),
        metavar="N",
        help="blocks in the pool; or give --kv-cache-memory; default: sized from free memory",
    )
    group.add_argument(
        "--kv-cache-memory", type=byte_count, metavar="SIZE", help="bytes, such as 2GiB or 512MiB"
    )
    group.add_argument(
        "--no-enable-prefix-caching",
        dest="enable_prefix_caching",
        action="store_false",
        help="compute every prompt in full, also what an earlier request already computed",
    )


def _add_scheduling_options(parser: argparse.ArgumentParser, default: EngineSettings) -> None:
    group = parser.add_argument_group("scheduling")
    group.add_argument(
        "--max-num-seqs",
        type=bounded_int(1),
        default=default.max_num_seqs,
        metavar="N",
        help=f"requests running at once (default {default.max_num_seqs})",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=bounded_int(1),
        default=default.max_num_batched_tokens,
        metavar="N",
        help="tokens computed in one step; smaller keeps running requests smoother, larger "
        f"starts new ones faster (default {default.max_num_batched_tokens})",
    )
    group.add_argument(
        "--watermark",
        type=bounded_float(0.0, 0.99),
        default=default.watermark,
        metavar="SHARE",
        help="share of the pool kept free when a request joins running ones, for their growth "
        f"(default {default.watermark:g})",
    )
    group.add_argument(
        "--scheduling-policy",
        choices=policy_names(),
        default=default.policy,
        help="who goes first; docs/policies.md says when each wins and loses "
        f"(default {default.policy})",
    )
    group.add_argument(
        "--adaptive-token-budget",
        action=argparse.BooleanOptionalAction,
        default=default.adaptive_token_budget,
        help="size each step by its predicted time: the slack that requests with targets leave, "
        "and no more than makes it efficient (default on)",
    )
    group.add_argument(
        "--coalesce-window-ms",
        type=bounded_float(0.0),
        default=default.coalesce_window_s * 1e3,
        metavar="MS",
        help="with the phase-aligned policy, arrivals wait for each other this long "
        f"(default {default.coalesce_window_s * 1e3:g})",
    )
    group.add_argument(
        "--coalesce-size",
        type=bounded_int(1),
        default=default.coalesce_size,
        metavar="N",
        help="with the phase-aligned policy, so many arrivals do not wait "
        f"(default {default.coalesce_size})",
    )
    group.add_argument(
        "--best-effort-delay",
        type=bounded_float(0.0),
        default=default.best_effort_delay_s,
        metavar="SECONDS",
        help="best-effort requests (slo class batch) are treated as come this much later "
        f"(default {default.best_effort_delay_s:g})",
    )
    group.add_argument(
        "--best-effort-step-ms",
        type=bounded_float(0.1),
        default=default.best_effort_step_s * 1e3,
        metavar="MS",
        help="a step in which all is best effort takes about so long at most, or the next arrival "
        "would wait for it; or twice as long as a single row, if that is more "
        f"(default {default.best_effort_step_s * 1e3:g})",
    )
    group.add_argument(
        "--plan-lead-ms",
        type=bounded_float(0.0),
        default=default.plan_lead_s * 1e3,
        metavar="MS",
        help="at a pipeline depth of 2, plan the next step so long before the running one is "
        "predicted to end: who arrives until then is in it. More than a step takes: at once "
        f"(default {default.plan_lead_s * 1e3:g})",
    )
    group.add_argument(
        "--background-share",
        type=bounded_float(0.0, 100.0),
        default=default.background_share,
        metavar="SHARE",
        help="best-effort requests without any target, such as those of batches, lengthen the "
        "steps of others by this share at most, on average; 0: by whatever the others' targets "
        f"leave (default {default.background_share:g})",
    )
    group.add_argument(
        "--relegate-late",
        action=argparse.BooleanOptionalAction,
        default=default.relegate_late,
        help="requests that can no longer meet their TTFT target let the others pass (default on)",
    )
    group.add_argument(
        "--pace-admission",
        action=argparse.BooleanOptionalAction,
        default=default.pace_admission,
        help="let nobody in while one more would make running requests miss their TPOT targets "
        "(default on)",
    )
    group.add_argument(
        "--future-memory-check",
        action=argparse.BooleanOptionalAction,
        default=default.future_memory_check,
        help="let a request in only if memory is predicted to last until those running end, "
        "instead of when it fits now (default on)",
    )
    group.add_argument(
        "--preemption",
        choices=PREEMPTION_MODES,
        default=default.preemption,
        help="what becomes of a preempted request's KV blocks: swap keeps a copy in host memory, "
        "recompute drops them, auto does what is predicted to take less time (default auto)",
    )
    group.add_argument(
        "--swap-space",
        type=byte_count,
        metavar="SIZE",
        help="host memory for swapped KV blocks; default: half the KV cache's size, taken as it "
        "is used; on CUDA 4GiB at most, pinned at once",
    )
    group.add_argument(
        "--priority-ageing",
        type=bounded_float(0.001),
        default=default.priority_ageing_s,
        metavar="SECONDS",
        help="with the priority policy, waiting this long counts as one level "
        f"(default {default.priority_ageing_s:g})",
    )
    group.add_argument(
        "--bypass-window",
        type=bounded_int(0),
        default=default.bypass_window,
        metavar="N",
        help="waiting requests tried behind a head that does not fit; 0: nobody passes "
        f"(default {default.bypass_window})",
    )
    group.add_argument(
        "--max-bypasses",
        type=bounded_int(0),
        default=default.max_bypasses,
        metavar="N",
        help="how often one head may be passed before all wait for it "
        f"(default {default.max_bypasses})",
    )
    group.add_argument(
        "--pipeline-depth",
        type=bounded_int(1, 8),
        default=default.pipeline_depth,
        metavar="N",
        help="steps handed to the backend at once: 2 plans a step while the last one runs, 1 "
        f"waits for it (default {default.pipeline_depth})",
    )


def add_admission_options(parser: argparse.ArgumentParser) -> None:
    """What a server refuses; offline work refuses nothing."""
    group = parser.add_argument_group("admission")
    group.add_argument(
        "--max-queue",
        type=bounded_int(0),
        default=2048,
        metavar="N",
        help="requests waiting at once; beyond that the answer is 429 with a predicted "
        "Retry-After; 0: no limit (default 2048)",
    )
    group.add_argument(
        "--max-wait",
        type=bounded_float(0.0),
        default=0.0,
        metavar="SECONDS",
        help="refuse a request (429) whose first token is predicted to take longer; 0: never "
        "(default 0)",
    )
    group.add_argument(
        "--queue-timeout",
        type=bounded_float(0.0),
        default=0.0,
        metavar="SECONDS",
        help="drop a request (429) that waited so long without being started; 0: never (default 0)",
    )
    group.add_argument(
        "--pressure-threshold",
        type=bounded_float(0.01, 1.0),
        default=0.88,
        metavar="SHARE",
        help="share of the KV cache in use at which the memory-pressure valve begins to open: "
        "smaller chunks, then no new best-effort work, then its preemption, then 429; 1: never "
        "(default 0.88)",
    )


def resolve_path(model: str) -> tuple[str, str]:
    """``(name, path)`` of a model argument, downloading it when it is an alias or hub id that is
    not here yet. Progress goes to standard error.

    Raises CheckpointError or UnknownModelError with what to do next.
    """
    from paceline.checkpoints.resolve import resolve_model
    from paceline.cli.progress import download_progress

    with download_progress() as progress:
        resolved = resolve_model(model, cache_dir=None, progress=progress)
    return resolved.name, str(resolved.path)


def engine_settings(
    args: argparse.Namespace, *, log_level: str = "info", log_format: str = "text"
) -> EngineSettings:
    """Settings from the flags of ``add_model_argument`` and ``add_engine_options``; fetches the
    model when needed."""
    if args.backend == "null":
        name, path = "null", None
        if args.model != DEFAULT_MODEL:
            raise ConfigError(
                f"--backend null runs no model, but {args.model!r} was named: leave one out"
            )
    else:
        name, path = resolve_path(args.model)
    return EngineSettings(
        model_name=name,
        model_path=path,
        backend=args.backend,
        device=args.device,
        dtype=args.dtype,
        kv_dtype=args.kv_dtype,
        compute=args.compute,
        max_model_len=args.max_model_len,
        block_size=args.block_size,
        num_blocks=args.num_blocks,
        kv_cache_bytes=args.kv_cache_memory,
        enable_prefix_caching=args.enable_prefix_caching,
        watermark=args.watermark,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        policy=args.scheduling_policy,
        priority_ageing_s=args.priority_ageing,
        adaptive_token_budget=args.adaptive_token_budget,
        coalesce_window_s=args.coalesce_window_ms / 1e3,
        coalesce_size=args.coalesce_size,
        best_effort_delay_s=args.best_effort_delay,
        best_effort_step_s=args.best_effort_step_ms / 1e3,
        plan_lead_s=args.plan_lead_ms / 1e3,
        background_share=args.background_share or None,
        future_memory_check=args.future_memory_check,
        pace_admission=args.pace_admission,
        relegate_late=args.relegate_late,
        max_num_waiting=args.max_queue or None,
        max_predicted_wait_s=args.max_wait or None,
        queue_timeout_s=args.queue_timeout or None,
        preemption=args.preemption,
        swap_bytes=args.swap_space,
        pressure_threshold=args.pressure_threshold,
        bypass_window=args.bypass_window,
        max_bypasses=args.max_bypasses,
        pipeline_depth=args.pipeline_depth,
        threads=args.threads,
        null_step_time=args.null_step_time,
        log_level=log_level,
        log_format=log_format,
    )
