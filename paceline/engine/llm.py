"""Offline use: many prompts in, many answers out, in the calling thread.

The caller's thread drives the engine, so there is no event loop, no process and no idle waiting.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Final

from paceline.core.request import FinishReason
from paceline.engine.core import EngineCore
from paceline.engine.fanout import add_to_core, request_of
from paceline.engine.protocol import Tokenizer
from paceline.engine.text.output_processor import OutputProcessor, merge_outputs
from paceline.engine.types import ChoiceDelta, GenerationOutput, GenerationRequest
from paceline.errors import EngineDeadError, InvalidRequestError, RequestError

__all__ = ["LLM"]

# requests in the scheduler beyond those it can run at once: enough to choose from
_AHEAD: Final = 64


class LLM:
    """Generates for whole lists of requests.

    A context manager; ``close`` ends the engine. Not thread-safe, and one ``stream`` at a time.

    Args:
        core: owned from here on.
    """

    def __init__(self, core: EngineCore, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._core = core
        self._processor = OutputProcessor(tokenizer)

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        *,
        progress: Callable[[GenerationOutput], None] | None = None,
    ) -> list[GenerationOutput]:
        """Return the finished output of every request, in the order of ``requests``.

        A refused request returns with finish_reason "error" and the reason; the others run.

        Args:
            progress: called with every output as it ends, in the order of ending.
        """
        ids = [request.request_id for request in requests]
        parts: dict[str, list[GenerationOutput]] = {}
        done: dict[str, GenerationOutput] = {}
        if len(set(ids)) < len(ids):
            raise ValueError(f"{len(ids)} requests have only {len(set(ids))} different ids")
        for output in self.stream(requests):
            parts.setdefault(output.request_id, []).append(output)
            if output.finished:
                done[output.request_id] = merge_outputs(parts.pop(output.request_id))
                if progress is not None:
                    progress(done[output.request_id])
        return [done[request_id] for request_id in ids]

    def stream(
        self, requests: Iterable[GenerationRequest]
    ) -> Generator[GenerationOutput, None, None]:
        """Yield the deltas of all requests, as they come, until every one has finished.

        ``requests`` may be lazy and long: it is read only as far ahead as the scheduler can use.
        Closing the generator aborts unfinished requests.

        Raises:
            EngineDeadError: the backend broke.
        """
        source = iter(requests)
        room = self._core.scheduler.config.max_num_seqs + _AHEAD
        try:
            more = True
            while more or self._processor.num_unfinished:
                while more and self._processor.num_unfinished < room:
                    request = next(source, None)
                    if request is None:
                        more = False
                        break
                    refused = self._add(request)
                    if refused is not None:
                        yield refused
                yield from self._step()
        finally:
            self._abort_all()

    def close(self) -> None:
        self._core.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _add(self, request: GenerationRequest) -> GenerationOutput | None:
        """Queue a request; return its only output if it was refused."""
        try:
            self._processor.add(request)
        except RequestError as error:
            return _refused(request, error)
        try:
            self._compile(request)
            add_to_core(self._core, request)
        except RequestError as error:
            self._processor.discard(request.request_id)
            return _refused(request, error)
        return None

    def _compile(self, request: GenerationRequest) -> None:
        """Compile a request's grammar, in this thread, as no other caller waits meanwhile."""
        grammar, matchers = request.sampling.grammar, self._core.matchers
        if grammar is None:
            return
        if matchers is None:
            raise InvalidRequestError("this engine does not serve structured output", grammar.field)
        try:
            matchers.prepare(grammar).result(matchers.timeout)
        except TimeoutError:
            raise InvalidRequestError(
                f"{grammar.field}: the grammar was not compiled within {matchers.timeout:.1f} s",
                grammar.field,
            ) from None

    def _step(self) -> Iterator[GenerationOutput]:
        if not self._processor.num_unfinished:
            return
        if not self._core.has_work:
            raise EngineDeadError(
                f"the engine forgot {self._processor.num_unfinished} unfinished requests"
            )
        updates = self._core.step()
        for expired in self._core.take_expired():
            request_id = request_of(expired.request_id)
            if not self._processor.unfinished_choices(request_id):
                # another of its choices has expired, and that ended all
                continue
            request = self._processor.request(request_id)
            self._core.abort(self._processor.discard(request_id))
            yield _refused(request, expired.error)
        self._processor.note_prompt_logprobs(self._core.prompt_logprobs)
        self._core.prompt_logprobs.clear()
        self._processor.note_pooled(self._core.pooled)
        self._core.pooled.clear()
        processed = self._processor.process(updates, time.monotonic())
        self._core.abort(processed.stopped, FinishReason.STOP)
        self._core.abort(processed.failed)
        yield from processed.outputs

    def _abort_all(self) -> None:
        for request_id in self._processor.request_ids:
            self._core.abort(self._processor.discard(request_id))


def _refused(request: GenerationRequest, error: RequestError) -> GenerationOutput:
    choices = tuple(
        ChoiceDelta(
            index=index,
            text="",
            token_ids=(),
            finish_reason=FinishReason.ERROR.value,
            error=str(error),
        )
        for index in range(max(1, request.n))
    )
    return GenerationOutput(
        request_id=request.request_id,
        choices=choices,
        num_prompt_tokens=len(request.prompt_token_ids),
        num_cached_tokens=0,
        num_output_tokens=0,
        finished=True,
    )
