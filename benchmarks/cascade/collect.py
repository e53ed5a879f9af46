"""Answers of models to the tasks, asked once and kept in the cache."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Final

from benchmarks.cascade.tasks import HELD_OUT, KINDS, make_labels
from benchmarks.common.server import PacelineServer
from paceline.bench.calibrate.asking import Answers, Source, ask, ask_all, ask_samples
from paceline.bench.calibrate.labels import Label
from paceline.checkpoints.hub.resolve import default_cache_dir

__all__ = ["SAMPLES", "SMALL", "answers_of", "folder", "labels"]

SMALL: Final = "smollm2-135m"
# further answers in the rows that say so
SAMPLES: Final = 3
_SEED: Final = 1


def labels() -> tuple[list[Label], list[Label]]:
    """Return 500 labels of the usual kinds, and 90 of the kinds held out."""
    usual = tuple(kind for kind in KINDS if kind not in HELD_OUT)
    return make_labels(500, usual, _SEED), make_labels(90, HELD_OUT, _SEED)


def folder() -> Path:
    """Return the folder of what is kept, outside the repository."""
    root = Path(os.environ.get("PACELINE_CASCADE") or default_cache_dir() / "cascade")
    root.mkdir(parents=True, exist_ok=True)
    return root


def answers_of(side: str, model: str, samples: int = 0) -> Answers:
    """Return a model's answers; those that are not kept yet are asked for first. Raises
    Unavailable if its server does not start, and SystemExit if it does not answer.

    Args:
        samples: further answers to each prompt, instead of the first one; 0: the first one.
    """
    root, name = folder(), Path(model).stem
    answers = Answers(root / f"{name}{f'-{samples}' if samples else ''}.jsonl")
    wanted = [label for part in labels() for label in part]
    missing = sum(answers.find(side, label) is None for label in wanted)
    if not missing:
        return answers
    print(f"asking {name} {missing} prompts, once: {root}", file=sys.stderr)

    def told(done: int, count: int) -> None:
        if done % 50 == 0:
            print(f"  {done} of {count}", file=sys.stderr)

    # greedy, and without the penalty of the catalogue's entry: the model as its file has it
    flags = (
        model, "--served-model-name", name, "--generation-config", "vllm",
        # a busy machine is slow, and no prompt may be left out for that
        "--max-predicted-ttft", "0", "--queue-timeout", "0",
    )  # fmt: skip
    with PacelineServer(*flags, log=root / "server.log") as server:
        source = Source(f"http://127.0.0.1:{server.port}", name)

        def answer(label: Label) -> dict[str, Any]:
            if samples:
                return ask_samples(source, label, samples)
            return ask(source, label, logprobs=side == "small")

        failed = ask_all(side, wanted, answers, answer, told)
    if failed:
        raise SystemExit(f"{len(failed)} prompts were not answered: {failed[0]}")
    return answers


if __name__ == "__main__":
    answers_of("small", SMALL)
    answers_of("small", SMALL, SAMPLES)
    from benchmarks.cascade.large_file import large

    if large():
        answers_of("large", large())
