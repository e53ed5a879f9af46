"""Flags for files and batches, and the settings made from them."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.flags.arguments import bounded_int, size_with_unit

if TYPE_CHECKING:
    from paceline.server.settings.config import BatchConfig

__all__ = ["add_batch_options", "batch_config"]

OFF = "off"


def add_batch_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("files and batches")
    group.add_argument(
        "--batch-dir",
        metavar="FOLDER",
        help="where files and batches are kept, one server at a time; off: nowhere; default: "
        "paceline/batches/PORT under $XDG_STATE_HOME (~/.local/state), made when first used",
    )
    group.add_argument(
        "--max-file-size",
        type=size_with_unit,
        default=200 * 2**20,
        metavar="SIZE",
        help="a larger file is refused with 413 (default 200MiB)",
    )
    group.add_argument(
        "--batch-storage",
        type=size_with_unit,
        default=10 * 2**30,
        metavar="SIZE",
        help="all files and answers together; beyond that uploads are refused with 413 and batches "
        "pause (default 10GiB)",
    )
    group.add_argument(
        "--max-batch-requests",
        type=bounded_int(1),
        default=50_000,
        metavar="N",
        help="a batch of more requests fails (default 50000)",
    )
    group.add_argument(
        "--batch-concurrency",
        type=bounded_int(1),
        metavar="N",
        help="requests of batches given to the engine at once; default: half of --max-num-seqs",
    )


def batch_config(args: argparse.Namespace, port: int) -> BatchConfig | None:
    """Return the settings of a server that listens on ``port``; None: batches are off."""
    from paceline.server.settings.config import BatchConfig

    if args.batch_dir == OFF:
        return None
    if args.batch_dir is not None:
        folder = Path(args.batch_dir).absolute()
    else:
        state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
        folder = Path(state) / "paceline" / "batches" / str(port)
    return BatchConfig(
        folder=folder,
        required=args.batch_dir is not None,
        max_file_bytes=args.max_file_size,
        max_bytes=args.batch_storage,
        max_requests=args.max_batch_requests,
        concurrency=args.batch_concurrency,
    )
