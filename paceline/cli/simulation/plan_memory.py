"""``paceline plan memory``: how many sequences fit into a memory, preallocated and paged."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.flags.arguments import (
    Parser,
    bounded_float,
    bounded_int,
    byte_count,
    json_object,
    size_with_unit,
)
from paceline.cli.simulation import plan_fleet
from paceline.errors import ConfigError
from paceline.speculation.settings import SpeculationSettings

if TYPE_CHECKING:
    from paceline.backends.loading.memory_estimate import ServedMemory
    from paceline.sim.plan.memory import MemoryPlan

__all__ = ["MemoryQuestion", "add_parser", "report"]

# flags of the numbers that a plan of memory needs, and the presets' fields
_NUMBERS = {
    "memory": "memory_bytes", "weights": "weight_bytes", "kv-per-token": "kv_bytes_per_token",
    "max-len": "max_len", "mean-len": "mean_len", "utilization": "utilization",
}  # fmt: skip
_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}


def add_parser(plans: argparse._SubParsersAction[Parser]) -> None:
    from paceline.sim.plan.memory import PRESETS

    titles = "; ".join(f"{name}: {preset.title}" for name, preset in PRESETS.items())
    parser = plans.add_parser(
        "memory",
        help="how many sequences fit into a GPU's memory",
        description="Divide a GPU's memory into weights and KV cache, and count sequences, with "
        "preallocated and with paged memory.",
    )
    parser.add_argument(
        "--preset",
        type=str.lower,
        choices=tuple(PRESETS),
        help=f"a textbook exercise, whose numbers flags can change. {titles}",
    )
    parser.add_argument("--model", metavar="NAME", help="name of a known model, or a checkpoint")
    plan_fleet.add_model_shape(parser)
    parser.add_argument("--memory", type=byte_count, help="of one GPU")
    parser.add_argument("--hardware", metavar="NAME", help="a known GPU, instead of --memory")
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="device on which serve would compute a checkpoint: auto, cpu, cuda or cuda:N, also "
        "one that this machine lacks (default auto)",
    )
    parser.add_argument(
        "--gpus", type=bounded_int(1), default=1, help="GPUs that share one model (default 1)"
    )
    parser.add_argument(
        "--weight-dtype",
        type=str.lower,
        choices=tuple(_BYTES),
        help="default: for a checkpoint what serve would choose here (with --hardware the format "
        "of the GGUF file), else bfloat16",
    )
    parser.add_argument(
        "--kv-dtype",
        type=str.lower,
        choices=tuple(_BYTES),
        help="default: for a checkpoint what serve would choose here, else bfloat16",
    )
    parser.add_argument("--weights", type=byte_count, help="instead of a model's")
    parser.add_argument("--kv-per-token", type=size_with_unit, help="instead of a model's")
    parser.add_argument("--max-len", type=bounded_int(1), help="prompt and output")
    parser.add_argument("--mean-len", type=bounded_float(1), metavar="N", help="mean sequence")
    parser.add_argument(
        "--utilization",
        type=bounded_float(0.01, 1.0),
        metavar="SHARE",
        help="share of memory that may be used (default 0.9)",
    )
    parser.add_argument(
        "--reserve",
        type=byte_count,
        help="memory for activations and the rest of the processes (default: for a checkpoint an "
        "estimate, else 0)",
    )
    parser.add_argument("--block-size", type=bounded_int(1), default=16, help="default 16")
    parser.add_argument(
        "--max-num-seqs",
        type=bounded_int(1),
        default=256,
        help="as in serve: sliding-window layers of a checkpoint have blocks for this many "
        "sequences (default 256)",
    )
    parser.add_argument(
        "--speculative-config",
        type=json_object,
        help="as in serve: with a checkpoint, the weights and the KV cache of its draft model are "
        "counted too",
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead")
    parser.set_defaults(run=_run)


def _served(args: argparse.Namespace) -> ServedMemory | None:
    """Return what ``serve`` would take for a checkpoint on this machine; None where the question is
    another: a model without a file, other hardware, or formats named by flags."""
    path = Path(args.model)
    if args.hardware or not path.exists() or (args.weight_dtype and args.kv_dtype):
        return None
    from paceline.backends.loading.memory_estimate import served_memory

    return served_memory(path, device=args.device or "auto")


def _draft(args: argparse.Namespace, kv_bytes_per_token: float) -> ServedMemory | None:
    """Return the memory of the model that guesses for the served one; None: none is named. The
    served one in fewer bits has a copy of its KV cache, which takes ``kv_bytes_per_token``."""
    from paceline.backends.loading.memory_estimate import served_memory
    from paceline.checkpoints.heads.eagle3 import is_eagle3
    from paceline.cli.flags.draft_model import draft_of, drafts_by_mtp

    config = args.speculative_config
    if config is None or not SpeculationSettings.of(config).models:
        return None
    if args.model is None or not Path(args.model).exists():
        raise ConfigError(
            "--speculative-config: a draft model is counted with a checkpoint only, and --model "
            f"{args.model} is not one: add its bytes to --weights and --kv-per-token"
        )
    if drafts_by_mtp(config):
        raise ConfigError(
            f"--speculative-config: the MTP layers of {args.model} are not counted here: add their "
            "bytes to --weights, and to --kv-per-token those of as many layers"
        )
    found = draft_of(config, args.model)
    assert found is not None
    path, dtype = found
    if is_eagle3(Path(path)):
        raise ConfigError(
            f"--speculative-config: the EAGLE-3 head {path} is not counted here: add its bytes to "
            "--weights, and to --kv-per-token those of one layer"
        )
    draft = served_memory(Path(path), dtype=dtype, device=args.device or "auto")
    if Path(path).resolve() == Path(args.model).resolve():
        return replace(draft, kv_bytes_per_token=kv_bytes_per_token)
    return draft


def _of_model(
    args: argparse.Namespace, served: ServedMemory | None
) -> tuple[float | None, float | None]:
    """Return the bytes of weights and of a token's keys and values: those of flags, else of what
    ``serve`` takes, else of the model's shape."""
    from paceline.sim.plan.models import find_model

    weights, per_token = args.weights, args.kv_per_token
    if args.model:
        model = find_model(args.model, plan_fleet.given_shapes(args))
        if served is not None:
            weights = weights or (None if args.weight_dtype else served.weight_bytes)
            per_token = per_token or (None if args.kv_dtype else served.kv_bytes_per_token)
        per_weight = _BYTES[args.weight_dtype] if args.weight_dtype else model.bytes_per_weight
        weights = weights or model.num_parameters * per_weight
        per_token = per_token or model.kv_bytes_per_token(_BYTES[args.kv_dtype or "bfloat16"])
    return weights, per_token


