"""Plans in, arrays through the model, tokens out.

Keeps each request's tokens and block table in a row of preallocated arrays, so that a step's flat
arrays are a few numpy gathers for any number of rows. Sampled tokens are written to these arrays at
once: the next plan may run before the scheduler has seen them.

This module does not know threads, files, how many blocks there are, or what kind of array a model's
logits are in.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.backends.runner.constraint import OutputConstraint
from paceline.backends.runner.drafting import Drafting, DraftRow, Made
from paceline.backends.runner.interface import (
    AttentionBatch,
    CopyableModel,
    Likeliest,
    LoadedAdapter,
    LoadedModel,
    Logits,
    RowAdapter,
    WindowedModel,
)
from paceline.backends.runner.sampling import SampleRow
from paceline.backends.runner.slot import Slot
from paceline.core.grammar import MatcherSource
from paceline.core.outputs import (
    DRAFT_MODEL,
    NewRequest,
    ScheduledRow,
    SchedulerOutput,
    StepResult,
    TokenLogprobs,
)
from paceline.core.request import MOST_DRAFT_TOKENS
from paceline.errors import NAN_LOGITS, NOTHING_LEFT, PacelineError

__all__ = ["ModelRunner"]

# one entry per sampled token, None for rows that asked for none
RowLogprobs: TypeAlias = tuple[TokenLogprobs, ...] | None
# row -> tokens its grammar forbids [vocab] after none of the row's drafts, after one, and so on,
# as far as the grammar can read them; or the reason for which the request fails
Masks: TypeAlias = dict[int, "list[NDArray[np.bool_]] | str"]

_NOTHING_LEFT: Final = (
    f"{NOTHING_LEFT}: the grammar, allowed_token_ids, bad_words and min_tokens of this request "
    "forbid all of them"
)


class ModelRunner:
    """Executor of plans, one after the other. Used from one thread.

    Args:
        max_num_seqs: requests expected to hold state at once; the arrays grow for more.
        max_model_len: longest request, tokens.
        draft: drafts tokens where a plan leaves them to the backend; None: no drafts are made.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        vocab_size: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        draft: Drafting | None = None,
    ) -> None:
        # public, so that callers can see what computes
        self.model = loaded.model
        # by the number that plans name; others than the model's thread may add to it
        self.adapters: dict[int, LoadedAdapter] = {}
        # what copies blocks out and in; None: nothing can
        self.memory: CopyableModel | None = None
        self._sampler = loaded.sampler
        self._score = loaded.score
        self._draft = draft
        self._vocab_size = vocab_size
        self._block_size = block_size
        # one column more: a request's last token is stored here, but never computed
        self._tokens = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
        blocks = -(-max_model_len // block_size)
        self._tables = np.zeros((max_num_seqs, blocks), dtype=np.int32)
        self._slots: dict[str, Slot] = {}
        self._free = list(range(max_num_seqs))
        self._matchers: MatcherSource | None = None
        self._mask_thread: Executor | None = None

    def constrain(self, matchers: MatcherSource, thread: Executor) -> None:
        """Apply grammars from now on; masks are filled on ``thread`` while the model runs."""
        self._matchers = matchers
        self._mask_thread = thread

    def write_blocks(self, block_ids: Sequence[int], data: bytes) -> None:
        """Fill blocks with content that was copied out before."""
        assert self.memory is not None, "this model's blocks cannot be copied"
        self.memory.write_blocks(block_ids, data)
        if self._draft is not None:
            self._draft.forget(block_ids, clear=True)

    def run(self, plan: SchedulerOutput) -> StepResult:
        """Run one step; see ``SchedulerOutput`` for the order in which a plan is applied."""
        if plan.swaps:
            # outside the step's time, which tells how long the rows take
            self.model.swap_blocks(plan.swaps)
            if self._draft is not None:
                self._draft.forget(
                    [swap.dst for swap in plan.swaps if not swap.to_host], clear=True
                )
        started = time.monotonic()
        self._apply(plan)
        rows, slots = plan.rows, [self._slots[row.request_id] for row in plan.rows]
        self._extend_tables(rows, slots)
        drafts: dict[int, Sequence[int]] = {draft.row: draft.token_ids for draft in plan.drafts}
        made: dict[int, tuple[int, ...]] = {}
        caught_up: tuple[int, ...] = ()
        behind: tuple[int, ...] = ()
        drafting = 0.0
        if self._draft is not None and any(draft.source == DRAFT_MODEL for draft in plan.drafts):
            began = time.monotonic()
            made, caught_up, behind = self._make(self._draft, plan, slots)
            # as if the plan had asked for these numbers of tokens
            rows = tuple(
                row._replace(num_tokens=row.num_tokens - len(drafts[r]) + len(made[r]))
                if r in made
                else row
                for r, row in enumerate(rows)
            )
            drafts |= made
            drafting = time.monotonic() - began
        sampled, logprobs, errors = self._execute_sorted(rows, slots, drafts)
        prompt_logprobs = self._take_prompt_logprobs(rows)
        forced = self._forced(plan.forces, rows, drafts, sampled) if plan.forces else ()
        return StepResult(
            step_id=plan.step_id,
            sampled=tuple(sampled),
            logprobs=tuple(logprobs) if any(entry is not None for entry in logprobs) else (),
            errors=tuple(errors),
            prompt_logprobs=prompt_logprobs,
            forced=forced,
            made=tuple(made.items()),
            caught_up=caught_up,
            behind=behind,
            elapsed=time.monotonic() - started - drafting,
            drafting=drafting,
        )

    def _apply(self, plan: SchedulerOutput) -> None:
        for request_id in plan.released:
            self._release(request_id)
        for new in plan.new_requests:
            self._add(new)
        if plan.window_blocks:
            assert isinstance(self.model, WindowedModel), "it was loaded with window blocks"
            self.model.place(plan.window_blocks)
        if plan.block_copies:
            for copy in plan.block_copies:
                slot = self._slots[copy.request_id]
                self._tables[slot.index, copy.index] = copy.dst
            pairs = [(copy.src, copy.dst) for copy in plan.block_copies]
            self.model.copy_blocks(pairs)
            if self._draft is not None:
                self._draft.copied(pairs)

    def _release(self, request_id: str) -> None:
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._free.append(slot.index)

    def _add(self, new: NewRequest) -> None:
        if not self._free:
            self._grow()
        slot = Slot(self._free.pop(), new, self._vocab_size)
        self._slots[new.request_id] = slot
        if new.sampling.grammar is not None:
            if self._matchers is None:
                slot.error = "this backend was not given a compiler for grammars"
            else:
                slot.constraint = OutputConstraint(self._matchers, new.sampling.grammar)
        token_ids = np.array(new.token_ids, dtype=np.int64)
        outside = token_ids[(token_ids < 0) | (token_ids >= self._vocab_size)]
        if len(outside):
            slot.error = f"token {outside[0]} is not in the vocabulary of {self._vocab_size}"
            token_ids[:] = 0
            # the prompt has tokens of which there is no log-probability
            slot.prompt_logprobs = None
        self._tokens[slot.index, : len(token_ids)] = token_ids
        self._tables[slot.index, : slot.num_blocks] = new.block_ids

    def _grow(self) -> None:
        count = len(self._tokens)
        self._free.extend(range(count, 2 * count))
        self._tokens = np.concatenate((self._tokens, np.zeros_like(self._tokens)))
        self._tables = np.concatenate((self._tables, np.zeros_like(self._tables)))

    def _make(
        self, draft: Drafting, plan: SchedulerOutput, slots: Sequence[Slot]
    ) -> tuple[dict[int, tuple[int, ...]], tuple[int, ...], tuple[int, ...]]:
        """Return the draft model's drafts, by row, where the plan leaves them to the backend; then
        ``StepResult.caught_up`` and ``StepResult.behind`` in the same order."""
        wanted: dict[int, DraftRow] = {}
        planned = {
            r: len(token_ids) for r, token_ids, source in plan.drafts if source == DRAFT_MODEL
        }
        for r, count in planned.items():
            slot = slots[r]
            if slot.error is not None or slot.drafting_failed:
                continue
            if slot.draft_sampling is None:
                slot.draft_sampling = draft.prepare(slot.sampling.params)
            wanted[r] = DraftRow(
                self._tokens[slot.index],
                self._tables[slot.index],
                plan.rows[r].start,
                count,
                slot.draft_sampling,
                slot.num_prompt_tokens,
                plan.rows[r].request_id,
            )
        results = dict(zip(wanted, draft.make(list(wanted.values())), strict=True))
        made: dict[int, tuple[int, ...]] = {}
        for r in planned:
            count, _, _, failed = results.setdefault(r, Made())
            slots[r].drafting_failed |= failed
            first = plan.rows[r].start + 1
            made[r] = tuple(self._tokens[slots[r].index, first : first + count].tolist())
        rows = [results[r] for r in planned]
        return made, tuple(row.caught_up for row in rows), tuple(row.behind for row in rows)

    def _execute_sorted(
        self,
        rows: Sequence[ScheduledRow],
        slots: Sequence[Slot],
        drafts: Mapping[int, Sequence[int]],
    ) -> tuple[list[tuple[int, ...]], list[RowLogprobs], list[tuple[str, str]]]:
        """Run ``_execute`` with rows of one adapter next to each other, which share its matrices;
        results are in the order of ``rows``."""
        if not self.adapters or all(slot.adapter < 0 for slot in slots):
            return self._execute(rows, slots, drafts)
        order = sorted(range(len(rows)), key=lambda r: slots[r].adapter)
        place = {r: i for i, r in enumerate(order)}
        found, found_logprobs, errors = self._execute(
            [rows[r] for r in order],
            [slots[r] for r in order],
            {place[r]: token_ids for r, token_ids in drafts.items()},
        )
        sampled = [found[place[r]] for r in range(len(rows))]
        logprobs = [found_logprobs[place[r]] for r in range(len(rows))]
        return sampled, logprobs, errors

    def _execute(
        self,
        rows: Sequence[ScheduledRow],
        slots: Sequence[Slot],
        drafts: Mapping[int, Sequence[int]],
    ) -> tuple[list[tuple[int, ...]], list[RowLogprobs], list[tuple[str, str]]]:
        if not rows:
            return [], [], []
        index = np.array([slot.index for slot in slots])
        starts = np.array([row.start for row in rows])
        counts = np.array([row.num_tokens for row in rows])
        ends = np.cumsum(counts)
        for r, draft_ids in drafts.items():
            row = rows[r]
            end = row.start + row.num_tokens
            # an id outside the vocabulary is verified as token 0: one wrong draft is like another
            self._tokens[index[r], end - len(draft_ids) : end] = [
                each if 0 <= each < self._vocab_size else 0 for each in draft_ids
            ]
        # flat tokens ends[r] - counts[r] ... ends[r] - 1 are positions starts[r] ... of row r
        positions = np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)
        token_ids = self._tokens[np.repeat(index, counts), positions]
        width = max(slot.num_blocks for slot in slots)
        tables = self._tables[index, :width].astype(np.int64)
        sampling = [r for r, row in enumerate(rows) if row.samples]
        masks = self._start_masks(rows, slots, sampling, drafts)
        draws = [(r, 0) for r in sampling]
        if drafts:
            draws = [(r, -i) for r in sampling for i in range(len(drafts.get(r, ())), -1, -1)]
        chosen = np.array([ends[r] - 1 + i for r, i in draws], dtype=np.int64)
        # flat tokens of prompts whose log-probabilities are wanted, row by row
        asked = {
            r: wanted
            for r, slot in enumerate(slots)
            if slot.prompt_logprobs is not None
            and slot.error is None
            and (wanted := slot.prompt_logprobs.wanted(rows[r].start, rows[r].num_tokens))
        }
        needed = chosen
        if asked:
            begins = ends - counts - starts
            needed = np.unique(np.concatenate([chosen, *(begins[r] + w for r, w in asked.items())]))
        logits = self.model.forward(
            token_ids.astype(np.int64),
            positions,
            AttentionBatch(starts, counts, tables, self._adapters_of(slots)),
            needed,
            needs_logits=bool(asked or masks)
            or any(slots[r].sampling.reads_logits for r in sampling),
        )
        likeliest = self.model.likeliest
        for r, wanted in asked.items():
            gatherer = slots[r].prompt_logprobs
            assert gatherer is not None
            of_row = logits[np.searchsorted(needed, begins[r] + wanted)]
            targets = gatherer.targets(wanted)
            gatherer.add(self._score(of_row, targets, [gatherer.count] * len(targets)))
        if asked:
            own = np.searchsorted(needed, chosen)
            logits = logits[own]
            likeliest = None if likeliest is None else likeliest[own]
        forbidden = masks.result() if masks else {}
        return self._sample(rows, slots, draws, drafts, logits, likeliest, forbidden)

    def _adapters_of(self, slots: Sequence[Slot]) -> list[RowAdapter | None] | None:
        """Return the adapter of each row; None: no row has one."""
        if not self.adapters or all(slot.adapter < 0 for slot in slots):
            return None
        return [
            RowAdapter(self.adapters[slot.adapter], slot.adapter_scale)
            if slot.adapter >= 0
            else None
            for slot in slots
        ]

    def _start_masks(
        self,
        rows: Sequence[ScheduledRow],
        slots: Sequence[Slot],
        sampling: Sequence[int],
        drafts: Mapping[int, Sequence[int]],
    ) -> Future[Masks] | None:
        """Start the matchers of rows that sample: read new output and fill the masks."""
        jobs: list[tuple[int, OutputConstraint, list[int], Sequence[int]]] = []
        for r in sampling:
            slot = slots[r]
            if slot.constraint is not None and slot.error is None:
                draft_ids = drafts.get(r, ())
                end = rows[r].start + rows[r].num_tokens - len(draft_ids)
                jobs.append((r, slot.constraint, self._unread(slot, end), draft_ids))
        if not jobs or self._mask_thread is None:
            return None
        return self._mask_thread.submit(self._fill_masks, jobs)

    def _unread(self, slot: Slot, end: int) -> list[int]:
        """Return the output before position ``end`` that the matcher has not taken in yet."""
        assert slot.constraint is not None
        first = slot.num_prompt_tokens + slot.constraint.num_read
        return [int(token) for token in self._tokens[slot.index, first:end]]

    def _fill_masks(
        self, jobs: Sequence[tuple[int, OutputConstraint, list[int], Sequence[int]]]
    ) -> Masks:
        masks: Masks = {}
        for r, constraint, new_tokens, draft_ids in jobs:
            try:
                allowed = constraint.masks(new_tokens, draft_ids)
            except PacelineError as error:
                masks[r] = str(error)
                continue
            masks[r] = [self._forbidden(mask) for mask in allowed]
        return masks

    def _forbidden(self, mask: bytes) -> NDArray[np.bool_]:
        packed = np.frombuffer(mask, dtype=np.uint8)
        bits = np.unpackbits(packed, bitorder="little")[: self._vocab_size]
        forbidden = np.ones(self._vocab_size, dtype=np.bool_)
        forbidden[: len(bits)] = bits == 0
        return forbidden

    def _forced(
        self,
        forces: Sequence[int],
        rows: Sequence[ScheduledRow],
        drafts: Mapping[int, Sequence[int]],
        sampled: Sequence[tuple[int, ...]],
    ) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Return ``StepResult.forced``, asked on the mask thread, where matchers must be used."""
        if self._mask_thread is None:
            return ()
        jobs: list[tuple[int, OutputConstraint, list[int]]] = []
        for r in forces:
            slot, row = self._slots[rows[r].request_id], rows[r]
            if slot.constraint is not None and slot.error is None and sampled[r]:
                end = row.start + row.num_tokens - len(drafts.get(r, ())) + len(sampled[r])
                jobs.append((r, slot.constraint, self._unread(slot, end)))

        def find() -> tuple[tuple[int, tuple[int, ...]], ...]:
            found = [(r, tuple(each.forced(new, MOST_DRAFT_TOKENS))) for r, each, new in jobs]
            return tuple(entry for entry in found if entry[1])

        return self._mask_thread.submit(find).result() if jobs else ()

    def _take_prompt_logprobs(
        self, rows: Sequence[ScheduledRow]
    ) -> tuple[tuple[str, tuple[TokenLogprobs, ...]], ...]:
        """Return those of the requests that get their first token in this step."""
        taken: list[tuple[str, tuple[TokenLogprobs, ...]]] = []
        for row in rows:
            slot = self._slots[row.request_id]
            if row.samples and slot.prompt_logprobs is not None:
                entries = slot.prompt_logprobs.result()
                if entries is not None:
                    taken.append((row.request_id, entries))
                slot.prompt_logprobs = None
        return tuple(taken)

    def _extend_tables(self, rows: Sequence[ScheduledRow], slots: Sequence[Slot]) -> None:
        """Append the rows' new blocks, and clear each block that a request writes from its first
        position on, since a former owner's values must not reach a padded product."""
        fresh: list[int] = []
        for row, slot in zip(rows, slots, strict=True):
            if slot.is_new:
                slot.is_new = False
                first = -(-row.start // self._block_size)
                fresh.extend(self._tables[slot.index, first : slot.num_blocks].tolist())
            if row.new_block_ids:
                count = slot.num_blocks + len(row.new_block_ids)
                self._tables[slot.index, slot.num_blocks : count] = row.new_block_ids
                slot.num_blocks = count
                fresh.extend(row.new_block_ids)
        if fresh:
            self.model.clear_blocks(fresh)
            if self._draft is not None:
                self._draft.forget(fresh, clear=True)

    def _sample(
        self,
        rows: Sequence[ScheduledRow],
        slots: Sequence[Slot],
        draws: Sequence[tuple[int, int]],
        drafts: Mapping[int, Sequence[int]],
        logits: Logits,
        likeliest: Likeliest,
        masks: Masks,
    ) -> tuple[list[tuple[int, ...]], list[RowLogprobs], list[tuple[str, str]]]:
        for r, failure in masks.items():
            if isinstance(failure, str):
                slots[r].error = failure
        sampled: list[tuple[int, ...]] = [()] * len(rows)
        logprobs: list[RowLogprobs] = [None] * len(rows)
        errors = [
            (row.request_id, slot.error)
            for row, slot in zip(rows, slots, strict=True)
            if slot.error is not None
        ]
        if not draws:
            return sampled, logprobs, errors
        sample_rows = []
        for r, offset in draws:
            slot, length = slots[r], rows[r].start + rows[r].num_tokens + offset
            tokens = self._tokens[slot.index, :length]
            mask = masks.get(r, "")
            place = offset + len(drafts.get(r, ()))
            # behind a draft that the grammar rejects any token may be drawn: it is dropped
            forbidden = mask[place] if not isinstance(mask, str) and place < len(mask) else None
            sample_rows.append(SampleRow(slot.sampling, tokens, slot.num_prompt_tokens, forbidden))
        samples = self._sampler.sample(logits, sample_rows, likeliest)
        # rows of which a draft was wrong
        settled: set[int] = set()
        for i, (r, offset) in enumerate(draws):
            slot = slots[r]
            if slot.error is not None or r in settled:
                continue
            token_id = samples.token_ids[i]
            if not samples.finite[i] or token_id < 0:
                settled.add(r)
                # after right drafts this fails in the next step, unless a draft ended the request
                if not sampled[r]:
                    why = _NOTHING_LEFT if samples.finite[i] else NAN_LOGITS
                    errors.append((rows[r].request_id, why))
                continue
            position = rows[r].start + rows[r].num_tokens + offset
            mask = masks.get(r, "")
            if offset and (
                self._tokens[slot.index, position] != token_id
                or (not isinstance(mask, str) and len(drafts[r]) + offset + 1 >= len(mask))
            ):
                settled.add(r)
            self._tokens[slot.index, position] = token_id
            sampled[r] += (token_id,)
            entry = samples.logprobs[i]
            if entry is not None:
                logprobs[r] = (*(logprobs[r] or ()), entry)
        return sampled, logprobs, errors
