"""``paceline plan fleet``: simulate fleets until the smallest that meets the targets is found."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.flags.arguments import Parser, bounded_float, bounded_int, parts_of
from paceline.cli.flags.plugins import listed_policies, load_policy
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.sim.plan.fleet import FleetAnswer, FleetOption
    from paceline.sim.step_times.models import ModelShape

__all__ = ["add_model_shape", "add_parser", "given_shapes"]

# exit code where no fleet meets the targets
_NONE_WILL_DO = 1


def add_parser(plans: argparse._SubParsersAction[Parser]) -> None:
    parser = plans.add_parser(
        "fleet",
        help="fewest replicas, and best settings, that meet targets at a load",
        description="Simulate fleets to find the smallest one that meets the targets, for every "
        "value of lists separated by commas.",
    )
    parser.add_argument("--model", metavar="NAME", help="name of a known model, or a checkpoint")
    add_model_shape(parser)
    parser.add_argument(
        "--hardware", metavar="NAME[,NAME]", help="known GPUs; another name lists them"
    )
    parser.add_argument(
        "--step-times",
        metavar="SPEC",
        help="instead of model and hardware, such as recorded:FILE ('paceline simulate --help')",
    )
    parser.add_argument(
        "--workload", required=True, metavar="SPEC", help="docs/understand/simulator.md"
    )
    parser.add_argument(
        "--ttft", metavar="TIME", help="TTFT target of every request, such as 500ms"
    )
    parser.add_argument("--tpot", metavar="TIME", help="TPOT target of every request, such as 50ms")
    parser.add_argument("--deadline", metavar="TIME", help="deadline of every request, such as 30s")
    parser.add_argument(
        "--attainment",
        type=bounded_float(0.01, 1.0),
        default=0.99,
        metavar="SHARE",
        help="share of requests that must meet all targets (default 0.99)",
    )
    parser.add_argument("--gpus", default="1", metavar="N[,N]", help="GPUs per replica (default 1)")
    parser.add_argument(
        "--policy", metavar="NAME[,NAME]", help="default: the recorded engine's, else fcfs"
    )
    parser.add_argument(
        "--max-num-batched-tokens",
        metavar="N[,N]",
        help="default: the recorded engine's, else 2048",
    )
    parser.add_argument("--router", default="least-outstanding", metavar="NAME")
    parser.add_argument(
        "--most", type=bounded_int(1), default=64, help="replicas at most (default 64)"
    )
    parser.add_argument(
        "--price-per-hour", metavar="P[,P]", help="price of one GPU of each --hardware, in order"
    )
    parser.add_argument(
        "--autoscale",
        action="store_true",
        help="also say the number at which a fleet's pool with bounds for its replicas settles",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the workload")
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead")
    parser.set_defaults(run=_run_fleet)


def add_model_shape(parser: argparse.ArgumentParser) -> None:
    """Add the flag that ``given_shapes`` reads."""
    parser.add_argument(
        "--model-shape",
        type=Path,
        help="shapes of further models: a checkpoint's config.json, or entries as in "
        "paceline/sim/step_times/models.json",
    )


def given_shapes(args: argparse.Namespace) -> tuple[ModelShape, ...]:
    """Return the shapes of --model-shape. Raises ConfigError for a malformed file."""
    from paceline.sim.step_times.models import ModelShape

    return ModelShape.read(args.model_shape) if args.model_shape else ()


def _run_fleet(args: argparse.Namespace) -> int:
    from paceline.sim.plan.fleet import best_fleet, settled_size
    from paceline.sim.plan.search import Target
    from paceline.sim.report.table import text_table
    from paceline.sim.workload.base import Workload
    from paceline.sim.workload.shaping import SloMix, with_classes
    from paceline.sim.workload.spec import open_workload, parse_seconds

    policies = listed_policies(args.policy)
    for policy in policies:
        if policy is not None:
            load_policy(policy)
    workload = open_workload(args.workload, seed=args.seed)
    texts = (args.ttft, args.tpot, args.deadline)
    ttft, tpot, deadline = (parse_seconds(text) if text else None for text in texts)
    if any(texts):
        mix = (SloMix("standard", 1.0, ttft, tpot, deadline),)
        source = workload
        workload = Workload(
            source.name, source.prefix_block, lambda: with_classes(source, mix, args.seed)
        )
    budgets: list[int | None] = [None]
    if args.max_num_batched_tokens:
        flag = "--max-num-batched-tokens"
        budgets = [*parts_of(args.max_num_batched_tokens, bounded_int(1), flag)]
    options = [
        replace(option, policy=policy, max_num_batched_tokens=budget, router=args.router)
        for option in _kinds(args)
        for policy in policies
        for budget in budgets
    ]
    unfit: list[tuple[str, str]] = []
    answers = best_fleet(
        options,
        workload,
        Target(args.attainment),
        prefix_block=workload.prefix_block,
        most=args.most,
        on_unfit=lambda option, why: unfit.append((option.name, why)),
    )
    done = 0 if any(answer.found.size is not None for answer in answers) else _NONE_WILL_DO
    settled = {
        answer.option.name: settled_size(
            answer.option, int(answer.found.size), workload, prefix_block=workload.prefix_block
        )
        for answer in answers
        if args.autoscale and answer.found.size is not None
    }
    if args.json:
        found = [
            {
                "option": answer.option.name,
                "replicas": answer.found.size,
                "gpus": answer.gpus,
                "price_per_hour": answer.price_per_hour,
                "tried": answer.found.tried,
                "reason": answer.reason,
                "settles_at": settled.get(answer.option.name),
                "run": answer.found.best.as_json(),
            }
            for answer in answers
        ]
        left_out = [{"option": name, "reason": why} for name, why in unfit]
        print(json.dumps({"plan": "fleet", "answers": found, "left_out": left_out}))
        return done
    head = ["replica", "replicas", "GPUs", "attainment %", "TTFT p99 ms", "TPOT p99 ms"]
    rows = [[*head, "price/h", "per million tokens"]]
    for answer in answers:
        run, size, price = answer.found.best, answer.found.size, answer.price_per_hour
        rows.append(
            [
                answer.option.name,
                _never(answer, args.most) if size is None else f"{size:g}",
                "-" if answer.gpus is None else str(answer.gpus),
                f"{100 * run.attainment:.1f}",
                "-" if run.ttft is None else f"{1e3 * run.ttft.p99:.0f}",
                "-" if run.tpot is None else f"{1e3 * run.tpot.p99:.1f}",
                "-" if price is None else f"{price:.2f}",
                "-" if price is None or run.cost is None else f"{run.cost:.2f}",
            ]
        )
    print(text_table(rows))
    for answer in answers:
        if answer.reason:
            print(f"{answer.option.name}: no fleet suffices: {answer.reason}")
    for name, size in settled.items():
        print(f"{name}: a pool that grows and shrinks settles at {size} under this load")
    for name, why in unfit:
        print(f"{name}: left out: {why}")
    return done


def _kinds(args: argparse.Namespace) -> list[FleetOption]:
    """Return the kinds of replica, with their prices."""
    from paceline.sim.plan.fleet import FleetOption
    from paceline.sim.plan.models import find_model
    from paceline.sim.step_times.roofline import HardwareCard
    from paceline.sim.step_times.spec import open_step_times

    if bool(args.step_times) == bool(args.model and args.hardware):
        raise ConfigError("needs either --step-times, or --model and --hardware")
    gpus = parts_of(args.gpus, bounded_int(1), "--gpus")
    names = [args.step_times] if args.step_times else args.hardware.split(",")
    prices: list[float | None] = [None] * len(names)
    if args.price_per_hour:
        prices = [*parts_of(args.price_per_hour, bounded_float(0.0), "--price-per-hour")]
    if len(prices) != len(names):
        raise ConfigError(
            f"--price-per-hour has {len(prices)} prices for {len(names)} kinds of hardware"
        )
    if args.step_times:
        if gpus != [1]:
            raise ConfigError("--gpus: --step-times are those of a whole replica")
        fitted = open_step_times(args.step_times, models=given_shapes(args))
        if fitted.config is not None:
            load_policy(fitted.config.scheduler.policy)
        return [FleetOption(args.step_times, fitted.another, price_per_hour=prices[0])]
    model = find_model(args.model, given_shapes(args))
    return [
        FleetOption.of_hardware(HardwareCard.named(name), model, count, price_per_hour=price)
        for name, price in zip(names, prices, strict=True)
        for count in gpus
    ]


def _never(answer: FleetAnswer, most: int) -> str:
    """Say why no size was found: all were tried, or none had to be."""
    return f"more than {most}" if answer.found.tried else "no fleet suffices"
