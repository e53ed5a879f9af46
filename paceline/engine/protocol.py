"""The two seams a server sees: an engine to ask and a tokenizer to speak with.

Both have fakes in the library (``paceline.engine.testing``), so a server is tested without a model.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol, TypeAlias

from paceline.core.errors import EngineDeadError
from paceline.engine.types import (
    EngineFaults,
    EngineInfo,
    EngineStats,
    GenerationOutput,
    GenerationRequest,
)

__all__ = ["EngineClient", "Sink", "Tokenizer"]

# The short way of an output: called on the event loop as soon as it is there, in place of waking
# whoever reads the iterator. True: taken, the iterator will not yield it. False: it goes the usual
# way. It never waits; what it raises ends the request, and the iterator raises it.
#
# It is asked only while the iterator's reader has taken everything before and waits for more, so
# outputs stay in order. The first output of a request (on each engine that it is sent to) and the
# last always go the usual way, and so may any other.
Sink: TypeAlias = Callable[[GenerationOutput], bool]


class Tokenizer(Protocol):
    """Text to ids and back. Pure, thread-safe, loaded without torch."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end an answer (generation_config's, the template's end of turn)."""
        ...

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that ``decode(skip_special_tokens=True)`` leaves out."""
        ...

    @property
    def chat_template_source(self) -> str | None:
        """The Jinja text that ``render_chat`` uses with tools, None if it has none to show."""
        ...

    @property
    def renders_quickly(self) -> bool:
        """Whether ``render_chat`` may be called on an event loop's thread for a short conversation
        and no template of the request's: no process is asked, and the time is in proportion to the
        text."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Quickest for a short text: other threads of the process wait until it is done."""
        ...

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """What ``encode`` says of each, together: other threads go on meanwhile, and several
        processors may take part. Raises like ``encode``, for all if one of the texts is bad."""
        ...

    def encode_texts(
        self,
        texts: Sequence[tuple[str, str | None]],
        *,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
        max_second: int | None = None,
    ) -> list[tuple[list[int], int | None]]:
        """Of each text, or pair as the model was trained on pairs, the ids, and where the second
        text's kind of token begins; None: nowhere. Other threads go on as with ``encode_batch``.

        Args:
            max_tokens: of each in all. The longer text of a pair is cut at its end, and special
                tokens stay.
            max_second: of each second text.
        """
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes one id stands for; may be half a character."""
        ...

    def vocabulary_token(self, token_id: int) -> str:
        """One id as the vocabulary spells it, such as "\u0120the"; empty without a token."""
        ...

    def token_text(self, token_id: int) -> str | None:
        """What one id adds to a decoded text whatever its neighbours are, as long as those before
        it leave no character open; None where that depends on them."""
        ...

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """The prompt text for a conversation, by the checkpoint's Jinja template. It may wait for a
        process (``template_process``).

        Raises InvalidRequestError when the template refuses the messages or there is none.
        The text already holds the special tokens: encode it with ``add_special_tokens=False``.
        """
        ...


class EngineClient(Protocol):
    """An engine as a server sees it, whatever process it lives in."""

    # called once, on the event loop, when the engine is gone without having been closed
    on_dead: Callable[[EngineDeadError], None] | None
    # called on the event loop for every snapshot; ``stats`` alone would miss step counts
    on_stats: Callable[[EngineStats], None] | None
    # called on the event loop with frames of ``engine.timeline``, whole ones, where the engine has
    # a tap; None: the engine is gone, and another one may follow
    on_timeline: Callable[[bytes | None], None] | None

    @property
    def info(self) -> EngineInfo: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def stats(self) -> EngineStats:
        """The latest snapshot; never waits."""
        ...

    @property
    def faults(self) -> EngineFaults:
        """What went wrong so far; never waits."""
        ...

    def generate(
        self, request: GenerationRequest, sink: Sink | None = None
    ) -> AsyncIterator[GenerationOutput]:
        """Deltas until ``finished``, less what ``sink`` takes. Closing the iterator or cancelling
        its task aborts the request and frees its blocks.

        Raises:
            RequestError: refused at the door (before the first delta).
            EngineDeadError: the engine went away for good; EngineLostError: another is on its
                way, and this request cannot go on there; EngineDrainingError: it takes nothing
                new.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request now; unknown ids are ignored. Its iterator yields a last delta with
        finish_reason "abort"."""
        ...

    def check_health(self) -> None:
        """Return if tokens flow (or nothing is asked for); raise EngineDeadError otherwise, also
        when work is waiting and no step has completed for the stall timeout, or EngineLostError
        while another engine is being started."""
        ...

    async def drain(self, timeout: float) -> None:
        """Take nothing new, wait for running requests up to ``timeout`` seconds, abort the rest."""
        ...

    async def close(self) -> None:
        """Stop the engine and release everything. Idempotent."""
        ...
