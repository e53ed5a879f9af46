"""Prompt token ids of a parsed request, and whether they fit.

Long texts are rendered on a small thread pool and tokenised by a ``BatchEncoder``, so that one long
prompt does not delay the tokens of other requests; short ones take less time inline. A template is
a program that runs in a process of its own (``engine.text.template_process``) unless it is known to
end; separate threads wait for that, so that a hostile one does not delay tokenising. Conversations
whose caller can influence the template, by arguments or a template of its own, wait apart from
plain ones.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

from paceline.core.sampling_params import SamplingParams
from paceline.engine.protocol import Tokenizer
from paceline.engine.text.batch_encoder import BatchEncoder
from paceline.errors import InvalidRequestError, NeverFitsError
from paceline.server.generation.template_gaps import REWRITTEN, Conversation, TemplateGaps
from paceline.server.protocol.earlier_calls import render_with_calls
from paceline.server.protocol.requests import CompletionRequest, GenerationOptions, TemplateOptions

__all__ = ["PromptMaker", "sampling_for", "slices", "truncated"]

_T = TypeVar("_T")

# characters; about half a millisecond of tokenising
_INLINE_CHARS: Final = 4096
# characters that take as long to encode as one call of the tokenizer costs
_CALL_CHARS: Final = 64
# characters that are encoded for vectors at a time; about 12 ms of one processor
_SLICE_CHARS: Final = 1 << 16
_THREADS: Final = 2
# tokens of a prediction kept beyond the answer's maximum, as the answer may skip some
_PREDICTION_SLACK: Final = 256
# maximum tokens of a prompt with log-probabilities: each needs the logits of a whole vocabulary
MAX_PROMPT_LOGPROBS: Final = 1024
# maximum characters of a request's template arguments with which its rendering is remembered
_MOST_VARIANT: Final = 256


class PromptMaker:
    """Converts texts to ids, for one tokenizer. ``close`` ends its threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._source = tokenizer.chat_template_source
        self._gaps = TemplateGaps()
        self._encoder = BatchEncoder(tokenizer)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="prompts")
        # each thread waits for a process that renders one conversation at a time
        self._plain = ThreadPoolExecutor(1, thread_name_prefix="templates")
        self._callers = ThreadPoolExecutor(1, thread_name_prefix="callers-templates")

    async def chat(self, template: TemplateOptions, *, add_special_tokens: bool) -> list[int]:
        """Return a conversation's ids. Raises InvalidRequestError if the template refuses it."""
        text = await self.render(template)
        return await self.encode(text, add_special_tokens=add_special_tokens)

    async def render(self, template: TemplateOptions) -> str:
        """Return the text of a conversation. Raises like ``chat``."""
        render = partial(self._render, template)
        if template.chat_template is None and self._tokenizer.renders_quickly:
            text, notes = await self._run(render, _size(template))
        else:
            lane = self._lane(template)
            text, notes = await asyncio.get_running_loop().run_in_executor(lane, render)
        if notes and (rewritten := REWRITTEN.get()) is not None:
            rewritten |= dict.fromkeys(notes)
        return text

    def _lane(self, template: TemplateOptions) -> ThreadPoolExecutor:
        apart = template.chat_template is not None or template.template_kwargs
        return self._callers if apart else self._plain

    def _render(self, template: TemplateOptions) -> tuple[str, tuple[str, ...]]:
        """Return the text, and notes on the parts of the conversation that were rewritten."""

        source = template.chat_template or self._source

        def render(
            messages: list[dict[str, Any]],
            tools: Sequence[dict[str, Any]] | None,
            continues: bool = False,
        ) -> str:
            render_chat = partial(
                self._tokenizer.render_chat,
                add_generation_prompt=template.add_generation_prompt,
                continue_final_message=continues,
                tools=tools,
                chat_template=template.chat_template,
                template_kwargs=template.template_kwargs,
            )
            return render_with_calls(render_chat, messages, source)

        written = self._gaps.fill(_conversation(template, self._source), render)
        text = render(written.messages, written.tools, template.continue_final_message)
        return text, written.notes

    async def mixed(
        self, prompts: Sequence[Sequence[str | int]], *, add_special_tokens: bool
    ) -> list[list[int]]:
        """Return the ids of prompts that mix texts and ids; special tokens precede a leading
        text."""

        def encode(parts: Sequence[str | int]) -> list[int]:
            ids: list[int] = []
            for place, part in enumerate(parts):
                if isinstance(part, int):
                    ids.append(part)
                else:
                    first = add_special_tokens and not place
                    ids += self._tokenizer.encode(part, add_special_tokens=first)
            return ids

        size = sum(
            1 if isinstance(part, int) else _CALL_CHARS + len(part)
            for parts in prompts
            for part in parts
        )
        return await self._run(lambda: [encode(parts) for parts in prompts], size)

    async def completion(self, request: CompletionRequest) -> list[list[int]]:
        """Return the ids of each prompt; prompts given as ids are unchanged."""
        texts = [prompt for prompt in request.prompts if isinstance(prompt, str)]
        found = iter(await self._encode(texts, request.options.add_special_tokens))
        return [next(found) if isinstance(prompt, str) else prompt for prompt in request.prompts]

    async def texts(
        self,
        texts: Sequence[tuple[str, str | None]],
        *,
        add_special_tokens: bool,
        max_tokens: int | None = None,
        max_second: int | None = None,
        check: Callable[[int, int], None] = lambda _place, _num_tokens: None,
    ) -> list[tuple[list[int], int | None]]:
        """Return the ids of texts and of pairs of texts; see ``Tokenizer.encode_texts``.

        Args:
            check: called with the index and length of each, in order; if it raises, the rest,
                behind a text that is too long, is not encoded.
        """
        encode = partial(
            self._tokenizer.encode_texts,
            add_special_tokens=add_special_tokens,
            max_tokens=max_tokens,
            max_second=max_second,
        )
        sizes = [_CALL_CHARS + len(first) + len(second or "") for first, second in texts]
        found: list[tuple[list[int], int | None]] = []
        for start, stop in slices(sizes, _SLICE_CHARS):
            part = texts[start:stop]
            found += await self._run(partial(encode, part), sum(sizes[start:stop]))
            for place in range(start, stop):
                check(place, len(found[place][0]))
        return found

    async def cut(self, texts: Sequence[str], max_tokens: int) -> list[str]:
        """Return the first ``max_tokens`` tokens of each text, as text."""

        def beginnings(part: Sequence[str]) -> list[str]:
            encoded = self._tokenizer.encode_batch(part, add_special_tokens=False)
            return [
                self._tokenizer.decode(ids[:max_tokens], skip_special_tokens=False)
                if len(ids) > max_tokens
                else text
                for text, ids in zip(part, encoded, strict=True)
            ]

        sizes = [_CALL_CHARS + len(text) for text in texts]
        found: list[str] = []
        for start, stop in slices(sizes, _SLICE_CHARS):
            work = partial(beginnings, texts[start:stop])
            found += await self._run(work, sum(sizes[start:stop]))
        return found

    async def render_all(self, templates: Sequence[TemplateOptions]) -> list[str]:
        """Return the text of each conversation, like ``render``; other tasks run in between."""
        found: list[str] = []
        since = 0
        for template in templates:
            found.append(await self.render(template))
            # a quick template is rendered inline, without giving way to other tasks
            since += _CALL_CHARS + _size(template)
            if since > _INLINE_CHARS:
                since = 0
                await asyncio.sleep(0)
        return found

    async def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences that must not be completed: each word at the start of a line
        and after a space, as the tokenizer spells them, without duplicates."""
        if not words:
            return ()

        spelt = [text for word in words for text in (word, f" {word.lstrip()}")]
        ids = await self._encode(spelt, add_special_tokens=False)
        return tuple(dict.fromkeys(map(tuple, ids)))

    async def prediction(self, text: str | None, max_tokens: int) -> tuple[int, ...]:
        """Return the ids of the caller's prediction, cut to what ``max_tokens`` can use."""
        if not text:
            return ()
        ids = await self.encode(text, add_special_tokens=False)
        return tuple(ids[: max_tokens + _PREDICTION_SLACK])

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        (ids,) = await self._encode((text,), add_special_tokens)
        return ids

    async def _encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        if sum(map(len, texts)) + _CALL_CHARS * (len(texts) - 1) <= _INLINE_CHARS:
            encode = self._tokenizer.encode
            return [encode(text, add_special_tokens=add_special_tokens) for text in texts]
        return await self._encoder.encode(texts, add_special_tokens=add_special_tokens)

    async def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return await self._run(
            lambda: self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens),
            len(token_ids),
        )

    async def _run(self, work: Callable[[], _T], size: int) -> _T:
        if size <= _INLINE_CHARS:
            return work()
        return await self._in_pool(work)

    async def _in_pool(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        self._encoder.close()
        for pool in (self._pool, self._plain, self._callers):
            pool.shutdown(wait=False, cancel_futures=True)


def _conversation(template: TemplateOptions, source: str | None) -> Conversation:
    """Return the conversation to render; ``source`` is the model's own template."""
    own, options = template.chat_template, template.template_kwargs
    variant = f"{template.add_generation_prompt}{json.dumps(options, sort_keys=True)}"
    return Conversation(
        messages=template.messages,
        tools=None if template.tools is None else template.tools.tools,
        source=source if own is None else own,
        variant=variant if own is None and len(variant) <= _MOST_VARIANT else None,
    )


def _size(template: TemplateOptions) -> int:
    """Return a conversation's characters, as far as they are cheap to count; above the inline limit
    if there are tools or calls to print."""
    if template.tools is not None or template.template_kwargs:
        return _INLINE_CHARS + 1
    size = 0
    for message in template.messages:
        if "tool_calls" in message:
            return _INLINE_CHARS + 1
        # everything that a template may print counts: reasoning and names too
        size += sum(len(text) for text in message.values() if type(text) is str)
    return size


def slices(sizes: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of runs of items with sizes of at most ``most`` in sum, or one larger."""
    start = total = 0
    for place, size in enumerate(sizes):
        if place > start and total + size > most:
            yield start, place
            start, total = place, 0
        total += size
    if start < len(sizes):
        yield start, len(sizes)


def truncated(prompt: list[int], options: GenerationOptions, max_model_len: int) -> list[int]:
    """Return the prompt after ``truncate_prompt_tokens``; left truncation keeps the end."""
    keep = options.truncate_prompt_tokens
    if keep is None:
        return prompt
    if keep == -1:
        keep = max_model_len - (options.max_tokens or 1)
        if options.cuts_max_tokens:
            # such a request shortens its output instead of its prompt
            keep = max(keep, max_model_len // 2)
    if len(prompt) <= keep:
        return prompt
    return prompt[-keep:] if options.truncation_side == "left" else prompt[:keep]


def sampling_for(
    prompt: list[int],
    options: GenerationOptions,
    *,
    max_model_len: int,
    default_max_tokens: int | None,
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> SamplingParams:
    """Return the request's sampling with its real ``max_tokens`` for this prompt.

    Without ``max_tokens`` a request gets ``default_max_tokens``, or the rest of the context if that
    is less or there is no default.

    Raises:
        InvalidRequestError: the prompt is empty.
        NeverFitsError: prompt and output exceed ``max_model_len``.
    """
    length = len(prompt)
    if not length:
        raise InvalidRequestError("the prompt is empty: it has 0 tokens", "prompt")
    room = max_model_len - length
    if room < 1:
        raise NeverFitsError(
            f"This model's maximum context length is {max_model_len} tokens, and the prompt has "
            f"{length} tokens, which leaves no room for output. Please shorten the prompt.",
            "prompt",
        )
    if options.sampling.prompt_logprobs is not None and length > MAX_PROMPT_LOGPROBS:
        raise InvalidRequestError(
            f"log-probabilities are served for prompts of up to {MAX_PROMPT_LOGPROBS} tokens, this "
            f"one has {length}",
            "prompt_logprobs",
        )
    wanted = options.max_tokens
    if wanted is None:
        wanted = room if default_max_tokens is None else min(room, default_max_tokens)
    elif wanted > room and options.cuts_max_tokens:
        wanted = room
    elif wanted > room:
        raise NeverFitsError(
            f"This model's maximum context length is {max_model_len} tokens. However, you "
            f"requested {length + wanted} tokens ({length} in the prompt, {wanted} in the output). "
            "Please shorten the prompt or lower max_tokens.",
            "max_tokens",
        )
    return replace(options.sampling, max_tokens=wanted, bad_words=bad_words)
