"""Drafts from finished answers: found, bounded, nobody else's, and no answer is another."""

from __future__ import annotations

from contextlib import closing
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from paceline.backends.loading.load import load_backend
from paceline.backends.loading.settings import BackendSettings
from paceline.backends.reference.null import NullBackend, expected_tokens
from paceline.core.request import AdapterUse, FinishReason
from paceline.core.sampling_params import SamplingParams
from paceline.engine import finished_answers
from paceline.engine.core import EngineCore
from paceline.engine.finished_answers import SOURCE, FinishedAnswers, Owner
from paceline.engine.llm import LLM
from paceline.engine.process.loop import engine_stats
from paceline.engine.testing import ByteTokenizer, null_core
from paceline.engine.types import GenerationOutput, GenerationRequest
from paceline.errors import ConfigError
from paceline.speculation import draft_choice
from tests.backends.torch.models import VOCAB, save_model
from tests.driving import adapter_use, ask, make_request

ME, OTHER = Owner("a", None), Owner("b", None)
AUTO = {"method": "auto"}
_names = count()


def _keep(answers: FinishedAnswers, owner: Owner, prompt: list[int], output: list[int]) -> None:
    """As if a request had ended."""
    request = make_request("r", prompt, len(output))
    ask(request, drafter=answers.drafter(*owner))
    request.output_token_ids += output
    request.finish_reason = FinishReason.LENGTH
    answers.added(request, 0.0)
    answers.ended(["r"], 0.0)


def _found(answers: FinishedAnswers, owner: Owner, tokens: list[int]) -> tuple[list[int], int]:
    draft = answers.drafter(*owner).propose(tokens, 4)
    return list(draft.token_ids), draft.match


def test_the_longest_match_goes_on_as_it_did() -> None:
    answers = FinishedAnswers(1 << 20)
    question = list(range(100, 140))
    _keep(answers, ME, question, [1, 2, 3, 4, 5, 6])
    _keep(answers, ME, [7, 8, 139], [1, 2, 9, 9, 9, 9])
    # the question tells which of two answers that begin alike it was
    assert _found(answers, ME, question) == ([1, 2, 3, 4], 16)
    assert _found(answers, ME, [*question, 1, 2]) == ([3, 4, 5, 6], 16)
    assert _found(answers, ME, [0, 8, 139, 1, 2]) == ([9, 9, 9, 9], 4)
    # of equal matches the latest
    assert _found(answers, ME, [0, 0, 1, 2]) == ([9, 9, 9, 9], 2)
    # up to the end of an answer, and nothing behind it
    assert _found(answers, ME, [*question, 1, 2, 3, 4]) == ([5, 6], 16)
    assert _found(answers, ME, [*question, 1, 2, 3, 4, 5, 6]) == ([], 0)
    assert _found(answers, ME, [2]) == _found(answers, ME, []) == ([], 0)
    assert _found(answers, OTHER, question) == _found(answers, Owner("a", "x"), question)
    assert _found(answers, OTHER, question) == ([], 0)


def test_memory_is_bounded_in_all_and_for_each_tenant() -> None:
    most = 1 << 18
    answers = FinishedAnswers(most)
    random = Random(1)
    latest: dict[Owner, tuple[list[int], list[int]]] = {}
    largest = 0
    for number in range(600):
        owner = Owner(f"t{number % 5}", random.choice([None, "x", "y", str(number)]))
        prompt = [random.randrange(1000) for _ in range(random.randint(1, 40))]
        output = [random.randrange(1000) for _ in range(random.choice([3, 50, 400, 3000]))]
        _keep(answers, owner, prompt, output)
        latest[owner] = prompt, output
        of_tenants: dict[str, int] = {}
        for each, ring in answers._rings.items():
            of_tenants[each.tenant] = of_tenants.get(each.tenant, 0) + ring.num_bytes
        assert sum(of_tenants.values()) == answers.num_bytes <= most
        assert max(of_tenants.values()) <= most // 3
        assert of_tenants == answers._bytes_of
        largest = max(largest, answers.num_bytes)
        # whatever was dropped, the newest is there
        held = min(len(prompt), 32) + len(output) < answers._rings[owner].capacity
        if held and len(prompt) >= 16:
            # by a shorter match where another has the same hash
            assert _found(answers, owner, prompt)[0] == output[:4]
    assert largest > most // 2
    assert len(answers._rings) < len(latest)


