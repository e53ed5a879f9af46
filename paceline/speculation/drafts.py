"""Draft tokens, added to a step whose rows are settled.

A row of one token becomes one of 1 + k: the last k are draft tokens, and the backend reports which
of them the request's own choice of tokens would have produced. Drafts come last of all: they take
tokens and blocks that no other request wants, in steps of few rows that compute no prompt and while
no request waits. One is added while its probability exceeds its share of the time.

This module does not know where draft tokens come from, what they cost or what becomes of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Final

from paceline.core.drafter import NO_DRAFT, Drafter, DraftTokens
from paceline.core.outputs import DRAFT_MODEL, Draft, SchedulerOutput, StepResult
from paceline.core.predict.chunk import LATE_QUANTILE
from paceline.core.request import Request
from paceline.core.step.limits import Step
from paceline.core.step.state import SchedulerState
from paceline.speculation.draft_choice import DraftChoice, StepCosts, likeliest_first
from paceline.speculation.draft_cost import MANY, DraftCosts, Tries
from paceline.speculation.draft_state import Acceptance, DraftState
from paceline.speculation.draft_tokens import ModelDrafter
from paceline.speculation.ngram import NgramDrafter
from paceline.speculation.prediction import PredictionDrafter
from paceline.speculation.settings import SpeculationSettings

__all__ = ["DrafterMaker", "Drafts"]

DrafterMaker = Callable[[Request], Drafter]

# adapters of which it is remembered how often drafts were right
_MOST_ADAPTERS: Final = 256
# most running requests with which drafts are made
_MOST_ROWS: Final = 8
_TOKEN_IDS: Final = attrgetter("token_ids")
_BEST_EFFORT: Final = attrgetter("best_effort")
# share of tokens drafted right above which the next step is planned only once the last tokens are
# known: planning earlier saves less than the drafts bring
_WORTH_WAITING: Final = 0.1


class Drafts:
    """The ``Speculation`` of one scheduler: adds drafts to steps, and counts their results.

    Args:
        make: makes a request's only drafter; None: as the settings say.

    Raises:
        ConfigError: unknown values of ``speculative_config``, see ``SpeculationSettings.of``.
    """

    def __init__(self, state: SchedulerState, make: DrafterMaker | None = None) -> None:
        self._settings = SpeculationSettings.of(state.config.speculative_config)
        self._totals, self._make = state.totals, make
        # of the model itself, and of it with each adapter, the one asked for last at the end
        self._acceptance, self._adapted = Acceptance(), dict[bytes, Acceptance]()
        self._costs = DraftCosts(state.step_time)
        self._tries = Tries()
        self._waiting, self._forks, self._running = state.waiting, state.forks, state.running
        self._kv, self._step_time, self._work = state.kv, state.step_time, state.work
        # requests of the last step had drafts worth verifying, or often have: the next step is best
        # planned once that step's tokens are known
        self.awaits_tokens = False
        # predicted seconds of the last step for making draft tokens
        self.making_seconds = 0.0

    def begins(self, request: Request | None) -> bool:
        """Whether there may be drafts: for all requests, or for one with an expected output."""
        if request is None:
            return self._make is not None or self._settings.drafts_alone
        return self._settings.predictions and len(request.asked.prediction_token_ids) > 0

    def add(self, step: Step) -> tuple[Draft, ...]:
        """Lengthen rows of a step that is otherwise complete; see ``SchedulerOutput.drafts``."""
        requests = step.requests
        waited = self.awaits_tokens and requests and requests[0].num_pending_tokens == 1
        self._costs.note_plan(step.now, len(requests), waited=bool(waited))
        self.awaits_tokens, self.making_seconds = False, 0.0
        if not requests or step.wide_tokens or not self._has_room(step):
            return ()
        proposed = [self._propose(request) for request in requests]
        counts = self._choose(step, proposed) if any(map(_TOKEN_IDS, proposed)) else ()
        self.awaits_tokens = not any(counts) and self._worth_waiting(step)
        drafts = []
        for index, count in enumerate(counts):
            if not count or not (count := self._with_blocks(requests[index], count)):
                continue
            self.awaits_tokens = True
            # drafts cannot follow a token of an earlier step that is not known yet
            if requests[index].num_pending_tokens == 1:
                extension = self._kv.extend(requests[index], count)
                assert extension is not None and extension.copy is None, "the blocks were counted"
                step.lengthen(index, count, extension.new_block_ids)
                draft = proposed[index]
                drafts.append(Draft(index, tuple(draft.token_ids[:count]), draft.source))
        if drafts:
            self._tries.end_step()
        self._predict_making(requests, drafts)
        return tuple(drafts)

    def _has_room(self, step: Step) -> bool:
        """Whether drafts take nothing that another request wants, if no prompt is computed."""
        return not (
            len(self._running.requests) > _MOST_ROWS
            or len(self._waiting)
            or self._forks.by_parent
            or any(map(_BEST_EFFORT, step.requests))
        )

    def forces(self, step: Step) -> tuple[int, ...]:
        """Return ``SchedulerOutput.forces``: rows with which drafts may pay in the next step."""
        if not self._settings.grammars or not self._has_room(step):
            return ()
        return tuple(
            index
            for index, request in enumerate(step.requests)
            if request.asked.sampling.grammar is not None
            and step.rows[index].samples
            # its next row has one more token
            and min(_room(request) - 1, request.asked.max_draft_tokens) > 0
        )

    def apply_result(
        self, plan: SchedulerOutput, requests: list[Request], result: StepResult, now: float
    ) -> None:
        """Take in a step's result, before its tokens are appended to the ``requests`` of its rows.
        Counts computed tokens of wrong drafts as not computed: the next row overwrites them."""
        num_verified = self._settle(plan, requests, result) if plan.drafts else 0
        planned_rows = len(plan.rows) + sum(len(token_ids) for _, token_ids, _ in plan.drafts)
        seconds = result.elapsed if plan.num_tokens == planned_rows else 0.0
        self._costs.note_result(now, len(plan.rows) + num_verified, seconds)
        for index, token_ids in result.forced:
            if (state := self._draft_state(requests[index])) is not None:
                state.force(requests[index].num_tokens + len(result.sampled[index]), token_ids)

    def _settle(self, plan: SchedulerOutput, requests: list[Request], result: StepResult) -> int:
        """Do ``apply_result`` for rows with drafts. Returns how many draft tokens were verified."""
        made, num_verified, busy = dict(result.made), 0, sum(result.caught_up) >= MANY
        caught_up = dict(zip(made, result.caught_up, strict=False))
        behind = dict(zip(made, result.behind, strict=False))
        for index, planned, source in plan.drafts:
            request, sampled = requests[index], result.sampled[index]
            token_ids = planned if source != DRAFT_MODEL else made.get(index, ())
            if source == DRAFT_MODEL and (state := _state_of(request)) is not None:
                left = behind.get(index, 0)
                # tokens that it skips without reading
                passed = state.num_unseen - caught_up.get(index, 0) - left
                if token_ids or left:
                    self._costs.note_skipped(passed, request.num_tokens - passed)
                state.learn(token_ids, left, busy)
            num_verified += len(token_ids)
            right = max(0, len(sampled) - 1)
            if token_ids:
                counted = min(right, _until_end(request, sampled))
                self._totals.note_draft(source, len(token_ids), counted)
                request.history.note_draft(source, len(token_ids), counted)
            request.settle_drafts(num_wrong=len(planned) - right)
        self._costs.note_drafted(result, verified=num_verified > 0, tried=self._tries.tried)
        return num_verified

    def _predict_making(self, requests: Sequence[Request], drafts: Sequence[Draft]) -> None:
        passes = unseen = 0
        for row, token_ids, source in drafts:
            if source == DRAFT_MODEL and (state := _state_of(requests[row])) is not None:
                passes = max(passes, len(token_ids))
                unseen += self._costs.unseen(state.num_unseen)
        self.making_seconds = self._costs.making(passes, unseen)

    def _propose(self, request: Request) -> DraftTokens:
        most = min(self._settings.num_tokens, _room(request), request.asked.max_draft_tokens)
        if most <= 0 or request.shares_tail:
            return NO_DRAFT
        state = _state_of(request) or self._draft_state(request)
        known = request.num_prompt_tokens, request.output_token_ids
        return NO_DRAFT if state is None else state.propose(*known, most)

    def _draft_state(self, request: Request) -> DraftState | None:
        """Return the request's drafts so far; None: there is no source of drafts."""
        state = _state_of(request)
        if state is None:
            drafters = self._drafters(request)
            forced = self._settings.grammars and request.asked.sampling.grammar is not None
            if drafters or forced:
                prompt = request.asked.prompt_token_ids
                state = DraftState(drafters, prompt, self._acceptance_of(request))
                request.keep_drafts(state)
                self._tries.on_request()
        return state

    def _acceptance_of(self, request: Request) -> Acceptance:
        """Return what is known of drafts for a request's model: an adapter says other things, which
        drafts may know worse, or better."""
        if (adapter := request.asked.adapter) is None:
            return self._acceptance
        found = self._adapted.pop(adapter.key, None) or Acceptance(self._acceptance, apart=True)
        self._adapted[adapter.key] = found
        if len(self._adapted) > _MOST_ADAPTERS:
            del self._adapted[next(iter(self._adapted))]
        return found

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

    def _choose(self, step: Step, proposed: list[DraftTokens]) -> Sequence[int]:
        """Return the number of draft tokens of each row that pay; (): none at all."""
        model, requests = self._step_time, step.requests
        if not model.ready and any(request.targets.has_targets for request in requests):
            return ()
        due, costs = self._tries.begin_step(), self._costs
        plain = costs.step_seconds(len(requests))[0]
        survivals: list[Sequence[float]] = [()] * len(requests)
        catching_up: dict[int, float] = {}
        for index, draft in enumerate(proposed):
            if not draft.token_ids or (state := _state_of(request := requests[index])) is None:
                continue
            survivals[index] = state.acceptance.survivals(draft)
            if draft.source == DRAFT_MODEL:
                left = max(1, self._work.output_tokens(request) - request.num_output_tokens)
                catching_up[index] = costs.unseen(state.num_unseen) * costs.token_seconds / left
        if not (ranked := likeliest_first(survivals, catching_up if due else ())):
            self._tries.note(False)
            return ()
        step_costs = StepCosts(
            making=costs.pass_seconds,
            catching_up=catching_up,
            seconds=model.predict(step.shape) if model.ready else 0.0,
            late=max(1.0, model.quantile(LATE_QUANTILE)),
            price=costs.step_seconds,
            known=costs.known,
        )
        choice = DraftChoice(requests, step_costs, most=step.budget, tries=due)
        choice.take(ranked, survivals)
        self._tries.note(due != choice.tries)
        gained = choice.tokens - len(requests)
        if costs.known and not choice.behind and gained * plain <= len(requests) * costs.bubble:
            # waiting for the tokens to follow would take longer than the drafts save
            return ()
        return choice.counts

    def _worth_waiting(self, step: Step) -> bool:
        """Whether drafts of the next step are likely to gain more time than delaying its plan until
        this step's tokens are known costs."""
        states = map(_state_of, step.requests)
        shares = [state.acceptance.share for state in states if state is not None]
        share = sum(shares) / max(1, len(shares))
        if share <= _WORTH_WAITING:
            return False
        count = len(step.requests)
        seconds, each_row = self._costs.step_seconds(count)
        return not seconds or share * (seconds - count * each_row) > self._costs.bubble

    def _with_blocks(self, request: Request, count: int) -> int:
        """Return how many of ``count`` draft tokens of its row a request can have blocks for
        without making another request give some up, now or in the next step."""
        held = len(request.block_ids) * self._kv.block_size - request.num_computed_tokens
        short = self._kv.pool.num_free <= count + len(self._running.requests)
        return max(0, min(count, held)) if short else count


def _state_of(request: Request) -> DraftState | None:
    """Return the drafts that the request keeps; None: it was never considered for some."""
    state = request.draft_state
    assert state is None or isinstance(state, DraftState)
    return state


def _room(request: Request) -> int:
    """Return the most draft tokens of a planned row: a request's last token is never computed."""
    return request.max_total_tokens - request.num_tokens - request.num_pending_tokens


def _until_end(request: Request, token_ids: Sequence[int]) -> int:
    """Count a row's tokens up to the one that ends the output: later ones are not part of it."""
    least = request.asked.sampling.min_tokens - request.num_output_tokens
    ends = [n for n, t in enumerate(token_ids, 1) if n >= least and t in request.stop_ids]
    return ends[0] if ends else len(token_ids)
