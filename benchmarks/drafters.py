"""Tokens per step by drafter: recorded answers are played again, on a simulated clock.

    RECORD=FILE python -m benchmarks.drafters     asks the model, without drafts, and keeps the ids
    ANSWERS=FILE python -m benchmarks.drafters    plays these with each drafter; needs no model

The engine is the one that serves: drafters, learned rates, the price of a row, the wait for tokens.
Its backend returns the recorded tokens, so answers are the same for any draft, and the time of a
step is that of CURVE for its number of rows. So two drafters differ by their drafts alone, a run is
exact, and it takes little processor time. All answers are played once before any is counted, by
callers of their own, as a server that has served before has learned how often drafts are right.

    off        no drafts
    auto       as "--speculative-config auto" has it
    ngram      n-grams of 1 to 5 tokens alone
    known      n-grams again, cut by a rule that knows which of them are right: the most that better
               rates, or a better rule, could gain

CURVE=ROWS:MS,... is the time of a step by its number of rows, linear in between; HOST=MS the time
between a step's tokens and a plan that waited for them; STREAMS=N the number that run at once.
RECORD takes PROMPTS, MODEL, DTYPE and TOKENS as ``benchmarks.speculation`` does. The last line is
JSON.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from paceline.bench.machine import machine
from paceline.core.backend import BackendInfo
from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.outputs import ScheduledRow, SchedulerOutput, StepResult
from paceline.core.request import Request
from paceline.core.sampling_params import SamplingParams
from paceline.engine.core import EngineCore
from paceline.engine.fanout import add_to_core
from paceline.engine.types import GenerationRequest
from paceline.speculation.draft_tokens import Drafter, DraftTokens
from paceline.speculation.drafts import DrafterMaker
from paceline.speculation.ngram import NgramDrafter

__all__ = ["Answer", "Count", "Curve", "play"]

# curve of SmolLM2-135M in q4 with 256 tokens of context; two threads of an EPYC Zen 4
CURVE = "1:3.4,3:3.4,4:3.7,5:4.6,6:4.9,8:5.5,9:5.9,12:6.5,16:7.9,24:11.4,32:18.6"
HOST = 0.2
_BLOCK_SIZE = 16
_OFF = {"method": "off"}
_AUTO = {"method": "auto"}


class Answer(NamedTuple):
    """A recorded answer of a model."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]


class Curve:
    """Seconds of a step by its number of rows.

    Raises ValueError for one whose rows do not rise."""

    def __init__(self, text: str) -> None:
        points = [point.partition(":") for point in text.split(",")]
        self._rows = [int(rows) for rows, _, _ in points]
        self._seconds = [float(ms) / 1e3 for _, _, ms in points]
        if len(self._rows) < 2 or any(a >= b for a, b in pairwise(self._rows)):
            raise ValueError(f"CURVE needs two or more numbers of rows that rise, got {text!r}")

    def __call__(self, num_rows: int) -> float:
        """Interpolate; beyond the ends the first and last lines go on."""
        at = min(max(bisect_left(self._rows, num_rows), 1), len(self._rows) - 1)
        low, high = self._rows[at - 1 : at + 1]
        share = (num_rows - low) / (high - low)
        return self._seconds[at - 1] + share * (self._seconds[at] - self._seconds[at - 1])


class Count(NamedTuple):
    """Cost of playing some answers."""

    tokens: int
    steps: int
    seconds: float
    # by source: draft tokens that were verified, and those that were right
    verified: dict[str, int]
    right: dict[str, int]


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class _Step(Future[StepResult]):
    """A step that ends at a set time; waiting for it sets the clock forward."""

    def __init__(self, clock: _Clock, end: float, result: StepResult) -> None:
        super().__init__()
        self._clock, self._end = clock, end
        self.set_result(result)

    def result(self, timeout: float | None = None) -> StepResult:
        if timeout is not None and self._clock.now + timeout < self._end:
            self._clock.now += timeout
            raise TimeoutError
        self._clock.now = max(self._clock.now, self._end)
        return super().result()


