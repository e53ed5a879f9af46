"""Offline generation in the calling thread."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from msgspec.structs import replace

from paceline.backends.reference.null import NullBackend, expected_tokens
from paceline.core.sampling_params import SamplingParams
from paceline.engine.llm import LLM
from paceline.engine.testing import ByteTokenizer, null_core
from paceline.engine.types import GenerationOutput, GenerationRequest
from tests.driving import ask

VOCAB = 251


def make(**core: Any) -> LLM:
    backend = NullBackend(vocab_size=VOCAB, num_blocks=64, block_size=4, max_model_len=200)
    return LLM(null_core(backend, **core), ByteTokenizer())


def request(number: int, max_tokens: int = 6, **fields: Any) -> GenerationRequest:
    sampling = fields.pop("sampling", {})
    return GenerationRequest(
        request_id=f"r{number}",
        prompt_token_ids=[number % 200 + 1, 7, 9],
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        arrival_time=0.0,
        **fields,
    )


def tokens(output: GenerationOutput, index: int = 0) -> list[int]:
    return list(output.choices[index].token_ids)


def test_answers_come_in_the_order_of_the_questions() -> None:
    requests = [request(number, max_tokens=1 + number % 9) for number in range(40)]
    ended: list[str] = []
    with make(max_num_seqs=4, max_num_batched_tokens=16) as llm:
        outputs = llm.generate(requests, progress=lambda out: ended.append(out.request_id))
    assert [out.request_id for out in outputs] == [one.request_id for one in requests]
    assert sorted(ended) == sorted(one.request_id for one in requests)
    for one, output in zip(requests, outputs, strict=True):
        expected = expected_tokens(one.prompt_token_ids, one.sampling.max_tokens, VOCAB)
        assert tokens(output) == expected
        assert output.choices[0].text == ByteTokenizer().decode(expected)
        assert output.choices[0].finish_reason == "length"
        assert output.num_output_tokens == one.sampling.max_tokens


def test_every_choice_is_answered() -> None:
    with make() as llm:
        (output,) = llm.generate([request(1, n=3)])
        expected = expected_tokens([2, 7, 9], 6, VOCAB)
        assert [tokens(output, index) for index in range(3)] == [expected] * 3
        assert output.num_output_tokens == 18


def test_choices_are_sampled_with_seeds_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make()
    seeds: dict[str, int] = {}
    add = llm._core.add_request

    def spy(sequence: Any) -> None:
        seeds[sequence.request_id] = sequence.asked.sampling.seed
        add(sequence)

    monkeypatch.setattr(llm._core, "add_request", spy)
    with llm:
        llm.generate([request(1, n=3, sampling={"seed": 2**63 - 2})])
    assert seeds == {"r1/0": 2**63 - 2, "r1/1": 2**63 - 1, "r1/2": -(2**63)}


def test_a_stop_string_ends_the_work_on_it() -> None:
    prompt = request(1).prompt_token_ids
    expected = expected_tokens(prompt, 100, VOCAB)
    stop = ByteTokenizer().decode(expected[4:6])
    with make() as llm:
        (output,) = llm.generate([request(1, max_tokens=100, stop=(stop,))])
        assert output.choices[0].stop_reason == stop
        assert tokens(output) == expected[:6]
        assert llm._core.num_steps < 12
        assert not llm._core.scheduler.has_unfinished


def test_work_that_a_stop_string_ended_was_not_in_vain_and_tells_how_long_answers_are() -> None:
    stop = ByteTokenizer().decode(expected_tokens(request(1).prompt_token_ids, 100, VOCAB)[4:6])
    with make(pipeline_depth=1) as llm:
        llm.generate([request(1, max_tokens=100, stop=(stop,))])
        assert llm._core.stats().num_discarded_tokens == 0
        assert llm._core.scheduler.lengths._all.values == [6]


def test_refused_requests_leave_the_others_alone() -> None:
    requests = [
        request(1),
        request(2, max_tokens=500),
        request(3, n=0),
        GenerationRequest(
            request_id="r4",
            prompt_token_ids=[1, VOCAB],
            sampling=SamplingParams(max_tokens=1),
            arrival_time=0.0,
        ),
        request(5, stop=("",)),
        request(6),
    ]
    with make() as llm:
        outputs = llm.generate(requests)
    reasons = [out.choices[0].finish_reason for out in outputs]
    assert reasons == ["length", "error", "error", "error", "error", "length"]
    errors = [str(out.choices[0].error) for out in outputs]
    assert "503 exceed the maximum context length of 200" in errors[1]
    assert "n must be at least 1, got 0" in errors[2]
    assert "token id 251, outside the vocabulary of 251" in errors[3]
    assert "empty string" in errors[4]


def test_a_group_that_is_refused_half_way_leaves_no_choice_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = make()
    add = llm._core.add_request

    def refuse_the_second(sequence: Any) -> None:
        if sequence.request_id.endswith("/1"):
            ask(sequence, prompt_token_ids=[])
            sequence.num_prompt_tokens = 0
        add(sequence)

    monkeypatch.setattr(llm._core, "add_request", refuse_the_second)
    with llm:
        (output,) = llm.generate([request(1, n=2)])
        assert "the prompt is empty" in str(output.choices[1].error)
        assert not llm._core.scheduler.has_unfinished
        llm._core.check_integrity()


@pytest.mark.parametrize(
    ("timeout", "reason"), [(5.0, "it waited 12.0 s"), (15.0, "it waited 16.0 s"), (99.0, "poison")]
)
def test_choices_left_behind_by_the_first_expire_together(timeout: float, reason: str) -> None:
    """The first fails within its prompt, after 12 seconds, so that the others compute that on their
    own, one after the other: both are too late for that, or one of them is."""
    backend = NullBackend(
        vocab_size=VOCAB, num_blocks=64, block_size=4, max_model_len=200, poison_token=250
    )
    core = null_core(
        backend,
        pipeline_depth=1,
        max_num_seqs=1,
        max_num_batched_tokens=8,
        queue_timeout_s=timeout,
        enable_prefix_caching=False,
    )
    # a second every time that somebody looks: two a step
    seconds = count()
    core._clock = lambda: float(next(seconds))
    with LLM(core, ByteTokenizer()) as llm:
        prompt = [5] * 40 + [250] + [5] * 20
        (output,) = llm.generate([replace(request(1, n=3), prompt_token_ids=prompt)])
        assert all(reason in (choice.error or "") for choice in output.choices)
        assert len(output.choices) == 3
        assert not core.has_work


def test_a_long_source_is_read_as_far_ahead_as_needed() -> None:
    read: list[int] = []

    def source() -> Iterator[GenerationRequest]:
        for number in range(1000):
            read.append(number)
            yield request(number, max_tokens=3)

    with make(max_num_seqs=8, max_num_batched_tokens=64) as llm:
        stream = llm.stream(source())
        first = next(stream)
        assert first.choices[0].token_ids
        assert len(read) <= 100
        stream.close()
        assert not llm._core.scheduler.has_unfinished
        assert llm._core.stats().num_free_blocks == 64


def test_ids_must_differ() -> None:
    with make() as llm, pytest.raises(ValueError, match="2 requests have only 1 different ids"):
        llm.generate([request(1), request(1)])
