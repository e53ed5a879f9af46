"""``paceline plan``: hardware that a model needs, how to divide it, and its price."""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.flags.arguments import Parser, bounded_float, bounded_int, byte_count, json_object
from paceline.cli.simulation import plan_fleet, plan_models
from paceline.errors import ConfigError
from paceline.speculation.settings import SpeculationSettings

if TYPE_CHECKING:
    from paceline.backends.loading.memory_estimate import ServedMemory

__all__ = ["add_parser"]

_EPILOG = """\
examples:
  paceline plan models --memory 16GB,24GB
  paceline plan memory --preset 80gb-40gb
  paceline plan memory --model llama-3.1-8b --memory 80GB --max-len 8192 --mean-len 1200
  paceline plan split --model llama-3.1-8b --hardware h100-sxm --prompt 2000 --output 200
  paceline plan fleet --model llama-3.1-8b --hardware l4,h100-sxm --ttft 1 --tpot 50ms \\
      --workload 'synthetic:rate=10,prompt=lognormal(1020,1),output=lognormal(129,1),n=2000'
  paceline plan batching --outputs 'bimodal(uniform(1,9),uniform(501,519),0.5)' --slots 16

'paceline plan WHAT --help' explains each; docs/understand/simulator.md has more.
"""

_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "plan",
        help="plan memory, replicas and cost before buying them",
        description="Plan by arithmetic where it holds and by simulation where it does not.",
        epilog=_EPILOG,
    )
    plans = parser.add_subparsers(
        title="what", metavar="WHAT", dest="what", required=True, parser_class=Parser
    )
    plan_models.add_parser(plans)
    _add_memory(plans)
    _add_batching(plans)
    _add_split(plans)
    plan_fleet.add_parser(plans)


def _report(args: argparse.Namespace, rows: list[tuple[str, str]], values: dict[str, Any]) -> int:
    """Print a table for users, or one line of JSON for programs."""
    if args.json:
        print(json.dumps({"plan": args.what, **values}))
        return 0
    width = max(len(label) for label, _ in rows)
    for label, text in rows:
        print(f"{label.ljust(width)}  {text}")
    return 0


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead")


# ---------------------------------------------------------------------- memory


def _add_memory(plans: argparse._SubParsersAction[Parser]) -> None:
    from paceline.sim.plan.memory import PRESETS

    titles = "; ".join(f"{name}: {preset.title}" for name, preset in PRESETS.items())
    parser = plans.add_parser(
        "memory",
        help="how many sequences fit, preallocated and paged",
        description="Divide a GPU's memory into weights and keys and values, and count sequences.",
    )
    parser.add_argument(
        "--preset",
        type=str.lower,
        choices=tuple(PRESETS),
        help=f"an exercise; flags change its numbers. {titles}",
    )
    parser.add_argument("--model", metavar="NAME", help="a known model, or a checkpoint")
    plan_fleet.add_model_shape(parser)
    parser.add_argument("--memory", type=byte_count, metavar="SIZE", help="of one GPU")
    parser.add_argument("--hardware", metavar="NAME", help="a known GPU, instead of --memory")
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="where serve would compute a checkpoint: auto, cpu, cuda or cuda:N, which need not be "
        "here (default auto)",
    )
    parser.add_argument(
        "--gpus", type=bounded_int(1), default=1, metavar="N", help="that share one model"
    )
    parser.add_argument(
        "--weight-dtype",
        type=str.lower,
        choices=tuple(_BYTES),
        help="default: of a checkpoint what serve takes for it here (with --hardware as a GGUF "
        "file stores them), else bfloat16",
    )
    parser.add_argument(
        "--kv-dtype",
        type=str.lower,
        choices=tuple(_BYTES),
        help="default: of a checkpoint what serve takes for it here, else bfloat16",
    )
    parser.add_argument("--weights", type=byte_count, metavar="SIZE", help="instead of a model's")
    parser.add_argument(
        "--kv-per-token", type=byte_count, metavar="SIZE", help="instead of a model's"
    )
    parser.add_argument("--max-len", type=bounded_int(1), metavar="N", help="prompt and output")
    parser.add_argument("--mean-len", type=bounded_float(1), metavar="N", help="of a mean sequence")
    parser.add_argument(
        "--utilization",
        type=bounded_float(0.01, 1.0),
        metavar="SHARE",
        help="of memory that may be used (default 0.9)",
    )
    parser.add_argument(
        "--reserve",
        type=byte_count,
        metavar="SIZE",
        help="for activations and the rest of the processes (default: of a checkpoint about what "
        "these take here, else 0)",
    )
    parser.add_argument(
        "--block-size", type=bounded_int(1), default=16, metavar="N", help="default 16"
    )
    parser.add_argument(
        "--max-num-seqs",
        type=bounded_int(1),
        default=256,
        metavar="N",
        help="as serve takes it: layers with a sliding window have blocks for so many sequences, "
        "where --model is a checkpoint that has such layers (default 256)",
    )
    parser.add_argument(
        "--speculative-config",
        type=json_object,
        metavar="JSON",
        help="as serve takes it: the weights and the KV cache of a draft model that it names are "
        "counted too, where --model is a checkpoint",
    )
    _add_json(parser)
    parser.set_defaults(run=_run_memory)