class _Recorded:
    """A ``ModelBackend`` that returns recorded tokens; ids of requests begin with the number of
    the answer."""

    def __init__(self, answers: Sequence[Answer], clock: _Clock, curve: Curve) -> None:
        self._texts = [[*answer.prompt, *answer.output] for answer in answers]
        self._clock, self._curve = clock, curve
        self._free = 0.0
        longest = max(map(len, self._texts)) + _BLOCK_SIZE
        self.info = BackendInfo(
            name="recorded",
            vocab_size=1 + max(max(text) for text in self._texts),
            max_model_len=longest,
            block_size=_BLOCK_SIZE,
            num_blocks=64 * (longest // _BLOCK_SIZE + 2),
            block_bytes=1,
            dtype="none",
            device="none",
        )

    def text_of(self, request_id: str) -> list[int]:
        return self._texts[int(request_id.partition("-")[0])]

    def execute(self, plan: SchedulerOutput) -> Future[StepResult]:
        drafts = {draft.row: draft.token_ids for draft in plan.drafts}
        sampled = tuple(self._says(row, drafts.get(r, ())) for r, row in enumerate(plan.rows))
        seconds = self._curve(plan.num_tokens)
        self._free = max(self._free, self._clock.now) + seconds
        result = StepResult(step_id=plan.step_id, sampled=sampled, elapsed=seconds)
        return _Step(self._clock, self._free, result)

    def close(self) -> None:
        """Do nothing."""

    def _says(self, row: ScheduledRow, drafts: Sequence[int]) -> tuple[int, ...]:
        if not row.samples:
            return ()
        text, known = self.text_of(row.request_id), row.start + row.num_tokens - len(drafts)
        right = 0
        while right < len(drafts) and drafts[right] == text[known + right]:
            right += 1
        return tuple(text[known : known + right + 1])


class _Known:
    """Proposes only the right ones of another drafter's tokens."""

    def __init__(self, drafter: Drafter, text: Sequence[int]) -> None:
        self._drafter, self._text = drafter, text

    def propose(self, tokens: Sequence[int], count: int) -> DraftTokens:
        draft = self._drafter.propose(tokens, count)
        right, known = 0, len(tokens)
        for token, comes in zip(draft.token_ids, self._text[known:], strict=False):
            if token != comes:
                break
            right += 1
        return draft._replace(token_ids=draft.token_ids[:right])


# makes the drafter of a request, given its text to come
_Maker = Callable[[Request, Sequence[int]], Drafter]
DRAFTERS: dict[str, tuple[dict[str, Any], _Maker | None]] = {
    "off": (_OFF, None),
    "auto": (_AUTO, None),
    "ngram": (_AUTO, lambda request, text: NgramDrafter(1, 5)),
    "known": (_AUTO, lambda request, text: _Known(NgramDrafter(1, 5), text)),
}


def play(
    answers: Sequence[Answer],
    drafter: str,
    *,
    curve: Curve,
    host: float = HOST / 1e3,
    streams: int = 1,
) -> Count:
    """Play all answers twice, the second time counted; ``streams`` of them at once."""
    config, maker = DRAFTERS[drafter]
    clock = _Clock()
    backend = _Recorded(answers, clock, curve)
    info = backend.info
    make: DrafterMaker | None = None
    if maker is not None:
        chosen = maker
        make = lambda request: chosen(request, backend.text_of(request.request_id))  # noqa: E731
    core = EngineCore(
        backend,
        SchedulerConfig(max_model_len=info.max_model_len, speculative_config=config, policy="fcfs"),
        CacheConfig(block_size=info.block_size, num_blocks=info.num_blocks),
        clock=clock,
        drafter=make,
    )
    totals, began, steps = core.scheduler.state.totals, 0.0, 0
    verified, right = dict(totals.drafted), dict(totals.accepted)
    for turn in range(2):
        began, steps = clock.now, core.num_steps
        verified, right = dict(totals.drafted), dict(totals.accepted)
        for first in range(0, len(answers), streams):
            for number in range(first, min(first + streams, len(answers))):
                add_to_core(core, _request(answers[number], number, turn, clock.now))
            while core.has_work:
                core.step(lambda: None)
                # host time costs nothing while a step runs
                clock.now += host
    seconds, steps = clock.now - began, core.num_steps - steps
    core.close()
    return Count(
        sum(len(answer.output) for answer in answers),
        steps,
        seconds,
        {name: count - verified.get(name, 0) for name, count in totals.drafted.items()},
        {name: count - right.get(name, 0) for name, count in totals.accepted.items()},
    )


def _request(answer: Answer, number: int, turn: int, now: float) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"{number}-{turn}",
        prompt_token_ids=list(answer.prompt),
        sampling=SamplingParams(max_tokens=len(answer.output), temperature=0.0),
        arrival_time=now,
        # no answer is drafted from another caller's
        cache_salt=f"{number}-{turn}",
    )


