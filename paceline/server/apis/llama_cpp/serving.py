"""Answers of llama-server's ``/completion``, whole and streamed.

A stream has an event for every delivery, ``"stop": false``, and one at the end of each choice with
the fields of a whole answer; nothing follows. Times are the request's, counts the choice's.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Final

from paceline.core.sampling_params import SamplingParams
from paceline.engine.types import ChoiceDelta, GenerationOutput, TokenLogprobs
from paceline.http.shortcut import Shortcut
from paceline.http.sse import event
from paceline.server.apis.llama_cpp.protocol import SAMPLERS, LlamaRequest
from paceline.server.apis.openai.answers import AnswerHead, generation_request
from paceline.server.apis.openai.logprobs import LOWEST_LOGPROB, TokenWriter
from paceline.server.generation.prompts import sampling_for
from paceline.server.generation.service import Service
from paceline.server.protocol.requests import GenerationOptions
from paceline.server.protocol.responses import Timings, encode

__all__ = ["NO_SLOT", "generation_settings", "llama_answer", "llama_events", "sampling_settings"]

# a request is not bound to a slot here
NO_SLOT: Final = -1


@dataclass(slots=True)
class _Choice:
    """The output of one choice so far."""

    prompt: list[int]
    sampling: SamplingParams
    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    has_new_line: bool = False
    # the last delivery
    output: GenerationOutput | None = None
    # how it ended
    stop_type: str = "none"
    stopping_word: str = ""

    def add(self, delta: ChoiceDelta, output: GenerationOutput) -> None:
        self.text.append(delta.text)
        self.tokens += delta.token_ids
        self.logprobs += delta.logprobs or ()
        self.has_new_line |= "\n" in delta.text
        self.output = output
        if delta.finish_reason == "length":
            self.stop_type = "limit"
        elif delta.finish_reason is not None and isinstance(delta.stop_reason, str):
            self.stop_type, self.stopping_word = "word", delta.stop_reason
        elif delta.finish_reason is not None:
            self.stop_type = "eos"


async def llama_events(
    service: Service,
    request: LlamaRequest,
    request_id: str,
    arrival: float,
    _: Shortcut[GenerationOutput],
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a streamed answer."""
    head = AnswerHead.of("cmpl", request_id, service, request.options)
    writer = TokenWriter(service.client.tokenizer, as_ids=False)
    async with aclosing(_run(service, request, head, arrival)) as news:
        async for index, choice, delta in news:
            if delta.text or delta.token_ids:
                yield event(encode(_chunk(request, index, choice, delta, writer)))
            if choice.stop_type != "none":
                # its text has been sent already
                emptied = {"content": "", "tokens": []}
                last = await _ended(service, request, head, index, choice)
                yield event(encode(_selected(request, last | emptied)))


async def llama_answer(
    service: Service, request: LlamaRequest, request_id: str, arrival: float
) -> bytes:
    """Return the body of an answer that is not streamed: an object, or a list of them."""
    head = AnswerHead.of("cmpl", request_id, service, request.options)
    writer = TokenWriter(service.client.tokenizer, as_ids=False)
    found: dict[int, _Choice] = {}
    async with aclosing(_run(service, request, head, arrival)) as news:
        async for index, choice, _ in news:
            found[index] = choice
    answers = []
    for index, choice in sorted(found.items()):
        answer = await _ended(service, request, head, index, choice)
        if request.n_probs:
            answer["completion_probabilities"] = _probabilities(choice.logprobs, writer)
        answers.append(_selected(request, answer))
    return encode(answers if request.is_list or len(answers) > 1 else answers[0])


async def _run(
    service: Service, request: LlamaRequest, head: AnswerHead, arrival: float
) -> AsyncGenerator[tuple[int, _Choice, ChoiceDelta], None]:
    """Yield deltas of choices, each with its index and the choice's output so far; no deltas follow
    the end of a choice."""
    options, tokenizer = request.options, service.prompts
    prompts = await tokenizer.mixed(request.prompts, add_special_tokens=True)
    options = replace(options, sampling=await _biased(service, request))
    if request.time_limit:
        # a whole answer is delivered at its end only, too late to apply the limit
        options = replace(options, stream=True)
    length = service.rules.max_model_len
    samplings = [
        sampling_for(prompt, options, max_model_len=length, default_max_tokens=None)
        for prompt in prompts
    ]
    requests = [
        generation_request(head.engine_id(index), prompt, sampling, options, arrival)
        for index, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
    ]
    choices = [
        _Choice(prompt, sampling)
        for prompt, sampling in zip(prompts, samplings, strict=True)
        for _ in range(options.n)
    ]
    under_way = len(choices)
    async with aclosing(service.run(requests)) as outputs:
        async for place, output in outputs:
            for delta in output.choices:
                index = place * options.n + delta.index
                choice = choices[index]
                if choice.stop_type != "none":
                    continue
                if request.only_prompt:
                    # a prompt is only computed if a token is requested
                    cut = None if delta.finish_reason is None else "length"
                    delta = ChoiceDelta(index=delta.index, text="", token_ids=(), finish_reason=cut)
                choice.add(delta, output)
                if choice.stop_type == "none" and _is_late(request, choice):
                    choice.stop_type = "limit"
                yield index, choice, delta
                under_way -= choice.stop_type != "none"
            if not under_way:
                return


