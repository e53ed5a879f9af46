"""Log-probabilities in OpenAI's two formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from paceline.engine.protocol import Tokenizer
from paceline.engine.types import TokenLogprobs
from paceline.server.protocol.responses import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    TopLogprob,
)

__all__ = [
    "LOWEST_LOGPROB",
    "TokenWriter",
    "chat_logprobs",
    "completion_logprobs",
    "echoed_logprobs",
    "prompt_logprobs_json",
]

# vLLM's substitute for -inf, which JSON lacks
LOWEST_LOGPROB: Final = -9999.0


class TokenWriter:
    """Writes single tokens, as their text or as ``token_id:17``."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def write(self, token_id: int) -> tuple[str, bytes]:
        """Return the token's text, with U+FFFD for parts of characters, and its exact bytes."""
        if self._as_ids:
            text = f"token_id:{token_id}"
            return text, text.encode()
        exact = self._tokenizer.token_bytes(token_id)
        return exact.decode("utf-8", errors="replace"), exact


def chat_logprobs(entries: Sequence[TokenLogprobs], writer: TokenWriter) -> ChatLogprobs:
    """Return one entry per token, each with the likeliest tokens at its position."""
    return ChatLogprobs([_chat_entry(entry, writer) for entry in entries])


def _chat_entry(entry: TokenLogprobs, writer: TokenWriter) -> ChatTokenLogprob:
    text, exact = writer.write(entry.token_id)
    top = []
    for token_id, logprob in entry.top:
        other, other_bytes = writer.write(token_id)
        top.append(TopLogprob(other, _finite(logprob), list(other_bytes)))
    return ChatTokenLogprob(text, _finite(entry.logprob), list(exact), top)


def completion_logprobs(
    entries: Sequence[TokenLogprobs], writer: TokenWriter, offset: int
) -> tuple[CompletionLogprobs, int]:
    """Return the columns that the completions endpoint has.

    ``top_logprobs`` always holds the chosen token too, so it may have one entry more than
    requested. ``offset`` is the first token's start, in characters; the next token's is returned.
    """
    columns = CompletionLogprobs([], [], [], [])
    for entry in entries:
        text, _ = writer.write(entry.token_id)
        top: dict[str, float] = {}
        for token_id, logprob in entry.top:
            # parts of characters share a spelling; the likelier one keeps the entry
            top.setdefault(writer.write(token_id)[0], _finite(logprob))
        top.setdefault(text, _finite(entry.logprob))
        columns.text_offset.append(offset)
        columns.token_logprobs.append(_finite(entry.logprob))
        columns.tokens.append(text)
        columns.top_logprobs.append(top)
        offset += len(text)
    return columns, offset


def prompt_logprobs_json(
    prompt: Sequence[int], entries: Sequence[TokenLogprobs] | None, writer: TokenWriter
) -> list[dict[str, PromptLogprob] | None] | None:
    """Return vLLM's format: per prompt token the likeliest tokens and its own, by id; None for the
    first token, which has no context."""
    if entries is None:
        return None
    rows: list[dict[str, PromptLogprob] | None] = [None] if prompt else []
    for entry in entries:
        row = {
            str(token_id): PromptLogprob(_finite(value), rank, writer.write(token_id)[0])
            for rank, (token_id, value) in enumerate(entry.top, 1)
        }
        row.setdefault(
            str(entry.token_id),
            PromptLogprob(_finite(entry.logprob), entry.rank, writer.write(entry.token_id)[0]),
        )
        rows.append(row)
    return rows


def echoed_logprobs(
    prompt: Sequence[int], entries: Sequence[TokenLogprobs], writer: TokenWriter
) -> tuple[CompletionLogprobs, int]:
    """Return the prompt's columns, like ``completion_logprobs``. The first token has no
    log-probability."""
    columns, _ = completion_logprobs(entries, writer, 0)
    first = writer.write(prompt[0])[0]
    size = len(first)
    rest = [offset + size for offset in columns.text_offset]
    end = rest[-1] + len(columns.tokens[-1]) if rest else size
    return (
        CompletionLogprobs(
            [0, *rest],
            [None, *columns.token_logprobs],
            [first, *columns.tokens],
            [None, *columns.top_logprobs],
        ),
        end,
    )


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
