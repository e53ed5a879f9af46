"""A draft model changes no answer, whatever was asked for, on every backend that has one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.backends.reference.null import NullBackend
from paceline.core.backend import ModelBackend
from paceline.core.grammar import ConstrainedBackend
from paceline.core.outputs import DRAFT_MODEL
from paceline.engine.text.grammar import GrammarCompiler
from paceline.speculation import draft_choice
from paceline.speculation.draft_tokens import GRAMMAR
from tests.contract.ascii import VOCAB, Ascii
from tests.contract.test_backends import (
    GREEDY,
    NUM_TOKENS,
    SAMPLED,
    drive,
    load_folder,
    load_tiny,
)
from tests.contract.test_drafts import add_all, answers_of, check_choices
from tests.contract.test_grammar import GRAMMARS

AUTO = {"method": "auto", "model": "another", "num_speculative_tokens": 5}
ALONE = {"model": "another", "num_speculative_tokens": 3}


def _null(_: Path) -> ModelBackend:
    return NullBackend(
        vocab_size=VOCAB,
        num_blocks=NUM_TOKENS // 4,
        block_size=4,
        num_host_blocks=40,
        draft_wrong=(2,),
    )


def load_two(folder: Path) -> ModelBackend:
    from tests.backends.torch.models import save_model

    other = folder / "other"
    save_model(other, "qwen2", vocab_size=VOCAB, max_position_embeddings=512, initializer_range=0.4)
    return load_tiny(folder, block_size=4, compute="torch", draft_path=str(other))


def _native(folder: Path) -> ModelBackend:
    from paceline.backends.native import unavailable_reason

    reason = unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    return load_tiny(
        folder, block_size=16, compute="native", draft_path=str(folder), draft_dtype="q4"
    )


def load_eagle3(folder: Path) -> ModelBackend:
    from tests.backends.torch.heads import save_eagle3

    head = folder / "head"
    # of two layers what each is given, and what the last gives
    save_eagle3(head, served_hidden=48, vocab=VOCAB, layers=(0, 1, 2))
    return load_tiny(folder, block_size=4, compute="torch", draft_path=str(head))


def load_mtp(folder: Path) -> ModelBackend:
    from tests.backends.torch.mtp_models import save_mtp_model

    sizes = {"intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 512}
    save_mtp_model(folder, "mimo", count=2, vocab_size=VOCAB, initializer_range=0.4, **sizes)
    return load_folder(folder, block_size=4, compute="torch", draft_mtp=True)


BACKENDS: dict[str, Callable[[Path], ModelBackend]] = {
    "eagle3": load_eagle3,
    "native": _native,
    "null": _null,
    "mtp": load_mtp,
    "torch": load_two,
}


@pytest.fixture(scope="module", params=sorted(BACKENDS))
def backend(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[ModelBackend]:
    made = BACKENDS[request.param](tmp_path_factory.mktemp("model"))
    assert isinstance(made, ConstrainedBackend)
    compiler = GrammarCompiler(Ascii)
    made.constrain(compiler)
    yield made
    made.close()
    compiler.close()


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(GREEDY, id="greedy"),
        pytest.param(SAMPLED, id="sampled", marks=pytest.mark.thorough),
    ],
)
def test_answers_are_the_same(
    backend: ModelBackend, sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend.info.name == "null" and sampling is SAMPLED:
        pytest.skip("it draws as if it were greedy")
    # all drafts are verified, however unlikely
    monkeypatch.setattr(draft_choice, "_LIKELY", 0.0)
    monkeypatch.setattr(draft_choice, "_UNLIKELY", 0.0)
    driver = drive(backend)
    add_all(driver, sampling)
    driver.run()
    reference = answers_of(driver)
    preempted = 0
    for config, settings in (
        (AUTO, {"depth": 2}),
        (ALONE, {"num_tokens": 176, "max_num_batched_tokens": 40}),
        (ALONE, {"num_tokens": 208, "enable_prefix_caching": False, "depth": 2}),
    ):
        driver = drive(backend, speculative_config=config, **settings)
        add_all(driver, sampling)
        driver.run()
        assert answers_of(driver) == reference, settings
        stats = driver.scheduler.stats()
        drafted, accepted = dict(stats.drafted), dict(stats.accepted)
        assert drafted[DRAFT_MODEL] > 20
        # a head of random weights is right by chance alone, which need not come
        random = any(head in backend.info.drafter for head in ("EAGLE-3", "MTP"))
        assert accepted[DRAFT_MODEL] > 0 or random
        if config is AUTO:
            assert drafted[GRAMMAR] == accepted[GRAMMAR] > 0
        preempted += stats.num_preemptions
    assert preempted > 0


def test_choices_of_one_request(backend: ModelBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_choice, "_LIKELY", 0.0)
    driver = check_choices(backend, ALONE, (None, None, GRAMMARS["lark"]))
    assert driver.scheduler.stats().num_draft_tokens > 0