def test_the_one_of_no_use_for_longest_is_dropped_first() -> None:
    # three rings of the smallest size
    answers = FinishedAnswers(1 << 17)
    for tenant in "abc":
        _keep(answers, Owner(tenant, None), [1, 2, 3], [4, 5])
    assert _found(answers, Owner("a", None), [1, 2, 3]) == ([4, 5], 2)
    _keep(answers, Owner("d", None), [1, 2, 3], [4, 5])
    kept = {tenant for tenant in "abcd" if _found(answers, Owner(tenant, None), [2, 3])[1]}
    assert kept == {"a", "c", "d"}
    # another salt of a tenant that has its share takes that tenant's own
    _keep(answers, Owner("d", "x"), [1, 2, 3], [4, 5])
    assert not _found(answers, Owner("d", None), [2, 3])[1]
    assert _found(answers, Owner("a", None), [2, 3])[1]


def test_the_newest_answers_overwrite_the_oldest() -> None:
    answers = FinishedAnswers(1 << 17)
    said = [[number, number + 1, *range(300, 500)] for number in range(0, 100, 2)]
    for number, output in enumerate(said):
        _keep(answers, ME, [1000 + number] * 16, output)
    held = [n for n in range(50) if _found(answers, ME, [1000 + n] * 16)[0] == said[n][:4]]
    # 1,024 tokens: four of these
    assert held == [46, 47, 48, 49]
    assert answers.num_bytes == 1024 * 36
    # one that is longer than all that there may be is kept as far as it goes
    _keep(answers, ME, [5, 6, 7, 8], list(range(2000, 6000)))
    assert _found(answers, ME, [5, 6, 7, 8])[0] == [2000, 2001, 2002, 2003]
    assert _found(answers, ME, list(range(2900, 2916)))[0] == [2916, 2917, 2918, 2919]


def test_a_ring_that_grows_is_taken_in_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finished_answers, "_INDEXED", 100)
    indexed: list[int] = []
    plain = finished_answers._Ring._index

    def index(self: Any, first: int, last: int, **older: bool) -> None:
        indexed.append(last - first)
        plain(self, first, last, **older)

    monkeypatch.setattr(finished_answers._Ring, "_index", index)
    answers = FinishedAnswers(1 << 20)
    said = [[number, *range(300, 480), 7, number] for number in range(6)]
    for number, output in enumerate(said):
        _keep(answers, ME, [1000 + number] * 16, output)
    assert answers._rings[ME].capacity == 2048
    # no call took in more than an answer, or than it may of what was there before
    assert max(indexed) <= 202
    # the newest is found at once, and of equal matches it stays the one
    assert _found(answers, ME, [1005] * 16)[0] == said[5][:4]
    assert _found(answers, ME, [478, 479])[0][:2] == [7, 5]
    for _ in range(12):
        _found(answers, ME, [0])
    assert max(indexed) <= 202
    assert _found(answers, ME, [478, 479])[0][:2] == [7, 5]
    for number in range(6):
        assert _found(answers, ME, [1000 + number] * 16)[0] == said[number][:4]


def test_no_ring_is_larger_than_what_may_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finished_answers, "_LARGEST", 4096)
    answers = FinishedAnswers(1 << 24)
    for number in range(60):
        _keep(answers, ME, [1000 + number] * 16, list(range(300, 500)))
    assert answers._rings[ME].capacity == 4096


def test_salts_that_never_come_back_make_way_for_a_ring_that_grows() -> None:
    # nine of the smallest rings for each tenant
    answers = FinishedAnswers(1 << 20)
    for number in range(2):
        _keep(answers, ME, [1000 + number] * 16, list(range(300, 500)))
    back = Owner("a", "back")
    for _ in range(2):
        _keep(answers, back, [1, 2, 3], [4, 5, 6])
    for number in range(7):
        _keep(answers, Owner("a", f"once {number}"), [1, 2, 3], [4, 5, 6])
    assert len(answers._rings) == 9
    for number in range(100):
        _keep(answers, ME, [2000 + number] * 16, list(range(300, 500)))
    # a ring of 8,192 takes 294,912 bytes, and another doubling is more than the tenant's third
    assert answers._rings[ME].capacity == 8192
    # one that came back is nobody's room
    assert back in answers._rings and len(answers._rings) < 9
    assert answers.num_bytes <= (1 << 20) // 3


