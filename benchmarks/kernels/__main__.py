"""The native CPU path against the ceilings of the machine.

Method: first the ceilings, which are the machine's. Reading: all threads read a buffer of a given
size, best of several passes. Products: on every thread the instructions that the variant
multiplies with, between registers, in a loop of assembly that shares nothing with the kernels
(csrc/ceiling.cpp); for bytes without an instruction of their own, the shortest exact sequence of
them. Where no loop is known (plain C++) only reading counts.

Products of packed weights alone, for shapes of SmolLM2-135M and 1.7B and 1 to 64 rows: multiply-
adds a second, and ``share``, the least time that the ceilings allow (the larger of reading the
weights once and of all products at the instructions' peak) over the time taken. Each is the median
of rounds through as many copies of the matrix as fill COPIES_MB, so that weights come from memory.

Then whole model steps on random weights of SmolLM2-135M's shape (30 layers, hidden 576, 9 query
and 3 KV heads of 64, MLP 1536, vocabulary 49152, tied): decode of 1, 8, 32 and 64 sequences at
context 192, and a prompt of 1024 tokens, with logits for every sequence's last token. A step's
time is the median.

``floor`` of a step is the least time that the ceilings allow for its weights and products, as
above, plus reading the step's keys and values once; attention's own products are not counted.
``share`` is floor / median. Where 4-bit weights are computed as int8 above some rows, that is
counted.

Then choosing tokens from random logits, compared with the sampler that needs PyTorch (on one
thread, as with native kernels), call by call in turns: medians of whole calls for 1 and 64 rows of
SmolLM2's vocabulary. Logits are normal, with a deviation of 6 (a few dozen tokens hold 95 % of the
probability) and of 1 (36,000 tokens do, so that top_p has to look at them all).

Prints a table and, last, one JSON line. QUICK=1 measures fewer steps. ISA=name picks a variant;
ISA=name,other compares several in turns instead (``benchmarks.kernels.turns``).
PARTS=products,steps,sampling chooses.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.common.parts import chosen
from benchmarks.kernels import turns
from benchmarks.kernels.model import CONFIG, CONTEXT, WEIGHT_BYTES, Ceilings, Step, make_model
from benchmarks.kernels.turns import COPIES_MB
from paceline.backends.machine.cpu import choose_threads
from paceline.backends.native import unavailable_reason, variants
from paceline.backends.native.sampling import NativeSampler
from paceline.backends.native.single_kernels import (
    PackedMatrix,
    products_seconds,
)
from paceline.backends.runner.sampling import PreparedSampling, SampleRow
from paceline.bench.machine import machine
from paceline.core.sampling_params import SamplingParams

QUICK = bool(os.environ.get("QUICK"))
# ``benchmarks.kernels.turns`` compares several
ISAS = [name for name in (os.environ.get("ISA") or "").split(",") if name]
ISA = ISAS[0] if ISAS else None
ALL_PARTS = ("products", "steps", "sampling")
BATCHES = (1, 8, 32, 64)
PROMPT = 1024
# weights and KV cache
FORMATS = (
    ("bfloat16", "bfloat16"),
    ("int8", "bfloat16"),
    ("int8", "int8"),
    ("q4", "bfloat16"),
    ("q4", "int8"),
)
# inputs and outputs: up and down of 135M, up of 1.7B, the head of 135M
SHAPES = ((576, 1536), (1536, 576), (2048, 8192), (576, 49152))
PRODUCT_ROWS = (1, 2, 4, 8, 16, 32, 64)
# deviations of the logits, numbers of rows, and their sampling settings
SPREADS = (6.0, 1.0)
SAMPLED_ROWS = (1, 64)
SAMPLING: dict[str, dict[str, Any]] = {
    "temperature 1": {},
    "top_k 50": {"top_k": 50},
    "min_p 0.05": {"min_p": 0.05},
    "top_p 0.95": {"top_p": 0.95},
    "top_p, top_k, min_p": {"top_p": 0.95, "top_k": 50, "min_p": 0.02},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "logprobs 5": {"logprobs": 5},
}


def sampled_rows(settings: dict[str, Any], count: int) -> list[SampleRow]:
    """Return rows with different seeds, 100 tokens of prompt and 200 of output."""
    vocab, tokens = CONFIG.vocab_size, np.arange(300, dtype=np.int32)
    params = (SamplingParams(max_tokens=300, seed=seed, **settings) for seed in range(count))
    return [SampleRow(PreparedSampling(each, vocab), tokens, 100) for each in params]


def in_turns(*calls: Callable[[], object]) -> list[float]:
    """Return the median seconds of each call."""
    times: list[list[float]] = [[] for _ in calls]
    budget = 0.5 if QUICK else 2.0
    while len(times[0]) < 5 or (len(times[0]) < 99 and sum(map(sum, times)) < budget):
        for call, mine in zip(calls, times, strict=True):
            began = time.perf_counter()
            call()
            mine.append(time.perf_counter() - began)
    return [statistics.median(mine) for mine in times]


def sampling_times(threads: int) -> dict[str, dict[str, float]]:
    """Print and return medians of both samplers, in milliseconds."""
    # imported here, as the native path does not need it
    import torch

    from paceline.backends.torch.sampler import sample

    torch.set_num_threads(1)
    config = dataclasses.replace(CONFIG, num_hidden_layers=1, vocab_size=128)
    model = make_model("float32", "float32", threads, config=config, isa=ISA)
    sampler = NativeSampler(model)
    random = np.random.default_rng(2)
    results: dict[str, dict[str, float]] = {}
    print(f"\n{'sampling':<22}{'deviation':>10}{'rows':>6}{'ms':>9}{'torch ms':>10}{'ratio':>7}")
    for spread in SPREADS:
        shape = (max(SAMPLED_ROWS), CONFIG.vocab_size)
        logits = random.normal(0, spread, shape).astype(np.float32)
        likeliest = logits.argmax(-1).astype(np.int32)
        for (name, settings), count in itertools.product(SAMPLING.items(), SAMPLED_ROWS):
            rows, part, known = sampled_rows(settings, count), logits[:count], likeliest[:count]
            tensor = torch.from_numpy(part)
            native, other = in_turns(
                functools.partial(sampler.sample, part, rows, known),
                functools.partial(sample, tensor, rows, known),
            )
            results[f"{name}, deviation {spread:g}, {count} rows"] = {
                "ms": round(native * 1e3, 3),
                "torch_ms": round(other * 1e3, 3),
            }
            print(
                f"{name:<22}{spread:>10g}{count:>6}{native * 1e3:>9.3f}{other * 1e3:>10.2f}"
                f"{other / native:>6.0f}x"
            )
            sys.stdout.flush()
    model.close()
    return results


def show_ceilings(most: Ceilings) -> None:
    """Print the ceilings."""
    print("\nceilings")
    for size, rate in most.bandwidths.items():
        print(f"  read {size:>4} MiB   {rate / 1e9:8.1f} GB/s")
    for dtype, rate in most.rates.items():
        print(f"  {dtype:<14} {rate / 1e9:8.0f} GMAC/s" if rate else f"  {dtype:<14}  not known")


def step_times(step: Step) -> list[float]:
    """Return seconds of a step."""
    times: list[float] = []
    budget = 1.0 if QUICK else 4.0
    while len(times) < 4 or (sum(times) < budget and len(times) < 200):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return times[1:]


def product_rates(threads: int, most: Ceilings) -> dict[str, dict[str, float]]:
    """Print and return multiply-adds per second of products, and their share of the ceilings."""
    random = np.random.default_rng(0)
    results: dict[str, dict[str, float]] = {}
    print(
        f"\n{'products, GMAC/s (share)':<26}" + "".join(f"{f'M = {m}':>13}" for m in PRODUCT_ROWS)
    )
    for (columns, outputs), dtype in itertools.product(
        SHAPES[: 2 if QUICK else None], WEIGHT_BYTES
    ):
        weights = random.standard_normal((outputs, columns), dtype=np.float32)
        size = weights.size * WEIGHT_BYTES[dtype]
        # the threads of the first copy compute all
        copies = [
            PackedMatrix(weights, dtype, threads=threads if i == 0 else 1, isa=ISA)
            for i in range(max(1, round(COPIES_MB * 1e6 / size)))
        ]
        name = f"{columns} x {outputs}"
        print(f"{name:<16}{dtype:<10}", end="")
        for rows in PRODUCT_ROWS:
            x = random.standard_normal((rows, columns), dtype=np.float32)
            times = [products_seconds(copies, x) for _ in range(4 if QUICK else 8)]
            seconds = statistics.median(times[1:]) / len(copies)
            work = weights.size * rows
            peak = most.rates[dtype]
            floor = max(size / most.bandwidth, work / peak if peak else 0.0)
            results[f"{dtype} {name} M={rows}"] = {
                "gmac_s": round(work / seconds / 1e9, 1),
                "share": round(floor / seconds, 3),
            }
            print(
                f"{work / seconds / 1e9:>7.1f} {f'({floor / seconds:.0%})':>5}", end="", flush=True
            )
        print()
        for matrix in copies:
            matrix.close()
    return results


def model_steps(threads: int, most: Ceilings) -> dict[str, dict[str, float]]:
    """Print and return whole steps of the model."""
    results: dict[str, dict[str, float]] = {}
    print(f"\n{'weights':<10}{'kv':<10}{'step':<16}{'median ms':>10}{'floor ms':>10}{'share':>7}")
    for dtype, kv_dtype in FORMATS:
        model = make_model(dtype, kv_dtype, threads, isa=ISA)
        steps = [(f"decode {n} x {CONTEXT}", n, 1, CONTEXT) for n in BATCHES]
        steps.append((f"prompt {PROMPT}", 1, PROMPT, PROMPT))
        for name, sequences, tokens, context in steps:
            rows = sequences * tokens
            median = statistics.median(step_times(Step(model, sequences, tokens, context)))
            floor = most.step_seconds(f"{dtype}/{kv_dtype}", rows, sequences, context)
            share = floor / median
            results[f"{dtype}/{kv_dtype} {name}"] = {
                "ms": round(median * 1e3, 3),
                "floor_ms": round(floor * 1e3, 3),
                "share": round(share, 3),
            }
            print(
                f"{dtype:<10}{kv_dtype:<10}{name:<16}{median * 1e3:>10.2f}{floor * 1e3:>10.2f}"
                f"{share:>7.0%}"
            )
            sys.stdout.flush()
        model.close()
    return results


def main() -> int:
    reason = unavailable_reason()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 1
    unknown = sorted(set(ISAS) - set(variants()))
    if unknown:
        print(f"ISA: {', '.join(unknown)} not among {', '.join(variants())}", file=sys.stderr)
        return 2
    if len(ISAS) > 1:
        return turns.main(ISAS)
    parts = chosen(ALL_PARTS)
    threads = choose_threads(None)
    isa = ISA or variants()[0]
    print(f"{threads} threads, kernels {isa} (usable: {', '.join(variants())})")
    report: dict[str, object] = {
        "bench": "kernels",
        "machine": machine() | {"threads": threads, "isa": isa},
    }
    if {"products", "steps"} & set(parts):
        most = Ceilings.measure(threads, ISA)
        show_ceilings(most)
        report["ceilings"] = most.as_json()
    if "products" in parts:
        report["products"] = product_rates(threads, most)
    if "steps" in parts:
        report["results"] = model_steps(threads, most)
    if "sampling" in parts:
        report["sampling"] = sampling_times(threads)
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
