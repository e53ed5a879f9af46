"""Cascade of a small and a large model: what it saves, and whether its bound on the loss holds.

Method. 500 prompts of 14 kinds with exact checkers are made from a seed, and 90 of three kinds
that are held out by name. The small model is SmolLM2-135M, really run: its answers, with
log-probabilities, are asked for once and kept (``PACELINE_CASCADE``, else in the cache). The large
one with ``LARGE=path.gguf`` is that model, really run, and with ``LARGE=package`` one of 0.5B that
a package holds (``large_file``); without, it is scripted: the checker's own answer, wrong by a rate
per kind.

* ``auroc``, ``apgr``, ``calls_saved``: in ten folds, with bootstrap intervals; ``apgr`` is 0.5 for
  a random choice; baselines are an oracle, one who knows which small answers are right, and the
  longest prompts first;
* ``samples``: the same of ``cascade`` with the agreement of three further answers;
* ``pairs``: the same small answers next to the real large model, where there is one, and three
  scripted ones, the first as above and two that are wrong more often, so that the qualities lie
  closer: what a judge that is never wrong about the small answers has (``small known``), these
  routers, and which share of that judge's area above a random choice is theirs;
* ``bound``: the mean loss over 20 splits of 200 labels to fit, 200 to calibrate and 100 to test;
* ``unseen_kind``: the kinds held out, with scorers that never saw them;
* ``router_us``: one decision, from the prompt and the answer's tokens to the score;
* ``overload``: the large engine at twice its load, in virtual time (``overload``);
* ``ttft_added_ms``: what holding tokens back adds to a first token, live (``live``);
* ``other_requests``: what it costs requests of models without a cascade, in turns (``cost``).

The last line is JSON; a part that was not run is absent from it, and named above it, and
``seconds`` says how long each took. ``PARTS=bound,folds`` runs some; QUICK=1: the bound alone.
``python -m benchmarks.cascade.collect`` asks for the answers before: they are greedy, so next to
other work they are the same, and a run then fits into a quarter of an hour.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, Final

from benchmarks.cascade.collect import SAMPLES, SMALL, answers_of, folder, labels
from benchmarks.cascade.cost import other_requests
from benchmarks.cascade.judging import (
    bound,
    by_kind,
    by_pair,
    in_folds,
    pair,
    router_us,
    scripted_large,
    unseen,
)
from benchmarks.cascade.large_file import large
from benchmarks.cascade.live import first_tokens
from benchmarks.cascade.overload import overload
from benchmarks.common.processes import Unavailable
from paceline.bench.calibrate.checkers import text_of
from paceline.bench.calibrate.fitting import Measured
from paceline.bench.machine import machine

Rows = Sequence[Measured]


def rows_of(samples: int = 0) -> tuple[list[Measured], list[Measured]]:
    """Return the measured labels of the usual kinds and of those held out; ``samples``: further
    answers of the small model to each."""
    usual, held = labels()
    small = answers_of("small", SMALL)
    drawn = answers_of("small", SMALL, samples) if samples else None
    if large():
        answers = answers_of("large", large())
        found = [answers.find("large", label) for label in (*usual, *held)]
        texts = [text_of(answer) for answer in found if answer is not None]
    else:
        texts = scripted_large([*usual, *held])
    parts = ((usual, texts[: len(usual)]), (held, texts[len(usual) :]))
    one, other = (pair(part, small, answers, drawn) for part, answers in parts)
    return one, other


def show(title: str, rows: dict[str, Any]) -> None:
    print(f"\n{title}")
    for name, value in rows.items():
        print(f"  {name:22}{value}")


def parts() -> list[str]:
    """Return the parts to run. Raises SystemExit for an unknown one."""
    told = os.environ.get("PARTS") or ("bound" if os.environ.get("QUICK") else ",".join(PARTS))
    if unknown := sorted({*told.split(",")} - {*PARTS}):
        raise SystemExit(f"PARTS has {', '.join(unknown)}; there are {', '.join(PARTS)}")
    return told.split(",")


def _shown(
    name: str, title: str, measure: Callable[[Rows, Rows], dict[str, Any]]
) -> Callable[[Rows, Rows], dict[str, Any]]:
    """Return a part that prints what is measured below a title, and names it in the result."""

    def part(usual: Rows, held: Rows) -> dict[str, Any]:
        found = measure(usual, held)
        show(title, found)
        return {name: found}

    return part


def _folds(usual: Rows, held: Rows) -> dict[str, Any]:
    folds = in_folds(usual)
    for name, each in folds.items():
        show(f"{name}, ten folds [value, low, high]", each)
    found = {
        name: {router: each[name] for router, each in folds.items()} for name in ("auroc", "apgr")
    }
    saved = ("calls_saved_at_95", "calls_saved_at_99")
    return found | {name: folds["cascade"][name] for name in saved}


def _router(usual: Rows, held: Rows) -> dict[str, Any]:
    found = router_us(usual)
    show("router", {"microseconds": found})
    return {"router_us": found}


def _samples(usual: Rows, held: Rows) -> dict[str, Any]:
    drawn = in_folds(rows_of(SAMPLES)[0], ("cascade",))["cascade"]
    show(f"cascade with {SAMPLES} further answers, ten folds", drawn)
    return {"with_samples": {"samples": SAMPLES, **drawn}}


def _pairs(usual: Rows, held: Rows) -> dict[str, Any]:
    found = by_pair(usual, Path(large()).stem)
    for name, each in found.items():
        show(f"next to {name}, which is better by {each['difference']}", each)
    return {"pairs": found}


# those that measure time come first, while the machine is quiet
PARTS: Final[dict[str, Callable[[Rows, Rows], dict[str, Any]]]] = {
    "router": _router,
    "live": _shown(
        "ttft_added_ms", "first tokens in mode prefix", lambda usual, _: first_tokens(usual)
    ),
    "cost": _shown(
        "other_requests", "requests of a model without a cascade",
        lambda *_: other_requests(folder()),
    ),
    "bound": _shown("bound", "bound on the loss, 20 splits", lambda usual, _: bound(usual)),
    "folds": _folds,
    "samples": _samples,
    "pairs": _pairs,
    "unseen": _shown(
        "unseen_kind", "kinds never seen: no bound is promised, as they are not exchangeable with "
        "the labels", unseen,
    ),
    "overload": _shown(
        "overload", "the large engine at twice its load, in virtual time",
        lambda usual, _: overload(usual),
    ),
}  # fmt: skip


def figures(usual: Rows, held: Rows) -> dict[str, Any]:
    """Run the parts that are wanted, and print each."""
    wanted, seconds = parts(), {}
    found: dict[str, Any] = {}
    if usual:
        show("quality of the small and the large model, by kind", by_kind([*usual, *held]))
        found["quality"] = [mean(r.small for r in usual), mean(r.large for r in usual)]
    for name, part in PARTS.items():
        if name not in wanted:
            continue
        began = time.monotonic()
        try:
            found |= part(usual, held)
        except Unavailable as error:
            print(f"\nnot run: {name}: {error}")
        seconds[name] = round(time.monotonic() - began, 1)
    print(f"\nnot run: {', '.join(name for name in PARTS if name not in wanted) or 'nothing'}")
    return found | {"seconds": seconds}


def main() -> int:
    usual: list[Measured] = []
    held: list[Measured] = []
    try:
        if parts() != ["cost"]:
            usual, held = rows_of()
    except Unavailable as error:
        print(f"not run: {error}", file=sys.stderr)
        return 1
    found = figures(usual, held)
    told = {"bench": "cascade", "pair": [SMALL, Path(large()).stem or "scripted"], "results": found}
    print(json.dumps({**told, "machine": machine()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
