"""Answers with drafts and without are the same, through the engine and real compute paths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.backends.drafting.draft_model import DraftModel
from paceline.backends.loading.load import load_backend
from paceline.backends.loading.settings import BackendSettings
from paceline.backends.native import unavailable_reason
from paceline.backends.runner.drafting import DraftRow
from paceline.core.sampling_params import SamplingParams
from paceline.engine.llm import LLM
from paceline.engine.testing import ByteTokenizer, null_core
from paceline.engine.types import GenerationRequest
from paceline.speculation import draft_choice
from tests.backends.torch.heads import save_eagle3
from tests.backends.torch.models import VOCAB, save_model
from tests.backends.torch.mtp_models import save_mtp_model

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 5,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 4,
}
# each changes what the next token may be in its own way
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.6, "top_p": 0.9, "top_k": 20},
    "hot": {"temperature": 1.5, "min_p": 0.02},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1},
    "bias": {"logit_bias": ((7, 3.0), (9, -100.0)), "temperature": 0.4},
    "minimum": {"stop_token_ids": frozenset(range(0, VOCAB, 2)), "min_tokens": 30},
    "stop ids": {"stop_token_ids": frozenset(range(0, VOCAB, 9)), "temperature": 0.5},
    "stop text": {"stop": ("a", "\x10", "7"), "min_tokens": 6, "temperature": 0.8},
    "bad words": {"bad_words": ((5,), (11, 12)), "temperature": 0.5},
    "logprobs": {"logprobs": 3, "prompt_logprobs": 2, "temperature": 0.3},
    "only": {"allowed_token_ids": (4, 5, 6, 7), "temperature": 1.0},
}


@dataclass(frozen=True)
class _Answers:
    tokens: list[Any]
    drafted: int
    accepted: int
    preemptions: int


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model with the same vocabulary."""
    folder = tmp_path_factory.mktemp("qwen3")
    save_model(folder, "qwen3", num_hidden_layers=2, max_position_embeddings=512)
    return folder


def _requests() -> list[GenerationRequest]:
    random = np.random.default_rng(3)
    requests = []
    for number, (name, sampling) in enumerate(SAMPLING.items()):
        phrase = random.integers(3, VOCAB, 7).tolist()
        stop = sampling.get("stop", ())
        own = {key: value for key, value in sampling.items() if key != "stop"}
        values = {"max_tokens": 70, "temperature": 0.0, "seed": number} | own
        requests.append(
            GenerationRequest(
                request_id=name,
                prompt_token_ids=phrase * 3,
                sampling=SamplingParams(**values),
                stop=stop,
                arrival_time=0.0,
            )
        )
    return requests


def _answers(
    folder: Path,
    compute: str,
    formats: tuple[str, str],
    size: int,
    blocks: int,
    draft: tuple[Path, str] | str | None = None,
    **config: Any,
) -> _Answers:
    """Of all requests, so many at a time. ``draft`` is a model and its format, or own layers."""
    named = None if isinstance(draft, str) else draft
    settings = BackendSettings(
        draft_path=None if named is None else str(named[0]),
        draft_dtype="auto" if named is None else named[1],
        draft_mtp=isinstance(draft, str),
        device="cpu",
        dtype=formats[0],
        kv_dtype=formats[1],
        compute=compute,
        num_blocks=blocks,
        # torch's team is of no use to a model so small
        threads=1 if compute == "torch" else 2,
    )
    core = null_core(
        load_backend(folder, settings), max_num_seqs=8, future_memory_check=False, **config
    )
    # by likelihood alone: how long steps take is another matter every time
    core.scheduler.step_time._min_observations = 10**9
    tokens: list[Any] = []
    preemptions = 0
    with LLM(core, ByteTokenizer()) as llm:
        requests = _requests()
        for first in range(0, len(requests), size):
            for output in llm.generate(requests[first : first + size]):
                choice = output.choices[0]
                tokens.append(
                    (choice.token_ids, choice.text, choice.finish_reason, choice.stop_reason)
                )
                entries = choice.logprobs
                tokens.append(None if entries is None else [(e.token_id, e.rank) for e in entries])
                preemptions += output.num_preemptions
                core.check_integrity()
        stats = core.stats()
    return _Answers(tokens, stats.num_draft_tokens, stats.num_accepted_tokens, preemptions)