def _served(args: argparse.Namespace) -> ServedMemory | None:
    """Return what ``serve`` would take for a checkpoint on this machine; None where the question is
    another: a model without a file, other hardware, or formats named by flags."""
    path = Path(args.model)
    if args.hardware or not path.exists() or (args.weight_dtype and args.kv_dtype):
        return None
    from paceline.backends.loading.memory_estimate import served_memory

    return served_memory(path, device=args.device or "auto")


def _draft(args: argparse.Namespace) -> tuple[ServedMemory, bool] | None:
    """Return the memory of the model that guesses for the served one, and whether it is the served
    one in fewer bits, whose KV cache is a copy; None: none is named."""
    from paceline.backends.loading.memory_estimate import served_memory
    from paceline.checkpoints.heads.eagle3 import is_eagle3
    from paceline.cli.flags.draft_model import draft_of, drafts_by_mtp

    config = args.speculative_config
    if config is None or not SpeculationSettings.of(config).models:
        return None
    if args.model is None or not Path(args.model).exists():
        raise ConfigError(
            f"--speculative-config: a draft model is counted beside a checkpoint, and --model "
            f"{args.model} is none: add its bytes to --weights and --kv-per-token"
        )
    if drafts_by_mtp(config):
        raise ConfigError(
            f"--speculative-config: the layers of {args.model} that guess are not counted here: "
            "add their bytes to --weights, and to --kv-per-token those of as many layers"
        )
    found = draft_of(config, args.model)
    assert found is not None
    path, dtype = found
    if is_eagle3(Path(path)):
        raise ConfigError(
            f"--speculative-config: the EAGLE-3 head {path} is not counted here: add its bytes to "
            "--weights, and to --kv-per-token those of one layer"
        )
    itself = Path(path).resolve() == Path(args.model).resolve()
    return served_memory(Path(path), dtype=dtype, device=args.device or "auto"), itself


