"""``POST /inference/v1/generate``: token ids in, token ids out, without text.

The body has ``token_ids``, ``sampling_params`` (the sampling fields of a completion request) and,
next to them, ``model``, ``stream``, ``request_id``, ``priority``, ``cache_salt``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final

import msgspec

from paceline.engine.types import GenerationOutput, GenerationRequest, TokenLogprobs
from paceline.errors import InvalidRequestError
from paceline.http.fields import check_object
from paceline.http.shortcut import Shortcut
from paceline.http.sse import DONE, event
from paceline.server.apis.openai.answers import AnswerHead, UsageCount, collect, prepared
from paceline.server.apis.openai.logprobs import TokenWriter, chat_logprobs, prompt_logprobs_json
from paceline.server.generation.service import Service
from paceline.server.protocol.body import Body, schema_of
from paceline.server.protocol.field_types import described, needed, token_ids
from paceline.server.protocol.generation import CompletionBody
from paceline.server.protocol.requests import CompletionRequest, RequestRules, parse_completion
from paceline.server.protocol.responses import ChatLogprobs, PromptLogprob, Usage, encode
from paceline.server.protocol.schemas import Schema, record

__all__ = ["TokenGenerateBody", "parse_token_generate", "token_answer", "token_events"]

# fields of a completion that are next to sampling_params here, and those without a use
_BESIDE: Final = (
    "model", "stream", "stream_options", "request_id", "priority", "cache_salt", "slo",
    "resume_output_ids",
)  # fmt: skip
_NOT_SAMPLING: Final = frozenset({*_BESIDE, "prompt", "echo", "stop", "timings_per_token"})
# OpenAI's default for completions
_DEFAULT_MAX_TOKENS: Final = 16


def _sampling_params(value: Any, name: str, _: RequestRules) -> dict[str, Any]:
    given = check_object(value, name)
    clash = sorted(given.keys() & _NOT_SAMPLING)
    if clash:
        raise InvalidRequestError(f"{name} must not hold {', '.join(clash)}", name)
    return given


def _sampling_schema(rules: RequestRules) -> Schema:
    properties = schema_of(CompletionBody, rules)["properties"]
    return record({}, {name: properties[name] for name in properties if name not in _NOT_SAMPLING})


class TokenGenerateBody(
    Body,
    passes=(CompletionBody, _BESIDE),
    refuses_unknown="{names}: unknown here; sampling fields go into sampling_params",
):
    """``/inference/v1/generate``."""

    token_ids = needed(token_ids(1))
    sampling_params = described(
        _sampling_params,
        _sampling_schema,
        note="the sampling fields of completions, without `stop` and `echo`; `detokenize` is off",
    )


class TokenChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    token_ids: tuple[int, ...]
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None


class TokenAnswer(msgspec.Struct, frozen=True, kw_only=True):
    request_id: str
    model: str
    choices: list[TokenChoice]
    usage: Usage | None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None


def parse_token_generate(
    body: dict[str, Any], rules: RequestRules, tenant: str = ""
) -> CompletionRequest:
    """Parse a body. Raises InvalidRequestError or UnknownModelError."""
    asked = TokenGenerateBody.read(body, rules)
    made = {**(asked.sampling_params or {}), **asked.passed(), "prompt": asked.token_ids}
    request = parse_completion(made, rules, tenant)
    return replace(request, options=replace(request.options, detokenize=False))


async def token_answer(
    service: Service, request: CompletionRequest, request_id: str, arrival: float
) -> bytes:
    """Return the body of an answer that is not streamed."""
    head = AnswerHead.of("gen", request_id, service, request.options)
    writer = TokenWriter(service.client.tokenizer, as_ids=True)
    asked = await _request(service, request, head, arrival)
    outputs = service.run((asked,))
    async with aclosing(outputs):
        whole = await collect(outputs, 1, request.options)
    choices = [
        TokenChoice(
            index=index,
            token_ids=tuple(choice.token_ids),
            logprobs=_logprobs(request, choice.logprobs, writer),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )
        for index, choice in enumerate(whole.choices)
    ]
    return encode(
        TokenAnswer(
            request_id=head.id,
            model=head.model,
            choices=choices,
            usage=whole.usage,
            prompt_logprobs=prompt_logprobs_json(
                asked.prompt_token_ids, whole.prompt_logprobs[0], writer
            ),
        )
    )


async def token_events(
    service: Service,
    request: CompletionRequest,
    request_id: str,
    arrival: float,
    shortcut: Shortcut[GenerationOutput],
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a streamed answer, with usage on the last, or on all if requested; then
    ``DONE``."""
    head = AnswerHead.of("gen", request_id, service, request.options)
    writer = TokenWriter(service.client.tokenizer, as_ids=True)
    options = request.options
    count = UsageCount(1, options)

    def render(output: GenerationOutput) -> bytes:
        count.update(0, output)
        choices = [
            TokenChoice(
                index=delta.index,
                token_ids=delta.token_ids,
                logprobs=_logprobs(request, delta.logprobs or (), writer),
                finish_reason=delta.finish_reason,
                stop_reason=delta.stop_reason,
            )
            for delta in output.choices
        ]
        answer = TokenAnswer(
            request_id=head.id,
            model=head.model,
            choices=choices,
            usage=count.usage() if output.finished or options.continuous_usage else None,
            prompt_logprobs=None,
        )
        return event(encode(answer))

    shortcut.render_with(render)
    outputs = service.run((await _request(service, request, head, arrival),), shortcut)
    async with aclosing(outputs):
        async for _, output in outputs:
            yield render(output)
    yield DONE


async def _request(
    service: Service, request: CompletionRequest, head: AnswerHead, arrival: float
) -> GenerationRequest:
    (prompt,) = request.prompts
    assert isinstance(prompt, list), "parse_token_generate() lets ids through alone"
    number = head.engine_id(0)
    return await prepared(service, number, prompt, request.options, arrival, _DEFAULT_MAX_TOKENS)


def _logprobs(
    request: CompletionRequest, entries: Sequence[TokenLogprobs], writer: TokenWriter
) -> ChatLogprobs | None:
    if request.options.sampling.logprobs is None:
        return None
    return chat_logprobs(entries, writer)