def test_what_is_refused() -> None:
    assert FinishedAnswers.of(None) is FinishedAnswers.of({"method": "off"}) is None
    assert FinishedAnswers.of({"method": "ngram"}) is None
    assert FinishedAnswers.of(AUTO | {"finished_answers_bytes": 0}) is None
    assert FinishedAnswers.of(AUTO) is not None
    for wrong in (-1, 1, 131071, 2**30 + 1, True, "1", 1e6):
        with pytest.raises(ConfigError, match=f"131072 to 1073741824, got {wrong!r}"):
            FinishedAnswers.of(AUTO | {"finished_answers_bytes": wrong})
    with pytest.raises(ConfigError, match=r"'ngram' takes .*, not 'finished_answers_bytes'"):
        _llm({"method": "ngram", "finished_answers_bytes": 0})


# ---------------------------------------------------------------------- through an engine


class _Engine(LLM):
    """One whose core can be looked at."""

    def __init__(self, core: EngineCore) -> None:
        super().__init__(core, ByteTokenizer())
        self.core = core


def _llm(config: dict[str, Any], **core: Any) -> _Engine:
    backend = NullBackend(vocab_size=251, num_blocks=256, block_size=4, max_model_len=300)
    return _Engine(null_core(backend, speculative_config=config, **core))


def _request(prompt: list[int], max_tokens: int = 60, **fields: Any) -> GenerationRequest:
    sampling = {"temperature": 0.0} | fields.pop("sampling", {})
    return GenerationRequest(
        request_id=f"q{next(_names)}",
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        arrival_time=0.0,
        **fields,
    )


def _right(llm: _Engine, *requests: GenerationRequest) -> int:
    """Right drafts from finished answers, of requests that run one after the other."""
    core = llm.core
    # by likelihood alone: how long steps take is another matter every time
    core.scheduler.step_time._min_observations = 10**9
    before = dict(core.stats().accepted).get(SOURCE, 0)
    for request in requests:
        (output,) = llm.generate([request])
        for index, choice in enumerate(output.choices):
            prompt, made = request.prompt_token_ids, len(choice.token_ids)
            assert list(choice.token_ids) == expected_tokens(prompt, made, 251), index
        core.check_integrity()
    return dict(core.stats().accepted).get(SOURCE, 0) - before


PROMPT = [9, 3, 250, 17, 4, 88]


def test_the_same_question_again_is_drafted() -> None:
    with closing(_llm(AUTO)) as llm:
        assert _right(llm, _request(PROMPT)) == 0
        assert _right(llm, _request(PROMPT)) > 30
        assert _right(llm, _request(PROMPT, n=2)) > 30
        steps = llm.core.num_steps
        assert _right(llm, _request(PROMPT)) > 40
        # 60 tokens, of which up to nine come in a step
        assert llm.core.num_steps - steps < 20
        stats = engine_stats(llm.core, 0.0)
        assert stats.finished_answers_bytes == 1024 * 36
    with closing(_llm(AUTO | {"finished_answers_bytes": 0})) as llm:
        assert _right(llm, _request(PROMPT), _request(PROMPT)) == 0
        assert engine_stats(llm.core, 0.0).finished_answers_bytes == 0


def test_answers_of_one_adapter_are_drafted_for_no_other() -> None:
    class Adapters:
        """All are resident; a request's id ends with its adapter."""

        def use_of(self, request_id: str) -> AdapterUse:
            return adapter_use(int(request_id[-1]), 0.5 if "half" in request_id else 1.0)

        def close(self) -> None: ...

    def ask_for(adapter: str | None) -> int:
        request = _request(PROMPT, adapter=adapter)
        return _right(llm, replace(request, request_id=f"{request.request_id} {adapter}"))

    with closing(_llm(AUTO)) as llm:
        llm.core.adapters = Adapters()  # type: ignore[assignment]
        assert [ask_for("a1"), ask_for("a2"), ask_for("half a1"), ask_for(None)] == [0] * 4
        assert min(ask_for("a1"), ask_for("a2"), ask_for("half a1"), ask_for(None)) > 30


