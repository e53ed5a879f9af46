"""``paceline plan``: hardware that a model needs, how to divide it, and its price."""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Any

from paceline.cli.flags.arguments import Parser, bounded_float, bounded_int
from paceline.cli.simulation import plan_fleet, plan_memory, plan_models
from paceline.cli.simulation.plan_memory import report
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.sim.plan.split import SplitEstimate
    from paceline.sim.step_times.spec import Source

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


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "plan",
        help="plan memory, replicas and cost before buying them",
        description="Plan by arithmetic where it is exact enough, else by simulation.",
        epilog=_EPILOG,
    )
    plans = parser.add_subparsers(
        title="what", metavar="WHAT", dest="what", required=True, parser_class=Parser
    )
    plan_models.add_parser(plans)
    plan_memory.add_parser(plans)
    _add_batching(plans)
    _add_split(plans)
    plan_fleet.add_parser(plans)


# ---------------------------------------------------------------------- batching


def _add_batching(plans: argparse._SubParsersAction[Parser]) -> None:
    parser = plans.add_parser(
        "batching",
        help="gain of continuous batching over static batching",
        description="Compare static with continuous batching, by arithmetic on output lengths.",
    )
    parser.add_argument(
        "--outputs",
        required=True,
        metavar="LENGTHS",
        help="fixed(N), uniform(A,B), lognormal(MEDIAN,SIGMA), bimodal(SHORT,LONG,SHARE) or "
        "empirical(FILE,output)",
    )
    parser.add_argument("--slots", type=bounded_int(1), default=32, help="default 32")
    parser.add_argument(
        "--fixed-ms",
        type=bounded_float(0.0),
        default=10.0,
        metavar="MS",
        help="fixed time of a step (default 10)",
    )
    parser.add_argument(
        "--row-ms",
        type=bounded_float(0.0),
        default=0.1,
        metavar="MS",
        help="additional time for each row of a step (default 0.1)",
    )
    parser.add_argument("--samples", type=bounded_int(1), default=20000, help="lengths drawn")
    parser.add_argument("--seed", type=int, default=0, help="seed (default 0)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead")
    parser.set_defaults(run=_run_batching)


def _run_batching(args: argparse.Namespace) -> int:
    from paceline.sim.plan.batching import estimate_batching
    from paceline.sim.workload.spec import parse_lengths

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
    return report(args, rows, asdict(found) | derived)


# ---------------------------------------------------------------------- split


