"""``paceline simulate``: a workload against configurations, without starting servers."""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.flags.arguments import (
    Parser,
    bounded_float,
    bounded_int,
    parts_of,
    size_with_unit,
)
from paceline.cli.flags.plugins import listed_policies
from paceline.cli.flags.scheduling_options import (
    add_flags,
)
from paceline.cli.simulation.plan_fleet import add_model_shape
from paceline.cli.simulation.simulated_pool import FLAGS, pool_of
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.sim.arrival import Arrival
    from paceline.sim.pool import Pool
    from paceline.sim.report.metrics import Metrics, Summary
    from paceline.timeline.collect import Collector

__all__ = ["add_parser"]

_EPILOG = """\
examples:
  paceline simulate --step-times roofline:H100-SXM,Llama-3.1-8B --policy fcfs,sjf \\
      --workload 'synthetic:rate=4,prompt=lognormal(800,1),output=lognormal(200,1),n=2000'
  paceline simulate --workload trace.csv --step-times recorded:run.jsonl --replicas 4 \\
      --router least-outstanding --speedup 0.5,1,1.5,2 --plot goodput.png

Step times: roofline:HARDWARE,MODEL[,DEGREE], recorded:FILE (of paceline serve --record),
profile:FOLDER[,PREFIX][,link=GB/S][,latency=TIME][,graphs=N][,host=TIME],
fixed:SECONDS[,SECONDS_PER_TOKEN].
"""


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "simulate",
        help="simulate another policy, GPU, load, or number of replicas",
        description="Simulate a workload with the scheduler that the server uses.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--workload",
        required=True,
        metavar="SPEC",
        help="a trace file, or synthetic:..., clients:...",
    )
    parser.add_argument(
        "--step-times", required=True, metavar="SPEC", help="how long steps take, see below"
    )
    add_model_shape(parser)
    parser.add_argument(
        "--policy", default=None, metavar="NAME[,NAME...]", help="policies to compare"
    )
    parser.add_argument("--replicas", type=bounded_int(1), default=1, help="default 1")
    parser.add_argument(
        "--router",
        default="least-outstanding",
        metavar="NAME",
        help="round-robin, least-outstanding (default), prefix-affinity or the gateway's predicted",
    )
    parser.add_argument(
        "--decode-replicas",
        type=bounded_int(1),
        help="more replicas, to which requests move after their first token (disaggregation)",
    )
    parser.add_argument(
        "--kv-bandwidth",
        type=bounded_float(1e-6),
        default=25.0,
        metavar="GB/S",
        help="bandwidth at which KV blocks move to decode replicas and to host memory "
        "(--swap-space) (default 25)",
    )
    group = parser.add_argument_group(
        "engine (defaults: those of the recording, else of paceline serve, without --swap-space)"
    )
    add_flags(group, FLAGS, None)
    group.add_argument("--max-model-len", type=bounded_int(1))
    group.add_argument("--num-blocks", type=bounded_int(1), help="of the KV cache")
    group.add_argument("--block-size", type=bounded_int(1), help="tokens per KV block")
    group.add_argument("--no-enable-prefix-caching", action="store_true")
    group.add_argument(
        "--max-tokens",
        type=bounded_int(1),
        help="max_tokens of requests, where outputs end earlier; default: the length of the output",
    )
    group.add_argument(
        "--acceptance",
        type=_chances,
        default=(),
        metavar="P[,P...]",
        help="probability that each draft token is accepted if those before it were: at most this "
        "many are drafted, as --speculative-config says (default: no drafts)",
    )
    group.add_argument(
        "--max-loras", type=bounded_int(1), help="different adapters that run at once, at most"
    )
    group.add_argument(
        "--lora-memory",
        type=size_with_unit,
        metavar="SIZE",
        help="memory for adapters, of workloads with adapters=N (default: all fit)",
    )
    group.add_argument(
        "--adapter-size",
        type=size_with_unit,
        default=10 << 20,
        metavar="SIZE",
        help="size of each adapter (default 10MiB: rank 16 on a model of 135M)",
    )
    parser.add_argument("--seed", type=bounded_int(0), default=0, help="default 0")
    parser.add_argument(
        "--jobs", type=bounded_int(1), default=1, help="simulations to run in parallel"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    group = parser.add_argument_group("reports")
    group.add_argument(
        "--speedup",
        default="1",
        metavar="X[,X...]",
        help="loads to compare: the times of arrival are divided by each (default 1)",
    )
    group.add_argument(
        "--itl",
        action="store_true",
        help="also measure every gap between tokens, which takes longer",
    )
    group.add_argument(
        "--price-per-hour",
        type=bounded_float(0.0),
        metavar="PRICE",
        help="price of one replica: adds the cost of a million output tokens",
    )
    group.add_argument(
        "--plot",
        type=Path,
        help="png, svg or pdf: distributions of TTFT, TPOT and E2E; with several loads, goodput "
        "against rate",
    )
    group.add_argument(
        "--html",
        type=Path,
        help="a page with the table and the same plots, which needs no matplotlib",
    )
    group.add_argument(
        "--timeline",
        type=Path,
        help="every step of a single simulation, for Perfetto or chrome://tracing. A name that "
        "ends in .gz gets requests and counters of one replica too, as 'paceline trace' saves them",
    )
    parser.set_defaults(run=run)


@dataclass(frozen=True, slots=True)
class _Point:
    """One simulation of a comparison; it is sent to a process of its own."""

    args: argparse.Namespace
    policy: str | None
    # divisor of the workload's times
    speedup: float = 1.0


@dataclass(frozen=True, slots=True)
class _Result:
    summary: Summary
    # fields of this point in JSON output
    entry: dict[str, Any]
    metrics: Metrics


def run(args: argparse.Namespace) -> int:
    policies = listed_policies(args.policy)
    speedups = parts_of(args.speedup, bounded_float(1e-6), "--speedup")
    points = [_Point(args, policy, speedup) for policy in policies for speedup in speedups]
    if args.timeline is not None and len(points) > 1:
        raise ConfigError(f"--timeline shows one simulation, but there are {len(points)}")
    # made here first, so that errors are reported before anything runs
    for point in points:
        pool_of(point.args, point.policy)
    if args.jobs > 1 and len(points) > 1:
        from concurrent.futures import ProcessPoolExecutor
        from multiprocessing import get_context

        # spawned: this process may have loaded libraries with threads of their own
        context = get_context("spawn")
        with ProcessPoolExecutor(min(args.jobs, len(points)), mp_context=context) as pool:
            results = list(pool.map(_simulate, points))
    else:
        results = [_simulate(point) for point in points]
    if args.plot is not None:
        _plot(args.plot, results)
    if args.html is not None:
        _write_page(args, results)
    if args.json:
        print(json.dumps({"runs": [result.entry for result in results]}))
        return 0
    from paceline.sim.report.table import minutes, side_by_side

    print(side_by_side([result.summary for result in results]))
    for result in results:
        if by_minute := minutes(result.summary):
            print(f"{result.summary.name}: {by_minute}")
        used = ", ".join(f"{share:.0%}" for share in result.entry["utilisation"])
        print(
            f"{result.summary.name}: backends busy {used}; requests of up to "
            f"{result.entry['max_model_len']} tokens, prompt and output (--max-model-len)"
        )
    return 0


def _chances(text: str) -> tuple[float, ...]:
    return tuple(bounded_float(0.0, 1.0)(part) for part in text.split(","))


def _plot(path: Path, results: list[_Result]) -> None:
    from paceline.sim.report.plots import plot_cdfs, plot_curves

    if len({result.entry["speedup"] for result in results}) == 1:
        count = max(result.summary.requests for result in results)
        runs = {result.summary.name: result.metrics for result in results}
        plot_cdfs(runs, path, title=f"{count} requests, simulated")
        return
    curves: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        point = (result.entry["offered_rate"], result.summary.goodput)
        curves.setdefault(result.entry["policy"], []).append(point)
    lines = {name: sorted(line) for name, line in curves.items()}
    plot_curves(
        lines,
        path,
        x="requests/s",
        y="goodput, requests/s",
        title="Requests within their targets, simulated",
        at_most_x="all requests",
    )


def _write_page(args: argparse.Namespace, results: list[_Result]) -> None:
    from paceline.files import write_private
    from paceline.sim.report.page import Section, html_page, latency_charts
    from paceline.sim.report.svg import Chart, Series
    from paceline.sim.report.table import comparison

    sections = [Section("Figures", tables=[comparison([result.summary for result in results])])]
    loads: dict[float, list[_Result]] = {}
    policies: dict[str, list[_Result]] = {}
    for result in sorted(results, key=lambda result: result.entry["offered_rate"]):
        loads.setdefault(result.entry["speedup"], []).append(result)
        policies.setdefault(result.entry["policy"], []).append(result)
    if len(loads) > 1:
        charts = []
        for title, unit, most, figure in (
            ("Goodput against the rate offered", "goodput, requests/s", "all requests", "goodput"),
            ("Attainment against the rate offered", "share within targets", "", "attainment"),
        ):
            curves = [
                Series(name, [(r.entry["offered_rate"], getattr(r.summary, figure)) for r in line])
                for name, line in policies.items()
            ]
            y_max = None if most else 1.02
            charts.append(
                Chart(title, "requests/s offered", unit, curves, y_max=y_max, at_most_x=most)
            )
        sections.append(Section("Loads", charts))
    for speedup, runs in loads.items():
        title = "Latencies" if len(loads) == 1 else f"Latencies at {speedup:g} times the load"
        charts = latency_charts({result.summary.name: result.metrics for result in runs})
        sections.append(Section(title, charts))
    asked = [["setting", ""], ["workload", args.workload], ["step times", args.step_times]]
    asked += [["seed", str(args.seed)], ["replicas", str(args.replicas)]]
    sections.append(Section("Settings", tables=[asked]))
    count = max(result.summary.requests for result in results)
    try:
        write_private(args.html, html_page(f"{count} requests, simulated", sections))
    except OSError as error:
        raise ConfigError(f"{args.html}: cannot be written: {error}") from error


def _simulate(point: _Point) -> _Result:
    from paceline.sim.report.metrics import Metrics
    from paceline.sim.report.steps import StepWatcher
    from paceline.sim.simulator import Simulator
    from paceline.sim.workload.shaping import speed_up
    from paceline.sim.workload.spec import open_workload
    from paceline.timeline.chrome import TimelineWriter, write_trace

    # a simulation makes no cycles, but objects for every token, which the collector would scan
    gc.disable()
    try:
        pool = pool_of(point.args, point.policy)
        workload = open_workload(point.args.workload, seed=point.args.seed)
        metrics = Metrics()
        stream = _Counted(_progress(speed_up(workload, point.speedup), point))
        with ExitStack() as stack:
            timeline, collector, path = None, None, point.args.timeline
            if path is not None and path.suffix == ".gz":
                collector = _collector(pool)
            elif path is not None:
                timeline = stack.enter_context(TimelineWriter(path))
            watcher = None
            if point.args.itl or timeline is not None:
                watcher = StepWatcher(metrics if point.args.itl else None, timeline)
            simulator = Simulator(
                pool,
                metrics.add,
                prefix_block=workload.prefix_block,
                on_plan=watcher,
                recorder=None if collector is None else lambda number, config: collector,
            )
            totals = simulator.run(stream)
            if not stream.count:
                # without requests, figures would look like those of a server that meets no target
                raise ConfigError(
                    f"--workload {point.args.workload}: no request has prompt and output tokens"
                )
            if collector is not None:
                write_trace(collector.trace(), path)
    finally:
        gc.enable()
    policy = point.policy or pool.replicas[0].config.scheduler.policy
    name = policy if point.speedup == 1 else f"{policy} x{point.speedup:g}"
    each = point.args.price_per_hour
    replicas = point.args.replicas + (point.args.decode_replicas or 0)
    summary = metrics.summary(name, price_per_hour=None if each is None else each * replicas)
    entry = summary.as_json() | {
        "policy": policy,
        "speedup": point.speedup,
        "offered_rate": stream.rate,
        "steps": totals.num_steps,
        "utilisation": [busy / totals.end if totals.end else 0.0 for busy in totals.busy_seconds],
        "max_model_len": pool.replicas[0].config.scheduler.max_model_len,
        "adapter_evictions": totals.num_evicted_adapters,
    }
    return _Result(summary, entry, metrics)


def _collector(pool: Pool) -> Collector:
    """Make a collector. Raises ConfigError for several replicas, whose lanes would overlap."""
    from paceline.timeline.collect import Collector

    if len(pool.replicas) != 1 or pool.disaggregation is not None:
        raise ConfigError(
            "--timeline FILE.gz shows the requests of one replica, and more are simulated: leave "
            ".gz out for the steps of all replicas"
        )
    config = pool.replicas[0].config
    return Collector(config.scheduler, config.cache)


class _Counted:
    """A stream that knows, once read, its arrivals per second."""

    def __init__(self, arrivals: Iterable[Arrival]) -> None:
        self._arrivals = arrivals
        self.count = 0
        self._last = 0.0

    def __iter__(self) -> Iterator[Arrival]:
        for arrival in self._arrivals:
            self.count += 1
            self._last = arrival.at
            yield arrival

    @property
    def rate(self) -> float:
        """Requests per second from 0 to the last arrival; 0 if all came at once."""
        return self.count / self._last if self._last > 0 else 0.0


def _progress(arrivals: Iterable[Arrival], point: _Point) -> Iterator[Arrival]:
    """Show progress, on a terminal only."""
    from tqdm import tqdm

    label = point.policy or "simulating"
    # disable=None: no bar when standard error is not a terminal
    yield from tqdm(arrivals, desc=label, unit=" requests", disable=None, file=sys.stderr)
