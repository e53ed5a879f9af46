"""Fakes that ship with the library, so that code above an engine is tested without a model.

``ByteTokenizer`` needs no vocabulary file; ``null_client`` is a whole engine on a thread.
With the null backend under it every answer can be computed by hand::

    client = null_client(NullBackend(vocab_size=256))
    # "hi" is [104, 105]: the null backend continues with (104*1 + 105*2) % 256 = 58, ":"

Drafters draft as a test wants; with any drafts, an answer must be the same as without. With the
null backend, whose answer after ``prompt`` is known::

    ScriptedDrafter([*prompt, *expected_tokens(prompt, 200, vocab)], vocab)            always right
    ScriptedDrafter(..., wrong=(0,))                                                   always wrong
    ScriptedDrafter(..., wrong=(2,), extra=9)       right twice, then wrong; more than allowed
    ForeignDrafter()                                                         ids that are no tokens
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from paceline.core.backend import ModelBackend
from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.drafter import DraftTokens
from paceline.core.grammar import ConstrainedBackend, MatcherSource
from paceline.core.memory.kv_cache import KVCacheManager
from paceline.engine.blocks.keeper import BlockKeeper
from paceline.engine.core import EngineCore, EngineParts
from paceline.engine.local import LocalEngineClient
from paceline.engine.process.loop import engine_info
from paceline.engine.protocol import Tokenizer
from paceline.engine.text.grammar import GrammarCompiler
from paceline.errors import InvalidRequestError
from paceline.speculation.draft_tokens import NGRAM
from paceline.timeline.tap import TimelineTap

__all__ = [
    "ByteTokenizer",
    "ForeignDrafter",
    "ScriptedDrafter",
    "null_client",
    "null_core",
]

# above every vocabulary, and below the largest valid id
_NO_TOKEN: Final = 1_000_000_000
_ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool"})


class ByteTokenizer:
    """Ids 0 to 255 are bytes; three special ids follow.

    ``encode`` puts ``BOS`` first by default, so that a prompt that got it twice shows.
    """

    BOS: Final = 256
    IM_START: Final = 257
    IM_END: Final = 258
    SPECIAL: Final = {BOS: "<|bos|>", IM_START: "<|im_start|>", IM_END: "<|im_end|>"}

    _ids: Final = {text: token_id for token_id, text in SPECIAL.items()}
    _pattern: Final = re.compile("(" + "|".join(re.escape(text) for text in SPECIAL.values()) + ")")

    @property
    def vocab_size(self) -> int:
        return 256 + len(self.SPECIAL)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset({self.IM_END})

    @property
    def special_token_ids(self) -> frozenset[int]:
        return frozenset(self.SPECIAL)

    @property
    def chat_template_source(self) -> str | None:
        """Return None: its template is code."""
        return None

    @property
    def renders_quickly(self) -> bool:
        return True

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = [self.BOS] if add_special_tokens else []
        for part in self._pattern.split(text):
            special = self._ids.get(part)
            ids += part.encode() if special is None else (special,)
        return ids

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        return [self.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    def encode_texts(
        self,
        texts: Sequence[tuple[str, str | None]],
        *,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
        max_second: int | None = None,
    ) -> list[tuple[list[int], int | None]]:
        """Join the two texts of a pair; there are no segments."""
        found: list[tuple[list[int], int | None]] = []
        for first, second in texts:
            ids = self.encode(first, add_special_tokens=add_special_tokens)
            if second is not None:
                ids += self.encode(second, add_special_tokens=False)[:max_second]
            found.append((ids[:max_tokens], None))
        return found

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        skip = self.special_token_ids if skip_special_tokens else frozenset()
        data = b"".join(self.token_bytes(i) for i in token_ids if i not in skip)
        return data.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return no bytes for ids past the vocabulary, which ``decode`` leaves out."""
        if 0 <= token_id < 256:
            return bytes((token_id,))
        return self.SPECIAL.get(token_id, "").encode()

    def vocabulary_token(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("latin-1")

    def token_text(self, token_id: int) -> str | None:
        try:
            return self.token_bytes(token_id).decode()
        except UnicodeDecodeError:
            return None

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
        """Render ChatML. ``tools`` become a system message of JSON; ``template_kwargs`` have no
        effect, as with any template that does not name them."""
        if chat_template is not None:
            raise InvalidRequestError("ByteTokenizer has one template, ChatML", "chat_template")
        if not messages:
            raise InvalidRequestError("a chat needs at least 1 message", "messages")
        turns = [] if tools is None else [("system", json.dumps(list(tools)))]
        for number, message in enumerate(messages):
            role = message.get("role")
            if role not in _ROLES:
                raise InvalidRequestError(f"message {number} has the role {role!r}", "messages")
            turns.append((role, str(message.get("content") or "")))
        text = "".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in turns)
        if continue_final_message:
            return text.removesuffix("<|im_end|>\n")
        return text + "<|im_start|>assistant\n" if add_generation_prompt else text


