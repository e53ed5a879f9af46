"""Progress bars on standard error; silent unless it is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["download_progress"]


@contextmanager
def download_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a ``checkpoints.hub.pip_models.Progress`` that draws one bar per stage on a terminal,
    and prints each stage's name once elsewhere. Draws nothing when it is never called."""
    bar: Any = None
    stage_shown = ""

    def show(stage: str, done: int, total: int) -> None:
        nonlocal bar, stage_shown
        if stage != stage_shown:
            stage_shown = stage
            if bar is not None:
                bar.close()
                bar = None
            if not sys.stderr.isatty():
                size = f" {total / 1e6:.0f} MB" if total else ""
                print(f"paceline: {stage}{size}", file=sys.stderr, flush=True)
            else:
                from tqdm import tqdm

                bar = tqdm(
                    total=total or None, desc=stage, unit="B", unit_scale=True, file=sys.stderr
                )
        if bar is not None:
            bar.update(done - bar.n)

    try:
        yield show
    finally:
        if bar is not None:
            bar.close()
