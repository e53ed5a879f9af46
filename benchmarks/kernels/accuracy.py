"""Effect of reduced precision: the default model against itself in float32, on real text.

Method. The text is the Python reference that ``pydoc`` carries: WINDOWS topics, WINDOW tokens of
each, 5,112 predictions. Every format is a dtype of weights and one of the KV cache. All formats and
float32 read the same tokens (teacher forcing), and at every position their distributions over the
next token are compared:

* top-1: the share of positions where the likeliest token is float32's;
* KL: mean of KL(float32 || format), in nats;
* perplexity: of the text, and its ratio to float32's.

The text is read twice, because the native kernels have different paths for few and many rows:
``steps`` reads one token of every window at a time, as decoding does, ``prompts`` reads CHUNK
tokens of every window at once. The gate holds for both.

All of it is done once for every level of the native kernels that runs here, in float32 too
(--levels chooses; the portable one, which takes hours, is left out unless it is named or the only
one).

The gate, chosen before any figure was seen:

* KL at most 0.01 nats. The expected log-likelihood ratio a token is the KL: at 0.01 it takes 300
  sampled tokens, more than the mean answer of Azure's conversation trace, before the odds that they
  came from float32 or from the other are 20 to 1.
* top-1 at least 95 %: of twenty greedy choices nineteen stay. Where two tokens are almost equally
  likely, any rounding may change which one is first, so this cannot be much nearer to 1.
* perplexity within 1 %: less than what models a few percent apart in size differ by.

``--chat`` adds the gate on chat of ``benchmarks/common/chat_gate.py``, for the same formats on the
first of the levels.

Exits with 1 when any of the formats fails. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.common.chat_gate import KEPT, judged, read_chat
from benchmarks.common.chat_gate import show as show_chat
from benchmarks.common.questions import QUESTIONS
from paceline.backends.loading.formats import Formats, choose_formats
from paceline.backends.machine.cpu import choose_threads
from paceline.backends.native import unavailable_reason, variants
from paceline.bench.machine import machine
from paceline.checkpoints.hub.resolve import find_local
from paceline.checkpoints.open import open_checkpoint
from paceline.errors import ConfigError
from paceline.quantize.check import (
    BLOCK,
    CHUNK,
    MAX_KL,
    MAX_PERPLEXITY_RATIO,
    MIN_TOP1,
    REFERENCE,
    WINDOW,
    WINDOWS,
    Figures,
    build,
    compare,
    forward_of,
    text_windows,
)  # fmt: skip

MODEL: Final = "smollm2-135m"
FORMATS: Final = tuple(
    f"{dtype}/{kv_dtype}"
    for dtype in ("bfloat16", "int8", "q4")
    for kv_dtype in ("bfloat16", "int8")
)


def automatic_format(path: Path, isa: str | None = None) -> str:
    """Return the formats of ``--dtype auto --kv-dtype auto`` for this model, on this machine's CPU
    or one with no better level than ``isa``; "" on a level that has not been judged yet."""
    try:
        chosen = _chosen(path, isa)
    except ConfigError:
        return ""
    return f"{chosen.dtype}/{chosen.kv_dtype}"


def _chosen(path: Path, isa: str | None) -> Formats:
    return choose_formats(
        open_checkpoint(path).config,
        compute="native",
        dtype="auto",
        kv_dtype="auto",
        block_size=BLOCK,
        device="cpu",
        # PyTorch does not compute here, so its dtype does not matter
        torch_dtype=str,
        isa=isa,
    )


def show(level: str, results: dict[str, dict[str, Any]], automatic: str) -> None:
    print(f"\n{level:20}{'read as':10}{'top-1':>9}{'KL':>11}{'perplexity':>12}{'ratio':>9}")
    for name, result in results.items():
        for way in ("steps", "prompts"):
            got = result[way]
            print(
                f"{name if way == 'steps' else '':20}{way:10}{got['top1']:>9.2%}{got['kl']:>11.5f}"
                f"{got['perplexity']:>12.3f}{got['perplexity_ratio']:>9.4f}"
            )
        note = "passes" if result["passes"] else "FAILS"
        print(f"{'':20}{note}{' (what auto picks)' if name == automatic else ''}")
    sys.stdout.flush()


def judge(
    path: Path, windows: NDArray[np.int64], formats: Sequence[str], level: str, threads: int
) -> dict[str, dict[str, Any]]:
    """Return figures and verdicts by format, for the kernels of one level."""
    shape = (WINDOWS, WINDOW)
    models = {name: build(path, name, threads, shape, level) for name in (REFERENCE, *formats)}
    try:
        others = {name: forward_of(model, shape) for name, model in models.items()}
        reference = others.pop(REFERENCE)
        steps = compare(windows, reference, others, 1)
        prompts = compare(windows, reference, others, CHUNK)
    finally:
        for model in models.values():
            model.close()

    def as_json(figures: Figures) -> dict[str, float]:
        return {
            "top1": round(figures.top1, 5),
            "kl": round(figures.kl, 6),
            "perplexity": round(figures.perplexity, 4),
            "perplexity_ratio": round(figures.perplexity_ratio, 5),
        }

    return {
        name: {
            "steps": as_json(steps[name]),
            "prompts": as_json(prompts[name]),
            "passes": steps[name].passes and prompts[name].passes,
        }
        for name in formats
    }


def usual_levels(here: Sequence[str]) -> list[str]:
    """Return the levels to run the gate on by default: all but the portable one, the last."""
    return list(here[:-1] or here)


def main() -> int:
    from paceline.engine.text.tokenizer import load_tokenizer

    here = variants()
    parser = argparse.ArgumentParser(prog="benchmarks.kernels.accuracy")
    parser.add_argument("--model", type=Path, help=f"a model's path (default: {MODEL})")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument(
        "--levels", nargs="+", choices=here, default=usual_levels(here), metavar="LEVEL",
        help=f"of the native kernels, of {', '.join(here)} (default: all but the last)",
    )  # fmt: skip
    parser.add_argument(
        "--chat", action="store_true", help="also ask 200 questions through the chat template"
    )
    args = parser.parse_args()
    path = args.model or find_local(MODEL)
    reason = unavailable_reason()
    if path is None or reason is not None:
        print(reason or f"{MODEL} is not here yet: run 'make model' first", file=sys.stderr)
        return 1
    about = machine()
    threads = choose_threads(None)
    torch.set_num_threads(threads)
    windows = text_windows(load_tokenizer(path).encode, WINDOW)
    count = len(args.formats)
    automatic, results = {}, {}
    for level in args.levels:
        print(f"{level}: {WINDOWS} x {WINDOW} tokens, {count} formats", file=sys.stderr)
        automatic[level] = automatic_format(path, level)
        results[level] = judge(path, windows, args.formats, level, threads)
        show(level, results[level], automatic[level])
    print(f"\ngate: KL <= {MAX_KL}, top-1 >= {MIN_TOP1:.0%}, "
          f"perplexity ratio <= {MAX_PERPLEXITY_RATIO}")  # fmt: skip
    about |= {
        "threads": threads,
        "auto": automatic,
        "predictions": windows.shape[0] * (windows.shape[1] - 1),
        "gate": {"kl": MAX_KL, "top1": MIN_TOP1, "perplexity_ratio": MAX_PERPLEXITY_RATIO},
    }
    passed = all(result["passes"] for part in results.values() for result in part.values())
    report: dict[str, Any] = {"bench": "accuracy", "machine": about, "results": results}
    if args.chat:
        formats = {name: (path, name) for name in args.formats}
        read = read_chat(path, formats, QUESTIONS, threads, isa=args.levels[0])
        report["chat_gate"] = {name: judged(answers, KEPT) for name, answers in read.items()}
        show_chat(report["chat_gate"])
        passed = passed and all(result["passes"] for result in report["chat_gate"].values())
    print(json.dumps(report))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
