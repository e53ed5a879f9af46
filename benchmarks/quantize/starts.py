"""Starts of ``paceline serve --dtype q4`` on a model in 16 bits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from benchmarks.common.server import PacelineServer

__all__ = ["starts"]

# within which the command writes its file next to the server
_PATIENCE: Final = 7200.0


def starts(
    model: Path, folder: Path, more: Sequence[str] = (), patience: float = _PATIENCE
) -> dict[str, dict[str, object]]:
    """Return seconds and the ready line of each start: ``alone`` keeps nothing, ``first`` has an
    empty cache of packed weights and serves until the four bits are there, ``second`` has them.

    Args:
        folder: the cache is made in it, and removed.
        more: flags of the server.

    Raises Unavailable where a server does not start, or no four bits are made within ``patience``.
    """
    found: dict[str, dict[str, object]] = {}
    with TemporaryDirectory(dir=folder) as cache:
        for name, flags in (
            ("alone", ()), ("first", ("--packed-cache", "2GiB")),
            ("second", ("--packed-cache", "2GiB")),
        ):  # fmt: skip
            server = PacelineServer(
                str(model), "--dtype", "q4", *flags, *more,
                log=Path(cache) / f"{name}.log", around=("env", f"PACELINE_CACHE={cache}"),
            )  # fmt: skip
            with server:
                line = server.line(r"^paceline ready: .*")[0].split(" - try: ")[0]
                found[name] = {"seconds": round(server.startup, 2), "ready": line}
                if name == "first":
                    done = server.line(r"quantize: .*\.gguf: .* MB, (\d+) s$", patience)
                    found[name]["made_s"] = int(done[1])
    return found