@pytest.mark.parametrize(
    ("compute", "formats"),
    [
        pytest.param("torch", ("float32", "float32"), marks=pytest.mark.thorough),
        ("native", ("float32", "float32")),
        ("native", ("int8", "int8")),
    ],
)
@pytest.mark.parametrize(
    ("size", "blocks"), [(1, 64), pytest.param(4, 64, marks=pytest.mark.thorough), (4, 16)]
)
def test_answers_are_the_same(
    folder: Path,
    compute: str,
    formats: tuple[str, str],
    size: int,
    blocks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if compute == "native" and unavailable_reason() is not None:
        pytest.skip(str(unavailable_reason()))
    # a model without training repeats itself rarely: more wrong drafts are verified
    monkeypatch.setattr(draft_choice, "_LIKELY", 0.0)
    off = _answers(folder, compute, formats, size, blocks)
    on = _answers(folder, compute, formats, size, blocks, speculative_config=NGRAM)
    assert on.tokens == off.tokens
    assert off.drafted == 0
    assert on.drafted > on.accepted > 0
    assert (on.preemptions > 0) == (blocks == 16)


@pytest.mark.parametrize(
    ("compute", "formats", "draft", "mirrors"),
    [
        pytest.param("torch", ("float32", "float32"), "float32", False, marks=pytest.mark.thorough),
        ("native", ("float32", "float32"), "auto", False),
        # the model itself, in other weights: its KV cache is a copy
        ("native", ("float32", "float32"), "bfloat16", True),
        ("native", ("bfloat16", "bfloat16"), "q4", True),
        pytest.param("native", ("bfloat16", "bfloat16"), "int8", True, marks=pytest.mark.thorough),
    ],
)
@pytest.mark.parametrize(
    ("size", "blocks"), [pytest.param(1, 64, marks=pytest.mark.thorough), (4, 16)]
)
def test_answers_are_those_without_a_draft_model(
    folder: Path,
    other: Path,
    compute: str,
    formats: tuple[str, str],
    draft: str,
    mirrors: bool,
    size: int,
    blocks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if compute == "native" and unavailable_reason() is not None:
        pytest.skip(str(unavailable_reason()))
    monkeypatch.setattr(draft_choice, "_LIKELY", 0.0)
    monkeypatch.setattr(draft_choice, "_UNLIKELY", 0.0)
    model = folder if mirrors else other
    off = _answers(folder, compute, formats, size, blocks)
    config = {"model": str(model), "num_speculative_tokens": 4}
    on = _answers(folder, compute, formats, size, blocks, (model, draft), speculative_config=config)
    assert on.tokens == off.tokens
    assert on.drafted > 50
    assert (on.preemptions > 0) == (blocks == 16)
    if mirrors and draft == "bfloat16":
        # its weights are nearly the same, and so is what it draws, at any temperature
        assert on.accepted > 0.6 * on.drafted
    else:
        assert on.accepted > 0


@pytest.mark.parametrize(
    "head",
    ["eagle3", *(pytest.param(head, marks=pytest.mark.thorough) for head in ("mimo", "qwen3"))],
)
@pytest.mark.parametrize(
    ("size", "blocks", "chunk"),
    [
        pytest.param(1, 64, 512, marks=pytest.mark.thorough),
        (4, 16, 512),
        pytest.param(4, 64, 12, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_answers_are_those_without_a_head(
    folder: Path,
    tmp_path: Path,
    head: str,
    size: int,
    blocks: int,
    chunk: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A head of random weights is nearly always wrong, and costs nothing but time."""
    monkeypatch.setattr(draft_choice, "_LIKELY", 0.0)
    monkeypatch.setattr(draft_choice, "_UNLIKELY", 0.0)
    formats, served = ("float32", "float32"), folder
    config: dict[str, Any] = {"method": "eagle3", "model": str(tmp_path)}
    draft: tuple[Path, str] | str = tmp_path, "auto"
    if head == "eagle3":
        save_eagle3(tmp_path, served_hidden=96)
    else:
        config, draft, served = {"method": "mtp"}, "own layers", tmp_path
        save_mtp_model(tmp_path, head, count=2, max_position_embeddings=512)
    off = _answers(served, "torch", formats, size, blocks, max_num_batched_tokens=chunk)
    on = _answers(
        served, "torch", formats, size, blocks, draft,
        max_num_batched_tokens=chunk, speculative_config=config | {"num_speculative_tokens": 4},
    )  # fmt: skip
    assert on.tokens == off.tokens
    assert on.drafted > 50
    # where four tokens are allowed it is right now and then, drawing as the model does
    assert on.accepted > 0
    assert (on.preemptions > 0) == (blocks == 16)


@pytest.mark.parametrize("compute", [pytest.param("torch", marks=pytest.mark.thorough), "native"])
@pytest.mark.parametrize("more", [3, -3])
def test_a_head_that_is_padded_otherwise(
    folder: Path, tmp_path: Path, compute: str, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compute == "native" and unavailable_reason() is not None:
        pytest.skip(str(unavailable_reason()))
    monkeypatch.setattr(draft_choice, "_LIKELY", 0.0)
    monkeypatch.setattr(draft_choice, "_UNLIKELY", 0.0)
    save_model(
        tmp_path, "qwen3", vocab_size=VOCAB + more, num_hidden_layers=1, max_position_embeddings=512
    )
    formats = ("float32", "float32")
    off = _answers(folder, compute, formats, 4, 64)
    config = {"model": str(tmp_path), "num_speculative_tokens": 4}
    draft = tmp_path, "float32"
    on = _answers(folder, compute, formats, 4, 64, draft, speculative_config=config)
    assert on.tokens == off.tokens
    assert on.drafted > 50


@pytest.mark.parametrize("all_fail", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_draft_model_that_fails_costs_nobody_an_answer(
    folder: Path,
    other: Path,
    all_fail: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(draft_choice, "_LIKELY", 0.0)
    propose = DraftModel.propose

    def fails(draft: DraftModel, rows: Sequence[DraftRow]) -> list[int]:
        # what is told about tokens is not asked of drafts
        assert all(row.sampling.params.logprobs is None for row in rows)
        if all_fail or any(row.request_id.startswith("penalties") for row in rows):
            raise RuntimeError("of one of them")
        return propose(draft, rows)

    off = _answers(folder, "torch", ("float32", "float32"), 4, 64)
    monkeypatch.setattr(DraftModel, "propose", fails)
    config = {"model": str(other), "num_speculative_tokens": 4}
    draft = other, "float32"
    on = _answers(folder, "torch", ("float32", "float32"), 4, 64, draft, speculative_config=config)
    assert on.tokens == off.tokens
    assert (on.drafted == 0) is all_fail
    assert ("draft_model_off" in caplog.text) is all_fail
    faults = [record for record in caplog.records if "is not drafted any more" in record.message]
    assert len(faults) == (3 if all_fail else 1)
