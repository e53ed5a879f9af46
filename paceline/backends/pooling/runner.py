"""Plans in, hidden states through the model and the layers behind it, vectors out.

A row that would sample ends its request's prompt: then the vector is computed, and no token. For a
prompt computed in chunks, the state that the mean or the first token needs is kept until then.

The layers behind are a few products of one row, so numpy computes them in float32, on every compute
path. This module does not know how hidden states are computed, or what a vector means.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from paceline.backends.runner.interface import AttentionBatch, Ints
from paceline.core.grammar import MatcherSource
from paceline.core.outputs import BlockSwap, NewRequest, ScheduledRow, SchedulerOutput, StepResult
from paceline.core.pooling import PoolingInfo, PoolingParams
from paceline.errors import NAN_LOGITS, ConfigError

__all__ = ["LAST_FUNCTIONS", "Dense", "HiddenModel", "PoolingHead", "PoolingRunner"]

Vector = NDArray[np.float32]

_erf: Final = np.vectorize(math.erf, otypes=[np.float32])


def _normalize(x: Vector) -> Vector:
    length = float(np.linalg.norm(x))
    # a vector of zeros has no direction and is returned as it is
    return np.asarray(x / max(length, 1e-12), dtype=np.float32)


def _sigmoid(x: Vector) -> Vector:
    # exp of a negative number cannot overflow
    small = np.exp(-np.abs(x))
    return np.asarray(np.where(x >= 0, 1, small) / (1 + small), dtype=np.float32)


def _softmax(x: Vector) -> Vector:
    powers = np.exp(x - x.max())
    return np.asarray(powers / powers.sum(), dtype=np.float32)


def _gelu(x: Vector) -> Vector:
    return np.asarray(0.5 * x * (1 + _erf(x / math.sqrt(2))), dtype=np.float32)


_FUNCTIONS: Final[dict[str, Callable[[Vector], Vector]]] = {
    "identity": lambda x: x,
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": _gelu,
    "sigmoid": _sigmoid,
    "softmax": _softmax,
    "normalize": _normalize,
}
# functions allowed at the end
LAST_FUNCTIONS: Final = ("identity", "sigmoid", "softmax", "normalize")


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """``function(weight @ x + bias)``."""

    # [out, in]
    weight: NDArray[np.float32]
    # [out]
    bias: NDArray[np.float32] | None = None
    # a key of _FUNCTIONS
    function: str = "identity"

    def __call__(self, x: Vector) -> Vector:
        out = self.weight @ x
        if self.bias is not None:
            out = out + self.bias
        return _FUNCTIONS[self.function](out)


class PoolingHead:
    """Layers one after the other, then what the request asks for.

    Args:
        hidden_size: size of a hidden state.
        function: the last one, of LAST_FUNCTIONS.

    Raises:
        ConfigError: layers that do not fit.
    """

    def __init__(self, hidden_size: int, layers: Sequence[Dense], function: str) -> None:
        self._layers = tuple(layers)
        self._function = _FUNCTIONS[function]
        self.size = hidden_size
        for number, layer in enumerate(self._layers):
            rows, columns = layer.weight.shape
            if columns != self.size or (layer.bias is not None and layer.bias.shape != (rows,)):
                raise ConfigError(
                    f"layer {number} behind the model takes {columns} numbers and gets {self.size}"
                )
            self.size = rows

    def __call__(self, hidden: Vector, params: PoolingParams, info: PoolingInfo) -> Vector:
        """Return the vector of one request, from a hidden state [hidden_size]."""
        x = hidden
        for layer in self._layers:
            x = layer(x)
        if params.dimensions is not None:
            x = x[: params.dimensions]
        wanted = params.use_activation
        if info.use_activation if wanted is None else wanted:
            x = self._function(x)
        return np.ascontiguousarray(x, dtype="<f4")


_NO_TOKENS: Final = (
    "this engine runs a pooling model, which generates no tokens: ask /v1/embeddings, /rerank, "
    "/score or /classify"
)
_NOT_SEEN: Final = "the vector needs the whole prompt, and its beginning was not computed here"


@runtime_checkable
class HiddenModel(Protocol):
    """A loaded model and its paged KV cache, if it has one. Called from one thread; block
    operations only between steps."""

    def hidden(
        self, token_ids: Ints, positions: Ints, batch: AttentionBatch, wanted: Ints, kinds: Ints
    ) -> NDArray[np.float32]:
        """Run one step.

        Args:
            token_ids: [T].
            positions: [T], below the model's longest sequence.
            wanted: [S], ascending: the tokens whose last hidden states are wanted; may be empty.
            kinds: [T], 1 for tokens of a pair's second text, else 0; for encoders that distinguish
                them.

        Returns:
            [S, hidden], behind the model's last norm.
        """

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None: ...

    def swap_blocks(self, swaps: Sequence[BlockSwap]) -> None: ...

    def clear_blocks(self, block_ids: Sequence[int]) -> None: ...


class _Prompt:
    """One request's tokens and blocks, and the hidden states seen so far."""

    def __init__(self, new: NewRequest, vocab_size: int) -> None:
        self.token_ids = np.array(new.token_ids, dtype=np.int64)
        self.block_ids = list(new.block_ids)
        self.is_new = True
        self.error: str | None = None
        self.params = new.sampling.pooling or PoolingParams()
        # sum of hidden states, in order, and their number
        self.total: NDArray[np.float64] | None = None
        self.seen = 0
        if new.sampling.pooling is None:
            self.error = _NO_TOKENS
        outside = self.token_ids[(self.token_ids < 0) | (self.token_ids >= vocab_size)]
        if len(outside):
            self.error = f"token {outside[0]} is not in the vocabulary of {vocab_size}"
            self.token_ids[:] = 0

    def wanted(self, row: ScheduledRow, pooling: str) -> range:
        """Return the positions of the row whose hidden states are needed."""
        end = row.start + row.num_tokens
        if self.error is not None:
            return range(0)
        if pooling == "mean":
            return range(row.start, end)
        if pooling == "cls":
            return range(row.start, min(end, 1)) if row.start == 0 else range(0)
        return range(end - 1, end) if row.samples else range(0)

    def take(self, start: int, hidden: NDArray[np.float32]) -> None:
        """Add hidden states from position ``start`` on."""
        if start == 0 or self.total is None:
            self.total, self.seen = np.zeros(hidden.shape[1]), 0
        self.total += hidden.sum(axis=0, dtype=np.float64)
        self.seen += len(hidden)

    def pooled(self, pooling: str) -> NDArray[np.float32] | None:
        """Return the hidden state for the vector, or None where a part of it was not seen."""
        needed = len(self.token_ids) if pooling == "mean" else 1
        if self.total is None or self.seen != needed:
            return None
        return (self.total / self.seen).astype(np.float32)