def _run_memory(args: argparse.Namespace) -> int:
    from paceline.sim.plan import PRESETS, find_model, plan_memory
    from paceline.sim.step_times.roofline import HardwareCard

    preset = PRESETS[args.preset] if args.preset else None
    weights, per_token = args.weights, args.kv_per_token
    served = _served(args) if args.model else None
    if served is None and args.device:
        raise ConfigError(
            "--device is where serve computes a checkpoint in formats that it takes by itself: it "
            "needs --model FILE, and goes with neither --hardware nor both --weight-dtype and "
            "--kv-dtype"
        )
    model = find_model(args.model, plan_fleet.given_shapes(args)) if args.model else None
    if model is not None:
        if served is not None:
            weights = weights or (None if args.weight_dtype else served.weight_bytes)
            per_token = per_token or (None if args.kv_dtype else served.kv_bytes_per_token)
        per_weight = _BYTES[args.weight_dtype] if args.weight_dtype else model.bytes_per_weight
        weights = weights or model.num_parameters * per_weight
        per_token = per_token or model.kv_bytes_per_token(_BYTES[args.kv_dtype or "bfloat16"])
    memory: float | None = args.memory
    if memory is None and args.hardware:
        memory = HardwareCard.named(args.hardware).memory
    values: dict[str, float | None] = {
        "memory": memory and memory * args.gpus,
        "weights": weights,
        "kv-per-token": per_token,
        "max-len": args.max_len,
        "mean-len": args.mean_len,
        "utilization": args.utilization,
    }
    if preset is not None:
        defaults = (
            preset.memory_bytes,
            preset.weight_bytes,
            preset.kv_bytes_per_token,
            preset.max_len,
            preset.mean_len,
            preset.utilization,
        )
        for name, default in zip(values, defaults, strict=True):
            values[name] = default if values[name] is None else values[name]
    values["utilization"] = 0.9 if values["utilization"] is None else values["utilization"]
    missing = [f"--{name}" for name, value in values.items() if value is None]
    if missing:
        raise ConfigError(
            f"needs {', '.join(missing)}; --model gives weights and KV, --preset gives all"
        )
    reserve: float = args.reserve or 0
    if args.reserve is None and served is not None:
        reserve = served.process_bytes
    known = {name: float(value) for name, value in values.items() if value is not None}
    draft_weights = draft_per_token = 0.0
    of_draft: list[tuple[str, str]] = []
    if (draft := _draft(args)) is not None:
        guesser, itself = draft
        draft_weights = guesser.weight_bytes
        draft_per_token = known["kv-per-token"] if itself else guesser.kv_bytes_per_token
        text = f"{draft_weights / 1e9:.3f} GB in {guesser.dtype}, {draft_per_token / 1024:.0f} KiB"
        of_draft.append(("  draft model", f"{text} a token, both counted here"))
    windows: dict[str, Any] = {}
    if served is not None and draft is None and not (args.kv_per_token or args.kv_dtype):
        windows["window"] = served.window
        windows["window_bytes_per_token"] = served.window_bytes_per_token
    plan = plan_memory(
        memory_bytes=known["memory"],
        weight_bytes=known["weights"] + draft_weights,
        kv_bytes_per_token=known["kv-per-token"] + draft_per_token,
        max_len=int(known["max-len"]),
        mean_len=known["mean-len"],
        utilization=known["utilization"],
        reserve_bytes=reserve,
        block_size=args.block_size,
        max_num_seqs=args.max_num_seqs,
        **windows,
    )
    of_windows: list[tuple[str, str]] = []
    if plan.num_window_blocks:
        text = (
            f"{plan.num_window_blocks}, {plan.window_bytes / 1e9:.3f} GB for layers with a window"
        )
        of_windows.append(("  window blocks", text))
    of_weights = of_values = ""
    where = "here" if served is None or served.device == "cpu" else f"on {served.device}"
    if served is not None and not (args.weights or args.weight_dtype):
        of_weights = f" in {served.dtype}, as serve takes it {where}"
    if served is not None and not (args.kv_per_token or args.kv_dtype):
        of_values = f" in {served.kv_dtype}, as serve takes it {where}"
    rows = [
        ("memory", f"{plan.memory_bytes / 1e9:.1f} GB, of which {known['utilization']:.0%} used"),
        (
            "weights",
            f"{plan.weight_bytes / 1e9:.{1 if plan.weight_bytes >= 1e9 else 3}f} GB{of_weights}",
        ),
        *of_draft,
        ("reserved", f"{reserve / 1e9:.2f} GB for the rest of the processes"),
        ("keys and values", f"{plan.kv_bytes / 1e9:.1f} GB"),
        ("  per token", f"{plan.kv_bytes_per_token / 1024:.0f} KiB{of_values}"),
        ("  blocks", f"{plan.num_blocks} of {plan.block_size} tokens"),
        *of_windows,
        ("preallocated", _sequences(plan.preallocated, plan.max_len, plan.preallocated_waste)),
        ("paged", _sequences(plan.paged, plan.mean_len, plan.paged_waste)),
        ("paged is", f"{plan.gain:.1f}x"),
    ]
    derived = {
        "preallocated_waste": plan.preallocated_waste,
        "paged_waste": plan.paged_waste,
        "reserve_bytes": reserve,
        "draft_weight_bytes": draft_weights,
        "draft_kv_bytes_per_token": draft_per_token,
        "gain": plan.gain,
    }
    return _report(args, rows, asdict(plan) | derived)


def _sequences(count: int, length: float, waste: float) -> str:
    return f"{count} sequences of {length:g} tokens at once, {100 * waste:.1f} % never written"


# ---------------------------------------------------------------------- batching