def null_core(
    backend: ModelBackend,
    *,
    pipeline_depth: int = 2,
    enable_prefix_caching: bool = True,
    tokenizer: Tokenizer | None = None,
    timeline: bool = False,
    blocks: Callable[[KVCacheManager], BlockKeeper] | None = None,
    **scheduler: Any,
) -> EngineCore:
    """Make an EngineCore that uses all of ``backend``.

    Args:
        tokenizer: vocabulary to compile grammars for; None: ByteTokenizer.
        timeline: make a timeline for viewers.
        blocks: see ``EngineParts``.
        scheduler: fields of SchedulerConfig.
    """
    info = backend.info
    matchers: MatcherSource | None = None
    if isinstance(backend, ConstrainedBackend):
        matchers = GrammarCompiler(lambda: tokenizer or ByteTokenizer())
    config = SchedulerConfig(**({"max_model_len": info.max_model_len} | scheduler))
    cache = CacheConfig(
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        enable_prefix_caching=enable_prefix_caching,
        window=info.window,
        num_window_blocks=info.num_window_blocks,
    )
    recorders = (TimelineTap(config, cache),) if timeline else ()
    parts = EngineParts(recorders=recorders, matchers=matchers, blocks=blocks)
    return EngineCore(backend, config, cache, pipeline_depth=pipeline_depth, parts=parts)


def null_client(
    backend: ModelBackend,
    *,
    tokenizer: Tokenizer | None = None,
    model: str = "null",
    stall_timeout: float = 60.0,
    **core: Any,
) -> LocalEngineClient:
    """Make a client of an engine on a thread; ``await client.close()`` ends it.

    Args:
        core: arguments of ``null_core``.
    """
    engine = null_core(backend, tokenizer=tokenizer, **core)
    return LocalEngineClient(
        engine,
        engine_info(engine, model),
        tokenizer or ByteTokenizer(),
        stall_timeout=stall_timeout,
    )


class ScriptedDrafter:
    """Drafts the known output, with some errors.

    Args:
        text: prompt and output.
        wrong: positions in a draft that are made wrong.
        extra: tokens drafted in addition to the number asked for.
    """

    def __init__(
        self, text: Sequence[int], vocab_size: int, wrong: Sequence[int] = (), extra: int = 0
    ) -> None:
        self._text = text
        self._vocab_size = vocab_size
        self.wrong = wrong
        self._extra = extra

    def propose(self, tokens: Sequence[int], count: int) -> DraftTokens:
        drafts = list(self._text[len(tokens) : len(tokens) + count + self._extra])
        for place in self.wrong:
            if place < len(drafts):
                drafts[place] = (drafts[place] + 1) % self._vocab_size
        return DraftTokens(drafts, 1, NGRAM)


class ForeignDrafter:
    """Drafts ids that are no tokens."""

    def propose(self, tokens: Sequence[int], count: int) -> DraftTokens:
        return DraftTokens([_NO_TOKEN] * count, 1, NGRAM)
