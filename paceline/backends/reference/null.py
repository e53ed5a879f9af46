"""A backend without a model, whose tokens can be computed by hand.

The KV cache is real, of integers: computing token ``t`` at position ``p`` writes ``t * (p + 1)``
into the slot the block table gives. Sampling adds up the slots of positions 0 to the last, modulo
the vocabulary::

    prompt [3, 5], vocab 100:  3*1 + 5*2 = 13          -> 13
    then   [3, 5, 13]:         13 + 13*3 = 52          -> 52
    then   [3, 5, 13, 52]:     52 + 52*4 = 260 % 100   -> 60

So a wrong block, a missed copy or a reused slot shows as a wrong number, not as a plausible text.
With a ``window``, everything is written to window blocks too, and a row that finds other values
there than it should fails.
Greedy and sampled requests get the same tokens; logit_bias of 100 or more forces a token. A token
that may not be sampled (a grammar, allowed_token_ids, bad_words, min_tokens) gives way to the next
one that may, counting up and around.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from paceline.backends.runner.constraint import OutputConstraint, allows
from paceline.core.backend import BackendInfo
from paceline.core.grammar import MatcherSource
from paceline.core.outputs import (
    DRAFT_MODEL,
    BlockSwap,
    NewRequest,
    ScheduledRow,
    SchedulerOutput,
    StepResult,
    TokenLogprobs,
    WindowBlock,
)
from paceline.core.request import MOST_DRAFT_TOKENS
from paceline.errors import NOTHING_LEFT, PacelineError, RequestFailedError

__all__ = ["NullBackend", "expected_tokens"]

_T = TypeVar("_T")


def expected_tokens(prompt: Sequence[int], count: int, vocab_size: int) -> list[int]:
    """The ``count`` tokens the null backend generates after ``prompt``, computed independently."""
    total = sum(token * (position + 1) for position, token in enumerate(prompt))
    tokens = []
    for position in range(len(prompt), len(prompt) + count):
        token = total % vocab_size
        tokens.append(token)
        total += token * (position + 1)
    return tokens


class _State:
    """One request's tokens and block table."""

    def __init__(self, new: NewRequest) -> None:
        self.tokens = list(new.token_ids)
        self.num_prompt_tokens = new.num_prompt_tokens
        self.sampling = new.sampling
        self.block_ids = list(new.block_ids)
        self.constraint: OutputConstraint | None = None
        # the request failed; rows planned before the scheduler knew that are left out
        self.failed = False
        self._tells_prompt = new.sampling.prompt_logprobs is not None

    def take_prompt(self) -> list[int] | None:
        """Return the prompt, once, if its log-probabilities are wanted: all of them are 0."""
        wanted, self._tells_prompt = self._tells_prompt, False
        return self.tokens[: self.num_prompt_tokens] if wanted else None

    def unread(self) -> list[int]:
        """Return the output that the grammar's matcher has not taken in yet."""
        assert self.constraint is not None
        return self.tokens[self.num_prompt_tokens + self.constraint.num_read :]

    def forced(self) -> tuple[int, ...]:
        """Return the tokens that the grammar forces next."""
        if self.constraint is None:
            return ()
        return tuple(self.constraint.forced(self.unread(), MOST_DRAFT_TOKENS))