def _record(file: Path) -> None:
    """Ask the model for an answer to each prompt, one at a time."""
    from benchmarks.speculation import asked, engines
    from paceline.engine.text.tokenizer import load_tokenizer

    path = asked.model_path()
    tokenizer = load_tokenizer(path)
    engine = engines.open_engine(path, _OFF, asked.DTYPE)
    found: dict[str, list[dict[str, list[int]]]] = {}
    for group, texts in asked.prompt_groups().items():
        prompts = engines.encode(tokenizer, texts)
        _, outputs = engines.play_prompts(engine, prompts, 1, 0, 0.0)
        found[group] = [
            {"prompt": prompt, "output": list(output)}
            for prompt, output in zip(prompts, outputs, strict=True)
        ]
        for text, output in zip(texts, outputs, strict=True):
            print(f"--- {group}: {text[:70]!r}\n{tokenizer.decode(output)}", flush=True)
    engine.close()
    file.write_text(json.dumps(found))


def read_answers(file: Path) -> dict[str, list[Answer]]:
    """Read the answers that RECORD wrote, by group."""
    return {
        group: [Answer(tuple(each["prompt"]), tuple(each["output"])) for each in answers]
        for group, answers in json.loads(file.read_text(encoding="utf-8-sig")).items()
    }


def main() -> int:
    if os.environ.get("RECORD"):
        _record(Path(os.environ["RECORD"]))
        return 0
    if not os.environ.get("ANSWERS"):
        raise SystemExit("no answers: RECORD=FILE asks a model for some, ANSWERS=FILE plays them")
    groups = read_answers(Path(os.environ["ANSWERS"]))
    curve = Curve(os.environ.get("CURVE") or CURVE)
    host = float(os.environ.get("HOST") or HOST) / 1e3
    streams = int(os.environ.get("STREAMS") or 1)
    results: dict[str, Any] = {}
    print(
        f"{'':14} {'drafter':10} {'tokens/step':>11} {'right/verified':>15} {'times as fast':>13}"
    )
    for group, answers in groups.items():
        results[group] = {}
        plain = 0.0
        for name in DRAFTERS:
            count = play(answers, name, curve=curve, host=host, streams=streams)
            plain = plain or count.seconds
            verified, right = sum(count.verified.values()), sum(count.right.values())
            entry = {
                "tokens_per_step": round(count.tokens / count.steps, 3),
                "verified": verified,
                "right": right,
                "ratio": round(plain / count.seconds, 3),
            }
            results[group][name] = entry
            print(
                f"{group:14} {name:10} {entry['tokens_per_step']:11.2f} "
                f"{f'{right}/{verified}':>15} {entry['ratio']:13.2f}",
                flush=True,
            )
    print(json.dumps({"bench": "drafters", "machine": machine(), "results": results}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