class PoolingRunner:
    """Executor of plans, one after the other. Used from one thread.

    Args:
        info: its ``pooling`` selects the hidden states that count.
    """

    def __init__(
        self,
        model: HiddenModel,
        head: PoolingHead,
        info: PoolingInfo,
        *,
        vocab_size: int,
        block_size: int,
    ) -> None:
        self._model, self._head, self._info = model, head, info
        self._vocab_size, self._block_size = vocab_size, block_size
        self._prompts: dict[str, _Prompt] = {}

    def constrain(self, matchers: MatcherSource, thread: Executor) -> None:
        """Ignore grammars: nothing is sampled."""

    def run(self, plan: SchedulerOutput) -> StepResult:
        """Run one step; see ``SchedulerOutput`` for the order in which a plan is applied."""
        if plan.swaps:
            self._model.swap_blocks(plan.swaps)
        started = time.monotonic()
        for request_id in plan.released:
            self._prompts.pop(request_id, None)
        for new in plan.new_requests:
            self._prompts[new.request_id] = _Prompt(new, self._vocab_size)
        for copy in plan.block_copies:
            self._prompts[copy.request_id].block_ids[copy.index] = copy.dst
        if plan.block_copies:
            self._model.copy_blocks([(copy.src, copy.dst) for copy in plan.block_copies])
        pooled, errors = self._execute(plan.rows) if plan.rows else ([], [])
        return StepResult(
            step_id=plan.step_id,
            sampled=((),) * len(plan.rows),
            errors=tuple(errors),
            pooled=tuple(pooled),
            elapsed=time.monotonic() - started,
        )

    def _execute(
        self, rows: Sequence[ScheduledRow]
    ) -> tuple[list[tuple[str, bytes]], list[tuple[str, str]]]:
        pooling = self._info.pooling
        prompts = [self._prompts[row.request_id] for row in rows]
        self._extend_tables(rows, prompts)
        starts = np.array([row.start for row in rows], dtype=np.int64)
        counts = np.array([row.num_tokens for row in rows], dtype=np.int64)
        firsts = np.cumsum(counts) - counts
        spans = [(row.start, row.start + row.num_tokens) for row in rows]
        positions = np.concatenate([np.arange(*span) for span in spans])
        token_ids = np.concatenate(
            [p.token_ids[slice(*span)] for p, span in zip(prompts, spans, strict=True)]
        )
        seconds = np.array([prompt.params.second_text or 1 << 30 for prompt in prompts])
        kinds = (positions >= np.repeat(seconds, counts)).astype(np.int64)
        tables = np.zeros((len(rows), max(len(p.block_ids) for p in prompts)), dtype=np.int64)
        for table, prompt in zip(tables, prompts, strict=True):
            table[: len(prompt.block_ids)] = prompt.block_ids
        ranges = [p.wanted(row, pooling) for p, row in zip(prompts, rows, strict=True)]
        wanted = np.concatenate(
            [first - start + np.array(r, dtype=np.int64)
             for first, start, r in zip(firsts, starts, ranges, strict=True)]
        )  # fmt: skip
        hidden = self._model.hidden(
            token_ids, positions, AttentionBatch(starts, counts, tables), wanted, kinds
        )
        done = 0
        for prompt, r in zip(prompts, ranges, strict=True):
            if r:
                prompt.take(r.start if pooling == "mean" else 0, hidden[done : done + len(r)])
                done += len(r)
        return self._finish(rows, prompts)

    def _finish(
        self, rows: Sequence[ScheduledRow], prompts: Sequence[_Prompt]
    ) -> tuple[list[tuple[str, bytes]], list[tuple[str, str]]]:
        pooled: list[tuple[str, bytes]] = []
        errors: list[tuple[str, str]] = []
        for row, prompt in zip(rows, prompts, strict=True):
            if prompt.error is None and row.samples:
                state = prompt.pooled(self._info.pooling)
                if state is None:
                    prompt.error = _NOT_SEEN
                elif not np.isfinite(vector := self._head(state, prompt.params, self._info)).all():
                    prompt.error = NAN_LOGITS
                else:
                    pooled.append((row.request_id, vector.tobytes()))
            if prompt.error is not None:
                errors.append((row.request_id, prompt.error))
        return pooled, errors

    def _extend_tables(self, rows: Sequence[ScheduledRow], prompts: Sequence[_Prompt]) -> None:
        """Append the rows' new blocks, and clear each block that a prompt writes from its first
        position on."""
        size = self._block_size
        fresh: list[int] = []
        for row, prompt in zip(rows, prompts, strict=True):
            if prompt.is_new:
                prompt.is_new = False
                fresh += prompt.block_ids[-(-row.start // size) :]
            prompt.block_ids += row.new_block_ids
            fresh += row.new_block_ids
        self._model.clear_blocks(fresh)
