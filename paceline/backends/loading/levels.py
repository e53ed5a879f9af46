"""Figures measured of the native kernels on each level of instructions, and choices by them.

A level is a variant of the kernels: a name of ``native.variants()``. ``levels.json`` next to this
file is written by ``make bench NAME=levels ARGS=--write``: for every level how long steps of a
model take in each pair of formats, whether other rows of a batch change a row, and what the
accuracy gate (docs/understand/accuracy.md) says of the pair. It is data of the package, not of the
machine: nothing is timed at a start, so the same file on the same level always gets the same
formats.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paceline.errors import ConfigError

__all__ = ["NEAR", "PATH", "STEADY", "Measured", "fastest", "measured", "parse", "preferred"]

PATH: Final = Path(__file__).parent / "levels.json"
# formats whose steps take at most this much longer than the fastest's count as equally fast:
# another run of the benchmark may order them otherwise
NEAR: Final = 1.05
# A rounding step of bfloat16. Sums taken in another order drift by some 1e-6 of the largest logit,
# by some 1e-3 where activations are rounded to bfloat16 on the way; other roundings of the weights
# drift by 1e-2.
STEADY: Final = 2.0**-8


@dataclass(frozen=True, slots=True)
class Measured:
    """A pair of formats on one level."""

    # formats of the weights and the KV cache, as --dtype and --kv-dtype name them
    weights: str
    kv: str
    # milliseconds by step; the pairs of a level have the same steps
    steps_ms: Mapping[str, float]
    # mean KL(float32, format), nats; the larger of the figures of both ways of reading
    kl: float
    # whether the pair passes the accuracy gate
    passes: bool
    # largest difference between a row's logits alone and in a batch, as a share of the largest
    # logit
    drift: float = 0.0

    @property
    def steady(self) -> bool:
        """Whether an answer does not depend on the rest of the batch, except for sums rounded in
        another order."""
        return self.drift <= STEADY

    @property
    def cost(self) -> float:
        """Geometric mean of the steps' times, so that each step weighs alike."""
        return math.exp(math.fsum(map(math.log, self.steps_ms.values())) / len(self.steps_ms))


def fastest(pairs: Iterable[Measured]) -> Measured:
    """Return the fastest pair; of equally fast ones (``NEAR``) the one closest to float32.

    Raises ValueError for no pairs.
    """
    known = list(pairs)
    limit = NEAR * min(pair.cost for pair in known)
    return min((pair for pair in known if pair.cost <= limit), key=lambda pair: pair.kl)


def parse(table: Mapping[str, Any]) -> dict[str, tuple[Measured, ...]]:
    """Return the table's pairs by level: those that were both timed and judged.

    Raises KeyError or ValueError for anything that is not such a table.
    """
    levels: dict[str, tuple[Measured, ...]] = {}
    for level, entry in table.items():
        pairs = []
        for name, figures in entry["formats"].items():
            if "steps_ms" not in figures or "passes" not in figures:
                continue
            weights, kv = name.split("/")
            steps = {step: float(value) for step, value in figures["steps_ms"].items()}
            if not steps or min(steps.values()) <= 0:
                raise ValueError(f"{level}: {name} has no times above zero")
            pairs.append(
                Measured(weights, kv, steps, figures["kl"], figures["passes"], figures["drift"])
            )
        if len({frozenset(pair.steps_ms) for pair in pairs}) > 1:
            raise ValueError(f"{level}: formats differ in the steps that were timed")
        levels[level] = tuple(pairs)
    return levels


@functools.cache
def _table() -> dict[str, tuple[Measured, ...]]:
    return parse(json.loads(PATH.read_text()))


@functools.cache
def _machines() -> dict[str, Any]:
    """Return the machine that each level was timed on. Levels without a processor model are left
    out, since hypervisors give many processors the same name."""
    on = {level: entry["machine"] for level, entry in json.loads(PATH.read_text()).items()}
    return {
        level: (about["cpu"], about["model"], about["cores"])
        for level, about in on.items()
        if about.get("model")
    }


def preferred(levels: Sequence[str], suits: Callable[[str, Measured], bool]) -> tuple[str, ...]:
    """``levels``, best first, from the first one on that no lesser one was measured to beat.

    A level counts by the fastest of its pairs that suits it. Levels are compared where both were
    timed on one kind of machine, and one beats the other by more than ``NEAR``. A level without
    figures keeps its place. The last one, plain C++, is not compared.

    Args:
        suits: called with a level and one of its pairs.
    """
    table, machines = _table(), _machines()

    def cost(level: str) -> float:
        pairs = table.get(level, ())
        return min((pair.cost for pair in pairs if suits(level, pair)), default=math.inf)

    best = 0
    for place in range(1, len(levels) - 1):
        one, other = levels[best], levels[place]
        alike = one in machines and machines[one] == machines.get(other)
        if alike and cost(other) * NEAR < cost(one) < math.inf:
            best = place
    return tuple(levels[best:])


def measured(levels: Sequence[str]) -> tuple[str, tuple[Measured, ...]]:
    """The first of ``levels`` that was measured, and its pairs of formats.

    Args:
        levels: levels that run on this machine, best first. A level without figures, because no
            such processor was at hand, is assumed to order formats as the next one does.

    Raises ConfigError where none of them was measured.
    """
    table = _table()
    for level in levels:
        if table.get(level):
            return level, table[level]
    raise ConfigError(
        f"nothing was measured of {', '.join(levels)}, so auto cannot choose formats: name them "
        "with --dtype and --kv-dtype"
    )
