"""The rule that turns a GenerationRequest with ``n`` choices into ``n`` sequences of the engine.

Choice ``i`` of request ``r`` is the sequence ``r/i``. It is sampled with ``seed + i``, and from the
second on it is a fork of the first, whose prompt blocks it shares. Choices that continue the output
of another engine are no forks: they share nothing but the prompt.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.core.request import Request, RequestSpec, ResumedOutput
from paceline.core.sampling_params import SamplingParams
from paceline.engine.types import GenerationRequest, ResumedChoice
from paceline.errors import InvalidRequestError, RequestError

if TYPE_CHECKING:
    # the API process names choices, and must not import a scheduler
    from paceline.engine.core import EngineCore

__all__ = [
    "add_to_core",
    "check_token_ids",
    "choice_id",
    "choice_ids",
    "open_choices",
    "request_of",
]

_SEEDS = 2**64


def choice_id(request_id: str, index: int) -> str:
    return f"{request_id}/{index}"


def request_of(choice: str) -> str:
    """Return the request that a choice belongs to."""
    return choice.rpartition("/")[0]


def open_choices(request: GenerationRequest) -> tuple[int, ...]:
    """Return the indices of the choices still to be made: all but those that ended elsewhere."""
    resume = request.resume
    if resume is None:
        return tuple(range(request.n))
    return tuple(index for index, choice in enumerate(resume.choices) if not choice.ended)


def choice_ids(request: GenerationRequest) -> tuple[str, ...]:
    """Return the ids of the choices still to be made."""
    return tuple(choice_id(request.request_id, index) for index in open_choices(request))


def add_to_core(core: EngineCore, request: GenerationRequest, adapter_wait: float = 0.0) -> None:
    """Queue every choice of a request, or none of them.

    Args:
        adapter_wait: seconds that it waited for its adapter.

    Raises:
        RequestError: refused; the engine holds nothing of this request.
    """
    check_token_ids(request, core.info.vocab_size)
    salt, adapter = request.cache_salt, None
    if request.adapter is not None:
        assert core.adapters is not None, "a request with an adapter was let in without any"
        adapter = core.adapters.use_of(request.request_id)
        # without one it would be answered by the model itself
        assert adapter is not None, "a request was let in before its adapter was resident"
    if request.sampling.prompt_logprobs is not None:
        # logits of cached positions are not computed, so such a prompt must share nothing; no two
        # requests have this id at the same time
        salt = f"prompt_logprobs {request.request_id}"
    drafter, answers = None, core.answers
    # no drafts from answers if blocks are not shared, or the caller wants no drafts or storage
    shares = request.sampling.prompt_logprobs is None
    if answers is not None and shares and request.store and request.max_draft_tokens:
        drafter = answers.drafter(
            request.tenant, salt if adapter is None else f"{adapter.key.hex()} {salt}"
        )
    added: list[str] = []
    is_new = request.resume is None
    for index in open_choices(request):
        request_id = choice_id(request.request_id, index)
        sequence = Request(
            RequestSpec(
                request_id=request_id,
                prompt_token_ids=request.prompt_token_ids,
                sampling=_sampling(request.sampling, index),
                arrival_time=request.arrival_time,
                priority=request.priority,
                cache_salt=salt,
                adapter=adapter,
                adapter_wait=adapter_wait + request.load_wait,
                slo=request.slo,
                tenant=request.tenant,
                fork_of=choice_id(request.request_id, 0) if index and is_new else None,
                num_forks=request.n - 1 if is_new and not index else 0,
                resumed=_resumed(request, index),
                max_draft_tokens=request.max_draft_tokens,
                prediction_token_ids=request.prediction,
                drafter=drafter,
            )
        )
        try:
            core.add_request(sequence)
        except RequestError:
            core.abort(added)
            raise
        added.append(request_id)


def _resumed(request: GenerationRequest, index: int) -> ResumedOutput | None:
    if request.resume is None:
        return None
    token_ids, times = request.resume.choices[index].token_ids, request.resume.times
    if times is not None:
        return ResumedOutput(token_ids, times.first_scheduled, times.first_token)
    if not token_ids:
        # the first token is still to come, with its target
        return None
    # assume that it has kept its pace until now
    first = request.arrival_time - len(token_ids) * (request.slo.tpot or 0.0)
    return ResumedOutput(token_ids, first, first)


def _sampling(sampling: SamplingParams, index: int) -> SamplingParams:
    if index == 0:
        return sampling
    # seeds are 64 bits, signed, and wrap
    seed = (sampling.seed + index + _SEEDS // 2) % _SEEDS - _SEEDS // 2
    return replace(sampling, seed=seed, prompt_logprobs=None)


def _choices(request: GenerationRequest) -> tuple[ResumedChoice, ...]:
    return () if request.resume is None else request.resume.choices


def check_token_ids(request: GenerationRequest, vocab_size: int) -> None:
    """Refuse ids outside the vocabulary, which would read outside the model's tables."""
    ids = {
        "prompt": request.prompt_token_ids,
        "logit_bias": [token_id for token_id, _ in request.sampling.logit_bias],
        "stop_token_ids": request.sampling.stop_token_ids,
        "allowed_token_ids": request.sampling.allowed_token_ids or (),
        "resume_output_ids": [i for choice in _choices(request) for i in choice.token_ids],
        "bad_words": [token_id for word in request.sampling.bad_words for token_id in word],
    }
    for param, token_ids in ids.items():
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            bad = next(i for i in token_ids if not 0 <= i < vocab_size)
            raise InvalidRequestError(
                f"{param} holds token id {bad}, outside the vocabulary of {vocab_size}", param
            )
