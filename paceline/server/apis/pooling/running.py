"""Pooling requests, from inputs to vectors: tokens, requests on the engine, their results as JSON.

Vectors become JSON, and are compared, on a thread in slices: two thousand vectors are millions of
numbers, and the event loop has to send other callers' tokens meanwhile. A thread holds the
interpreter while it writes numbers as text, so a slice takes about a millisecond, and the loop runs
between two of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
import numpy as np

from paceline.core.sampling_params import SamplingParams
from paceline.engine.types import GenerationRequest
from paceline.errors import InvalidRequestError, NeverFitsError, RequestFailedError
from paceline.server.apis.openai.answers import AnswerHead
from paceline.server.apis.pooling.protocol import Input, PoolingOptions
from paceline.server.generation.prompts import slices
from paceline.server.generation.service import Service
from paceline.server.protocol.responses import encode

__all__ = ["Vectors", "cosines", "encode_list", "encoded_inputs", "length_check", "run_vectors"]


@dataclass(frozen=True, slots=True)
class Vectors:
    """The results of a request."""

    # little-endian float32, in the order of the inputs
    values: list[bytes]
    # tokens of all inputs together
    num_prompt_tokens: int


def length_check(
    most: int,
    name: Callable[[int], str],
    cut_by: str = "truncate_prompt_tokens=-1",
    beside: Callable[[int], str] = lambda _number: "",
) -> Callable[[int, int], None]:
    """Return a check of an input's number and tokens, which refuses empty and too long inputs.

    Args:
        name: returns the caller's name of an input, by its number.
        cut_by: fields that truncate an input that is too long.
        beside: describes the other text in the same prompt.
    """

    def check(number: int, num_tokens: int) -> None:
        if not num_tokens:
            raise InvalidRequestError(f"{name(number)} is empty: it has 0 tokens", name(number))
        if num_tokens > most:
            raise NeverFitsError(
                f"This model's maximum context length is {most} tokens, and {name(number)}"
                f"{beside(number)} has {num_tokens}. Please shorten it; {cut_by} cuts what is too "
                "long.",
                name(number),
            )

    return check


async def encoded_inputs(
    service: Service, inputs: Sequence[Input], options: PoolingOptions, name: Callable[[int], str]
) -> list[tuple[list[int], int | None]]:
    """Return token ids of inputs; inputs given as ids are unchanged, or cut at their end.

    Args:
        name: returns the caller's name of an input, by its number.

    Raises:
        NeverFitsError: one is longer than the model takes; later ones are not encoded.
        InvalidRequestError: one is empty.
    """
    keep = options.max_tokens
    check = length_check(service.rules.max_model_len, name)
    found: list[tuple[list[int], int | None]] = []
    text_numbers: list[int] = []
    texts: list[tuple[str, str | None]] = []
    lower = service.client.info.pooling is not None and service.client.info.pooling.lower_case
    for number, item in enumerate(inputs):
        if isinstance(item, str):
            text_numbers.append(number)
            texts.append((item.lower() if lower else item, None))
            found.append(([], None))
        else:
            found.append((item[:keep], None))
            check(number, len(found[-1][0]))
    encoded = await service.prompts.texts(
        texts,
        add_special_tokens=options.add_special_tokens,
        max_tokens=keep,
        check=lambda place, num_tokens: check(text_numbers[place], num_tokens),
    )
    for number, prompt in zip(text_numbers, encoded, strict=True):
        found[number] = prompt
    return found


async def run_vectors(
    service: Service,
    prompts: Sequence[tuple[list[int], int | None]],
    options: PoolingOptions,
    head: AnswerHead,
    arrival: float,
) -> Vectors:
    """Return the vectors of all prompts, which must fit, or raise what ``Service.run`` raises."""
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


_T = TypeVar("_T")

# numbers of vectors per slice, or as many characters of other items
_SLICE: Final = 1 << 14
# numbers that are multiplied per slice, which takes a tenth of the time of writing them
_SLICE_OF_PRODUCTS: Final = 1 << 17


async def encode_list(
    answer: msgspec.Struct, name: str, make: Callable[[int], Any], sizes: Sequence[int]
) -> bytes:
    """Return ``answer`` as JSON with a list in place of the empty one in its field ``name``.

    Args:
        make: makes the list's item of an index; called on another thread.
        sizes: size of each item, in numbers or characters.
    """

    def part(start: int, stop: int) -> bytes:
        return encode([make(place) for place in range(start, stop)])[1:-1]

    parts = await _in_slices(part, sizes, _SLICE)
    # unambiguous: quotation marks inside a text of the answer are escaped
    before, empty, after = encode(answer).partition(f'"{name}":[]'.encode())
    assert empty, f"the answer has no empty list {name}"

    def join() -> bytes:
        return b"".join((before, f'"{name}":['.encode(), b",".join(parts), b"]", after))

    return await _off_the_loop(join, sum(map(len, parts)), _SLICE)


async def cosines(vectors: Sequence[bytes], pairs: Sequence[tuple[int, int]]) -> list[float]:
    """Return the cosine similarity of each pair of indices; 0 if one of the vectors is zero."""
    size = len(vectors[0]) // 4
    first, second = np.array(pairs, dtype=np.int64).reshape(-1, 2).T

    def numbers(chosen: Any) -> Any:
        packed = b"".join(vectors[place] for place in chosen)
        return np.frombuffer(packed, "<f4").reshape(-1, size).astype(np.float64)

    def part(start: int, stop: int) -> list[float]:
        a, b = numbers(first[start:stop]), numbers(second[start:stop])
        lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
        dots = np.einsum("ij,ij->i", a, b)
        found: list[float] = np.divide(
            dots, lengths, out=np.zeros_like(dots), where=lengths > 0
        ).tolist()
        return found

    parts = await _in_slices(part, [size] * len(pairs), _SLICE_OF_PRODUCTS)
    return [value for part in parts for value in part]


async def _in_slices(work: Callable[[int, int], _T], sizes: Sequence[int], most: int) -> list[_T]:
    """Return the result of ``work(start, stop)`` for each slice of the items."""
    return [
        await _off_the_loop(partial(work, start, stop), sum(sizes[start:stop]), most)
        for start, stop in slices(sizes, most)
    ]


async def _off_the_loop(work: Callable[[], _T], size: int, most: int) -> _T:
    """Run ``work`` on a thread, unless it takes less time than handing it over."""
    if 8 * size <= most:
        return work()
    return await asyncio.get_running_loop().run_in_executor(None, work)
