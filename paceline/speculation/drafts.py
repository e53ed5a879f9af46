"""Guesses of next tokens, added to a step whose rows are settled.

A row of one token becomes one of 1 + k: the last k are guesses, and the backend says which of them
the request's own choice of tokens would have made. Guesses come last of all: they take tokens and
blocks that no other request wants, in steps of few rows in which no prompt is computed and while
no request waits. One is added while it is likelier to be right than its share of the step's time.

This module does not know where guesses come from, or what becomes of their tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Final

from paceline.core.outputs import DRAFT_MODEL, Draft, ScheduledRow, SchedulerOutput, StepResult
from paceline.core.predict.chunk import LATE_QUANTILE
from paceline.core.predict.step_time import StepShape
from paceline.core.request import Request
from paceline.core.step.limits import Step
from paceline.core.step.state import SchedulerState
from paceline.speculation.draft_choice import DraftChoice, StepCosts, likeliest_first
from paceline.speculation.guess import NO_GUESS, Drafter, Guess, ModelDrafter
from paceline.speculation.guesser import Acceptance, Guesser
from paceline.speculation.ngram import NgramDrafter
from paceline.speculation.prediction import PredictionDrafter
from paceline.speculation.row_price import RowPrice
from paceline.speculation.settings import SpeculationSettings

__all__ = ["DrafterMaker", "Drafts"]

DrafterMaker = Callable[[Request], Drafter]

# running requests beyond which none is given guesses
_MOST_ROWS: Final = 8
# one step in so many tries a likely guess whatever it is thought to cost, or it would not be known
# any more; a try that was not worth it makes the next twice as rare, up to the second number, until
# a guess is worth it or another request comes
_TRY: Final = 32
_MOST_TRY: Final = 512
# steps with guesses before which it is not known what they cost: rows of one request alone cannot
# be told from the fixed part of a step
_UNPRICED: Final = 16
# weight of the newest in means, and of what a try found
_NEWEST: Final = 0.1
_TRIED: Final = 0.5
# of the mean wait for tokens is left after a step that waited for nothing
_FORGETTING: Final = 0.99
# known tokens that the draft model takes in in a step, from which on its time tells their price
_MANY: Final = 32
_TOKEN_IDS: Final = attrgetter("token_ids")
_BEST_EFFORT: Final = attrgetter("best_effort")
# share of tokens guessed from which on the next step is planned when the last one's tokens are
# known: planning meanwhile saves less than what can be guessed then
_WORTH_WAITING: Final = 0.1


class Drafts:
    """The ``Speculation`` of one scheduler: adds guesses to steps, and counts what became of them.

    Args:
        make: a drafter for a request, which is the only one then; None: by the settings.

    Raises:
        ConfigError: ``speculative_config`` says what is not known, see ``SpeculationSettings.of``.
    """

    def __init__(self, state: SchedulerState, make: DrafterMaker | None = None) -> None:
        self._settings = SpeculationSettings.of(state.config.speculative_config)
        self._totals, self._make = state.totals, make
        self._acceptance, self._row_price = Acceptance(), RowPrice()
        self._waiting, self._forks, self._running = state.waiting, state.forks, state.running
        self._kv, self._step_time, self._work = state.kv, state.step_time, state.work
        self._num_steps = self._num_lengthened = 0
        # from this step on a guess is to be tried, and the next one so many steps later; whether
        # the last guesses were a try
        self._try_at = self._try_every = _TRY
        self._tried = False
        # requests of the last step had guesses that are worth verifying, or often have: the next
        # step is best planned when that one's tokens are known
        self.awaits_tokens = False
        # seconds that pass between a step's tokens and the plan that waited for them, and when the
        # last tokens came
        self._bubble = self._told_at = 0.0
        # seconds in which the draft model makes a guess of each row, and takes in a known token, of
        # which it took in so many in a step at most
        self._pass_seconds = self._token_seconds = 0.0
        self._most_taken = 0
        # known tokens of a request that it takes in at most: a head sees no more; 0: not known
        self._most_seen = 0
        # predicted seconds of the last step in which guesses are made
        self.making_seconds = 0.0

    def begins(self, request: Request | None) -> bool:
        """Whether there may be guesses: of all requests, or of one that says what it expects."""
        if request is None:
            return self._make is not None or self._settings.guesses_alone
        return self._settings.predictions and len(request.asked.prediction_token_ids) > 0

    def add(self, step: Step) -> tuple[Draft, ...]:
        """Lengthen rows of a step that is otherwise complete; see ``SchedulerOutput.drafts``."""
        requests = step.requests
        self._note_bubble(requests, step.now)
        self.awaits_tokens, self.making_seconds = False, 0.0
        if not requests or step.wide_tokens or not self._has_room(step):
            return ()
        guesses = [self._guesses(request) for request in requests]
        counts = self._choose(step, guesses) if any(map(_TOKEN_IDS, guesses)) else ()
        self.awaits_tokens = not any(counts) and self._worth_waiting(step)
        drafts = []
        for index, count in enumerate(counts):
            if not count or not (count := self._with_blocks(requests[index], count)):
                continue
            self.awaits_tokens = True
            # where an earlier step's token is not known yet, what follows it cannot be guessed
            if requests[index].num_pending_tokens == 1:
                self._lengthen(step, index, count)
                guess = guesses[index]
                drafts.append(Draft(index, tuple(guess.token_ids[:count]), guess.source))
        if drafts and self._num_steps >= self._try_at:
            self._try_every = min(_MOST_TRY, 2 * self._try_every) if self._tried else _TRY
            self._try_at = self._num_steps + self._try_every
        self._predict_making(requests, drafts)
        return tuple(drafts)

    def _has_room(self, step: Step) -> bool:
        """Whether guesses take nothing that another request wants, once no prompt is computed."""
        return not (
            len(self._running.requests) > _MOST_ROWS
            or len(self._waiting)
            or self._forks.by_parent
            or any(map(_BEST_EFFORT, step.requests))
        )

    def forces(self, step: Step) -> tuple[int, ...]:
        """See ``SchedulerOutput.forces``: where guesses may be worth something in the next step."""
        if not self._settings.grammars or not self._has_room(step):
            return ()
        return tuple(
            index
            for index, request in enumerate(step.requests)
            if request.asked.sampling.grammar is not None
            and step.rows[index].samples
            # its next row has a token more
            and min(_room(request) - 1, request.asked.max_draft_tokens) > 0
        )

    def take_in(
        self, plan: SchedulerOutput, requests: list[Request], result: StepResult, now: float
    ) -> None:
        """A step is back, whose tokens the ``requests`` of its rows do not have yet: count what was
        computed of wrong guesses as not computed, so that the next row overwrites it."""
        self._told_at = now
        num_guesses = self._settle(plan, requests, result) if plan.drafts else 0
        planned_rows = len(plan.rows) + sum(len(token_ids) for _, token_ids, _ in plan.drafts)
        if plan.num_tokens == planned_rows and result.elapsed > 0.0:
            self._row_price.observe(len(plan.rows) + num_guesses, result.elapsed)
        for index, token_ids in result.forced:
            if (guesser := self._guesser(requests[index])) is not None:
                guesser.force(requests[index].num_tokens + len(result.sampled[index]), token_ids)

    def _settle(self, plan: SchedulerOutput, requests: list[Request], result: StepResult) -> int:
        """``take_in`` of rows with guesses. Returns how many of these were verified."""
        made, num_guesses, busy = dict(result.made), 0, sum(result.caught_up) >= _MANY
        caught_up = dict(zip(made, result.caught_up, strict=False))
        behind = dict(zip(made, result.behind, strict=False))
        guesser: Guesser | None
        for index, planned, source in plan.drafts:
            request, sampled = requests[index], result.sampled[index]
            token_ids = planned if source != DRAFT_MODEL else made.get(index, ())
            if source == DRAFT_MODEL and (guesser := request.guesser) is not None:
                left = behind.get(index, 0)
                # it guesses without having seen so many
                passed = guesser.num_unseen - caught_up.get(index, 0) - left
                if passed >= _MANY and (token_ids or left):
                    self._most_seen = max(self._most_seen, request.num_tokens - passed)
                guesser.learn(token_ids, left, busy)
            num_guesses += len(token_ids)
            right = max(0, len(sampled) - 1)
            if token_ids:
                counted = min(right, _until_end(request, sampled))
                self._totals.note_draft(source, len(token_ids), counted)
                verified, so_far = request.history.drafts.get(source, (0, 0))
                request.history.drafts[source] = verified + len(token_ids), so_far + counted
            # the caller is told with the next tokens
            request.told = False
            # 0 if it has ended or been preempted: its blocks are gone
            if request.num_draft_tokens:
                request.num_computed_tokens -= len(planned) - right
                request.num_draft_tokens = 0
        self._num_lengthened += bool(num_guesses or made)
        if made:
            self._learn_making(max(map(len, made.values())), result)
        return num_guesses

    def _learn_making(self, passes: int, result: StepResult) -> None:
        """The backend's model took some time for so many passes, and to take in known tokens."""
        taken, seconds = sum(result.caught_up), result.drafting
        self._most_taken = max(self._most_taken, taken)
        if taken < _MANY:
            share = _TRIED if self._tried else _NEWEST
            self._pass_seconds = _mean(self._pass_seconds, seconds / max(1, passes), share)
        elif self._pass_seconds or not passes:
            rest = max(0.0, seconds - passes * self._pass_seconds)
            self._token_seconds = _mean(self._token_seconds, rest / taken, _NEWEST)

    def _predict_making(self, requests: Sequence[Request], drafts: Sequence[Draft]) -> None:
        passes = unseen = 0
        guesser: Guesser | None
        for row, token_ids, source in drafts:
            if source == DRAFT_MODEL and (guesser := requests[row].guesser) is not None:
                passes, unseen = max(passes, len(token_ids)), unseen + self._unseen(guesser)
        taken = min(unseen, self._most_taken) * self._token_seconds
        self.making_seconds = passes * self._pass_seconds + taken

    def _unseen(self, guesser: Guesser) -> int:
        """Known tokens that the backend's model is expected to take in."""
        return min(guesser.num_unseen, self._most_seen or guesser.num_unseen)

    def _guesses(self, request: Request) -> Guess:
        most = min(self._settings.num_tokens, _room(request), request.asked.max_draft_tokens)
        if most <= 0 or request.shares_tail:
            return NO_GUESS
        guesser: Guesser | None = request.guesser or self._guesser(request)
        known = request.num_prompt_tokens, request.output_token_ids
        return NO_GUESS if guesser is None else guesser.guess(*known, most)

    def _guesser(self, request: Request) -> Guesser | None:
        """None: there is nothing to guess from."""
        guesser: Guesser | None = request.guesser
        if guesser is None:
            drafters = self._drafters(request)
            forced = self._settings.grammars and request.asked.sampling.grammar is not None
            if drafters or forced:
                prompt = request.asked.prompt_token_ids
                guesser = request.guesser = Guesser(drafters, prompt, self._acceptance)
                self._try_every = _TRY
                self._try_at = min(self._try_at, self._num_steps + _TRY)
        return guesser

    def _drafters(self, request: Request) -> list[Drafter]:
        if self._make is not None:
            return [self._make(request)]
        settings, drafters = self._settings, list[Drafter]()
        if settings.predictions and (predicted := request.asked.prediction_token_ids):
            drafters.append(PredictionDrafter(predicted, request.num_prompt_tokens))
        if settings.lookup_min is not None and settings.lookup_max is not None:
            drafters.append(NgramDrafter(settings.lookup_min, settings.lookup_max))
        if request.asked.drafter is not None:
            drafters.append(request.asked.drafter)
        if settings.models:
            drafters.append(ModelDrafter())
        return drafters

    def _choose(self, step: Step, guesses: list[Guess]) -> Sequence[int]:
        """How many guesses of each row are worth it; (): of none."""
        model, requests = self._step_time, step.requests
        if not model.ready and any(request.targets.aims for request in requests):
            return ()
        self._num_steps += 1
        known = model.ready and self._num_lengthened >= _UNPRICED
        due, plain = self._num_steps >= self._try_at, self._price(len(requests))[0]
        survivals: list[Sequence[float]] = [()] * len(requests)
        catching_up: dict[int, float] = {}
        guesser: Guesser | None
        for index, guess in enumerate(guesses):
            if not guess.token_ids or (guesser := (request := requests[index]).guesser) is None:
                continue
            survivals[index] = guesser.acceptance.survivals(guess)
            if guess.source == DRAFT_MODEL:
                left = max(1, self._work.output_tokens(request) - request.num_output_tokens)
                catching_up[index] = self._unseen(guesser) * self._token_seconds / left
        if not (ranked := likeliest_first(survivals, catching_up if due else ())):
            self._tried = False
            return ()
        costs = StepCosts(
            making=self._pass_seconds,
            catching_up=catching_up,
            seconds=model.predict(step.shape) if model.ready else 0.0,
            late=max(1.0, model.quantile(LATE_QUANTILE)),
            price=self._price,
            known=known,
        )
        choice = DraftChoice(requests, costs, most=step.budget, tries=due)
        choice.take(ranked, survivals)
        self._tried = due != choice.tries
        gained = choice.tokens - len(requests)
        if known and not choice.behind and gained * plain <= len(requests) * self._bubble:
            # waiting for the tokens that follow takes longer than all of them would
            return ()
        return choice.counts

    def _note_bubble(self, requests: Sequence[Request], now: float) -> None:
        """Learn from a plan that waited for tokens; what is not tried is forgotten, to be tried
        again."""
        if not self.awaits_tokens or not requests or requests[0].num_pending_tokens != 1:
            self._bubble *= _FORGETTING
            return
        waited, step = now - self._told_at, self._price(len(requests))[0]
        # longer than two steps: no request was there
        if waited < 2 * step:
            self._bubble += _NEWEST * (waited - self._bubble)

    def _worth_waiting(self, step: Step) -> bool:
        """Whether guesses of the next step are likely to bring more than the next plan's waiting
        for this step's tokens costs."""
        shares: list[float] = [
            r.guesser.acceptance.share for r in step.requests if r.guesser is not None
        ]
        share = sum(shares) / max(1, len(shares))
        if share <= _WORTH_WAITING:
            return False
        count = len(step.requests)
        seconds, each_row = self._price(count)
        return not seconds or share * (seconds - count * each_row) > self._bubble

    def _price(self, num_rows: int) -> tuple[float, float]:
        """Seconds of a step of so many rows, and those that one more adds; 0 while nothing is
        known."""
        found, model = self._row_price.of(num_rows), self._step_time
        if found is not None or not model.ready:
            return found or (0.0, 0.0)
        return model.predict(StepShape(narrow_rows=num_rows)), model.row_seconds(0)

    def _with_blocks(self, request: Request, count: int) -> int:
        """For how many of so many guesses of its row a request can have blocks without making
        another give some up, now or in the next step."""
        held = len(request.block_ids) * self._kv.block_size - request.num_computed_tokens
        short = self._kv.pool.num_free <= count + len(self._running.requests)
        return max(0, min(count, held)) if short else count

    def _lengthen(self, step: Step, index: int, count: int) -> None:
        """Make a row one of so many guesses more, whose blocks are there."""
        request = step.requests[index]
        extension = self._kv.extend(request, count)
        assert extension is not None and extension.copy is None, "the blocks were counted"
        request_id, start, num_tokens, block_ids, samples = step.rows[index]
        block_ids += extension.new_block_ids
        step.rows[index] = ScheduledRow(request_id, start, num_tokens + count, block_ids, samples)
        request.num_computed_tokens += count
        request.num_draft_tokens = count
        # they cost what rows of one token do, but for the keys, which a row reads once
        step.count_plain(count, 0)


def _room(request: Request) -> int:
    """Guesses that a planned row may have: the last token that a request gets is never computed."""
    return request.max_total_tokens - request.num_tokens - request.num_pending_tokens


def _until_end(request: Request, token_ids: Sequence[int]) -> int:
    """A row's tokens up to the one that ends the output: the others are not part of it."""
    least = request.asked.sampling.min_tokens - request.num_output_tokens
    ends = [n for n, t in enumerate(token_ids, 1) if n >= least and t in request.stop_ids]
    return ends[0] if ends else len(token_ids)


def _mean(mean: float, newest: float, share: float) -> float:
    """Of what was seen lately; 0 before anything was."""
    return mean + (share if mean else 1.0) * (newest - mean)
