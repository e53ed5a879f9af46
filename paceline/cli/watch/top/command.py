"""The command: flags, the loop, output for users or programs."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from paceline.cli.flags.arguments import Parser, bounded_float
from paceline.cli.watch.top.watch import Seen, Source, Watch
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["add_parser"]

_EPILOG = """\
examples:
  paceline top                                  the server on this machine, port 8000
  paceline top gpu1:8000 --interval 5
  paceline top http://127.0.0.1:9400            a --metrics-port: answers while the server is busy
  paceline top http://127.0.0.1:8080            a gateway: a row for each of its engines
  paceline top gpu1:8000 gpu2:8000              a row for each server
  paceline top --once                           one frame, on any terminal
  paceline top --json | jq .running             an object per interval, for programs

A server with API keys requires one of scope admin: PACELINE_API_KEY=... paceline top. That key is
sent to every address. Ctrl-C ends the command.
"""


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "top",
        help="watch running servers and gateways",
        description="Show what a running server does: its batch, its queue and what blocks it, "
        "attainment, KV cache, step times. For a gateway: its engines, and the spending of keys.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "addresses",
        nargs="*",
        metavar="ADDRESS",
        help="host:port or URL of a server, its --metrics-port or a gateway, or several of them "
        "(default http://127.0.0.1:8000)",
    )
    parser.add_argument(
        "--interval",
        type=bounded_float(0.05, 3600.0),
        default=1.0,
        metavar="SECONDS",
        help="seconds between two readings, over which rates are computed (default 1)",
    )
    parser.add_argument("--once", action="store_true", help="print one frame and exit")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per line, with plain values"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    key = os.environ.get("PACELINE_API_KEY", "")
    addresses = dict.fromkeys(args.addresses or ["http://127.0.0.1:8000"])
    watches = [Watch(Source(address, key)) for address in addresses]
    with ThreadPoolExecutor(len(watches)) as pool:
        look = _Look(watches, pool)
        seen = look.first()
        if args.json:
            while True:
                time.sleep(args.interval)
                print(json.dumps(_plain(look.strict())), flush=True)
                if args.once:
                    return 0
        return _show(look, seen, args.interval, once=args.once)


class _Look:
    """Reader of all addresses in parallel, so that an unreachable one does not delay the others."""

    def __init__(self, watches: Sequence[Watch], pool: ThreadPoolExecutor) -> None:
        self._watches, self._pool = watches, pool

    def first(self) -> list[Seen]:
        """Read for the first time. Raises ConfigError where no address answers."""
        if len(self._watches) == 1:
            return [self._watches[0].look()]
        seen = self.again()
        if all(each.frame is None for each in seen):
            raise ConfigError("; ".join(each.problem for each in seen))
        return seen

    def again(self) -> list[Seen]:
        if len(self._watches) == 1:
            # on this thread, so that Ctrl-C interrupts it at once
            return [self._watches[0].look_again()]
        return list(self._pool.map(Watch.look_again, self._watches))

    def strict(self) -> list[Seen]:
        """Read for programs. Raises ConfigError where the only address does not answer."""
        return [self._watches[0].look()] if len(self._watches) == 1 else self.again()


def _plain(seen: Sequence[Seen]) -> dict[str, Any]:
    """Return the frame of a single address, or a frame for each of several."""
    if len(seen) == 1:
        assert seen[0].frame is not None, "it has answered, or the command has ended"
        return asdict(seen[0].frame)
    return {
        "addresses": {
            each.address: {
                "kind": each.kind,
                "problem": each.problem,
                "frame": None if each.frame is None else asdict(each.frame),
            }
            for each in seen
        }
    }


def _render(seen: Sequence[Seen]) -> RenderableType:
    from paceline.cli.watch.top.gateway_view import render_fleet
    from paceline.cli.watch.top.view import render
    from paceline.server.observability.snapshot.frame import Frame

    (first, *more) = seen
    if not more and isinstance(first.frame, Frame):
        return render(first.frame, first.url, first.problem)
    return render_fleet(seen)


def _show(look: _Look, seen: Sequence[Seen], interval: float, *, once: bool) -> int:
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError:
        raise ConfigError(
            "frames need the package rich: pip install 'paceline[top]'; --json needs nothing"
        ) from None

    console = Console()
    if once:
        time.sleep(interval)
        console.print(_render(look.strict()))
        return 0
    with Live(_render(seen), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            live.update(_render(look.again()), refresh=True)