def _add_split(plans: argparse._SubParsersAction[Parser]) -> None:
    parser = plans.add_parser(
        "split",
        help="prefill and decode replicas for disaggregation",
        description="Balance prefill and decode replicas, by arithmetic on step times; with "
        "--ttft and --tpot, simulate whether they carry more than replicas that do both.",
    )
    parser.add_argument("--model", metavar="NAME", help="name, or a checkpoint")
    plan_fleet.add_model_shape(parser)
    parser.add_argument("--hardware", metavar="NAME", help="a known GPU; a wrong name lists them")
    parser.add_argument(
        "--step-times",
        metavar="SPEC",
        help="instead of model and hardware, such as recorded:FILE ('paceline simulate --help')",
    )
    parser.add_argument(
        "--gpus", type=bounded_int(1), default=1, help="GPUs per replica (default 1)"
    )
    parser.add_argument("--prompt", type=bounded_int(1), required=True, help="tokens")
    parser.add_argument("--output", type=bounded_int(1), required=True, help="tokens")
    parser.add_argument("--tpot", metavar="TIME", help="longest decode step, such as 50ms")
    parser.add_argument("--ttft", metavar="TIME", help="TTFT target, such as 2s: simulate")
    parser.add_argument(
        "--kv-bytes-per-token",
        type=bounded_float(0.0),
        metavar="BYTES",
        help="keys and values of a token, for a recording (default 131072)",
    )
    parser.add_argument(
        "--link",
        type=bounded_float(0.001),
        default=10.0,
        metavar="GBIT",
        help="Gbit/s between replicas (default 10)",
    )
    parser.add_argument(
        "--requests",
        type=bounded_int(10),
        default=200,
        help="requests of a simulation (default 200)",
    )
    parser.add_argument(
        "--seeds",
        type=bounded_int(1),
        default=3,
        help="sequences of arrivals that are simulated (default 3)",
    )
    parser.add_argument("--replicas", type=bounded_int(2), default=4, help="replicas (default 4)")
    parser.add_argument("--max-num-seqs", type=bounded_int(1), default=256, help="default 256")
    parser.add_argument(
        "--max-num-batched-tokens",
        type=bounded_int(1),
        default=2048,
        help="prompt tokens in a step (default 2048)",
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead")
    parser.set_defaults(run=_run_split)


def _run_split(args: argparse.Namespace) -> int:
    from paceline.sim.plan.split import estimate_split
    from paceline.sim.step_times.spec import open_step_times
    from paceline.sim.workload.spec import parse_seconds

    named = (args.model, args.hardware)
    if any(named) if args.step_times else not all(named):
        raise ConfigError("needs either --step-times, or --model and --hardware")
    if args.ttft and not args.tpot:
        raise ConfigError("--ttft needs --tpot: both targets are simulated together")
    spec = args.step_times or f"roofline:{args.hardware},{args.model},{args.gpus}"
    source = open_step_times(spec, models=plan_fleet.given_shapes(args))
    room = source.num_blocks(1)
    if room is None and source.config is not None:
        room = source.config.cache.num_blocks * source.config.cache.block_size
    if room is not None and room < args.prompt + args.output:
        raise ConfigError(
            f"{room} tokens of KV cache are too few for a request of {args.prompt} + {args.output}"
        )
    # sequences are half grown on average, but the longest must fit
    most = args.max_num_seqs if room is None else room // (args.prompt + args.output // 2)
    tpot = parse_seconds(args.tpot) if args.tpot else None
    found = estimate_split(
        source.times,
        prompt_tokens=args.prompt,
        output_tokens=args.output,
        tpot=tpot,
        max_batch=max(1, min(most, args.max_num_seqs)),
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
    told = asdict(found) | {"ratio": found.ratio}
    if tpot is not None and args.ttft:
        more, pays = _simulated_split(args, source, found, parse_seconds(args.ttft), tpot)
        rows += more
        told["simulated"] = pays
    return report(args, rows, told)


def _simulated_split(
    args: argparse.Namespace, source: Source, found: SplitEstimate, ttft: float, tpot: float
) -> tuple[list[tuple[str, str]], dict[str, Any]]:
    """Return rows, and values by name, that say whether prompts and answers apart pay."""
    from paceline.core.config import CacheConfig, SchedulerConfig
    from paceline.sim.plan.apart import ApartLoad, compare_ways, pool_of, split_above
    from paceline.sim.replica import ReplicaConfig
    from paceline.sim.transfer import KVTransfer

    scheduler = SchedulerConfig(
        max_model_len=args.prompt + args.output,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_num_seqs=args.max_num_seqs,
    )
    cache = CacheConfig(block_size=16, num_blocks=source.num_blocks(16) or 1 << 16)
    config = source.config or ReplicaConfig(scheduler=scheduler, cache=cache)
    per_token = args.kv_bytes_per_token or source.kv_bytes_per_token or 131_072.0
    transfer = KVTransfer(
        per_token, args.link * 1e9 / 8.0, 1e-3,
        # a recording is of our engine
        between_steps=source.config is not None,
    )  # fmt: skip
    least = split_above(source.times, tpot)
    load = ApartLoad(args.prompt, args.output, ttft, tpot, args.requests)
    found_ways = compare_ways(
        lambda prompts, outputs: pool_of(
            config, lambda n: source.another(n).times, prompts, outputs, transfer, least
        ),
        load, args.replicas, range(args.seeds), guess=found.colocated_rate,
    )  # fmt: skip
    rows = [(f"simulated, {name}", _rates(rates)) for name, rates in found_ways.rates.items()]
    best, num = found_ways.best, found_ways.num_better
    if num == args.seeds:
        answer = f"yes: {best}, split_above = {least}"
    elif num == 0:
        answer = "no: let all replicas do both"
    else:
        answer = (
            f"it depends on the arrivals: {best} carries more with {num} of {args.seeds} seeds "
            f"(split_above = {least})"
        )
    rows.append(("it pays", answer))
    told = {
        "rates": {name: median(rates) for name, rates in found_ways.rates.items()},
        "pays": num == args.seeds, "seeds": args.seeds, "pays_with": num, "best": best,
        "split_above": least,
    }  # fmt: skip
    return rows, told


def _rates(rates: Sequence[float]) -> str:
    """Return the rates of a way at all seeds, for people."""
    low, high = min(rates), max(rates)
    if not high:
        return "never in time"
    spread = f" ({low:.2f} to {high:.2f})" if low < high else ""
    return f"{median(rates):.2f} requests/s{spread}"
