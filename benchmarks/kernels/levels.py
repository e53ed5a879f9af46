"""The best formats for each level of this machine: times of steps, and the accuracy gate.

Method. For each level of the native kernels that runs on this machine, one model of SmolLM2-135M's
shape in random weights is packed in each pair of formats (weights/KV cache). Steps are timed in
turns, A B C A B C, so that other load on the machine affects all pairs alike: decode of 1, 8 and 64
sequences at context 192, and a prompt of 256 tokens. A figure is the least time of all turns, since
other load only makes steps longer; there are fewer turns where one takes long. ``cost`` is the
geometric mean of a pair's steps. ``drift`` is the change of a row's logits when 7 or 63 others are
computed in the same step, as a share of the largest: auto does not choose formats whose kernels
have different paths for few and for many rows.

Then ``kernels.accuracy`` judges the pairs on that level with the default model. float32 is the
reference, and passes. ``--levels LEVEL ...`` chooses levels, all by default, and
``--steps LEVEL ...`` and ``--gate LEVEL ...`` those of one part (without a level: none).

The portable level is timed on a fifth of the model and is not judged by itself: it rounds where the
next better level does, and gets that level's verdicts.

``--write`` updates the measured figures in ``paceline/backends/loading/levels.json``, by which
``auto`` chooses (``paceline/backends/loading/formats.py``), level by level; the rest stays as it
is, levels of other machines too. Nothing else writes a figure or a verdict there. The last line is
JSON. QUICK=1 takes fewer turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.processes import REPOSITORY
from benchmarks.kernels.accuracy import usual_levels
from benchmarks.kernels.model import BLOCK, CONFIG, CONTEXT, make_model
from paceline.backends.loading.levels import PATH, fastest, parse
from paceline.backends.machine.cpu import choose_threads
from paceline.backends.native import unavailable_reason, variants
from paceline.bench.machine import machine

__all__ = ["FORMATS", "STEPS", "renewed", "verdicts"]

REFERENCE: Final = "float32/float32"
FORMATS: Final = (
    REFERENCE,
    *(f"{weights}/{kv}" for weights in ("bfloat16", "int8", "q4") for kv in ("bfloat16", "int8")),
)
PROMPT: Final = 256
MOST: Final = 64
# sequences, tokens of each and length at the end
STEPS: Final = {
    **{f"decode {count}": (count, 1, CONTEXT) for count in (1, 8, MOST)},
    f"prompt {PROMPT}": (1, PROMPT, PROMPT),
}
TURNS: Final = 3 if os.environ.get("QUICK") else 5
# a step is repeated within a turn for about this long, or once
SECONDS: Final = 0.1
# a level that has taken this long gets no further turn
BUDGET: Final = 90.0
# facts about the machine that the table keeps
_KEPT: Final = ("cpu", "model", "cores", "clock_ghz", "read_gb_s", "load")
# plain C++, by far the slowest level: a fifth of the model must suffice, as no step of it waits for
# memory; with fewer layers, drift would be less too. The gate would take hours there
PLAIN: Final = "portable"
PART: Final = replace(CONFIG, num_hidden_layers=6, vocab_size=9856)


class Steps:
    """A model in one pair of formats, and the inputs of its steps."""

    def __init__(self, level: str, name: str, threads: int) -> None:
        weights, kv = name.split("/")
        config = PART if level == PLAIN else CONFIG
        self._vocab = config.vocab_size
        self._model = make_model(weights, kv, threads, config=config, isa=level)
        # keys and values as in real use, for one sequence; the others get copies of them
        self._run(1, CONTEXT, CONTEXT)
        each = CONTEXT // BLOCK
        self._model.copy_blocks(
            [(block, row * each + block) for row in range(1, MOST) for block in range(each)]
        )

    def drift(self) -> float:
        """Return the drift, see the module's docstring."""
        alone = self._run(1, 1, CONTEXT)[0].copy()
        among = [self._run(count, 1, CONTEXT)[0].copy() for count in (8, MOST)]
        return max(float(np.abs(row - alone).max()) for row in among) / float(np.abs(alone).max())

    def _run(self, sequences: int, tokens: int, length: int) -> NDArray[np.float32]:
        """Return logits of the last token of each sequence, valid until the next step."""
        blocks = -(-length // BLOCK)
        tables = np.arange(sequences * blocks).reshape(sequences, blocks)
        starts = np.arange(sequences + 1) * tokens
        positions = np.tile(np.arange(length - tokens, length), sequences)
        ids = np.random.default_rng(1).integers(0, self._vocab, sequences * tokens)
        return self._model.forward(ids, positions, starts, tables, starts[1:] - 1)

    def milliseconds(self, step: str) -> float:
        """Return the least time of as many repetitions as ``SECONDS`` allow."""
        times: list[float] = []
        while not times or sum(times) < SECONDS:
            began = time.perf_counter()
            self._run(*STEPS[step])
            times.append(time.perf_counter() - began)
        return 1e3 * min(times)

    def close(self) -> None:
        self._model.close()


def measure(level: str, threads: int, turns: int) -> dict[str, dict[str, Any]]:
    """Return, by pair of formats, the least milliseconds of each step, and the drift."""
    models = {name: Steps(level, name, threads) for name in FORMATS}
    seen: dict[str, dict[str, list[float]]] = {name: {} for name in FORMATS}
    began = time.perf_counter()
    try:
        drifts = {name: model.drift() for name, model in models.items()}
        for turn in range(turns):
            if turn and time.perf_counter() - began > BUDGET:
                break
            for step in STEPS:
                for name, model in models.items():
                    seen[name].setdefault(step, []).append(model.milliseconds(step))
    finally:
        for model in models.values():
            model.close()
    return {
        name: {
            "steps_ms": {step: round(min(times), 3) for step, times in steps.items()},
            "drift": float(f"{drifts[name]:.2g}"),
        }
        for name, steps in seen.items()
    }


def gate(level: str) -> dict[str, dict[str, Any]]:
    """Return KL and verdict by pair of formats, from ``kernels.accuracy`` on that level."""
    argv = [sys.executable, "-m", "benchmarks.kernels.accuracy", "--levels", level]
    done = subprocess.run(argv, cwd=REPOSITORY, stdout=subprocess.PIPE, check=False, text=True)
    try:
        results = json.loads(done.stdout.splitlines()[-1])["results"][level]
    except (IndexError, ValueError, KeyError):
        raise SystemExit(f"kernels.accuracy ended with {done.returncode}: {argv}") from None
    return verdicts(results)


def verdicts(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the part of the gate's results on one level that the table keeps."""
    return {
        name: {
            "kl": max(result[way]["kl"] for way in ("steps", "prompts")),
            "passes": result["passes"],
        }
        for name, result in results.items()
    }


def borrowed(table: dict[str, Any], here: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return verdicts of the level before the portable one; none if that has none."""
    formats = table.get(here[-2], {}).get("formats", {}) if len(here) > 1 else {}
    return {
        name: {key: figures[key] for key in ("kl", "passes")}
        for name, figures in formats.items()
        if "passes" in figures
    }


def renewed(
    part: dict[str, Any],
    *,
    about: dict[str, Any] | None = None,
    measured: dict[str, dict[str, Any]] | None = None,
    judged: dict[str, dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return a level's part of the table with new measurements (and the machine they were taken
    on), new verdicts or both; the rest stays."""
    formats: dict[str, dict[str, Any]] = {
        name: dict(figures) for name, figures in part.get("formats", {}).items()
    }
    for fresh in (measured, judged):
        for name, figures in (fresh or {}).items():
            formats.setdefault(name, {}).update(figures)
    formats.setdefault(REFERENCE, {}).update(kl=0.0, passes=True)
    on = part.get("machine") if about is None else {key: about[key] for key in _KEPT}
    return {"machine": on, "formats": formats}


def show(level: str, part: dict[str, Any]) -> None:
    """Print the level's table, with a mark on the formats that auto chooses for 4-bit files like
    the default model."""
    (pairs,) = parse({level: part}).values()
    if not pairs:
        return
    few = [pair for pair in pairs if pair.weights in ("q4", "int8") and pair.passes and pair.steady]
    first = fastest(few) if few else None
    steps = next(iter(pairs)).steps_ms
    head = "".join(f"{step:>12}" for step in steps)
    print(f"\n{level + ', ms':20}{head}{'cost':>9}{'drift':>9}{'KL':>9}  gate")
    for pair in pairs:
        row = "".join(f"{pair.steps_ms[step]:>12.2f}" for step in steps)
        verdict = "passes" if pair.passes else "FAILS"
        mark = "  <- auto, 4 bits" if pair is first else ""
        print(
            f"{pair.weights + '/' + pair.kv:20}{row}{pair.cost:>9.2f}{pair.drift:>9.0e}"
            f"{pair.kl:>9.4f}  {verdict}{mark}"
        )
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    reason = unavailable_reason()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 1
    here = variants()
    parser = argparse.ArgumentParser(prog="benchmarks.kernels.levels")
    parser.add_argument("--levels", nargs="+", choices=here, default=list(here), metavar="LEVEL")
    for name in ("--steps", "--gate"):
        parser.add_argument(name, nargs="*", choices=here, metavar="LEVEL")
    parser.add_argument("--write", action="store_true", help=f"renew {PATH.name}")
    args = parser.parse_args(argv)
    if args.steps is None:
        args.steps = args.levels
    if args.gate is None:
        args.gate = [level for level in args.levels if level in usual_levels(here)]
    table: dict[str, Any] = json.loads(PATH.read_text())
    threads = choose_threads(None)
    about = machine()
    for level in here:
        part = table.get(level, {})
        if level in args.steps:
            print(f"{level}: steps", file=sys.stderr)
            part = renewed(part, about=about, measured=measure(level, threads, TURNS))
        if level in args.gate:
            print(f"{level}: the accuracy gate", file=sys.stderr)
            part = renewed(part, judged=gate(level))
        elif level == PLAIN and part:
            part = renewed(part, judged=borrowed(table, here))
        if part:
            table[level] = part
            show(level, part)
        if args.write:
            # level by level, so that no measurement is lost if the next one is interrupted
            PATH.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    print()
    print(json.dumps({"bench": "levels", "machine": about, "results": table}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
