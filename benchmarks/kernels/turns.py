"""Comparison of levels of the native kernels: the same work in turns, by processor time.

Method. One thread, whose processor time is measured, so that other work on the machine affects the
levels only by its use of caches, memory and clock. A round computes the work with each level in
turn, A B A B; figures are the least time of all rounds, and ``ratio``, the median over the rounds
of the first level's rate over the other's in the same round.

Products: shapes of SmolLM2-135M and 1.7B, weights from memory (``benchmarks.kernels``), in
multiply-adds a second and as a share of the level's instructions' peak between registers on one
thread. Steps: SmolLM2-135M's shape, random weights: decode of 1, 8 and 64 sequences at context
192 and a prompt of 512 tokens.

``ISA=avxvnni,avx2 make bench NAME=kernels`` runs it; PARTS=products,steps and FORMATS=int8/int8,...
choose, QUICK=1 takes fewer rounds. The last line is JSON.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from benchmarks.common.parts import chosen
from benchmarks.kernels.model import CONTEXT, WEIGHT_BYTES, Step, make_model
from paceline.backends.native.single_kernels import PackedMatrix, peak_rate, products_seconds
from paceline.bench.machine import machine

__all__ = ["Times", "main", "take_turns"]

PARTS: Final = ("products", "steps")
# three times the last-level cache of the first machines measured
COPIES_MB = 96
SHAPES: Final = ((576, 1536), (2048, 8192))
ROWS: Final = (1, 4, 8, 16, 32, 64)
PROMPT: Final = 512
# name: sequences, tokens of each, length at the end
STEPS: Final = {
    **{f"decode {count}": (count, 1, CONTEXT) for count in (1, 8, 64)},
    f"prompt {PROMPT}": (1, PROMPT, PROMPT),
}
DTYPES: Final = ("int8", "q4")
FORMATS: Final = ("int8/int8", "int8/bfloat16", "q4/int8")
ROUNDS: Final = 5 if os.environ.get("QUICK") else 15

# seconds of processor time by level, a figure for each round
Times = Mapping[str, Sequence[float]]


def take_turns(works: Mapping[str, Callable[[], object]], rounds: int) -> Times:
    """Measure the processor time of each work, in turns. The first round, with cold caches, is left
    out."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds + 1):
        for name, work in works.items():
            began = time.process_time()
            work()
            if turn:
                times[name].append(time.process_time() - began)
    return times


def ratios(times: Times) -> dict[str, float]:
    """Return the ratio of the first level's rate to that of each other level."""
    (_, mine), *others = times.items()
    return {
        name: round(statistics.median(b / a for a, b in zip(mine, theirs, strict=True)), 3)
        for name, theirs in others
    }


def products(levels: Sequence[str]) -> dict[str, Any]:
    """Print and return rates of products."""
    random = np.random.default_rng(0)
    peaks = {(isa, dtype): peak_rate(dtype, 1, isa) for isa in levels for dtype in DTYPES}
    results: dict[str, Any] = {}
    for isa in levels:
        print(f"peak of {isa}: " + ", ".join(f"{d} {peaks[isa, d] / 1e9:.0f}" for d in DTYPES))
    head = "".join(f"{isa:>20}" for isa in levels) + "".join(f"{f'/ {b}':>12}" for b in levels[1:])
    print(f"\n{'products, GMAC/s (share)':<30}{head}")
    for (columns, outputs), dtype in itertools.product(SHAPES, DTYPES):
        weights = random.standard_normal((outputs, columns), dtype=np.float32)
        size = weights.size * WEIGHT_BYTES[dtype]
        count = max(1, round(COPIES_MB * 1e6 / size))
        packed = {
            isa: [PackedMatrix(weights, dtype, isa=isa) for _ in range(count)] for isa in levels
        }
        for rows in ROWS:
            x = random.standard_normal((rows, columns), dtype=np.float32)
            times = take_turns(
                {isa: partial(products_seconds, of, x) for isa, of in packed.items()}, ROUNDS
            )
            found: dict[str, Any] = {"ratio": ratios(times)}
            for isa, taken in times.items():
                rate, peak = weights.size * rows * count / min(taken), peaks[isa, dtype]
                found[isa] = {
                    "gmac_s": round(rate / 1e9, 1),
                    "share": round(rate / (peak or rate), 3),
                }
            results[f"{dtype} {columns} x {outputs} M={rows}"] = found
            line = "".join(
                f"{found[isa]['gmac_s']:>13.1f} {found[isa]['share']:>6.0%}" for isa in levels
            )
            line += "".join(f"{value:>11.2f}x" for value in found["ratio"].values())
            print(f"{f'{columns} x {outputs}':<16}{dtype:<8}{f'M={rows}':<6}{line}", flush=True)
        for matrix in itertools.chain(*packed.values()):
            matrix.close()
    return results


def steps(levels: Sequence[str], formats: Sequence[str]) -> dict[str, Any]:
    """Print and return milliseconds of whole steps, and of their parts."""
    results: dict[str, Any] = {}
    head = "".join(f"{isa:>14}" for isa in levels) + "".join(f"{f'/ {b}':>12}" for b in levels[1:])
    print(f"\n{'steps, ms':<30}{head}")
    for name in formats:
        dtype, kv_dtype = name.split("/")
        models = {isa: make_model(dtype, kv_dtype, 1, isa=isa) for isa in levels}
        for step, shape in STEPS.items():
            works = {isa: Step(model, *shape) for isa, model in models.items()}
            times = take_turns(works, ROUNDS if shape[0] * shape[1] < 64 else ROUNDS // 2 + 1)
            found: dict[str, Any] = {"ratio": ratios(times)}
            found |= {isa: {"ms": round(min(taken) * 1e3, 3)} for isa, taken in times.items()}
            results[f"{name} {step}"] = found
            line = "".join(f"{found[isa]['ms']:>14.2f}" for isa in levels)
            line += "".join(f"{value:>11.2f}x" for value in found["ratio"].values())
            print(f"{name:<16}{step:<14}{line}", flush=True)
        for model in models.values():
            model.close()
    return results


def main(levels: Sequence[str]) -> int:
    """Compare the first level with the others."""
    parts = chosen(PARTS)
    formats = (os.environ.get("FORMATS") or ",".join(FORMATS)).split(",")
    about = machine()
    report: dict[str, Any] = {"bench": "kernel_turns", "machine": about, "levels": levels}
    print(f"{about['cpu']}, load {about['load']}: one thread's processor time, {ROUNDS} rounds")
    if "products" in parts:
        report["products"] = products(levels)
    if "steps" in parts:
        report["steps"] = steps(levels, formats)
    print(json.dumps(report))
    return 0
