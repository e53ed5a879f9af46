"""Flags of ``paceline serve`` that limit what callers may ask for and send."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from paceline.cli.flags.arguments import Parser, bounded_float, bounded_int, size_with_unit
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.http.rate_limits.rates import Rate

__all__ = ["add_limit_options", "limit_settings"]

# flag -> field of Bounds; a flag that is not given leaves the field's default
_BOUNDS: Final = {
    "max_header_size": "max_head_bytes",
    "max_headers": "max_headers",
    "max_json_depth": "max_json_depth",
    "max_json_items": "max_json_items",
    "max_connections": "max_connections",
    "receive_timeout": "receive_timeout",
    "keep_alive_timeout": "keep_alive_timeout",
}


def rate(text: str) -> Rate:
    # imported here, as everywhere in this package: other commands need no server
    from paceline.http.rate_limits.rates import Rate

    try:
        return Rate.parse(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_limit_options(parser: Parser) -> None:
    group = parser.add_argument_group(
        "limits of one API key (docs/operate/limits.md)",
        "Without keys, limits of one client address. A line of the key file may end with limits "
        "for its key: requests=RATE tokens=RATE concurrent=N, each also =unlimited. RATE is "
        "written 60/minute, 5/10s or 1000000/day.",
    )
    group.add_argument("--rate-limit-requests", type=rate, help="requests (default: no limit)")
    group.add_argument(
        "--rate-limit-tokens",
        type=rate,
        help="prompt and output tokens; max_tokens are reserved, and tokens that were not "
        "generated are given back (default: no limit)",
    )
    group.add_argument(
        "--max-concurrent-per-key",
        type=bounded_int(1, 1_000_000),
        help="requests that generate at once (default: no limit)",
    )
    group.add_argument(
        "--rate-limit-storage",
        metavar="URL",
        help="a Redis that counts for several servers, such as redis://host:6379/0; while it does "
        "not answer, each server counts alone (default: each counts alone)",
    )
    bounds = parser.add_argument_group("limits of requests (docs/operate/limits.md)")
    bounds.add_argument(
        "--max-header-size",
        type=size_with_unit,
        help="size of the request line and all headers, at least 1KiB (default 64KiB)",
    )
    bounds.add_argument(
        "--max-headers", type=bounded_int(8, 100_000), help="headers of one request (default 128)"
    )
    bounds.add_argument(
        "--max-json-depth",
        type=bounded_int(1, 64),
        help="nesting of lists and objects in a JSON body (default 64)",
    )
    bounds.add_argument(
        "--max-json-items",
        type=bounded_int(16, 2**31),
        help="entries in all lists and objects of a JSON body (default 500000)",
    )
    bounds.add_argument(
        "--max-connections",
        type=bounded_int(1, 1_000_000),
        help="connections open at once; fewer if the system allows fewer open files (default 4096)",
    )
    bounds.add_argument(
        "--receive-timeout",
        type=bounded_float(0.0),
        metavar="SECONDS",
        help="time for a request to arrive, plus one second for every 4KiB of it; 0: no limit "
        "(default 60)",
    )
    bounds.add_argument(
        "--keep-alive-timeout",
        type=bounded_float(0.0),
        metavar="SECONDS",
        help="close a connection that is idle for this long; behind a proxy give more than the "
        "proxy's limit, or requests may meet a closing connection (default 120)",
    )
    web = parser.add_argument_group("access (docs/operate/security.md)")
    web.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="allow web pages of this origin, such as https://example.org, or * for all, to send "
        "requests and read answers; may be given several times (default: none)",
    )
    web.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="answer only to this Host header; *.NAME: any subdomain; may be given several times "
        "(default: any)",
    )
    web.add_argument(
        "--no-ui", dest="ui", action="store_false", help="do not serve the page at /ui"
    )
    web.add_argument(
        "--ui-dir",
        type=Path,
        metavar="PATH",
        help="serve the page from this folder and read its files for each request, for work on "
        "the page (default: the files of the package)",
    )
    web.add_argument(
        "--no-timeline",
        dest="timeline",
        action="store_false",
        help="do not record the engine's steps for the page's timeline",
    )
    web.add_argument(
        "--timeline-history",
        type=size_with_unit,
        default=8 * 2**20,
        help="memory for past steps in the page's timeline: about ten minutes of a busy engine, "
        "hours of a quiet one (default 8MiB)",
    )
    web.add_argument(
        "--share-prefix-cache",
        action="store_true",
        help="let callers with different keys share cached prompt prefixes: faster if they have a "
        "system prompt in common, but answer times reveal the prompts of other tenants",
    )


def limit_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return fields of ServerConfig. Raises ConfigError."""
    from paceline.http.bounds import Bounds
    from paceline.http.rate_limits.rates import KeyLimits

    given = {name: getattr(args, flag) for flag, name in _BOUNDS.items()}
    return {
        "limits": KeyLimits(
            requests=args.rate_limit_requests,
            tokens=args.rate_limit_tokens,
            concurrent=args.max_concurrent_per_key,
        ),
        "rate_limit_storage": args.rate_limit_storage,
        "bounds": Bounds(**{name: value for name, value in given.items() if value is not None}),
        "cors_origins": tuple(args.cors_origin),
        "allowed_hosts": tuple(args.allowed_host),
        "ui": args.ui,
        "ui_dir": args.ui_dir,
        "timeline_history": args.timeline_history if args.ui and args.timeline else 0,
        "share_prefix_cache": args.share_prefix_cache,
    }
