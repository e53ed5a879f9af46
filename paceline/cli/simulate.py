"""``paceline simulate``: a workload against configurations that nobody had to start."""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from paceline.cli.options import Parser, bounded_float, bounded_int
from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from paceline.sim.arrival import Arrival
    from paceline.sim.replica import ReplicaConfig
    from paceline.sim.report.metrics import Summary
    from paceline.sim.simulator import Pool
    from paceline.sim.step_times.spec import Source

__all__ = ["add_parser"]

_EPILOG = """\
examples:
  paceline simulate --step-times roofline:H100-SXM,Llama-3.1-8B --policy fcfs,sjf \\
      --workload 'synthetic:rate=4,prompt=lognormal(800,1),output=lognormal(200,1),n=2000'
  paceline simulate --workload trace.csv --step-times recorded:run.jsonl --replicas 4 \\
      --router least-outstanding

Step times: roofline:HARDWARE,MODEL[,DEGREE], recorded:FILE (of paceline serve --record),
profile:FOLDER[,PREFIX], fixed:SECONDS[,SECONDS_PER_TOKEN].
"""
# a recording brings its own; without one
_NUM_BLOCKS = 8192
_BLOCK_SIZE = 16
_MAX_MODEL_LEN = 32_768


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "simulate",
        help="what would happen if: another policy, GPU, load, or number of replicas",
        description="Simulate a workload with the scheduler that serves.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--workload",
        required=True,
        metavar="SPEC",
        help="a trace file, or synthetic:..., clients:...",
    )
    parser.add_argument(
        "--step-times", required=True, metavar="SPEC", help="where the seconds come from, see below"
    )
    parser.add_argument(
        "--policy", default=None, metavar="NAME[,NAME...]", help="compared side by side"
    )
    parser.add_argument("--replicas", type=bounded_int(1), default=1, metavar="N", help="default 1")
    parser.add_argument(
        "--router",
        default="least-outstanding",
        metavar="NAME",
        help="round-robin, least-outstanding (default) or prefix-affinity",
    )
    parser.add_argument(
        "--decode-replicas",
        type=bounded_int(1),
        metavar="N",
        help="so many more take requests over after their first token (disaggregation)",
    )
    parser.add_argument(
        "--kv-bandwidth",
        type=bounded_float(1e-6),
        default=25.0,
        metavar="GB/S",
        help="of the link that prompts' keys and values then move over (default 25)",
    )
    group = parser.add_argument_group("engine (default: the recorded one's, else paceline serve's)")
    group.add_argument("--max-num-seqs", type=bounded_int(1), metavar="N")
    group.add_argument("--max-num-batched-tokens", type=bounded_int(1), metavar="N")
    group.add_argument("--max-model-len", type=bounded_int(1), metavar="N")
    group.add_argument("--num-blocks", type=bounded_int(1), metavar="N", help="of the KV cache")
    group.add_argument("--block-size", type=bounded_int(1), metavar="N", help="tokens per KV block")
    group.add_argument("--pipeline-depth", type=bounded_int(1), metavar="N")
    group.add_argument("--no-enable-prefix-caching", action="store_true")
    group.add_argument(
        "--max-tokens",
        type=bounded_int(1),
        metavar="N",
        help="what callers ask for where outputs end by themselves; default: what they will get",
    )
    parser.add_argument("--seed", type=bounded_int(0), default=0, metavar="N", help="default 0")
    parser.add_argument(
        "--jobs", type=bounded_int(1), default=1, metavar="N", help="policies simulated at once"
    )
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    parser.set_defaults(run=run)


@dataclass(frozen=True, slots=True)
class _Point:
    """One simulation of a comparison; travels to a process of its own."""

    args: argparse.Namespace
    policy: str | None


