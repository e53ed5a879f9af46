"""Steps of a model with adapters and without, and steps while adapters are loaded."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.statistics import paired_ratio, percentile
from benchmarks.kernels.model import BLOCK, CONFIG, CONTEXT, make_model
from paceline.backends.machine.cpu import choose_threads
from paceline.backends.native import NativeModel
from paceline.backends.native.adapters import NativeAdapter
from paceline.backends.runner.interface import RowAdapter
from paceline.checkpoints.model.adapter import (
    MODULES,
    AdapterFile,
    AdapterPair,
    AdapterValues,
    module_shapes,
)
from paceline.checkpoints.model.config import ModelConfig
from paceline.checkpoints.open import open_adapter
from paceline.engine.adapters.loading import Slices, yield_to_steps

QUICK: Final = bool(os.environ.get("QUICK"))
PAIRS: Final = 8 if QUICK else 20
RANK: Final = 16
THREADS: Final = choose_threads(int(os.environ["THREADS"]) if os.environ.get("THREADS") else None)
CLOCK: Final = time.thread_time if THREADS == 1 else time.perf_counter
PROMPT: Final = 192
# turns of 100 steps while adapters are loaded, and as many without
LOAD_TURNS: Final = 4 if QUICK else 8
# format of the adapters' values
KEPT: Final = os.environ.get("LORA_DTYPE", "bfloat16")
FORMATS: Final = os.environ.get("FORMATS", "int8/int8,q4/int8").split(",")
# sequences, adapters
CASES: Final = {
    "one_of_one": (1, 1), "eight_of_eight": (8, 8), "sixtyfour_of_eight": (64, 8),
    "sixtyfour_of_sixtyfour": (64, 64),
}  # fmt: skip
BIG: Final = replace(
    CONFIG, vocab_size=49152 // 4, hidden_size=2048, intermediate_size=8192, num_hidden_layers=6,
    num_attention_heads=32, num_key_value_heads=32,
)  # fmt: skip
Values = NDArray[np.float32]


def random_values(config: ModelConfig, seed: int) -> AdapterValues:
    """An adapter as it is read from a file."""
    random = np.random.default_rng(seed)
    pairs: dict[tuple[int, str], AdapterPair] = {}
    for layer in range(config.num_hidden_layers):
        for module, (outputs, inputs) in module_shapes(config, layer).items():
            a = random.standard_normal((RANK, inputs), dtype=np.float32) * np.float32(inputs**-0.5)
            b = random.standard_normal((outputs, RANK), dtype=np.float32) * np.float32(0.1)

            def read(a: Values = a, b: Values = b) -> tuple[Values, Values]:
                return a, b

            shapes = (a.shape, b.shape)
            pairs[layer, module] = AdapterPair(layer, module, ("A", "B"), shapes, 1.0, read)
    return AdapterFile.of(Path("random"), config, pairs).read()


class Rows:
    """One step: each of ``count`` sequences computes ``tokens`` tokens up to ``length``."""

    def __init__(self, model: NativeModel, count: int, tokens: int, length: int) -> None:
        blocks = -(-length // BLOCK)
        random = np.random.default_rng(1)
        self._model, self._tables = model, np.arange(count * blocks).reshape(count, blocks)
        self._starts = np.arange(count + 1) * tokens
        self._positions = np.tile(np.arange(length - tokens, length), count)
        self._ids = random.integers(0, 1000, count * tokens)
        for row in range(count if tokens < length else 0):
            whole = np.arange(length)
            model.forward(
                np.zeros_like(whole), whole, np.array([0, length]), self._tables[row : row + 1],
                whole[-1:],
            )  # fmt: skip

    def __call__(self, adapters: Sequence[RowAdapter | None] | None) -> NDArray[np.float32]:
        return self._model.forward(
            self._ids, self._positions, self._starts, self._tables, self._starts[1:] - 1,
            adapters=adapters,
        )  # fmt: skip

    def alone(self, row: int, adapter: RowAdapter | None) -> NDArray[np.float32]:
        """Compute one of the sequences by itself."""
        first, last = self._starts[row : row + 2]
        return self._model.forward(
            self._ids[first:last], self._positions[first:last], np.array([0, last - first]),
            self._tables[row : row + 1], np.array([last - first - 1]), adapters=[adapter],
        )  # fmt: skip


def seconds(work: Callable[[], object], clock: Callable[[], float] = CLOCK) -> float:
    """Return the seconds of one call."""
    began = clock()
    work()
    return clock() - began


def ratio(
    ours: Callable[[], object], theirs: Callable[[], object], least: float = 0.24
) -> list[float]:
    """Return the ratio of two works: the median of the pairs, and the interval of their mean.

    A pair is the medians of single calls in turns, three of each or as many as fill ``least``
    seconds: what disturbs the machine for longer than a call affects both sides alike, and a call
    that is disturbed by itself counts for neither.
    """
    times: tuple[list[float], list[float]] = ([], [])
    for pair in range(PAIRS + 1):
        found: tuple[list[float], list[float]] = ([], [])
        while len(found[0]) < 3 or sum(map(sum, found)) < least:
            order = ((0, ours), (1, theirs)) if len(found[0]) % 2 else ((1, theirs), (0, ours))
            for side, work in order:
                found[side].append(seconds(work))
        # the first one warms up
        for side in (0, 1) if pair else ():
            times[side].append(statistics.median(found[side]))
    return [round(value, 3) for value in paired_ratio(*times)]


def measure(model: NativeModel, adapters: Sequence[NativeAdapter]) -> dict[str, Any]:
    """The cases of one model; a case without room in the KV cache is left out."""
    found: dict[str, Any] = {}
    uses = [RowAdapter(adapter, 1.0) for adapter in adapters]
    for name, (count, distinct) in CASES.items():
        if distinct > len(uses):
            continue
        rows = Rows(model, count, 1, CONTEXT)
        # rows of one adapter lie next to each other, as ModelRunner sorts them
        chosen = [uses[row * distinct // count] for row in range(count)]
        found[name] = ratio(lambda rows=rows, chosen=chosen: rows(chosen), lambda r=rows: r(None))  # type: ignore[misc]
    prompt = Rows(model, 1, PROMPT, PROMPT)
    found["prompt_192"] = ratio(lambda: prompt(uses[:1]), lambda: prompt(None))
    return found


def identical(model: NativeModel, adapters: Sequence[NativeAdapter]) -> bool:
    """Return whether rows of a mixed step equal those that run alone, bit for bit."""
    rows = Rows(model, 64, 1, CONTEXT)
    uses = [
        RowAdapter(adapters[row % len(adapters)], 1.0) if row % 5 else None for row in range(64)
    ]
    together = rows(uses).copy()
    return all(np.array_equal(rows.alone(row, uses[row])[0], together[row]) for row in range(64))


def write_folder(folder: Path, values: AdapterValues) -> int:
    """Write an adapter as a folder of peft in bfloat16; return its bytes."""
    header, data, begin = {}, [], 0
    for pair, a, b in values.pairs:
        for which, array in (("A", a), ("B", b)):
            stored = (array.view(np.uint32) >> 16).astype("<u2").tobytes()
            name = f"base_model.model.model.layers.{pair.layer}.{pair.module}.lora_{which}.weight"
            span = [begin, begin + len(stored)]
            header[name] = {"dtype": "BF16", "shape": list(array.shape), "data_offsets": span}
            data.append(stored)
            begin = span[1]
    text = json.dumps(header).encode()
    whole = len(text).to_bytes(8, "little") + text + b"".join(data)
    (folder / "adapter_model.safetensors").write_bytes(whole)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK,
              "target_modules": [module.rpartition(".")[2] for module in MODULES]}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return begin


def loading(model: NativeModel) -> dict[str, float]:
    """Loading of a folder by itself, and steps of 8 rows while that goes on."""
    with tempfile.TemporaryDirectory() as name:
        size = write_folder(Path(name), random_values(CONFIG, 99))

        is_computing = False
        slices = Slices(lambda: is_computing)

        def load() -> None:
            slices.begin()
            values = open_adapter(Path(name), CONFIG, pause=slices.pause).read(slices.pause)
            layers = CONFIG.num_hidden_layers
            NativeAdapter(model.handle, layers, values, dtype=KEPT, pause=slices.pause)

        times = [seconds(load, time.perf_counter) for _ in range(1 + 5)][1:]
        rows = Rows(model, 8, 1, CONTEXT)
        found: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(1 + 2 * LOAD_TURNS):
            # of turns with loads and without, since the machine changes; the first one warms up
            stop, is_computing = threading.Event(), turn % 2 == 1

            def load_on(stop: threading.Event = stop) -> None:
                yield_to_steps()
                while not stop.is_set():
                    load()

            thread = threading.Thread(target=load_on)
            if is_computing:
                thread.start()
            taken = [seconds(lambda: rows(None), time.perf_counter) for _ in range(100)]
            stop.set()
            if is_computing:
                thread.join()
            found[is_computing] += taken if turn else []
        quiet, busy = (percentile(found[side], 0.99) for side in (False, True))
    return {
        "load_mb": round(size / 1e6, 1),
        "load_ms": round(statistics.median(times) * 1e3, 1),
        "load_step_ms_p99": round((busy - quiet) * 1e3, 2),
    }


def loaded(model: NativeModel, config: ModelConfig) -> list[NativeAdapter]:
    """Return 64 adapters in memory."""
    layers = config.num_hidden_layers
    return [
        NativeAdapter(model.handle, layers, random_values(config, seed), dtype=KEPT)
        for seed in range(64)
    ]


def steps(kinds: str, isa: str | None) -> dict[str, Any]:
    """Return the figures of one pair of formats."""
    dtype, kv_dtype = kinds.split("/")
    bare = make_model(dtype, kv_dtype, THREADS, isa=isa)
    model = make_model(dtype, kv_dtype, THREADS, isa=isa)
    found: dict[str, Any] = {"isa": model.isa}
    ours, theirs = Rows(model, 8, 1, CONTEXT), Rows(bare, 8, 1, CONTEXT)
    found["base_rows_control"] = ratio(lambda: ours(None), lambda: theirs(None))
    adapters = loaded(model, CONFIG)
    found["base_rows"] = ratio(lambda: ours(None), lambda: theirs(None))
    bare.close()
    found |= measure(model, adapters)
    found["identical"] = identical(model, adapters)
    found |= loading(model)
    found["adapter_mb"] = round(adapters[0].num_bytes / 1e6, 1)
    model.close()
    return found


def big(kinds: str, isa: str | None) -> dict[str, Any]:
    """Return the figures of 1.7B's shape."""
    dtype, kv_dtype = kinds.split("/")
    model = make_model(dtype, kv_dtype, THREADS, config=BIG, isa=isa)
    found = measure(model, loaded(model, BIG))
    model.close()
    return found


def shown(value: Any) -> str:
    """Return a figure for people."""
    if isinstance(value, list):
        return f"{value[0]:.2f} ({value[1]:.2f} to {value[2]:.2f})"
    return str(value)
