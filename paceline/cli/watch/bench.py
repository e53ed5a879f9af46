"""``paceline bench``: send load to a running server and report the results."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from paceline.cli.flags.arguments import Parser, bounded_float, bounded_int
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.bench.account import Report

__all__ = ["add_parser"]

_EPILOG = """\
examples:
  paceline bench --rate 4 --num-requests 200 --slo-ttft-ms 1000
  paceline bench --url http://gpu1:8000 --concurrency 64 --duration 60
  paceline bench --rate 8 --arrivals bursty --input-len 'lognormal(1020,0.8)' \\
      --output-len 'uniform(50,200)' --html report.html
  paceline bench --trace azure.csv --send-slo --slo-ttft-ms 1000 \\
      --output run.json

Any server with OpenAI's streaming chat or completions will do; docs/use/bench.md says what the
figures mean. A key is read from PACELINE_API_KEY or OPENAI_API_KEY. The exit code is 1 if no
request succeeded. Ctrl-C ends a run early, with a report of the requests that had ended.
"""
_DAY_MS: Final = 86_400e3
_KEYS: Final = ("PACELINE_API_KEY", "OPENAI_API_KEY")


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "bench",
        help="send load to any OpenAI-compatible server and measure it",
        description="Measure latencies, throughput and attainment of a running server.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="URL of the server; without a path, its /v1 (default http://127.0.0.1:8000)",
    )
    parser.add_argument(
        "--model",
        default="",
        metavar="NAME",
        help="model name; default: the first that the server lists",
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="visible to other users here: prefer PACELINE_API_KEY or OPENAI_API_KEY",
    )
    parser.add_argument(
        "--endpoint",
        choices=("chat", "completions"),
        default="chat",
        help="chat (default) or completions",
    )
    group = parser.add_argument_group(
        "when requests are sent (one of --rate, --concurrency, --trace)"
    )
    group.add_argument(
        "--rate",
        type=bounded_float(1e-6, 1e6),
        metavar="N",
        help="requests per second, however fast the server answers (open loop)",
    )
    group.add_argument(
        "--concurrency",
        type=bounded_int(1, 100_000),
        help="requests at once; each is followed by the next when it ends (closed loop)",
    )
    group.add_argument(
        "--arrivals",
        choices=("poisson", "bursty", "constant"),
        help="gaps between requests at --rate: exponential (default), gamma with --cv, or equal",
    )
    group.add_argument(
        "--cv",
        type=bounded_float(0.0, 100.0),
        metavar="X",
        help="coefficient of variation of bursty gaps (default 3)",
    )
    group.add_argument(
        "--num-requests", type=bounded_int(1), help="default: 100, or the whole trace"
    )
    group.add_argument(
        "--duration",
        type=bounded_float(1e-3, 1e6),
        metavar="SECONDS",
        help="stop sending after this time, then wait for running requests",
    )
    group = parser.add_argument_group("what is sent")
    group.add_argument(
        "--input-len",
        metavar="TOKENS",
        help="tokens of prompts: 256 (default), uniform(LOW,HIGH), lognormal(MEDIAN,SIGMA), ...",
    )
    group.add_argument("--output-len", metavar="TOKENS", help="max_tokens, likewise (default 128)")
    group.add_argument(
        "--trace",
        default="",
        metavar="SPEC",
        help="times and lengths from a file that paceline simulate reads, or a description such "
        "as clients:...; with --rate or --concurrency only its lengths",
    )
    group.add_argument(
        "--prompts",
        type=Path,
        help="JSON lines with prompt or messages, and other fields such as temperature, sent in "
        "turn",
    )
    group.add_argument("--ignore-eos", action="store_true", help="send ignore_eos (an extension)")
    group.add_argument(
        "--extra-body", default="{}", metavar="JSON", help="further fields for every request"
    )
    group = parser.add_argument_group("targets")
    for name, text in (
        ("ttft", "to the first token"),
        ("tpot", "per token after the first"),
        ("e2e", "to the last token"),
    ):
        group.add_argument(
            f"--slo-{name}-ms", type=bounded_float(1e-3, _DAY_MS), metavar="MS", help=text
        )
    group.add_argument("--send-slo", action="store_true", help="send the targets too, as slo")
    group = parser.add_argument_group("the run")
    group.add_argument(
        "--seed",
        type=bounded_int(0),
        default=0,
        help="seed of times, lengths and prompts; prompts of an earlier run with the same seed "
        "may still be in the server's prefix cache (default 0)",
    )
    group.add_argument("--warmup", type=bounded_int(0), default=0, help="requests to warm up")
    group.add_argument(
        "--timeout",
        type=bounded_float(1e-3, 86_400.0),
        default=600.0,
        metavar="SECONDS",
        help="longest time of a request (default 600)",
    )
    group.add_argument("--json", action="store_true", help="print JSON instead of a table")
    group.add_argument(
        "--output",
        type=Path,
        help="file for JSON with the times of every request, this machine and the settings",
    )
    group.add_argument("--html", type=Path, help="file for a page with plots")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import asyncio

    from paceline.bench.account import make_report
    from paceline.bench.drive import Server, drive, prepare
    from paceline.bench.plan import Bodies, PromptFile, Words
    from paceline.http.event_loop import new_event_loop

    plan = _plan(args)
    server = Server.parse(args.url, args.api_key if args.api_key is not None else _key())
    bodies = Bodies(
        args.model,
        args.endpoint,
        Words(args.seed, plan.prefix_block),
        prompts=None if args.prompts is None else PromptFile(args.prompts),
        ignore_eos=args.ignore_eos,
        send_slo=args.send_slo,
        extra=_fields(args.extra_body),
    )
    _allow_connections()

    async def both() -> tuple[str, Any]:
        ready = await prepare(server, bodies, warmup=args.warmup, timeout=args.timeout)
        with _Progress() as progress:
            return ready.model, await drive(
                server, plan, ready, timeout=args.timeout, progress=progress
            )

    began = time.time()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        model, found = runner.run(both())
    report = make_report(found.outcomes, name=model, lags=found.lags, interrupted=found.interrupted)
    settings = _settings(args) | {"model": model, "workload": plan.name}
    _write(args, report, settings, began)
    if args.json:
        figures = report.as_json()
        del figures["requests"]
        print(json.dumps(figures))
    else:
        print(report.table())
    if report.interrupted:
        return 130
    return 0 if report.ok else 1


def _plan(args: argparse.Namespace) -> Any:
    from paceline.bench.plan import ARRIVALS, Plan

    if args.rate is None and (args.arrivals is not None or args.cv is not None):
        raise ConfigError("--arrivals and --cv need an open loop: give --rate too")
    if args.cv is not None and args.arrivals not in (None, "bursty"):
        raise ConfigError(f"--cv is for --arrivals bursty, not {args.arrivals}")
    if args.trace and (args.input_len or args.output_len):
        raise ConfigError("--trace sets the lengths: leave out --input-len and --output-len")
    arrivals = args.arrivals or ("poisson" if args.cv is None else "bursty")
    return Plan.make(
        rate=args.rate,
        concurrency=args.concurrency,
        cv=ARRIVALS[arrivals] if args.cv is None else args.cv,
        trace=args.trace,
        input_len=args.input_len or "256",
        output_len=args.output_len or "128",
        number=args.num_requests,
        duration=args.duration,
        ttft=_seconds(args.slo_ttft_ms),
        tpot=_seconds(args.slo_tpot_ms),
        e2e=_seconds(args.slo_e2e_ms),
        seed=args.seed,
    )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _key() -> str:
    return next((os.environ[name] for name in _KEYS if os.environ.get(name)), "")


def _fields(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--extra-body: not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ConfigError('--extra-body: expected an object such as {"temperature": 0}')
    return fields


def _allow_connections() -> None:
    """Allow as many open files as the system does: in overload each request needs a connection."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class _Progress:
    """Progress bar of requests that ended, on a terminal only."""

    def __enter__(self) -> _Progress:
        from tqdm import tqdm

        self._bar = tqdm(desc="bench", unit=" requests", disable=None, file=sys.stderr)
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def __call__(self, _: object) -> None:
        self._bar.update()


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the command's settings, without the key."""
    left_out = ("run", "command", "api_key", "output", "html", "json")
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in sorted(vars(args).items())
        if name not in left_out and value is not None
    }


def _write(
    args: argparse.Namespace, report: Report, settings: dict[str, Any], began: float
) -> None:
    if args.output is None and args.html is None:
        return
    from paceline import __version__
    from paceline.bench.machine import machine
    from paceline.bench.page import bench_page

    about: dict[str, Any] = {
        "paceline_bench": 1,
        "paceline": __version__,
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
        "settings": settings,
        "machine": machine(),
    }
    if args.output is not None:
        _save(args.output, json.dumps(about | report.as_json()) + "\n")
    if args.html is not None:
        shown = settings | {name: about[name] for name in ("began", "paceline")}
        _save(args.html, bench_page(report, shown, about["machine"]))


def _save(path: Path, text: str) -> None:
    from paceline.files import write_private

    try:
        write_private(path, text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error}") from error