def _add_batching(plans: argparse._SubParsersAction[Parser]) -> None:
    parser = plans.add_parser(
        "batching",
        help="what continuous batching gains over static",
        description="Compare static with continuous batching, by arithmetic on output lengths.",
    )
    parser.add_argument(
        "--outputs",
        required=True,
        metavar="LENGTHS",
        help="fixed(N), uniform(A,B), lognormal(MEDIAN,SIGMA), bimodal(SHORT,LONG,SHARE) or "
        "empirical(FILE,output)",
    )
    parser.add_argument("--slots", type=bounded_int(1), default=32, metavar="N", help="default 32")
    parser.add_argument(
        "--fixed-ms",
        type=bounded_float(0.0),
        default=10.0,
        metavar="MS",
        help="of a step, whatever is in it (default 10)",
    )
    parser.add_argument(
        "--row-ms",
        type=bounded_float(0.0),
        default=0.1,
        metavar="MS",
        help="of each row of a step (default 0.1)",
    )
    parser.add_argument(
        "--samples", type=bounded_int(1), default=20000, metavar="N", help="lengths drawn"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws (default 0)")
    _add_json(parser)
    parser.set_defaults(run=_run_batching)


def _run_batching(args: argparse.Namespace) -> int:
    from paceline.sim.plan import estimate_batching
    from paceline.sim.workload import parse_lengths

    lengths = parse_lengths(args.outputs)
    rng = random.Random(args.seed)
    drawn = [lengths.sample(rng) for _ in range(args.samples)]
    found = estimate_batching(drawn, args.slots, fixed=args.fixed_ms / 1e3, row=args.row_ms / 1e3)
    rows = [
        (
            "outputs",
            f"{found.mean:.1f} tokens on average, longest of {args.slots} {found.longest:.1f}",
        ),
        ("static, padded", f"{found.padded:.0f} tokens/s"),
        ("static, finished rows dropped", f"{found.dropped:.0f} tokens/s"),
        ("continuous", f"{found.continuous:.0f} tokens/s, {found.gain:.2f}x"),
        ("textbook gain, equal steps", f"{found.textbook_gain:.2f}x"),
    ]
    derived = {"gain": found.gain, "textbook_gain": found.textbook_gain}
    return _report(args, rows, asdict(found) | derived)


# ---------------------------------------------------------------------- split


def _add_split(plans: argparse._SubParsersAction[Parser]) -> None:
    parser = plans.add_parser(
        "split",
        help="prefill and decode replicas for disaggregation",
        description="Balance prefill and decode replicas, by arithmetic on roofline step times.",
    )
    parser.add_argument("--model", required=True, metavar="NAME", help="known, or a checkpoint")
    plan_fleet.add_model_shape(parser)
    parser.add_argument(
        "--hardware", required=True, metavar="NAME", help="known; a wrong name lists them"
    )
    parser.add_argument(
        "--gpus", type=bounded_int(1), default=1, metavar="N", help="of one replica (default 1)"
    )
    parser.add_argument("--prompt", type=bounded_int(1), required=True, metavar="N", help="tokens")
    parser.add_argument("--output", type=bounded_int(1), required=True, metavar="N", help="tokens")
    parser.add_argument("--tpot", metavar="TIME", help="a decode step may take, such as 50ms")
    parser.add_argument(
        "--replicas", type=bounded_int(2), default=4, metavar="N", help="to divide (default 4)"
    )
    parser.add_argument(
        "--max-num-seqs", type=bounded_int(1), default=256, metavar="N", help="default 256"
    )
    parser.add_argument(
        "--max-num-batched-tokens",
        type=bounded_int(1),
        default=2048,
        metavar="N",
        help="prompt tokens of a step (default 2048)",
    )
    _add_json(parser)
    parser.set_defaults(run=_run_split)


def _run_split(args: argparse.Namespace) -> int:
    from paceline.sim.plan import estimate_split, find_model
    from paceline.sim.step_times.roofline import HardwareCard, RooflineStepTimes
    from paceline.sim.workload import parse_seconds

    card = HardwareCard.named(args.hardware)
    times = RooflineStepTimes(
        card, find_model(args.model, plan_fleet.given_shapes(args)), degree=args.gpus
    )
    # sequences are half grown on average, but the longest must fit
    room = times.num_blocks(1) // (args.prompt + args.output // 2)
    if times.num_blocks(1) < args.prompt + args.output:
        raise ConfigError(
            f"{times.num_blocks(1)} tokens of keys and values do not hold one request of "
            f"{args.prompt} + {args.output}"
        )
    found = estimate_split(
        times,
        prompt_tokens=args.prompt,
        output_tokens=args.output,
        tpot=parse_seconds(args.tpot) if args.tpot else None,
        max_batch=min(room, args.max_num_seqs),
        max_num_batched_tokens=args.max_num_batched_tokens,
        replicas=args.replicas,
    )
    rows = [
        ("a prefill replica", f"{found.prefill_rate:.2f} requests/s"),
        (
            "a decode replica",
            f"{found.decode_rate:.2f} requests/s: {found.decode_batch} at once, "
            f"{1e3 * found.decode_seconds:.1f} ms a token",
        ),
        ("prefill : decode", f"{found.ratio:.2f} : 1"),
        (
            f"of {args.replicas} replicas",
            f"{found.best[0]} : {found.best[1]}, {found.split_rate:.2f} requests/s",
        ),
        ("the same, doing both", f"{found.colocated_rate:.2f} requests/s"),
    ]
    return _report(args, rows, asdict(found) | {"ratio": found.ratio})
