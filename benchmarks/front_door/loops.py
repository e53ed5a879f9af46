"""How often the first answers of a server loop."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from benchmarks.common.questions import HELD, LOOP_TOKENS, OPEN, QUESTIONS, loops, share
from benchmarks.common.server import PacelineServer

__all__ = ["MODEL", "ask", "measure_loops"]

MODEL: Final = "smollm2-135m"
SEEDS: Final = (1, 2, 3)
# seeds that settings are chosen by
OPEN_SEEDS: Final = (4, 5, 6)
_CONCURRENT: Final = 16


def measure_loops(
    folder: Path, *, every: int = 1, flags: Sequence[str] = (), only_open: bool = False
) -> dict[str, Any]:
    """Ask the questions with each seed, and return the shares of answers that loop: of all, by
    seed, and of the half that nothing was chosen by."""
    questions = (OPEN if only_open else QUESTIONS)[::every]
    seeds = OPEN_SEEDS if only_open else SEEDS
    asked = [(question, seed) for seed in seeds for question in questions]
    with (
        PacelineServer(MODEL, *flags, log=folder / "log") as server,
        ThreadPoolExecutor(_CONCURRENT) as pool,
    ):
        bodies = (
            {
                "messages": [{"role": "user", "content": question}],
                "max_tokens": LOOP_TOKENS, "seed": seed,
            }
            for question, seed in asked
        )  # fmt: skip
        answers = list(pool.map(lambda body: ask(server.port, body), bodies))
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


def ask(port: int, body: dict[str, Any]) -> str:
    """Return the text of a chat's answer."""
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
