"""Encoding of texts on threads, so that the event loop goes on; texts that wait together are
encoded together.

A tokenizer holds the interpreter while it encodes one text, and nothing else runs in the process;
while it encodes a batch it does not, and several processors take part (``Tokenizer.encode_batch``).
So texts that arrive while all threads are busy form the next batch. A batch is bounded, and callers
take turns: one with many texts delays others only briefly.

This module does not know the use of texts, or which are short enough to be encoded at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Final

from paceline.engine.protocol import Tokenizer

__all__ = ["BatchEncoder"]

# most characters of a batch; about 50 ms of one processor
_MOST_CHARS: Final = 1 << 18
# batches at a time: the second goes on while one long text runs, which cannot be divided
_THREADS: Final = 2


@dataclass(slots=True, eq=False)
class _Job:
    """Texts of one caller."""

    texts: Sequence[str]
    special: bool
    # done early if the caller has gone, or the tokenizer has refused a text
    future: asyncio.Future[list[list[int]]]
    # number of texts handed out to be encoded
    num_taken: int = 0
    # encoded texts, by the index of the first of each batch, as batches need not end in order
    parts: dict[int, list[list[int]]] = field(default_factory=dict)
    num_done: int = 0


@dataclass(frozen=True, slots=True)
class _Piece:
    """Part of a batch: some of a job's texts, from ``start`` on."""

    job: _Job
    start: int
    texts: Sequence[str]


class BatchEncoder:
    """Encodes for one tokenizer, on one event loop. ``close`` ends its threads.

    Args:
        most_chars: most characters of a batch; one text may be longer.
        threads: batches that are encoded at a time.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, most_chars: int = _MOST_CHARS, threads: int = _THREADS
    ) -> None:
        self._tokenizer = tokenizer
        self._most_chars = most_chars
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="encode")
        self._num_idle = threads
        self._closed = False
        # jobs with texts yet to be handed out, in order of their turns
        self._jobs: deque[_Job] = deque()

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Return the ids of each text.

        Raises:
            InvalidRequestError: one of the texts is not valid Unicode. Other callers' texts in the
                same batch are not affected.
            RuntimeError: the encoder is closed.
        """
        if self._closed:
            raise RuntimeError("no text is encoded any more: the encoder is closed")
        if not texts:
            return []
        loop = asyncio.get_running_loop()
        job = _Job(texts, add_special_tokens, loop.create_future())
        self._jobs.append(job)
        # texts that arrive in this turn of the loop join the batch
        loop.call_soon(self._start, loop)
        return await job.future

    def close(self) -> None:
        """Stop; callers that still wait are cancelled."""
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        for job in self._jobs:
            job.future.cancel()
        self._jobs.clear()

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._num_idle and (batch := self._next_batch()):
            self._num_idle -= 1
            done = loop.run_in_executor(self._pool, self._encode, batch)
            done.add_done_callback(partial(self._take_in, loop, batch))

    def _next_batch(self) -> list[_Piece]:
        """Take as many texts of each job as fit, in order; jobs that need special tokens and those
        that do not are in different batches. Jobs with more texts left go behind the others."""
        batch: list[_Piece] = []
        started: list[_Job] = []
        room = self._most_chars
        for _ in range(len(self._jobs)):
            job = self._jobs.popleft()
            if job.future.done():
                continue
            start = stop = job.num_taken
            if not batch or batch[0].job.special == job.special:
                while stop < len(job.texts) and (
                    len(job.texts[stop]) <= room or (stop == start and not batch)
                ):
                    room -= len(job.texts[stop])
                    stop += 1
            if stop == start:
                self._jobs.append(job)
                continue
            batch.append(_Piece(job, start, job.texts[start:stop]))
            job.num_taken = stop
            if stop < len(job.texts):
                started.append(job)
        self._jobs += started
        return batch

    def _encode(self, batch: Sequence[_Piece]) -> list[list[list[int]] | Exception]:
        """Return, on a thread, the ids of each piece, or the error."""
        texts = [text for piece in batch for text in piece.texts]
        try:
            ids = iter(self._tokenizer.encode_batch(texts, add_special_tokens=batch[0].job.special))
        except Exception as error:
            if len(batch) == 1:
                return [error]
            # it is not known whose text is at fault
            return [result for piece in batch for result in self._encode([piece])]
        return [list(islice(ids, len(piece.texts))) for piece in batch]

    def _take_in(
        self,
        loop: asyncio.AbstractEventLoop,
        batch: Sequence[_Piece],
        done: asyncio.Future[list[list[list[int]] | Exception]],
    ) -> None:
        self._num_idle += 1
        if done.cancelled():
            for piece in batch:
                piece.job.future.cancel()
            return
        if (error := done.exception()) is not None:
            # the fault of the library and not of a text: callers must not wait for ever
            for piece in batch:
                if not piece.job.future.done():
                    piece.job.future.set_exception(error)
            self._start(loop)
            return
        for piece, result in zip(batch, done.result(), strict=True):
            job = piece.job
            if job.future.done():
                continue
            if isinstance(result, Exception):
                job.future.set_exception(result)
                continue
            job.parts[piece.start] = result
            job.num_done += len(result)
            if job.num_done == len(job.texts):
                job.future.set_result(
                    [ids for start in sorted(job.parts) for ids in job.parts[start]]
                )
        self._start(loop)