def test_it_is_told_in_the_request_s_account() -> None:
    with closing(_llm(AUTO)) as llm:
        _right(llm, _request(PROMPT))
        (output,) = llm.generate([_request(PROMPT)])
        timeline = output.choices[0].timeline
        assert timeline is not None
        (verified, right), *_ = [entry[1:] for entry in timeline.drafts if entry[0] == SOURCE]
        assert verified >= right > 30


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        ({"tenant": "a"}, {"tenant": "a"}, True),
        ({"tenant": "a"}, {"tenant": "b"}, False),
        ({"tenant": "a"}, {}, False),
        ({"cache_salt": "s"}, {"cache_salt": "s"}, True),
        ({"cache_salt": "s"}, {"cache_salt": "t"}, False),
        ({"cache_salt": "s"}, {}, False),
        ({"tenant": "a", "cache_salt": "s"}, {"tenant": "b", "cache_salt": "s"}, False),
        # who wants nothing drafted or kept neither gives nor takes
        ({"max_draft_tokens": 0}, {}, False),
        ({}, {"max_draft_tokens": 0}, False),
        ({"store": False}, {}, False),
        ({}, {"store": False}, False),
        ({"sampling": {"prompt_logprobs": 1}}, {}, False),
        ({}, {"sampling": {"prompt_logprobs": 1}}, False),
        # another question does not matter where the text is the same
        ({"sampling": {"temperature": 1.0, "seed": 1}}, {}, True),
    ],
)
def test_who_gets_whose(first: dict[str, Any], second: dict[str, Any], shared: bool) -> None:
    with closing(_llm(AUTO)) as llm:
        assert _right(llm, _request(PROMPT, **first)) == 0
        assert (_right(llm, _request(PROMPT, **second)) > 0) is shared


def test_half_an_answer_is_kept_only_if_it_ended_there() -> None:
    text = expected_tokens(PROMPT, 60, 251)
    # ends where the stop string is found, which the scheduler is told of as of an abort
    place = next(i for i in range(25, 60) if 32 < text[i] < 127 and text.index(text[i]) == i)
    stop = chr(text[place])
    with closing(_llm(AUTO)) as llm:
        (output,) = llm.generate([_request(PROMPT, 60, stop=(stop,))])
        assert output.choices[0].stop_reason == stop
        assert _right(llm, _request(PROMPT)) > place // 2
    with closing(_llm(AUTO)) as llm:
        deltas = llm.stream([_request(PROMPT)])
        for _ in range(40):
            next(deltas)
        # whoever reads stops reading: aborted
        deltas.close()
        assert _right(llm, _request(PROMPT)) == 0
        assert llm.core.answers is not None and not llm.core.answers._open


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param({}, marks=pytest.mark.thorough),
        {"temperature": 0.7, "top_p": 0.9, "seed": 5},
    ],
)
def test_a_model_answers_as_without(
    tmp_path: Path, sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_choice, "_LIKELY", 0.0)
    save_model(tmp_path, "llama", hidden_size=96, max_position_embeddings=512)
    random = Random(2)
    prompts = [[random.randrange(3, VOCAB) for _ in range(20)] for _ in range(3)]

    def play(size: int) -> tuple[list[GenerationOutput], int]:
        """Each question three times, the last with another seed; two at once."""
        settings = BackendSettings(
            # torch's team is of no use to a model so small
            device="cpu", dtype="float32", compute="torch", num_blocks=40, threads=1
        )  # fmt: skip
        core = null_core(
            load_backend(tmp_path, settings),
            speculative_config=AUTO | {"finished_answers_bytes": size},
            future_memory_check=False,
        )
        core.scheduler.step_time._min_observations = 10**9
        outputs: list[GenerationOutput] = []
        with LLM(core, ByteTokenizer()) as llm:
            for seed in (5, 5, 6):
                own = sampling | ({"seed": seed} if sampling else {})
                batch = [_request(prompt, 36, sampling=own) for prompt in prompts]
                outputs += llm.generate(batch[:1])
                outputs += llm.generate(batch[1:])
            return outputs, dict(core.stats().accepted).get(SOURCE, 0)

    without, none = play(0)
    drafted, right = play(finished_answers._USUAL_BYTES)
    assert [o.choices[0].token_ids for o in drafted] == [o.choices[0].token_ids for o in without]
    assert none == 0
    assert right > 60
