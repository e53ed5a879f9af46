"""How often the first answers of a server loop, and how many tasks with exact checkers its default
settings answer well."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any, Final

from benchmarks.cascade.tasks import KINDS, make_labels
from benchmarks.common.questions import HELD, LOOP_TOKENS, OPEN, QUESTIONS, loops, share
from benchmarks.common.server import PacelineServer
from paceline.bench.calibrate.checkers import quality

__all__ = ["MODEL", "measure_loops", "measure_tasks"]

MODEL: Final = "smollm2-135m"
SEEDS: Final = (1, 2, 3)
# seeds that settings are chosen by
OPEN_SEEDS: Final = (4, 5, 6)
_CONCURRENT: Final = 16
_NUM_TASKS: Final = 510
# seeds of the tasks, which settings are chosen by and which figures are of
_OPEN_TASKS: Final = 2
_TASKS: Final = 3


def measure_loops(
    folder: Path, *, every: int = 1, flags: Sequence[str] = (), only_open: bool = False
) -> dict[str, Any]:
    """Ask the questions with each seed, and return the shares of answers that loop: of all, by
    seed, and of the half that nothing was chosen by."""
    questions = (OPEN if only_open else QUESTIONS)[::every]
    seeds = OPEN_SEEDS if only_open else SEEDS
    asked = [(question, seed) for seed in seeds for question in questions]
    answers = _answers(folder, flags, _CONCURRENT, [
        {
            "messages": [{"role": "user", "content": question}],
            "max_tokens": LOOP_TOKENS, "seed": seed,
        }
        for question, seed in asked
    ])  # fmt: skip
    found = [loops(answer) for answer in answers]
    for (question, seed), is_loop, answer in zip(asked, found, answers, strict=True):
        if is_loop:
            print(f"loops, seed {seed}: {question}\n          {answer[-120:]!r}")
    by_seed = [
        share(
            is_loop for (_, seed), is_loop in zip(asked, found, strict=True) if seed == each
        ).share
        for each in seeds
    ]
    held = [is_loop for (each, _), is_loop in zip(asked, found, strict=True) if each in HELD]
    whole = share(found)
    print(f"\n{whole.share:.1%} of {len(found)} answers loop ({whole.low:.1%} to {whole.high:.1%})")
    return {
        "share": round(whole.share, 4),
        "interval": [round(whole.low, 4), round(whole.high, 4)],
        "by_seed": [round(each, 4) for each in by_seed],
        "held": round(share(held).share, 4) if held else None,
        "answers": len(found),
    }


def measure_tasks(
    folder: Path, *, every: int = 1, flags: Sequence[str] = (), only_open: bool = False
) -> dict[str, Any]:
    """Ask the tasks once each, and return the share of good answers, with its interval."""
    labels = make_labels(_NUM_TASKS // every, tuple(KINDS), _OPEN_TASKS if only_open else _TASKS)
    answers = _answers(folder, flags, _CONCURRENT // 2, [
        {"messages": each.chat, "max_tokens": each.max_tokens, "seed": 1} for each in labels
    ])  # fmt: skip
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


def _answers(
    folder: Path, flags: Sequence[str], count: int, bodies: Sequence[dict[str, Any]]
) -> list[str]:
    """Return the texts of a new server's answers to these chats, ``count`` at once."""
    with (
        PacelineServer(MODEL, *flags, log=folder / "log") as server,
        ThreadPoolExecutor(count) as pool,
    ):
        return list(pool.map(lambda body: _ask(server.port, body), bodies))


def _ask(port: int, body: dict[str, Any]) -> str:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    while True:
        try:
            with urllib.request.urlopen(request, timeout=600) as response:
                answer: str = json.load(response)["choices"][0]["message"]["content"]
            return answer
        except urllib.error.HTTPError as error:
            # a slow machine: the server predicts that the answer would begin too late
            if error.code != 429:
                raise
            time.sleep(float(error.headers.get("Retry-After", "1")))
