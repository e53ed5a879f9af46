"""``paceline trace``: a running server's recent activity, as a file for Perfetto."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

from paceline.cli.flags.arguments import Parser, bounded_float
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.timeline.model import Model

__all__ = ["add_parser"]

_EPILOG = """\
examples:
  paceline trace                                the last minute of the server on this machine
  paceline trace gpu1:8000 --seconds 600 -o slow.json.gz

Open the file in https://ui.perfetto.dev, which reads it on your computer and uploads nothing.
A server with API keys requires one of scope admin: PACELINE_API_KEY=... paceline trace.
"""
_TIMEOUT: Final = 30.0
# far above any sensible value of the server's own limit
_MAX_BYTES: Final = 512 * 2**20


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "trace",
        help="save the last minute (--seconds) of a running server, for Perfetto",
        description="Save a running server's latest steps and their requests as a trace file.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "address",
        nargs="?",
        default="http://127.0.0.1:8000",
        metavar="ADDRESS",
        help="host:port or URL of the server (default http://127.0.0.1:8000)",
    )
    parser.add_argument(
        "--seconds",
        type=bounded_float(0.0, 999_999.0),
        default=60.0,
        metavar="SECONDS",
        help="how many seconds back, as far as the server's --timeline-history reaches (default "
        "60)",
    )
    parser.add_argument(
        "--model", metavar="NAME", help="of a server of several models (default: its first)"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("paceline-trace.json.gz"),
        help="output file; compressed if it ends in .gz (default paceline-trace.json.gz)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from paceline.cli.watch.top.watch import fetch
    from paceline.timeline.chrome import trace_of, write_trace

    url = args.address if "://" in args.address else f"http://{args.address}"
    url = f"{url.rstrip('/')}/ui/api/timeline?seconds={args.seconds:.3f}"
    if args.model is not None:
        url += f"&{urlencode({'model': args.model})}"
    data = fetch(url, os.environ.get("PACELINE_API_KEY", ""), _TIMEOUT, _MAX_BYTES)
    steps: list[Any] = []
    ended: list[Any] = []
    model = _read(data, steps, ended)
    trace = trace_of(steps, [*ended, *model.requests.values()], now=model.now)
    write_trace(trace, args.output)
    left_out = trace["otherData"]["left_out"]
    print(
        f"{args.output}: {len(steps)} steps, {len(ended)} requests ended, {len(model.requests)} "
        "still running"
        + (f"; the oldest {left_out} slices were left out" if left_out else "")
        + (f"; {len(model.gaps)} gaps" if model.gaps else "")
    )
    return 0


def _read(data: bytes, steps: list[Any], ended: list[Any]) -> Model:
    """Build a model. Raises ConfigError for data that is no timeline of this version."""
    from paceline.timeline.codec import Decoder
    from paceline.timeline.events import VERSION
    from paceline.timeline.model import Model

    model, decoder = Model(steps.append, ended.append), Decoder()
    for frame in decoder.feed(data):
        model.take(frame)
    version = model.hello.get("version")
    if decoder.lost or version != VERSION:
        raise ConfigError(
            f"the timeline has version {version}, not {VERSION}: does another release run there?"
        )
    return model
