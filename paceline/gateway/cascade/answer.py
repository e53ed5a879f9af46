"""Answers of models: read for the decision, and changed to what its caller asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from paceline.gateway.cascade.prompt import Prompt
from paceline.gateway.requests.body import Body
from paceline.gateway.settings.cascade import Mode
from paceline.gateway.streams.openai_stream import DONE
from paceline.routing.cascade import (
    Answer,
    Features,
    Token,
    agree,
    confidence_of,
    exact_fault,
    form_of_answer,
    is_refusal,
)

__all__ = [
    "Said",
    "agreement_of",
    "events_of",
    "fault_of",
    "features_of",
    "read_said",
    "shown",
    "tokens_of",
    "with_logprobs",
    "without_logprobs",
]

# likeliest tokens that are asked for at each place
_TOP: Final = 5


class _Top(msgspec.Struct):
    logprob: float = 0.0


class _Place(msgspec.Struct):
    logprob: float = 0.0
    top_logprobs: list[_Top] | None = None


class _Logprobs(msgspec.Struct):
    content: list[_Place] | None = None


class _Function(msgspec.Struct, frozen=True):
    name: str = ""
    arguments: str = ""


class _Call(msgspec.Struct):
    function: _Function = _Function()


class _Message(msgspec.Struct):
    content: str | None = None
    refusal: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None
    logprobs: Any = None


class _Whole(msgspec.Struct):
    choices: list[_Choice]
    # for each token but the first, the log-probability by its number
    prompt_logprobs: list[dict[str, _Top] | None] | None = None


class Said(msgspec.Struct, frozen=True):
    """One answer, and its tokens; without any, the engine tells no log-probabilities."""

    answer: Answer
    tokens: Sequence[Token]
    # share of further answers that say the same; None: none was drawn
    agreement: float | None = None
    # mean log-probability of the prompt's tokens; None: it was not told
    prompt_logprob: float | None = None

    def scored_by(self, *, agreement: bool, perplexity: bool) -> Said:
        """Return it with the signals that count; a caller may have asked for others."""
        return msgspec.structs.replace(
            self,
            agreement=self.agreement if agreement else None,
            prompt_logprob=self.prompt_logprob if perplexity else None,
        )


def with_logprobs(body: Body, *, stream: bool, of_prompt: bool = False) -> Body:
    """Return a request that also asks for log-probabilities, with ``of_prompt`` for those of the
    prompt too."""
    body = without_logprobs(body, stream=stream)
    top = max(_TOP, _asked_top(body))
    fields = {**body.fields, "logprobs": b"true", "top_logprobs": b"%d" % top}
    if of_prompt:
        fields.setdefault("prompt_logprobs", b"0")
    return msgspec.structs.replace(body, fields=fields)


def without_logprobs(body: Body, *, stream: bool) -> Body:
    """Return the request, asking for an answer in one piece where ``stream`` is False."""
    if body.stream == stream:
        return body
    fields = {n: v for n, v in body.fields.items() if n not in ("stream", "stream_options")}
    return msgspec.structs.replace(
        body, fields=fields, stream=False, include_usage=False, return_token_ids=False
    )


def _asked_top(body: Body) -> int:
    value = body.fields.get("top_logprobs", b"0")
    return min(20, int(value)) if value.isdigit() else 0


def tokens_of(logprobs: Any) -> list[Token]:
    """Return the tokens of a choice's ``logprobs``, of an answer or of a chunk. Raises
    ValidationError."""
    found = msgspec.convert(logprobs, _Logprobs | None)
    return [
        Token(place.logprob, [top.logprob for top in place.top_logprobs or ()])
        for place in (found and found.content) or ()
    ]


def read_said(data: bytes, prompt: Prompt) -> Said | None:
    """Read an answer that came in one piece; None if it is no answer to a chat."""
    try:
        whole = msgspec.json.decode(data, type=_Whole)
        tokens = tokens_of(whole.choices[0].logprobs)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, IndexError):
        return None
    told = [next(iter(each.values())).logprob for each in whole.prompt_logprobs or () if each]
    prompt_logprob = sum(told) / len(told) if told else None
    return Said(_answer_of(whole.choices[0], prompt), tokens, None, prompt_logprob)


def agreement_of(data: bytes, said: Said, prompt: Prompt) -> float | None:
    """Return the share of an answer's choices that say what ``said`` says; None: it has none."""
    try:
        choices = msgspec.json.decode(data, type=_Whole).choices
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    same = [agree(said.answer, _answer_of(choice, prompt)) for choice in choices]
    return sum(same) / len(same) if same else None


