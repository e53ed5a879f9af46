"""The command: flags, the loop, output for people or programs."""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict

from paceline.cli.arguments import Parser, bounded_float
from paceline.cli.top.scrape import Source
from paceline.core.errors import ConfigError
from paceline.server.readings import Frame, Scrape, make_frame, parse_metrics

__all__ = ["add_parser"]

_EPILOG = """\
examples:
  paceline top                                  the server on this machine, port 8000
  paceline top gpu1:8000 --interval 5
  paceline top http://127.0.0.1:9400            a --metrics-port: answers while the server is busy
  paceline top --once                           one frame, on any terminal
  paceline top --json | jq .running             an object per interval, for programs

A server with API keys wants one of scope admin: PACELINE_API_KEY=... paceline top. Ctrl-C ends it.
"""


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "top",
        help="watch a running server",
        description="What a running server does: its batch, its queue and what holds it up, "
        "targets met, KV cache, step times.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "address",
        nargs="?",
        default="http://127.0.0.1:8000",
        metavar="ADDRESS",
        help="host:port or URL of the server or its --metrics-port (default http://127.0.0.1:8000)",
    )
    parser.add_argument(
        "--interval",
        type=bounded_float(0.05, 3600.0),
        default=1.0,
        metavar="SECONDS",
        help="time between two readings, which rates are of (default 1)",
    )
    parser.add_argument("--once", action="store_true", help="print one frame and end")
    parser.add_argument(
        "--json", action="store_true", help="print an object a line, with plain values"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    source = Source(args.address, os.environ.get("PACELINE_API_KEY", ""))
    before = _read(source)
    if args.json:
        while True:
            time.sleep(args.interval)
            after = _read(source)
            print(json.dumps(asdict(make_frame(before, after))), flush=True)
            if args.once:
                return 0
            before = after
    return _show(source, before, args.interval, once=args.once)


def _read(source: Source) -> Scrape:
    now = time.monotonic()
    return parse_metrics(source.fetch(), now)


def _show(source: Source, before: Scrape, interval: float, *, once: bool) -> int:
    from rich.console import Console
    from rich.live import Live

    from paceline.cli.top.view import render

    console = Console()
    if once:
        time.sleep(interval)
        console.print(render(make_frame(before, _read(source)), source.url))
        return 0
    # a server that has just been asked for the first time has done nothing yet
    frame: Frame = make_frame(before, before)
    with Live(render(frame, source.url), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            problem = ""
            try:
                after = _read(source)
            except ConfigError as error:
                # it may come back; what was last seen stays
                problem = str(error)
            else:
                frame, before = make_frame(before, after), after
            live.update(render(frame, source.url, problem), refresh=True)