@dataclass(frozen=True, slots=True)
class MemoryQuestion:
    """A question for ``plan_memory``, whose numbers are the flags', else the model's, else the
    preset's."""

    args: argparse.Namespace
    # bytes for the rest of the processes
    reserve: float
    # by the keys of _NUMBERS
    numbers: dict[str, float]
    # memory of a checkpoint as ``serve`` would take it here; None: not asked
    served: ServedMemory | None
    # memory of the model that guesses; None: there is none
    draft: ServedMemory | None

    @classmethod
    def of(cls, args: argparse.Namespace) -> MemoryQuestion:
        """Fill in what flags leave open. Raises ConfigError for flags that do not go together, or
        where numbers are missing."""
        from paceline.sim.plan.memory import PRESETS
        from paceline.sim.step_times.roofline import HardwareCard

        served = _served(args) if args.model else None
        if served is None and args.device:
            raise ConfigError(
                "--device says where serve would compute a checkpoint in formats that it chooses: "
                "it needs --model FILE, and excludes --hardware, and --weight-dtype with "
                "--kv-dtype"
            )
        weights, per_token = _of_model(args, served)
        memory: float | None = args.memory
        if memory is None and args.hardware:
            memory = HardwareCard.named(args.hardware).memory
        given = (
            memory and memory * args.gpus, weights, per_token, args.max_len, args.mean_len,
            args.utilization,
        )  # fmt: skip
        preset = PRESETS[args.preset] if args.preset else None
        numbers: dict[str, float | None] = dict(zip(_NUMBERS, given, strict=True))
        for flag, of_preset in _NUMBERS.items() if preset else ():
            if numbers[flag] is None:
                numbers[flag] = getattr(preset, of_preset)
        if numbers["utilization"] is None:
            numbers["utilization"] = 0.9
        if missing := [f"--{flag}" for flag, value in numbers.items() if value is None]:
            raise ConfigError(
                f"needs {', '.join(missing)}; --model gives weights and KV, --preset gives all"
            )
        known = {flag: float(value) for flag, value in numbers.items() if value is not None}
        reserve = args.reserve or 0
        if args.reserve is None and served is not None:
            reserve = served.process_bytes
        return cls(args, reserve, known, served, _draft(args, known["kv-per-token"]))

    @property
    def draft_bytes(self) -> tuple[float, float]:
        """Bytes of the draft model's weights, and of a token in its KV cache."""
        draft = self.draft
        return (draft.weight_bytes, draft.kv_bytes_per_token) if draft else (0.0, 0.0)

    @property
    def _has_served_values(self) -> bool:
        return self.served is not None and not (self.args.kv_per_token or self.args.kv_dtype)

    def plan(self) -> MemoryPlan:
        """Answer the question."""
        from paceline.sim.plan.memory import plan_memory

        numbers, (draft_weights, draft_per_token) = self.numbers, self.draft_bytes
        windowed = self.served if self._has_served_values and self.draft is None else None
        return plan_memory(
            memory_bytes=numbers["memory"],
            weight_bytes=numbers["weights"] + draft_weights,
            kv_bytes_per_token=numbers["kv-per-token"] + draft_per_token,
            max_len=int(numbers["max-len"]),
            mean_len=numbers["mean-len"],
            utilization=numbers["utilization"],
            reserve_bytes=self.reserve,
            block_size=self.args.block_size,
            max_num_seqs=self.args.max_num_seqs,
            window=0 if windowed is None else windowed.window,
            window_bytes_per_token=0.0 if windowed is None else windowed.window_bytes_per_token,
        )

    def rows(self, plan: MemoryPlan) -> list[tuple[str, str]]:
        """Return the answer's table, for users."""
        served, weights, values = self.served, "", ""
        if served is not None:
            where = "here" if served.device == "cpu" else f"on {served.device}"
            if not (self.args.weights or self.args.weight_dtype):
                weights = f" in {served.dtype}, as serve chooses {where}"
            if self._has_served_values:
                values = f" in {served.kv_dtype}, as serve chooses {where}"
        share, digits = self.numbers["utilization"], 1 if plan.weight_bytes >= 1e9 else 3
        rows = [
            ("memory", f"{plan.memory_bytes / 1e9:.1f} GB, {share:.0%} of it used"),
            ("weights", f"{plan.weight_bytes / 1e9:.{digits}f} GB{weights}"),
            ("reserved", f"{self.reserve / 1e9:.2f} GB for the rest of the processes"),
            ("keys and values", f"{plan.kv_bytes / 1e9:.1f} GB"),
            ("  per token", f"{plan.kv_bytes_per_token / 1024:.0f} KiB{values}"),
            ("  blocks", f"{plan.num_blocks} of {plan.block_size} tokens"),
            ("preallocated", _sequences(plan.preallocated, plan.max_len, plan.preallocated_waste)),
            ("paged", _sequences(plan.paged, plan.mean_len, plan.paged_waste)),
            ("paged is", f"{plan.gain:.1f}x"),
        ]
        if plan.num_window_blocks:
            size = f"{plan.window_bytes / 1e9:.3f} GB for sliding-window layers"
            rows.insert(6, ("  window blocks", f"{plan.num_window_blocks}, {size}"))
        if self.draft is not None:
            weight_bytes, per_token = self.draft_bytes
            text = f"{weight_bytes / 1e9:.3f} GB in {self.draft.dtype}, {per_token / 1024:.0f} KiB"
            rows.insert(2, ("  draft model", f"{text} a token, both counted here"))
        return rows


def _run(args: argparse.Namespace) -> int:
    question = MemoryQuestion.of(args)
    plan = question.plan()
    draft_weights, draft_per_token = question.draft_bytes
    derived = {
        "preallocated_waste": plan.preallocated_waste,
        "paged_waste": plan.paged_waste,
        "reserve_bytes": question.reserve,
        "draft_weight_bytes": draft_weights,
        "draft_kv_bytes_per_token": draft_per_token,
        "gain": plan.gain,
    }
    return report(args, question.rows(plan), asdict(plan) | derived)


def _sequences(count: int, length: float, waste: float) -> str:
    return f"{count} sequences of {length:g} tokens at once, {100 * waste:.1f} % never written"


def report(args: argparse.Namespace, rows: list[tuple[str, str]], values: dict[str, Any]) -> int:
    """Print a table for users, or one line of JSON for programs."""
    if args.json:
        print(json.dumps({"plan": args.what, **values}))
        return 0
    width = max(len(label) for label, _ in rows)
    for label, text in rows:
        print(f"{label.ljust(width)}  {text}")
    return 0
