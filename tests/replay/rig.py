"""Drives one core through events and writes down what it decides, line by line.

The lines of one call belong together: the first says what was asked, the others, indented, what
came of it. Statistics, times and tiers are written where they have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import takewhile
from operator import eq
from typing import Any

from paceline.backends.reference.null import expected_tokens
from tests.replay import observe
from tests.replay.observe import Asked, Core

# (tokens of rows of several tokens, rows of one token) -> seconds of a step
Seconds = Callable[[int, int], float]

_CENSUS_EVERY = 16


class Rig:
    """A scheduler of ``core`` with a hand-moved clock, over a model that is computed by hand.

    Args:
        config, cache: arguments of the core's two configurations.
        depth: steps in flight at most.
        seconds: of a step; None: the backend measures nothing.
        tick: seconds that pass with each step whatever it takes; None: those that it takes.
        vocab: tokens are smaller than this.
        tell_all: updates tell of every token, and not of requests that ended alone.
        check: look at the scheduler's integrity after every plan.
    """

    def __init__(
        self,
        core: Core,
        config: Mapping[str, Any],
        cache: Mapping[str, Any],
        *,
        depth: int = 1,
        seconds: Seconds | None = None,
        tick: float | None = 1.0,
        vocab: int = 997,
        tell_all: bool = True,
        check: bool = False,
    ) -> None:
        self.scheduler = observe.make_scheduler(core, config, cache)
        self.now = 0.0
        self.lines: list[str] = []
        # requests that have not ended, by name
        self.live: dict[str, Any] = {}
        self._core = core
        self._errors = observe.request_errors(core)
        self._depth = depth
        self._seconds = seconds
        self._tick = tick
        self._vocab = vocab
        self._tell_all = tell_all
        self._check = check
        # of each request: its prompt's length, its output, and where in that it fails, if it does
        self._outputs: dict[str, tuple[int, list[int], int | None]] = {}
        self._failed: set[str] = set()
        self._flying: list[tuple[Any, Any, float]] = []
        # what was written last
        self._said: dict[str, Any] = {}
        self._tiers: dict[str, str] = {}
        self._num_plans = 0

    @property
    def num_flying(self) -> int:
        return len(self._flying)

    def add(self, asked: Asked, fails_at: int | None = None) -> bool:
        """Ask for a request; its output token ``fails_at`` cannot be computed. Returns whether it
        was taken."""
        self._head(f"add {asked.name}")
        request = observe.make_request(self._core, asked)
        try:
            self.scheduler.add_request(request)
        except self._errors as error:
            self._say([f"refused {observe.refusal_line(error)}"])
            self._look()
            return False
        self._say([f"predicted {observe.predicted_ttft(request)}"])
        self.live[asked.name] = request
        output = expected_tokens(asked.prompt, asked.max_tokens, self._vocab)
        self._outputs[asked.name] = len(asked.prompt), output, fails_at
        self._look([asked.name])
        return True

    def abort(self, *names: str) -> None:
        self._head(f"abort {' '.join(names)}")
        self._take(self.scheduler.abort(names))
        self._look()

    def plan(self) -> bool:
        """Plan a step and run it, leaving its result in flight. Returns whether it has rows."""
        self._head("plan")
        plan = self.scheduler.schedule(self.now)
        for expired in self.scheduler.take_expired():
            self._say([f"expired {observe.expiry_line(expired)}"])
            for name in observe.expired_names(expired):
                del self.live[name]
        self._num_plans += 1
        self._say(observe.plan_lines(plan))
        if self._num_plans % _CENSUS_EVERY == 0:
            self._say([f"census {observe.census_line(self.scheduler)}"])
        self._look(self.live)
        if self._check:
            self.scheduler.check_integrity()
        rows = list(observe.rows(plan))
        if rows:
            self._execute(plan, rows)
        return bool(rows)

    def settle(self) -> None:
        """Take in the oldest result in flight."""
        plan, result, _ = self._flying.pop(0)
        self._head("update")
        self._take(self.scheduler.update(plan, result, self.now, tell_all=self._tell_all))
        self._look()

    def step(self) -> bool:
        """One turn of an engine with ``depth`` steps in flight, or one where its tokens are waited
        for; False when nothing moved."""
        while len(self._flying) < self._depth:
            if self._flying and observe.awaits_tokens(self.scheduler):
                break
            if not self.plan():
                break
        passing = self._flying[0][2] if self._flying else 1.0
        self.now += passing if self._tick is None else self._tick
        if not self._flying:
            return self.scheduler.wake_at is not None
        self.settle()
        return True

    def run(self, max_steps: int = 10_000) -> None:
        """Until idle, or until nothing moves."""
        for _ in range(max_steps):
            if not self.step():
                break
        self.lines.append("stuck" if self.scheduler.has_unfinished else "idle")

    def _execute(self, plan: Any, rows: list[tuple[str, int, int, bool, tuple[int, ...]]]) -> None:
        sampled: list[tuple[int, ...]] = []
        errors: list[tuple[str, str]] = []
        wide = narrow = 0
        for name, start, num_tokens, samples, drafts in rows:
            if num_tokens == 1:
                narrow += 1 + len(drafts)
            else:
                wide += num_tokens
            prompt, output, fails_at = self._outputs[name]
            index = start + num_tokens - prompt
            if samples and index == fails_at and name not in self._failed:
                self._failed.add(name)
                errors.append((name, f"output token {index} cannot be computed"))
            got = samples and name not in self._failed
            # drafts that are right bring a token more each
            right = len(list(takewhile(bool, map(eq, drafts, output[index:]))))
            if fails_at is not None and fails_at > index:
                right = min(right, fails_at - index - 1)
            sampled.append(tuple(output[index : index + 1 + right]) if got else ())
        elapsed = self._seconds(wide, narrow) if self._seconds else 0.0
        result = observe.make_result(self._core, plan, sampled, errors, elapsed)
        self._flying.append((plan, result, elapsed))

    def _take(self, updates: Iterable[Any]) -> None:
        for update in updates:
            self._say([observe.update_line(update)])
            if observe.has_ended(update):
                del self.live[update.request_id]

    def _head(self, what: str) -> None:
        self.lines.append(f"{what} at {self.now!r}")

    def _say(self, lines: Iterable[str]) -> None:
        self.lines += [f"  {line}" for line in lines]

    def _look(self, names: Iterable[str] = ()) -> None:
        """Write down what has changed of what can be seen from outside, and of these requests: a
        plan may move any of them, and nothing else moves them."""
        seen = observe.statistics(self.scheduler) | observe.times(self.scheduler)
        news = [(word, value) for word, value in seen.items() if self._said.get(word) != value]
        self._said = seen
        if news:
            self._say([" ".join([f"{word}={value!r}" for word, value in news])])
        for name in names:
            tier = observe.tier(self.live[name])
            if self._tiers.get(name) != tier:
                self._tiers[name] = tier
                self._say([f"tier {name} {tier}"])
