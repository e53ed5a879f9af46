"""How many tasks with exact checkers the default settings of a server answer well."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any, Final

from benchmarks.cascade.tasks import KINDS, make_labels
from benchmarks.common.questions import share
from benchmarks.common.server import PacelineServer
from benchmarks.front_door.loops import MODEL, ask
from paceline.bench.calibrate.checkers import quality

__all__ = ["measure_tasks"]

_COUNT: Final = 510
# seeds of the tasks, which settings are chosen by and which figures are of
_OPEN_SEED: Final = 2
_SEED: Final = 3
_CONCURRENT: Final = 8


def measure_tasks(
    folder: Path, *, every: int = 1, flags: Sequence[str] = (), only_open: bool = False
) -> dict[str, Any]:
    """Ask the tasks once each, and return the share of good answers, with its interval."""
    labels = make_labels(_COUNT // every, tuple(KINDS), _OPEN_SEED if only_open else _SEED)
    with (
        PacelineServer(MODEL, *flags, log=folder / "log") as server,
        ThreadPoolExecutor(_CONCURRENT) as pool,
    ):
        bodies = ({"messages": each.chat, "max_tokens": each.max_tokens} for each in labels)
        answers = list(pool.map(lambda body: ask(server.port, body | {"seed": 1}), bodies))
    good = [quality(each, answer) == 1.0 for each, answer in zip(labels, answers, strict=True)]
    by_kind = defaultdict(list)
    for label, is_good in zip(labels, good, strict=True):
        by_kind[label.kind].append(is_good)
    for kind, found in by_kind.items():
        print(f"{kind:16}{mean(found):6.1%} of {len(found)}")
    whole = share(good)
    print(f"{whole.share:.1%} of {len(good)} tasks are answered well "
          f"({whole.low:.1%} to {whole.high:.1%})")  # fmt: skip
    return {"share": round(whole.share, 4), "interval": [round(v, 4) for v in whole[1:]]}
