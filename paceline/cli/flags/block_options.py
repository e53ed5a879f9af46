"""Flags of ``paceline serve`` for KV blocks that outlive the engine, or come from other engines."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any, Final

from paceline.cli.flags.arguments import bounded_int, memory_size
from paceline.errors import ConfigError

__all__ = ["add_block_options", "block_settings"]

_SIZE: Final = 8 << 30


def add_block_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    group = parser.add_argument_group("KV blocks on disk and at peers")
    group.add_argument(
        "--kv-store",
        type=Path,
        metavar="DIR",
        help="keep computed prompts in this folder, of this process alone: after a restart they "
        "are read instead of computed (docs/operate/prompts-over-restarts.md; default: none)",
    )
    group.add_argument(
        "--kv-store-size",
        type=memory_size,
        metavar="SIZE",
        help="most disk that --kv-store takes; the least recently used go first (default 8GiB)",
    )
    group.add_argument(
        "--kv-port",
        type=bounded_int(0, 65535),
        metavar="PORT",
        help="port of --host at which other engines with the same key ($PACELINE_KV_KEY) fetch "
        "computed prompts; 0 takes a free one; not encrypted (default: none)",
    )


def block_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the engine's settings. Raises ConfigError for a size without a store."""
    if args.kv_store is None and args.kv_store_size is not None:
        raise ConfigError("--kv-store-size has no effect without --kv-store")
    return {
        "kv_store": None if args.kv_store is None else os.path.abspath(args.kv_store.expanduser()),
        "kv_store_bytes": args.kv_store_size or _SIZE,
        "kv_port": args.kv_port,
        "kv_host": args.host,
    }