async def _biased(service: Service, request: LlamaRequest) -> SamplingParams:
    """Return the sampling with the biases of texts."""
    sampling = request.options.sampling
    if not request.text_biases:
        return sampling
    biases = dict(sampling.logit_bias)
    texts = [(text,) for text, _ in request.text_biases]
    spelt = await service.prompts.mixed(texts, add_special_tokens=False)
    for ids, (_, bias) in zip(spelt, request.text_biases, strict=True):
        for token_id in ids:
            biases[token_id] = biases.get(token_id, 0.0) + bias
    return replace(sampling, logit_bias=tuple(biases.items()))


def _is_late(request: LlamaRequest, choice: _Choice) -> bool:
    """Return whether a time limit ends the choice, once its text has a complete line."""
    times = None if choice.output is None else choice.output.times
    if not request.time_limit or times is None or not choice.has_new_line:
        return False
    return time.monotonic() - times.first_token > request.time_limit


def _chunk(
    request: LlamaRequest, index: int, choice: _Choice, delta: ChoiceDelta, writer: TokenWriter
) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "index": index,
        "content": delta.text,
        "tokens": delta.token_ids,
        "stop": False,
        "id_slot": NO_SLOT,
        "tokens_predicted": len(choice.tokens),
        "tokens_evaluated": len(choice.prompt),
    }
    if request.timings_per_token:
        fields["timings"] = _timings(choice)
    if request.n_probs:
        fields["completion_probabilities"] = _probabilities(delta.logprobs or (), writer)
    return fields


async def _ended(
    service: Service, request: LlamaRequest, head: AnswerHead, index: int, choice: _Choice
) -> dict[str, Any]:
    """Return the fields of a choice that has ended."""
    length = len(choice.prompt) + len(choice.tokens)
    output = choice.output
    return {
        "index": index,
        "content": "".join(choice.text),
        "tokens": choice.tokens if request.return_tokens else [],
        "id_slot": NO_SLOT,
        "stop": True,
        "model": head.model,
        "tokens_predicted": len(choice.tokens),
        "tokens_evaluated": len(choice.prompt),
        "generation_settings": generation_settings(
            choice.sampling, request.options, service, request
        ),
        "prompt": await service.prompts.decode(choice.prompt),
        "has_new_line": choice.has_new_line,
        # the context's end has ended it
        "truncated": choice.stop_type == "limit" and length >= service.rules.max_model_len,
        "stop_type": choice.stop_type,
        "stopping_word": choice.stopping_word,
        "tokens_cached": 0 if output is None else output.num_cached_tokens,
        "timings": _timings(choice),
    }


def _timings(choice: _Choice) -> Timings:
    output = choice.output
    cached = 0 if output is None else output.num_cached_tokens
    times = None if output is None else output.times
    return Timings.of(times, len(choice.prompt), cached, len(choice.tokens))


def _probabilities(entries: Any, writer: TokenWriter) -> list[dict[str, Any]]:
    def one(token_id: int, logprob: float) -> dict[str, Any]:
        text, exact = writer.write(token_id)
        value = max(logprob, LOWEST_LOGPROB)
        return {"id": token_id, "token": text, "bytes": list(exact), "logprob": value}

    return [
        one(entry.token_id, entry.logprob) | {"top_logprobs": [one(*top) for top in entry.top]}
        for entry in entries
    ]


def _selected(request: LlamaRequest, answer: dict[str, Any]) -> dict[str, Any]:
    """Return the requested fields; ``a/b`` is b of a, and keeps that name."""
    if request.response_fields is None:
        return answer
    found = {}
    for path in request.response_fields:
        value: Any = answer
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            found[path] = value
    return found


def sampling_settings(sampling: SamplingParams) -> dict[str, Any]:
    """Return the settings of sampling that llama-server has too, in its fields."""
    names = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")
    settings = {name: getattr(sampling, name) for name in names}
    return settings | {"repeat_penalty": sampling.repetition_penalty}


def generation_settings(
    sampling: SamplingParams,
    options: GenerationOptions,
    service: Service,
    request: LlamaRequest | None = None,
) -> dict[str, Any]:
    """Return how a choice is sampled, in llama-server's fields.

    Args:
        request: None: return the defaults.
    """
    limit = -1 if options.max_tokens is None else options.max_tokens
    adapter = options.adapter
    return {
        "n_ctx": service.rules.max_model_len,
        "model": service.model_name if adapter is None else adapter.name,
        "n_predict": 0 if request is not None and request.only_prompt else limit,
        "max_tokens": limit,
        "seed": -1 if request is None else sampling.seed,
        **sampling_settings(sampling),
        # penalties cover the whole context
        "repeat_last_n": -1,
        "samplers": SAMPLERS,
        # unserved methods are off
        "dynatemp_range": 0.0,
        "typical_p": 1.0,
        "top_n_sigma": -1.0,
        "xtc_probability": 0.0,
        "dry_multiplier": 0.0,
        "mirostat": 0,
        "stop": options.stop,
        "n_keep": 0,
        "n_discard": 0,
        "min_keep": 0,
        "ignore_eos": not sampling.eos_token_ids and bool(service.rules.eos_token_ids),
        "stream": request is not None and options.stream,
        "n_probs": 0 if request is None else request.n_probs,
        "post_sampling_probs": False,
        "timings_per_token": request is not None and request.timings_per_token,
        "grammar": "" if request is None else request.grammar,
        "logit_bias": [{"token": token, "bias": bias} for token, bias in sampling.logit_bias],
        "lora": [
            {"id": place, "scale": adapter.scale}
            for place, name in enumerate(service.rules.adapters)
            if adapter is not None and adapter.name == name
        ],
    }
