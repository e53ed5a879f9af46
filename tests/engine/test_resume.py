"""What one engine has begun another goes on with, token for token, whatever was asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from paceline.backends.loading.load import load_backend
from paceline.backends.loading.settings import BackendSettings
from paceline.backends.native import unavailable_reason
from paceline.backends.reference.null import NullBackend
from paceline.core.grammar import Grammar
from paceline.core.sampling_params import SamplingParams
from paceline.engine.llm import LLM
from paceline.engine.testing import ByteTokenizer, null_core
from paceline.engine.types import GenerationOutput, GenerationRequest, Resume, ResumedChoice
from tests.backends.torch.models import VOCAB

SCHEMA = '{"type":"object","properties":{"a":{"type":"string"}},"required":["a"]}'
# what looks at the output before a position: settings, and fields of the request
ASKED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({}, {}),
    "drawn": ({"temperature": 0.8, "top_p": 0.9, "seed": -7}, {}),
    "penalties": (
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
        {},
    ),
    "least": ({"min_tokens": 20, "stop_token_ids": frozenset(range(3, 60))}, {}),
    "words": ({"bad_words": ((5, 6), (7,)), "temperature": 1.0}, {}),
    "allowed": ({"allowed_token_ids": frozenset(range(65, 91)), "temperature": 1.0}, {}),
    "logprobs": ({"logprobs": 3, "temperature": 0.5}, {}),
    "stops": ({"temperature": 1.0}, {"stop": ("qq", "Z", "\n\n"), "skip_special_tokens": False}),
    "choices": ({"temperature": 1.0}, {"n": 3}),
    "grammar": ({"temperature": 1.0, "grammar": Grammar("regex", "[a-c]{3}(x|yy){2,9}[0-9]+")}, {}),
    "json": ({"temperature": 0.7, "grammar": Grammar("json_schema", SCHEMA)}, {}),
}


def request_of(name: str, number: int = 0) -> GenerationRequest:
    sampling, fields = ASKED[name]
    random = np.random.default_rng(number)
    return GenerationRequest(
        request_id=f"{name}-{number}",
        prompt_token_ids=random.integers(3, VOCAB, 9).tolist(),
        sampling=SamplingParams(**({"max_tokens": 40, "seed": 3, "temperature": 0.0} | sampling)),
        arrival_time=0.0,
        **fields,
    )


def prefixes(request: GenerationRequest, uncut: GenerationOutput, cut: int) -> Resume | None:
    """What was out after ``cut`` tokens of each choice; None once all of it was."""
    choices = tuple(
        ResumedChoice(
            token_ids=choice.token_ids[:cut],
            ended=cut >= len(choice.token_ids),
        )
        for choice in uncut.choices
    )
    return None if all(choice.ended for choice in choices) else Resume(choices=choices)


def check(llm: LLM, other: LLM, requests: list[GenerationRequest], *, exactly: bool) -> None:
    """Cut after so many tokens, all of them at once; ``exactly``: also to the last bit."""
    uncut = llm.generate(requests)
    for cut in (0, 1, 2, 3, 7, 8, 15, 16, 31, 38, 39):
        rest = [
            (request, output, resume)
            for request, output in zip(requests, uncut, strict=True)
            if (resume := prefixes(request, output, cut)) is not None
        ]
        resumed = other.generate(
            [msgspec.structs.replace(request, resume=resume) for request, _, resume in rest]
        )
        for (request, whole, resume), output in zip(rest, resumed, strict=True):
            where = (request.request_id, cut)
            assert output.num_output_tokens == whole.num_output_tokens, where
            assert output.num_prompt_tokens == whole.num_prompt_tokens
            new = {choice.index: choice for choice in output.choices}
            for choice, before in zip(whole.choices, resume.choices, strict=True):
                if before.ended:
                    assert choice.index not in new
                    continue
                rest_of = new[choice.index]
                assert before.token_ids + rest_of.token_ids == choice.token_ids, where
                assert choice.text.endswith(rest_of.text) and (cut or rest_of.text == choice.text)
                assert (rest_of.finish_reason, rest_of.stop_reason) == (
                    choice.finish_reason,
                    choice.stop_reason,
                )
                if choice.logprobs is not None:
                    told = [entry.logprob for entry in rest_of.logprobs or ()]
                    wanted = [entry.logprob for entry in choice.logprobs[cut:]]
                    assert told == (wanted if exactly else pytest.approx(wanted, rel=1e-4)), where


def open_model(folder: Path, compute: str, dtype: str, **settings: Any) -> LLM:
    chosen = BackendSettings(
        device="cpu",
        dtype=dtype,
        kv_dtype="auto",
        compute=compute,
        num_blocks=64,
        # torch's team is of no use to a model so small
        threads=1 if compute == "torch" else 2,
    )
    return LLM(null_core(load_backend(folder, chosen), **settings), ByteTokenizer())


@pytest.mark.parametrize(
    ("compute", "dtype"),
    [
        pytest.param("torch", "float32", marks=pytest.mark.thorough),
        ("native", "float32"),
        pytest.param("native", "bfloat16", marks=pytest.mark.thorough),
        ("native", "int8"),
    ],
)
def test_a_model_goes_on_where_it_was(folder: Path, compute: str, dtype: str) -> None:
    """The other engine has little memory, small steps and others beside, and its cache is empty."""
    if compute == "native" and (why := unavailable_reason()) is not None:
        pytest.skip(why)
    requests = [request_of(name, number) for name in ASKED for number in range(2)]
    small = {"max_num_seqs": 9, "max_num_batched_tokens": 24, "enable_prefix_caching": False}
    with (
        open_model(folder, compute, dtype, max_num_seqs=64, max_num_batched_tokens=64) as llm,
        open_model(folder, compute, dtype, **small) as other,
    ):
        # sums of the torch path depend on what else is in a step
        check(llm, other, requests, exactly=compute == "native")


def null_llm(**scheduler: Any) -> LLM:
    backend = NullBackend(vocab_size=259, num_blocks=64, block_size=4, max_model_len=200)
    return LLM(null_core(backend, **scheduler), ByteTokenizer())


def asked(resume: tuple[int, ...], **fields: Any) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=fields.pop("max_tokens", 4), **fields.pop("sampling", {}))
    return GenerationRequest(
        request_id="r",
        prompt_token_ids=[5, 6],
        sampling=sampling,
        arrival_time=0.0,
        resume=Resume(choices=(ResumedChoice(token_ids=resume),)),
        **fields,
    )


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (asked((65, 66, 67, 68)), "holds 4 tokens, and max_tokens=4 counts them"),
        (
            asked((65, 66), sampling={"stop_token_ids": frozenset({65})}),
            "token 65, which ends the output, at position 0 of 2",
        ),
        (asked((65, 66), stop=("B",)), "stop string 'B', which ends the output, after 2 of 2"),
        (asked((65, 259)), "resume_output_ids holds token id 259, outside the vocabulary of 259"),
        (asked((65, 66), sampling={"grammar": Grammar("regex", "x+")}), "left its grammar"),
    ],
)
def test_what_cannot_be_gone_on_from_is_refused(request_: GenerationRequest, words: str) -> None:
    with null_llm() as llm:
        (choice,) = llm.generate([request_])[0].choices
        assert choice.finish_reason == "error"
        assert choice.error is not None and words in choice.error
        # and nobody else is hurt
        assert llm.generate([asked((65,))])[0].num_output_tokens == 4


def test_a_full_queue_takes_what_has_begun() -> None:
    """Its caller has been promised the rest."""
    with null_llm(max_num_seqs=1, max_num_waiting=1) as llm:
        requests = [
            msgspec.structs.replace(asked((65,)), request_id=f"r{number}") for number in range(9)
        ]
        assert {output.num_output_tokens for output in llm.generate(requests)} == {4}