def run(args: argparse.Namespace) -> int:
    policies: list[str | None] = args.policy.split(",") if args.policy else [None]
    points = [_Point(args, policy) for policy in policies]
    # made here first, so that whatever is wrong is said before anything runs
    for point in points:
        _pool(point)
    if args.jobs > 1 and len(points) > 1:
        from concurrent.futures import ProcessPoolExecutor
        from multiprocessing import get_context

        # spawned: this process may have loaded libraries that own threads
        context = get_context("spawn")
        with ProcessPoolExecutor(min(args.jobs, len(points)), mp_context=context) as pool:
            results = list(pool.map(_simulate, points))
    else:
        results = [_simulate(point) for point in points]
    if args.json:
        print(json.dumps({"runs": [entry for _, entry in results]}))
        return 0
    from paceline.sim.report.table import side_by_side

    print(side_by_side([summary for summary, _ in results]))
    for summary, entry in results:
        used = ", ".join(f"{share:.0%}" for share in entry["utilisation"])
        print(f"{summary.name}: backends busy {used}")
    return 0


def _simulate(point: _Point) -> tuple[Summary, dict[str, Any]]:
    from paceline.sim.report.metrics import Metrics
    from paceline.sim.simulator import Simulator
    from paceline.sim.workload.spec import open_workload

    # a simulation makes no cycles, and a few objects for every token: the collector only looks
    gc.disable()
    try:
        pool = _pool(point)
        workload = open_workload(point.args.workload, seed=point.args.seed)
        metrics = Metrics()
        simulator = Simulator(pool, metrics.add, prefix_block=workload.prefix_block)
        totals = simulator.run(_progress(workload, point))
    finally:
        gc.enable()
    name = point.policy or pool.replicas[0].config.scheduler.policy
    summary = metrics.summary(name)
    entry = summary.as_json() | {
        "policy": name,
        "steps": totals.num_steps,
        "utilisation": [busy / totals.end if totals.end else 0.0 for busy in totals.busy_seconds],
    }
    return summary, entry


def _progress(arrivals: Iterable[Arrival], point: _Point) -> Iterator[Arrival]:
    """Shown on a terminal only."""
    from tqdm import tqdm

    label = point.policy or "simulating"
    # disable=None: when standard error is not a terminal
    yield from tqdm(arrivals, desc=label, unit=" requests", disable=None, file=sys.stderr)


def _pool(point: _Point) -> Pool:
    from paceline.sim.routing import make_router
    from paceline.sim.simulator import Disaggregation, KVTransfer, Pool, ReplicaSpec
    from paceline.sim.step_times.spec import open_step_times

    args = point.args
    decoding = args.decode_replicas or 0
    sources = [
        open_step_times(args.step_times, seed=args.seed + index)
        for index in range(args.replicas + decoding)
    ]
    config = _config(point, sources[0])
    specs = [ReplicaSpec(config, source.times) for source in sources]
    split = None
    if decoding:
        per_token = sources[0].kv_bytes_per_token
        if per_token is None:
            raise ConfigError(
                f"--decode-replicas: {args.step_times} does not say how many bytes of keys and "
                "values a token has; use roofline or profile step times"
            )
        transfer = KVTransfer(per_token, 1e9 * args.kv_bandwidth)
        split = Disaggregation(specs[args.replicas :], transfer, make_router(args.router))
    return Pool(specs[: args.replicas], make_router(args.router), split)


def _config(point: _Point, source: Source) -> ReplicaConfig:
    """The recorded engine's settings, or the defaults, with what the flags change."""
    from paceline.core.config import CacheConfig, SchedulerConfig
    from paceline.core.policies import POLICIES
    from paceline.sim.replica import ReplicaConfig

    args = point.args
    config = source.config
    if config is None:
        block_size = args.block_size or _BLOCK_SIZE
        config = ReplicaConfig(
            scheduler=SchedulerConfig(max_model_len=_MAX_MODEL_LEN),
            cache=CacheConfig(
                block_size=block_size, num_blocks=source.num_blocks(block_size) or _NUM_BLOCKS
            ),
        )
    if point.policy is not None and point.policy not in POLICIES:
        raise ConfigError(f"unknown policy {point.policy!r}; known: {', '.join(sorted(POLICIES))}")
    scheduler = {"policy": point.policy}
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
        scheduler[name] = getattr(args, name)
    cache = {"num_blocks": args.num_blocks, "block_size": args.block_size}
    if args.no_enable_prefix_caching:
        cache["enable_prefix_caching"] = False
    return replace(
        config,
        scheduler=replace(config.scheduler, **_given(scheduler)),
        cache=replace(config.cache, **_given(cache)),
        pipeline_depth=args.pipeline_depth or config.pipeline_depth,
        max_tokens=args.max_tokens,
    )


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
