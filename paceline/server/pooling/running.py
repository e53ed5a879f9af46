"""From inputs to vectors: tokens, requests on the engine, and what they came to."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from paceline.core.errors import InvalidRequestError, NeverFitsError, RequestFailedError
from paceline.core.sampling_params import SamplingParams
from paceline.engine.types import GenerationRequest
from paceline.server.openai.answers import AnswerHead
from paceline.server.pooling.bodies import Input, PoolingOptions
from paceline.server.service import Service

__all__ = ["Vectors", "encoded_inputs", "run_vectors"]


@dataclass(frozen=True, slots=True)
class Vectors:
    """What a request came to."""

    # little-endian float32, in the order of the inputs
    values: list[bytes]
    # of all inputs together
    num_prompt_tokens: int


async def encoded_inputs(
    service: Service, inputs: Sequence[Input], options: PoolingOptions
) -> list[tuple[list[int], int | None]]:
    """Token ids of inputs; what is given as ids stays as it is, or is cut at its end."""
    lower = service.client.info.pooling is not None and service.client.info.pooling.lower_case
    texts = [(item.lower() if lower else item, None) for item in inputs if isinstance(item, str)]
    encoded = iter(
        await service.prompts.texts(
            texts,
            add_special_tokens=options.add_special_tokens,
            max_tokens=options.max_tokens,
            max_second=None,
        )
    )
    keep = options.max_tokens
    return [next(encoded) if isinstance(item, str) else (item[:keep], None) for item in inputs]


async def run_vectors(
    service: Service,
    prompts: Sequence[tuple[list[int], int | None]],
    options: PoolingOptions,
    head: AnswerHead,
    arrival: float,
    *,
    cut_by: str = "truncate_prompt_tokens=-1",
) -> Vectors:
    """The vector of each prompt; all of them, or an error.

    Args:
        cut_by: what a caller may send to have an input cut that is too long.

    Raises:
        NeverFitsError: a prompt is longer than the model takes.
        And what ``Service.run`` raises.
    """
    _check_lengths(prompts, service.rules.max_model_len, cut_by)
    sampling = SamplingParams(max_tokens=1, pooling=options.params)
    requests = [
        GenerationRequest(
            request_id=head.engine_id(index),
            prompt_token_ids=prompt,
            sampling=sampling
            if second is None
            else replace(sampling, pooling=replace(options.params, second_text=second)),
            detokenize=False,
            arrival_time=arrival,
            priority=options.priority,
            cache_salt=options.cache_salt,
            slo=options.slo,
            tenant=options.tenant,
            whole=True,
        )
        for index, (prompt, second) in enumerate(prompts)
    ]
    values: list[bytes | None] = [None] * len(requests)
    outputs = service.run(requests)
    async with aclosing(outputs):
        async for index, output in outputs:
            if output.pooled is not None:
                values[index] = output.pooled
    found = [value for value in values if value is not None]
    if len(found) != len(values):
        raise RequestFailedError("the engine ended a request without its vector")
    return Vectors(found, sum(len(prompt) for prompt, _ in prompts))


def _check_lengths(prompts: Sequence[tuple[list[int], int | None]], most: int, cut_by: str) -> None:
    for number, (prompt, _) in enumerate(prompts):
        if not prompt:
            raise InvalidRequestError(f"input {number} is empty: it has 0 tokens", "input")
        if len(prompt) > most:
            raise NeverFitsError(
                f"This model's maximum context length is {most} tokens, and input {number} has "
                f"{len(prompt)}. Please shorten it; {cut_by} cuts what is too long.",
                "input",
            )