@dataclass(kw_only=True, eq=False)
class NullBackend:
    """A backend that adds up token ids; see the module."""

    vocab_size: int = 256
    num_blocks: int = 1024
    block_size: int = 16
    max_model_len: int = 4096
    # seconds of each step, on a thread of its own, so that a driver's waiting and pipelining can be
    # watched
    step_time: float = 0.0
    # a request whose input holds this token fails alone, with an error
    poison_token: int | None = None
    num_host_blocks: int = 0
    # indices of drafts that are spoilt; the others are right, ``draft_most`` of them at
    # most; None: there is no draft model
    draft_wrong: Collection[int] | None = None
    draft_most: int = MOST_DRAFT_TOKENS
    window: int = 0
    num_window_blocks: int = 0

    def __post_init__(self) -> None:
        self._info = BackendInfo(
            name="null",
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            block_bytes=8 * self.block_size,
            dtype="int64",
            device="cpu",
            num_host_blocks=self.num_host_blocks,
            drafter="" if self.draft_wrong is None else "null",
            window=self.window,
            num_window_blocks=self.num_window_blocks,
            window_block_bytes=8 * self.block_size if self.num_window_blocks else 0,
        )
        self._cache, self._window_cache, self._host = (
            [[0] * self.block_size for _ in range(count)]
            for count in (self.num_blocks, self.num_window_blocks, self.num_host_blocks)
        )
        # block -> its window block
        self._places: dict[int, int] = {}
        self._states: dict[str, _State] = {}
        self._executor = ThreadPoolExecutor(max_workers=1) if self.step_time > 0 else None
        self._matchers: MatcherSource | None = None
        self._turn: AbstractContextManager[object] = nullcontext()

    @property
    def info(self) -> BackendInfo:
        return self._info

    def constrain(self, matchers: MatcherSource) -> None:
        self._matchers = matchers

    def take_turns(self, turn: AbstractContextManager[Callable[[], float]]) -> None:
        """Compute each step within ``turn``."""
        self._turn = turn

    def execute(self, plan: SchedulerOutput) -> Future[StepResult]:
        return self._submit(partial(self._in_turn, plan))

    def block_layout(self) -> tuple[int, str] | None:
        return None if self.num_window_blocks else (8 * self.block_size, "null")

    def read_blocks(self, block_ids: Sequence[int]) -> Future[bytes]:
        def read() -> bytes:
            slots = [slot for block_id in block_ids for slot in self._cache[block_id]]
            return struct.pack(f"<{len(slots)}q", *slots)

        return self._submit(read)

    def write_blocks(self, block_ids: Sequence[int], data: bytes) -> Future[None]:
        def write() -> None:
            slots = struct.unpack(f"<{len(data) // 8}q", data)
            for index, block_id in enumerate(block_ids):
                first = index * self.block_size
                self._cache[block_id] = list(slots[first : first + self.block_size])

        return self._submit(write)

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown()

    def _submit(self, work: Callable[[], _T]) -> Future[_T]:
        if self._executor is not None:
            return self._executor.submit(work)
        future: Future[_T] = Future()
        future.set_result(work())
        return future

    def _in_turn(self, plan: SchedulerOutput) -> StepResult:
        with self._turn:
            return self._run(plan)

    def _run(self, plan: SchedulerOutput) -> StepResult:
        started = time.monotonic()
        if self.step_time > 0:
            time.sleep(self.step_time)
        self._apply(plan)
        made = {
            draft.row: self._propose(plan.rows[draft.row], len(draft.token_ids))
            for draft in plan.drafts
            if draft.source == DRAFT_MODEL
        }
        drafted = {draft.row: draft.token_ids for draft in plan.drafts}
        rows = [
            row._replace(num_tokens=row.num_tokens - len(drafted[index]) + len(made[index]))
            if index in made
            else row
            for index, row in enumerate(plan.rows)
        ]
        drafted |= made
        self._compute(rows, drafted)
        errors: list[tuple[str, str]] = []
        sampled = [
            self._take(row, drafted.get(index, ()), errors) for index, row in enumerate(rows)
        ]
        logprobs = [self._logprobs(row, tokens) for row, tokens in zip(rows, sampled, strict=True)]
        prompts = tuple(
            (row.request_id, tuple(TokenLogprobs(token, 0.0, 1, ()) for token in prompt[1:]))
            for row in rows
            if row.samples and (prompt := self._states[row.request_id].take_prompt()) is not None
        )
        forced = [
            (index, self._states[rows[index].request_id].forced())
            for index in plan.forces
            if sampled[index]
        ]
        return StepResult(
            step_id=plan.step_id,
            sampled=tuple(sampled),
            logprobs=tuple(logprobs) if any(entry is not None for entry in logprobs) else (),
            errors=tuple(errors),
            prompt_logprobs=prompts,
            forced=tuple(entry for entry in forced if entry[1]),
            made=tuple(made.items()),
            elapsed=time.monotonic() - started,
        )

    def _apply(self, plan: SchedulerOutput) -> None:
        """Take in what the plan says of requests and blocks, before anything is computed."""
        for request_id in plan.released:
            self._states.pop(request_id, None)
        self._swap(plan.swaps)
        self._place(plan.window_blocks)
        for new in plan.new_requests:
            state = self._states[new.request_id] = _State(new)
            if new.sampling.grammar is not None and self._matchers is not None:
                state.constraint = OutputConstraint(self._matchers, new.sampling.grammar)
        for copy in plan.block_copies:
            self._cache[copy.dst] = list(self._cache[copy.src])
            self._states[copy.request_id].block_ids[copy.index] = copy.dst

    def _compute(
        self, rows: Sequence[ScheduledRow], drafted: Mapping[int, tuple[int, ...]]
    ) -> None:
        """Write the rows' tokens, drafts included, into their blocks."""
        for index, row in enumerate(rows):
            state = self._states[row.request_id]
            if not state.failed:
                known = len(state.tokens)
                state.tokens += drafted.get(index, ())
                self._write(row)
                del state.tokens[known:]
        for row in rows if self._window_cache else ():
            self._check_window(row)

    def _take(
        self, row: ScheduledRow, drafts: Sequence[int], errors: list[tuple[str, str]]
    ) -> tuple[int, ...]:
        """Return the row's new tokens, () where its request failed; why goes to ``errors``."""
        state = self._states[row.request_id]
        if self.poison_token in state.tokens[row.start : row.start + row.num_tokens]:
            state.failed = True
            errors.append((row.request_id, f"token {self.poison_token} is poison"))
        if state.failed or not row.samples:
            return ()
        try:
            return self._draw(row, state, drafts)
        except PacelineError as error:
            state.failed = True
            errors.append((row.request_id, str(error)))
            return ()

    def _logprobs(
        self, row: ScheduledRow, tokens: Sequence[int]
    ) -> tuple[TokenLogprobs, ...] | None:
        wanted = self._states[row.request_id].sampling.logprobs
        if not tokens or wanted is None:
            return None
        return tuple(
            TokenLogprobs(token, 0.0, 1, ((token, 0.0),) if wanted else ()) for token in tokens
        )

    def _propose(self, row: ScheduledRow, count: int) -> tuple[int, ...]:
        """Return the draft model's drafts."""
        state, vocab = self._states[row.request_id], self.vocab_size
        if self.draft_wrong is None or state.failed:
            return ()
        tokens = expected_tokens(state.tokens, min(count, self.draft_most), vocab)
        return tuple((t + (i in self.draft_wrong)) % vocab for i, t in enumerate(tokens))

    def _swap(self, swaps: Sequence[BlockSwap]) -> None:
        for src, dst, to_host in swaps:
            if to_host:
                self._host[dst] = list(self._cache[src])
            else:
                self._cache[dst] = list(self._host[src])

    def _place(self, given: Sequence[WindowBlock]) -> None:
        for block, place, source in given:
            copied = [0] * self.block_size if source < 0 else self._window_cache[source]
            self._window_cache[place] = list(copied)
            self._places[block] = place

    def _check_window(self, row: ScheduledRow) -> None:
        """Check a row's window blocks, after all rows of the step have written."""
        state, size = self._states[row.request_id], self.block_size
        known = min(len(state.tokens), row.start + row.num_tokens)
        for position in range(max(0, row.start - self.window + 1), known):
            place = self._places[state.block_ids[position // size]]
            found, right = self._window_cache[place][position % size], state.tokens[position]
            if not state.failed and found != right * (position + 1):
                raise AssertionError(
                    f"{row.request_id}: window block {place} has {found} for position {position}"
                )

    def _write(self, row: ScheduledRow) -> None:
        state = self._states[row.request_id]
        state.block_ids.extend(row.new_block_ids)
        size = self.block_size
        for position in range(row.start, row.start + row.num_tokens):
            block_id = state.block_ids[position // size]
            value = state.tokens[position] * (position + 1)
            self._cache[block_id][position % size] = value
            if self._window_cache:
                self._window_cache[self._places[block_id]][position % size] = value

    def _draw(self, row: ScheduledRow, state: _State, drafts: Sequence[int]) -> tuple[int, ...]:
        """Append the row's tokens: one, and one more for each draft that is right."""
        drawn: list[int] = []
        end = row.start + row.num_tokens
        # first position behind drafts that the grammar cannot read past
        last = end
        if drafts and state.constraint is not None:
            masks = state.constraint.masks(state.unread(), drafts)
            last = end - len(drafts) + len(masks) - 1
        for length in range(end - len(drafts), end + 1):
            token = self._sample(length, state)
            drawn.append(token)
            state.tokens.append(token)
            if length == last or token != drafts[length - end] or token == self.poison_token:
                # a poison token ends the row here, so that the next step fails on it
                break
        return tuple(drawn)

    def _sample(self, length: int, state: _State) -> int:
        size = self.block_size
        full, rest = divmod(length, size)
        total = sum(sum(self._cache[block_id]) for block_id in state.block_ids[:full])
        if rest:
            total += sum(self._cache[state.block_ids[full]][:rest])
        vocab = self.vocab_size
        may = self._choosable(state)
        for token, bias in state.sampling.logit_bias:
            if bias >= 100.0 and may(token):
                return token
        token = total % vocab
        for step in range(vocab):
            if may((token + step) % vocab):
                return (token + step) % vocab
        raise RequestFailedError(f"{NOTHING_LEFT}: this request forbids all of them")

    def _choosable(self, state: _State) -> Callable[[int], bool]:
        """Return whether a token may come next, as a function of the token."""
        sampling = state.sampling
        output = state.tokens[state.num_prompt_tokens :]
        mask: bytes | None = None
        if state.constraint is not None:
            (mask,) = state.constraint.masks(state.unread())
        banned: set[int] = {
            word[-1]
            for word in sampling.bad_words
            if output[max(0, len(output) - len(word) + 1) :] == list(word[:-1])
        }
        ending = sampling.eos_token_ids | sampling.stop_token_ids
        vocab = range(self.vocab_size)
        if len(output) < sampling.min_tokens and (
            # a grammar that is complete overrides min_tokens
            mask is None or any(allows(mask, t) for t in vocab if t not in ending)
        ):
            banned |= ending
        only = sampling.allowed_token_ids
        return lambda token: (
            token not in banned
            and (only is None or token in only)
            and (mask is None or allows(mask, token))
        )
