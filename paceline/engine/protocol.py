"""The two interfaces that a server uses: an engine and its tokenizer.

Both have fakes in the library (``paceline.engine.testing``), so a server is tested without a model.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

from paceline.engine.types import (
    AdapterStatus,
    EngineFaults,
    EngineInfo,
    EngineStats,
    GenerationOutput,
    GenerationRequest,
)
from paceline.errors import EngineDeadError

__all__ = ["AdapterClient", "EngineClient", "Sharing", "Sink", "Tokenizer"]

# The fast path of an output: called on the event loop as soon as the output exists, instead of
# waking the iterator's reader. True: accepted, the iterator will not yield it. False: the iterator
# yields it. It never waits; an exception ends the request, and the iterator raises it.
#
# It is called only while the iterator's reader has taken all earlier outputs and waits for more, so
# outputs stay in order. The first output of a request (on each engine that it is sent to) and the
# last always go through the iterator, and so may any other.
Sink: TypeAlias = Callable[[GenerationOutput], bool]


class Tokenizer(Protocol):
    """Text to ids and back. Pure, thread-safe, loaded without torch."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end an answer (generation_config's, the template's end of turn)."""

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that ``decode(skip_special_tokens=True)`` leaves out."""

    @property
    def chat_template_source(self) -> str | None:
        """The Jinja text that ``render_chat`` uses with tools, None if there is none to show."""

    @property
    def renders_quickly(self) -> bool:
        """Whether ``render_chat`` may run on an event loop's thread for a short conversation
        without a template of the request's: it calls no process, and its time is proportional to
        the text."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text; best for short ones, as other threads wait until it is done."""

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Return what ``encode`` returns for each text, together: other threads go on meanwhile,
        and several processors may take part. Raises like ``encode``, for all if one text is bad."""

    def encode_texts(
        self,
        texts: Sequence[tuple[str, str | None]],
        *,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
        max_second: int | None = None,
    ) -> list[tuple[list[int], int | None]]:
        """Return, for each text, or pair in the model's own format, the ids and where the second
        text's segment begins; None: nowhere. Other threads go on as with ``encode_batch``.

        Args:
            max_tokens: most ids of each. The longer text of a pair is truncated at its end, and
                special tokens stay.
            max_second: most ids of each second text.
        """

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the exact bytes of one id; may be half a character."""

    def vocabulary_token(self, token_id: int) -> str:
        """Return one id as the vocabulary spells it, such as "\u0120the"; empty without a token."""

    def token_text(self, token_id: int) -> str | None:
        """Return the text that one id adds to a decoded text after complete characters, the same
        with any neighbours; None if it depends on these."""

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
        """Return the prompt text of a conversation, by the checkpoint's Jinja template. It may wait
        for a process (``template_process``).

        Raises InvalidRequestError when the template refuses the messages or there is none.
        The text already holds the special tokens: encode it with ``add_special_tokens=False``.
        """


@runtime_checkable
class AdapterClient(Protocol):
    """An EngineClient whose engine serves adapters (``EngineInfo.adapter_bytes``)."""

    @property
    def adapters(self) -> Mapping[str, AdapterStatus]:
        """Latest news of each adapter by key; never waits."""

    async def load_adapter(self, key: str, path: str, *, pinned: bool = False) -> AdapterStatus:
        """Check and load an adapter; return once it is resident, or has failed. ``key`` was not
        used before; ``pinned``: it stays in memory until it is unloaded. Raises
        EngineError if the engine ends meanwhile."""

    def register_adapter(
        self, key: str, path: str, digest: str = "", *, pinned: bool = False
    ) -> None:
        """Have an adapter that was loaded before, with these contents, served by this engine."""

    def unload_adapter(self, key: str) -> None:
        """Forget an adapter: its memory goes with the last request that uses it."""


class Sharing(Protocol):
    """Processors that several engines share (``engine.models.turn``), as one engine's core sees
    it. Times are seconds of the core's clock."""

    def neighbours(self, now: float) -> tuple[float, float]:
        """Return the seconds that others will take between two steps, and the longest step that
        leaves them their pace; called before each plan."""

    def planned(self, seconds: float, due: float, tightest_tpot: float) -> None:
        """Note a step before it is executed: predicted seconds, the time by which it must have
        ended, and the least TPOT target among running requests; infinite: none."""


class EngineClient(Protocol):
    """An engine as a server sees it, in any process."""

    # called once, on the event loop, when the engine has ended without having been closed
    on_dead: Callable[[EngineDeadError], None] | None
    # called on the event loop for every snapshot; ``stats`` alone would miss step counts
    on_stats: Callable[[EngineStats], None] | None
    # called on the event loop with complete frames of ``engine.timeline``, if the engine has a tap;
    # None: the engine has ended, and another one may follow
    on_timeline: Callable[[bytes | None], None] | None

    @property
    def info(self) -> EngineInfo: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def stats(self) -> EngineStats:
        """The latest snapshot; never waits."""

    @property
    def faults(self) -> EngineFaults:
        """Losses and failures so far; never waits."""

    def generate(
        self, request: GenerationRequest, sink: Sink | None = None
    ) -> AsyncIterator[GenerationOutput]:
        """Yield deltas until ``finished``, except those that ``sink`` accepts. Closing the iterator
        or cancelling its task aborts the request and frees its blocks.

        Raises:
            RequestError: refused on arrival (before the first delta).
            EngineDeadError: the engine has ended for good; EngineLostError: another is being
                started, and this request cannot go on there; EngineDrainingError: no new requests.
        """

    async def abort(self, request_id: str) -> None:
        """End a request now; unknown ids are ignored. Its iterator yields a last delta with
        finish_reason "abort"."""

    def check_health(self) -> None:
        """Return if tokens flow (or there are no requests); raise EngineDeadError otherwise, also
        when work is waiting and no step has completed for the stall timeout, or EngineLostError
        while another engine is being started."""

    async def drain(self, timeout: float) -> None:
        """Refuse new requests, wait up to ``timeout`` seconds for running ones, abort the rest."""

    async def close(self) -> None:
        """Stop the engine and release everything. Idempotent."""
