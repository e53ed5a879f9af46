"""What a plan says is what is done: tables, copies, chunks, slots, faults of single requests."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.backends.loading.load import WorkerBackend
from paceline.backends.native import unavailable_reason
from paceline.core.outputs import Draft
from tests.backends.conftest import load
from tests.backends.plans import Plans
from tests.backends.torch.models import VOCAB, make_model

PROMPTS = {
    "short": [3, 5, 8],
    "block": list(range(20, 28)),
    "long": [(i * 37 + 11) % VOCAB for i in range(45)],
}
LENGTH = 12
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 5, "top_p": 0.95}


@pytest.fixture(scope="module")
def reference(llama: WorkerBackend) -> dict[str, list[int]]:
    return {name: Plans(llama).generate(prompt, LENGTH).output for name, prompt in PROMPTS.items()}


def test_scattered_blocks_and_any_chunks(
    llama: WorkerBackend, reference: dict[str, list[int]]
) -> None:
    for seed, chunk in ((1, None), (2, 1), (3, 3), (4, 4), (5, 5), (6, 44)):
        plans = Plans(llama, seed=seed)
        for name, prompt in PROMPTS.items():
            plans.add(name, prompt)
        plans.run(until=LENGTH, chunk=chunk)
        for name in PROMPTS:
            assert plans.release(name).output == reference[name]


def test_rows_come_and_go_in_any_order(
    llama: WorkerBackend, reference: dict[str, list[int]]
) -> None:
    plans = Plans(llama)
    for name, prompt in PROMPTS.items():
        plans.add(name, prompt)
    plans.step({"long": 10})
    plans.step({"short": 3, "long": 2})
    plans.step({"long": 20, "block": 8, "short": 1})
    plans.step({"short": 1})
    plans.step({"block": 1, "long": 13})
    plans.run("long", until=LENGTH)
    plans.run("short", "block", until=LENGTH)
    for name in PROMPTS:
        assert plans.sequences[name].output == reference[name]


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_resumed_after_preemption(llama: WorkerBackend, sampling: dict[str, Any]) -> None:
    alone = Plans(llama).generate(PROMPTS["long"], LENGTH, **sampling).output
    plans = Plans(llama)
    plans.add("long", PROMPTS["long"], **sampling)
    plans.add("short", PROMPTS["short"])
    plans.run(until=5)
    plans.preempt("long")
    # others take the blocks it had
    plans.add("block", PROMPTS["block"])
    plans.run("short", "block", until=LENGTH)
    plans.run("long", until=LENGTH, chunk=20)
    assert plans.sequences["long"].output == alone


def test_steps_queued_ahead_use_the_tokens_sampled_here(
    llama: WorkerBackend, reference: dict[str, list[int]]
) -> None:
    plans = Plans(llama)
    plans.add("long", PROMPTS["long"])
    plans.add("short", PROMPTS["short"])
    queued = [plans.plan({"long": 45, "short": 3})]
    for ahead in range(1, LENGTH):
        queued.append(plans.plan({"short": 1, "long": 1}, ahead=ahead))
    futures = [llama.execute(plan) for plan in queued]
    for plan, future in zip(queued, futures, strict=True):
        plans.take(plan, future.result(60))
    for name in ("long", "short"):
        assert plans.sequences[name].output == reference[name]


@pytest.mark.parametrize("name", ["short", "block", "long"])
def test_forks_copy_the_block_they_write(
    name: str, llama: WorkerBackend, reference: dict[str, list[int]]
) -> None:
    plans = Plans(llama)
    parent = plans.add("parent", PROMPTS[name])
    plans.step({"parent": len(parent.tokens)})
    plans.fork("parent", "same")
    plans.fork("parent", "other", logit_bias=((reference[name][1], -100.0),))
    plans.run(until=LENGTH)
    assert plans.sequences["parent"].output == reference[name]
    assert plans.sequences["same"].output == reference[name]
    other = plans.sequences["other"].output
    assert reference[name][1] not in other


@pytest.mark.parametrize("name", ["short", "long"])
def test_a_running_request_can_be_the_one_that_copies(
    name: str, llama: WorkerBackend, reference: dict[str, list[int]]
) -> None:
    plans = Plans(llama)
    plans.add("parent", PROMPTS[name])
    plans.run(until=1)
    plans.fork("parent", "child", parent_copies=True, logit_bias=((reference[name][0], -100.0),))
    # the child writes other tokens into the block that both had
    plans.step({"child": 1, "parent": 1})
    plans.run(until=LENGTH)
    assert plans.sequences["parent"].output == reference[name]
    alone = Plans(llama).generate(PROMPTS[name], LENGTH, logit_bias=((reference[name][0], -100.0),))
    assert plans.sequences["child"].output == alone.output != reference[name]


def test_more_requests_than_slots(llama_folder: Path, reference: dict[str, list[int]]) -> None:
    backend = load(llama_folder, max_num_seqs=1)
    plans = Plans(backend)
    for index in range(7):
        plans.add(f"{index}", PROMPTS["short"])
        plans.step({f"{index}": 2})
    plans.run(until=LENGTH)
    for index in range(7):
        assert plans.release(f"{index}").output == reference["short"]
    # slots are used again
    for _ in range(3):
        assert plans.generate(PROMPTS["long"], LENGTH).output == reference["long"]
    runner = backend._runner
    assert runner is not None
    assert len(runner._tokens) == 8
    backend.close()


def test_the_last_token_of_a_full_context(llama_folder: Path, llama: WorkerBackend) -> None:
    expected = Plans(llama).generate(PROMPTS["short"], 20).output
    backend = load(llama_folder, max_model_len=23)
    assert backend.info.max_model_len == 23
    assert Plans(backend).generate(PROMPTS["short"], 20).output == expected
    backend.close()


def test_an_empty_plan(llama: WorkerBackend) -> None:
    result = llama.execute(Plans(llama).plan({})).result(60)
    assert (result.sampled, result.logprobs, result.errors) == ((), (), ())


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerBackend]:
    """The embedding of token 150 is NaN, that of token 151 infinite; neither is ever sampled."""
    model = make_model("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[150] = math.nan
        model.model.embed_tokens.weight[151] = math.inf
        model.lm_head.weight[150:152] = 0.0
    folder = tmp_path_factory.mktemp("poisoned")
    model.save_pretrained(folder)
    backend = load(folder, kv_cache_bytes=40 * 3072, max_model_len=64)
    assert backend.info.num_blocks == 40
    yield backend
    backend.close()


class TestFaultsOfOneRequest:
    def test_not_a_number_fails_alone(self, poisoned: WorkerBackend) -> None:
        clean = {name: Plans(poisoned).generate(p, LENGTH).output for name, p in PROMPTS.items()}
        plans = Plans(poisoned)
        for name in ("short", "long"):
            plans.add(name, PROMPTS[name])
        plans.add("nan", [1, 2, 150, 4])
        plans.add("inf", [1, 151])
        plans.step({"short": 3, "nan": 4, "long": 45, "inf": 2})
        assert set(plans.errors) == {"nan", "inf"}
        assert "NaN or infinite" in plans.errors["nan"]
        assert plans.sequences["nan"].output == []
        plans.release("nan")
        plans.release("inf")
        plans.run(until=LENGTH)
        for name in ("short", "long"):
            assert plans.release(name).output == clean[name]
        # all blocks, the poisoned ones too, go to others without harm
        for _ in range(4):
            for name, prompt in PROMPTS.items():
                plans.add(name, prompt)
            plans.run(until=LENGTH)
            for name in PROMPTS:
                assert plans.release(name).output == clean[name]
            plans.add("nan", [150] * 9)
            plans.step({"nan": 9})
            plans.release("nan")

    def test_what_fails_behind_guesses_that_were_right_is_the_next_steps(
        self, llama: WorkerBackend
    ) -> None:
        # nothing may follow token 150, which may have ended the answer
        nothing = tuple((150, token) for token in range(VOCAB))
        plans = Plans(llama)
        plans.add("guessed", [1, 2, 4], logit_bias=((150, 100.0),), bad_words=nothing)
        plans.step({"guessed": 2})
        plan = plans.plan({"guessed": 1})
        rows = (plan.rows[0]._replace(num_tokens=2),)
        plan = replace(plan, rows=rows, num_tokens=2, drafts=(Draft(0, (150,), "ngram"),))
        result = llama.execute(plan).result(60)
        assert (result.sampled, result.errors) == (((150,),), ())
        plans.take(plan, result)
        plans.step({"guessed": 1})
        assert set(plans.errors) == {"guessed"}

    @pytest.mark.parametrize("compute", ["torch", "native"])
    def test_tokens_outside_the_vocabulary(self, compute: str, llama_folder: Path) -> None:
        if compute == "native" and unavailable_reason() is not None:
            pytest.skip(str(unavailable_reason()))
        backend = load(llama_folder, compute=compute, block_size=16)
        expected = Plans(backend).generate(PROMPTS["short"], 3).output
        plans = Plans(backend)
        plans.add("short", PROMPTS["short"])
        plans.add("large", [1, VOCAB, 2])
        plans.add("negative", [-1])
        # neither may what is said of a prompt's tokens look for these
        plans.add("scored", [1, 2, VOCAB + 1], prompt_logprobs=1)
        plans.add("partly", [1, 2, -2, 3], prompt_logprobs=0)
        plans.step({"short": 3, "large": 2, "negative": 1, "scored": 3, "partly": 3})
        assert plans.errors == {
            "large": f"token {VOCAB} is not in the vocabulary of {VOCAB}",
            "negative": f"token -1 is not in the vocabulary of {VOCAB}",
            "scored": f"token {VOCAB + 1} is not in the vocabulary of {VOCAB}",
            "partly": f"token -2 is not in the vocabulary of {VOCAB}",
        }
        assert plans.prompt_logprobs == []
        for name in plans.errors:
            plans.release(name)
        plans.run(until=3)
        assert plans.release("short").output == expected
        backend.close()

    def test_bias_outside_the_vocabulary(self, poisoned: WorkerBackend) -> None:
        plans = Plans(poisoned)
        plans.add("bias", [1, 2], logit_bias=((VOCAB, 1.0),))
        plans.add("fine", [1, 2], logit_bias=((VOCAB - 1, 1000.0),))
        plans.step({"bias": 2, "fine": 2})
        assert list(plans.errors) == ["bias"]
        assert plans.sequences["fine"].output == [VOCAB - 1]


def test_sampling_does_not_depend_on_the_company(llama: WorkerBackend) -> None:
    settings: list[dict[str, Any]] = [
        {"temperature": 1.0, "seed": 1},
        {"temperature": 1.3, "seed": 2, "top_k": 30},
        {"temperature": 0.8, "seed": 3, "top_p": 0.9, "frequency_penalty": 0.5},
        {"temperature": 1.0, "seed": 4, "min_p": 0.02, "repetition_penalty": 1.2},
        {"temperature": 0.0, "presence_penalty": 1.0},
    ]
    alone = [Plans(llama).generate(PROMPTS["long"], 20, **s).output for s in settings]
    plans = Plans(llama)
    for index, sampling in enumerate(settings):
        plans.add(f"{index}", PROMPTS["long"], **sampling)
        plans.step({f"{index}": 30 + index})
    plans.run("0", "3", until=9)
    plans.preempt("3")
    plans.run(until=20, chunk=25)
    assert [plans.sequences[f"{index}"].output for index in range(5)] == alone
    assert len({tuple(output) for output in alone}) == 5


@pytest.mark.parametrize("compute", ["torch", "native"])
def test_log_probabilities_of_the_prompt(compute: str, llama_folder: Path) -> None:
    """The same as the reference model's, whole or in chunks."""
    if compute == "native" and unavailable_reason() is not None:
        pytest.skip(str(unavailable_reason()))
    backend = load(llama_folder, compute=compute, block_size=16)
    prompt = PROMPTS["long"]
    with torch.no_grad():
        logits = make_model("llama")(torch.tensor([prompt])).logits[0]
    expected = logits.log_softmax(-1)[torch.arange(len(prompt) - 1), prompt[1:]]
    for chunk in (None, 7):
        plans = Plans(backend)
        plans.add("asks", prompt, prompt_logprobs=2)
        plans.add("other", PROMPTS["block"])
        plans.run(until=2, chunk=chunk)
        ((request_id, entries),) = plans.prompt_logprobs
        assert request_id == "asks" and [e.token_id for e in entries] == prompt[1:]
        values = torch.tensor([entry.logprob for entry in entries])
        torch.testing.assert_close(values, expected, atol=1e-4, rtol=1e-4)
        for position, entry in enumerate(entries):
            best = int(logits[position].argmax())
            assert entry.top[0][0] == best and len(entry.top) == 2
            assert (entry.rank == 1) == (entry.token_id == best)
    backend.close()


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, False),
        ({"temperature": 1.0}, True),
        ({"logprobs": 0}, True),
        ({"prompt_logprobs": 0}, True),
        ({"presence_penalty": 0.5}, True),
        ({"bad_words": ((7,),)}, True),
        ({"min_tokens": 2, "stop_token_ids": frozenset({7})}, True),
        ({"min_tokens": 2}, False),
    ],
    ids=str,
)
def test_logits_are_asked_for_where_somebody_reads_them(
    llama: WorkerBackend,
    monkeypatch: pytest.MonkeyPatch,
    sampling: dict[str, Any],
    expected: bool,
) -> None:
    assert llama._runner is not None
    model, asked = llama._runner.model, []

    def forward(*arguments: Any, needs_logits: bool) -> Any:
        asked.append(needs_logits)
        return type(model).forward(model, *arguments, needs_logits=needs_logits)

    monkeypatch.setattr(model, "forward", forward, raising=False)
    plans = Plans(llama)
    plans.add("one", PROMPTS["block"], **sampling)
    plans.run("one", until=1)
    assert asked == [expected]
    plans.release("one")
