"""``paceline plan models``: known models that fit a memory, and the format in which they do."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from paceline.cli.flags.arguments import Parser, bounded_float, bounded_int, byte_count, parts_of
from paceline.cli.simulation import plan_fleet
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.sim.step_times.models import ModelShape

__all__ = ["add_parser"]

# formats of weights from the most exact on, and bytes per weight with its scales, as in GGUF's
# Q8_0 and Q4_0
_FORMATS: Final = (("bfloat16", 2.0), ("int8", 8.5 / 8), ("q4", 4.5 / 8))
_UTILIZATION: Final = 0.9


@dataclass(frozen=True, slots=True)
class _Fit:
    """A model in a given memory."""

    # format of the weights; "" where no format leaves room for enough sequences
    format: str
    # sequences that run at once
    sequences: int


def add_parser(plans: argparse._SubParsersAction[Parser]) -> None:
    parser = plans.add_parser(
        "models",
        help="which known models fit a memory, and in which format",
        description="For each known model and memory: the most exact format of the weights that "
        "leaves room for enough sequences, and how many run at once. Computed as in 'plan "
        "memory', with a bfloat16 KV cache. int8 and q4 are formats of the native kernels.",
    )
    parser.add_argument(
        "--memory",
        required=True,
        metavar="SIZE,...",
        help="memory of one GPU, or of a server on a CPU; 90%% of it is used",
    )
    plan_fleet.add_model_shape(parser)
    parser.add_argument(
        "--mean-len",
        type=bounded_float(1),
        default=2048.0,
        metavar="N",
        help="mean tokens of a sequence, prompt and output (default 2048)",
    )
    parser.add_argument(
        "--sequences",
        type=bounded_int(1),
        default=4,
        help="sequences that must fit at once (default 4)",
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from paceline.sim.step_times.models import known_models

    sizes = [part.strip() for part in args.memory.split(",")]
    memories = parts_of(args.memory, byte_count, "--memory")
    shapes = sorted(
        {shape.name: shape for shape in (*known_models(), *plan_fleet.given_shapes(args))}.values(),
        key=lambda shape: shape.num_parameters,
    )
    fits = {
        shape.name: [_fit(shape, memory, args.mean_len, args.sequences) for memory in memories]
        for shape in shapes
    }
    if args.json:
        models = {
            name: [
                {"memory_bytes": memory, "format": fit.format or None, "sequences": fit.sequences}
                for memory, fit in zip(memories, found, strict=True)
            ]
            for name, found in fits.items()
        }
        print(json.dumps({"plan": args.what, "mean_len": args.mean_len, "models": models}))
        return 0
    print("| model | parameters | weights in bfloat16, int8, q4 | KV of 1,000 tokens |", end="")
    print("".join(f" {size} |" for size in sizes))
    print("|---" * (4 + len(sizes)) + "|")
    for shape in shapes:
        weights = ", ".join(f"{_gb(shape.num_parameters * each)}" for _, each in _FORMATS)
        cells = [
            shape.name.split("/")[-1],
            f"{shape.num_parameters / 1e9:.3g} B",
            f"{weights} GB",
            f"{1000 * shape.kv_bytes_per_token() / 1e6:.0f} MB",
            *(
                f"{fit.format}: {fit.sequences:,}" if fit.format else "-"
                for fit in fits[shape.name]
            ),
        ]
        print(f"| {' | '.join(cells)} |")
    return 0


def _fit(shape: ModelShape, memory: int, mean_len: float, wanted: int) -> _Fit:
    from paceline.sim.plan.memory import plan_memory

    for name, per_weight in _FORMATS:
        try:
            plan = plan_memory(
                memory_bytes=memory,
                weight_bytes=shape.num_parameters * per_weight,
                kv_bytes_per_token=shape.kv_bytes_per_token(),
                max_len=math.ceil(mean_len),
                mean_len=mean_len,
                utilization=_UTILIZATION,
            )
        except ConfigError:
            # no room for a single sequence
            continue
        if plan.paged >= wanted:
            return _Fit(name, plan.paged)
    return _Fit("", 0)


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f}" if size >= 1e9 else f"{size / 1e9:.2f}"
