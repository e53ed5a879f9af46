"""Hand-made plans: drives a backend without the scheduler, over scattered blocks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from paceline.core.backend import ModelBackend
from paceline.core.outputs import (
    BlockCopy,
    NewRequest,
    ScheduledRow,
    SchedulerOutput,
    StepResult,
    TokenLogprobs,
)
from paceline.core.sampling_params import SamplingParams


class Tracked:
    """One request as the plans see it."""

    def __init__(self, tokens: list[int], num_prompt_tokens: int, sampling: SamplingParams) -> None:
        self.tokens = tokens
        self.num_prompt_tokens = num_prompt_tokens
        self.sampling = sampling
        self.computed = 0
        self.blocks: list[int] = []
        self.sent = False
        self.logprobs: list[TokenLogprobs] = []

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]


class Plans:
    """Writes plans and keeps what they bring. Blocks are handed out in random order."""

    def __init__(self, backend: ModelBackend, *, seed: int = 0) -> None:
        self.backend = backend
        self.block_size = backend.info.block_size
        self.free = list(range(backend.info.num_blocks))
        random.Random(seed).shuffle(self.free)
        self.sequences: dict[str, Tracked] = {}
        self.errors: dict[str, str] = {}
        self.prompt_logprobs: list[tuple[str, tuple[TokenLogprobs, ...]]] = []
        self._released: list[str] = []
        self._copies: list[BlockCopy] = []
        self._step_id = 0

    def add(self, request_id: str, prompt: Sequence[int], **sampling: Any) -> Tracked:
        params = SamplingParams(**({"max_tokens": 512, "temperature": 0.0} | sampling))
        sequence = Tracked(list(prompt), len(prompt), params)
        self.sequences[request_id] = sequence
        return sequence

    def release(self, request_id: str) -> Tracked:
        """Drop a request at the next step; its blocks are free at once, with what they hold."""
        sequence = self.sequences.pop(request_id)
        self.free.extend(reversed(sequence.blocks))
        self._released.append(request_id)
        return sequence

    def preempt(self, request_id: str) -> None:
        """Drop a request's state and let it start over with the tokens it has."""
        old = self.release(request_id)
        new = Tracked(old.tokens, old.num_prompt_tokens, old.sampling)
        new.logprobs = old.logprobs
        self.sequences[request_id] = new

    def fork(
        self, request_id: str, child_id: str, *, parent_copies: bool = False, **sampling: Any
    ) -> Tracked:
        """Share all blocks of a computed prompt. One of the two copies the last of them before
        writing to it: the child, or the parent, whose table the backend knows already."""
        parent = self.sequences[request_id]
        prompt = parent.tokens[: parent.num_prompt_tokens]
        child = self.add(child_id, prompt, **sampling)
        child.computed = len(prompt) - 1
        child.blocks = parent.blocks[: -(-len(prompt) // self.block_size)]
        writer, writer_id = (parent, request_id) if parent_copies else (child, child_id)
        index = child.computed // self.block_size
        source, target = writer.blocks[index], self.free.pop()
        writer.blocks[index] = target
        self._copies.append(BlockCopy(writer_id, index, source, target))
        return child

    def plan(self, counts: dict[str, int], *, ahead: int = 0) -> SchedulerOutput:
        """A plan in which each named request computes so many tokens. ``ahead`` tokens of each are
        not known yet: earlier plans will bring them."""
        rows, new_requests = [], []
        for request_id, count in counts.items():
            sequence = self.sequences[request_id]
            start, stop = sequence.computed, sequence.computed + count
            known = len(sequence.tokens) + ahead
            assert stop <= known, "more tokens than there are"
            missing = -(-stop // self.block_size) - len(sequence.blocks)
            added = tuple(self.free.pop() for _ in range(missing))
            sequence.blocks.extend(added)
            if not sequence.sent:
                sequence.sent = True
                new_requests.append(
                    NewRequest(
                        request_id,
                        tuple(sequence.tokens),
                        sequence.num_prompt_tokens,
                        sequence.sampling,
                        tuple(sequence.blocks),
                    )
                )
                added = ()
            rows.append(ScheduledRow(request_id, start, count, added, stop == known))
            sequence.computed = stop
        output = SchedulerOutput(
            step_id=self._step_id,
            rows=tuple(rows),
            new_requests=tuple(new_requests),
            block_copies=tuple(self._copies),
            released=tuple(self._released),
            num_tokens=sum(counts.values()),
        )
        self._step_id += 1
        self._released, self._copies = [], []
        return output

    def take(self, plan: SchedulerOutput, result: StepResult) -> None:
        assert result.step_id == plan.step_id
        assert len(result.sampled) == len(plan.rows)
        self.errors.update(result.errors)
        self.prompt_logprobs += result.prompt_logprobs
        failed = {request_id for request_id, _ in result.errors}
        for index, row in enumerate(plan.rows):
            expected = int(row.samples and row.request_id not in failed)
            assert len(result.sampled[index]) == expected
            sequence = self.sequences.get(row.request_id)
            if sequence is None:
                continue
            sequence.tokens.extend(result.sampled[index])
            if result.logprobs and result.logprobs[index] is not None:
                sequence.logprobs.extend(result.logprobs[index] or ())

    def step(self, counts: dict[str, int]) -> StepResult:
        plan = self.plan(counts)
        result = self.backend.execute(plan).result(60)
        self.take(plan, result)
        return result

    def run(self, *request_ids: str, until: int, chunk: int | None = None) -> None:
        """Compute together until each has ``until`` output tokens, at most ``chunk`` per step."""
        for _ in range(10_000):
            counts = {}
            for request_id in request_ids or tuple(self.sequences):
                sequence = self.sequences[request_id]
                if len(sequence.output) < until:
                    left = len(sequence.tokens) - sequence.computed
                    counts[request_id] = min(left, chunk or left)
            if not counts:
                return
            self.step(counts)
        raise AssertionError("no end")

    def generate(
        self, prompt: Sequence[int], count: int, *, chunk: int | None = None, **sampling: Any
    ) -> Tracked:
        """One request alone, from its prompt to ``count`` tokens, then released."""
        self.add("alone", prompt, **sampling)
        self.run("alone", until=count, chunk=chunk)
        return self.release("alone")