def _answer_of(choice: _Choice, prompt: Prompt) -> Answer:
    message = choice.message
    return Answer(
        text=message.content or "",
        finish_reason=choice.finish_reason or "stop",
        refusal=message.refusal or "",
        calls=[(c.function.name, c.function.arguments) for c in message.tool_calls or ()],
        tools=prompt.tools,
        wants_call=prompt.wants_call,
        wants_json=prompt.wants_json,
        schema=prompt.schema,
    )


def fault_of(said: Said, mode: Mode, first: int) -> str:
    """Return the fault of a whole answer that a mode sees before it decides; empty: none."""
    if mode == "route":
        return ""
    if mode == "prefix" and len(said.tokens) > first:
        return "refusal" if is_refusal(said.answer.text) else ""
    return exact_fault(said.answer)


def features_of(prompt: Prompt, said: Said | None, mode: Mode, first: int) -> Features:
    """Return the features of a request in a mode, the same for a fit and for a decision.

    Args:
        said: the answer, or its beginning; None: the prompt alone decides.
        first: tokens of a prefix.
    """
    dense = prompt.form()
    if said is not None:
        tokens = said.tokens if mode == "cascade" else said.tokens[:first]
        dense += confidence_of(tokens, first)
        if mode == "cascade":
            dense += form_of_answer(said.answer.text, prompt.text)
            dense += [v for v in (said.agreement, said.prompt_logprob) if v is not None]
    return Features(prompt.ngrams, np.array(dense, np.float32))


def shown(whole: dict[str, Any], body: Body, note: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return an answer or a chunk as the caller asked for it.

    Args:
        body: the request as it came.
        note: what the gateway did; None: a later chunk says it.
    """
    wants = body.fields.get("logprobs") == b"true"
    if body.fields.get("prompt_logprobs", b"null") == b"null":
        whole.pop("prompt_logprobs", None)
    for choice in whole.get("choices") or ():
        told = choice.get("logprobs")
        if told is None:
            continue
        if not wants:
            choice["logprobs"] = None
            continue
        for place in told.get("content") or ():
            place["top_logprobs"] = (place.get("top_logprobs") or [])[: _asked_top(body)]
    if note is not None:
        whole["paceline"] = {**whole.get("paceline", {}), **note}
    return whole


def events_of(whole: dict[str, Any], body: Body) -> bytes:
    """Return a whole answer, as it is shown, as the events of a stream."""
    names = ("id", "created", "model")
    head: dict[str, Any] = {name: whole[name] for name in names if name in whole}
    head["object"] = "chat.completion.chunk"
    first, last = [], []
    for choice in whole["choices"]:
        index, message = choice.get("index", 0), dict(choice["message"])
        calls = message.get("tool_calls")
        if calls:
            message["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        first.append(
            {
                "index": index,
                "delta": message,
                "logprobs": choice.get("logprobs"),
                "finish_reason": None,
            }
        )
        last.append({"index": index, "delta": {}, "finish_reason": choice.get("finish_reason")})
    chunks: list[dict[str, Any]] = [
        {**head, "choices": first},
        {**head, "choices": last, "paceline": whole.get("paceline", {})},
    ]
    if body.include_usage and "usage" in whole:
        chunks.append({**head, "choices": [], "usage": whole["usage"]})
    return b"".join(b"data: %b\n\n" % msgspec.json.encode(chunk) for chunk in chunks) + DONE
