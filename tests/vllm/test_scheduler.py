"""The adapter over the recorded interface of vLLM."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.sim.recording import Recording
from paceline.vllm.pacer import Pacer
from tests.vllm import fake
from tests.vllm.loop import Loop


def test_steps_are_the_plans(paced_class: Any) -> None:
    engine = Loop(paced_class)
    engine.add("long", 100, 4, extra_args={"ttft_ms": 60_000})
    engine.add("short", 8, 4, extra_args={"ttft_ms": 100})
    engine.run()
    assert engine.tokens == {"long": [0, 1, 2, 3], "short": [0, 1, 2, 3]}
    counts = engine.scheduler.pacer.counts
    assert counts.num_steps == len(engine.steps) and not counts.num_amended
    assert not counts.num_own_steps and not counts.num_faults
    # the short one has less time, so it goes first, though it came later
    assert list(engine.steps[0]) == ["short", "long"]
    told = engine.scheduler.pacer.answer({"counts": True})
    assert told["ended"] == told["kept"] == {"standard": 2} and told["missed"] == []
    assert told["step_tokens"] == {"prefill": 108, "decode": 6} and told["requests"] == []


def test_without_the_plug_in_arrival_decides() -> None:
    scheduler = fake.Scheduler(fake.Config())
    for name, prompt in (("long", 100), ("short", 8)):
        scheduler.add_request(fake.Request(name, list(range(prompt)), 4))
    assert scheduler.schedule().num_scheduled_tokens == {"long": 64}


def test_request_that_is_not_ready(paced_class: Any) -> None:
    engine = Loop(paced_class)
    engine.scheduler.unready.add("grammar")
    engine.add("grammar", 8, 3)
    engine.add("other", 8, 6)
    for _ in range(4):
        engine.step()
    assert not engine.tokens["grammar"] and engine.tokens["other"]
    amended = engine.scheduler.pacer.counts.num_amended
    assert amended == 4, "its row was planned and did not run"
    engine.scheduler.unready.clear()
    engine.run()
    assert engine.tokens == {"grammar": [0, 1, 2], "other": [0, 1, 2, 3, 4, 5]}
    assert engine.scheduler.pacer.counts.num_amended == amended


def test_cached_prefix_is_asked_of_vllm(paced_class: Any) -> None:
    engine = Loop(paced_class)
    prompt = list(range(40))
    engine.add("first", 40, 2, tokens=prompt)
    engine.run()
    engine.add("second", 40, 2, tokens=prompt)
    engine.step()
    # 9 of 10 blocks were found: one token at least is computed
    assert engine.steps[-1] == {"second": 4}
    assert not engine.scheduler.pacer.counts.num_amended


def test_longest_request_fits_with_several_kinds_of_layers(
    paced_class: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # layers with a sliding window keep few blocks, so vLLM serves what a third of the blocks
    # could not hold
    monkeypatch.setattr(fake.KVCacheManager, "num_kv_cache_groups", 3)
    engine = Loop(paced_class)
    for number in range(3):
        engine.add(f"r{number}", 240, 16)
    engine.run()
    assert [len(tokens) for tokens in engine.tokens.values()] == [16] * 3
    assert engine.scheduler.pacer.kv.pool.num_free == engine.scheduler.pacer.kv.pool.num_blocks


@pytest.mark.parametrize("seed", [2, 11, 13])
def test_no_more_adapters_run_than_vllm_has_slots_for(paced_class: Any, seed: int) -> None:
    # vLLM counts the adapters of a step's rows, and a step may leave running requests out
    chance = random.Random(seed)
    engine = Loop(paced_class, lora_config=SimpleNamespace(max_loras=1))
    adapters = [SimpleNamespace(lora_int_id=number) for number in (1, 2)]
    wanted = {}
    for number in range(40):
        targets = {"ttft_ms": chance.choice([30, 60_000]), "tpot_ms": chance.choice([5, 100, 2000])}
        targets = chance.choice([{"best_effort": 1}, targets])
        name, prompt = f"r{number}", chance.randrange(10, 200)
        wanted[name] = chance.randrange(3, 30)
        adapter = chance.choice([*adapters, None])
        engine.add(name, prompt, wanted[name], extra_args=targets, lora_request=adapter)
        for _ in range(chance.randrange(6)):
            engine.step()
    engine.run()
    assert {name: len(tokens) for name, tokens in engine.tokens.items()} == wanted
    counts = engine.scheduler.pacer.counts
    assert not counts.num_faults and counts.num_amended <= 0.02 * counts.num_steps


def test_stop_and_abort(paced_class: Any) -> None:
    engine = Loop(paced_class)
    engine.add("stops", 8, 50, stop_token=3)
    engine.add("leaves", 8, 50)
    for _ in range(6):
        engine.step()
    engine.scheduler.finish_requests("leaves", fake.RequestStatus.FINISHED_ABORTED)
    engine.run()
    assert engine.tokens["stops"] == [0, 1, 2, 3]
    assert engine.ended == {"stops": fake.FinishReason.STOP}
    assert not engine.scheduler.pacer.core.has_unfinished
    assert engine.scheduler.kv_cache_manager.num_free() == 64


def test_refused_request_ends_with_an_error(paced_class: Any) -> None:
    engine = Loop(
        paced_class, additional_config={"paceline": {"max_num_waiting": 1}}, max_num_seqs=1
    )
    for number in range(4):
        engine.add(f"r{number}", 20, 4, extra_args={"paceline_tag": f"tag{number}"})
        engine.step()
    engine.run()
    refused = [name for name, reason in engine.ended.items() if reason == fake.FinishReason.ERROR]
    assert refused, "the queue holds one"
    fate = engine.scheduler.pacer.answer({"fate": f"tag{refused[0][1:]}"})
    assert fate["refusal"]["status"] == 429 and fate["refusal"]["retry_after"] > 0.0
    assert "the limit is 1" in fate["refusal"]["message"]
    told = engine.scheduler.pacer.answer({"counts": True})
    assert told["missed"] == [("standard", "refused", len(refused))]
    assert told["refused"] == {"queue-full": len(refused)}
    served = engine.scheduler.pacer.answer({"fate": "tag0"})
    assert served["refusal"] is None and served["timeline"] is not None and served["ttft"] > 0.0
    assert engine.scheduler.pacer.answer({"fate": "nonsense"}) is None


def test_refusal_of_one_choice_is_the_whole_answers(paced_class: Any) -> None:
    settings = {"paceline": {"max_num_waiting": 1}}
    engine = Loop(paced_class, additional_config=settings, max_num_seqs=1)
    # vLLM's front end sends each choice as a request of its own
    for number in range(3):
        engine.add(f"{number}_r", 20, 4, extra_args={"paceline_tag": "t"})
    engine.run()
    assert sorted(engine.ended.values()) == [1, 1, 3], "two were served after the refusal"
    assert engine.scheduler.pacer.answer({"fate": "t"})["refusal"]["status"] == 429


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ttft_ms": 0}, "slo.ttft_ms must be above 0"),
        ({"tpot_ms": "fast"}, "vllm_xargs.tpot_ms must be a number, got 'fast'"),
        ({"tenant": 7}, "vllm_xargs.tenant must be a string, got 7"),
        ({"slo_class": "mine"}, "vllm_xargs.slo_class must be one of interactive, standard"),
    ],
)
def test_bad_arguments_end_that_request_alone(
    paced_class: Any, arguments: dict[str, Any], message: str
) -> None:
    engine = Loop(paced_class)
    engine.add("bad", 8, 4, extra_args=arguments | {"paceline_tag": "t"})
    engine.add("good", 8, 4)
    engine.run()
    assert engine.ended["bad"] == fake.FinishReason.ERROR and len(engine.tokens["good"]) == 4
    refusal = engine.scheduler.pacer.answer({"fate": "t"})["refusal"]
    assert refusal["status"] == 400 and message in refusal["message"]


def test_dropped_after_its_time_in_the_queue(paced_class: Any) -> None:
    engine = Loop(paced_class, max_num_seqs=1)
    engine.add("runs", 8, 40)
    engine.step()
    engine.add("waits", 8, 4, extra_args={"queue_ttl_ms": 50, "paceline_tag": "t"})
    engine.run()
    assert engine.ended["waits"] == fake.FinishReason.ERROR
    assert engine.scheduler.pacer.answer({"fate": "t"})["refusal"]["reason"] == "expired"


def test_streaming_input_is_vllms_alone(paced_class: Any) -> None:
    engine = Loop(paced_class)
    engine.add("session", 30, 5, resumable=True)
    engine.add("ours", 30, 5)
    engine.run()
    assert len(engine.tokens["session"]) == len(engine.tokens["ours"]) == 5
    assert not engine.scheduler.pacer.counts.num_own_steps
    engine.add("more", 8, 1)
    engine.run()
    assert not engine.scheduler.pacer.foreign, "the session has ended"


def test_session_in_a_queue_of_its_own_is_scheduled_once(paced_class: Any) -> None:
    engine = Loop(paced_class)
    engine.add("session", 30, 5, resumable=True)
    # so vLLM keeps one that waits for more of its prompt: its own schedule() reads that queue
    engine.scheduler.waiting.clear()
    engine.add("ours", 30, 5)
    engine.step()
    assert engine.steps == [{"ours": 30}]


def test_sessions_take_places_of_running_requests(
    paced_class: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Loop(paced_class, max_num_seqs=2)
    engine.add("session", 8, 40, resumable=True)
    engine.add("runs", 8, 40)
    engine.step()
    engine.add("waits", 8, 4)
    # a plan that leaves a running request out has a place for another, and vLLM has none
    plan = SimpleNamespace(released=(), rows=[SimpleNamespace(request_id="waits")])
    monkeypatch.setattr(engine.scheduler.pacer, "plan", lambda: plan)
    _, shown, admitted, hidden = engine.scheduler._stage()
    named = [[each.request_id for each in part] for part in (shown, admitted, hidden)]
    assert named == [["session"], [], ["runs"]]


def test_fault_of_ours_ends_pacing_and_not_the_engine(
    paced_class: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Loop(paced_class)
    engine.add("a", 100, 6)
    engine.step()

    def broken(now: float) -> Any:
        raise KeyError("broken")

    monkeypatch.setattr(engine.scheduler.pacer.core, "schedule", broken)
    engine.add("b", 20, 6)
    with caplog.at_level(logging.ERROR):
        engine.run()
    assert [len(tokens) for tokens in engine.tokens.values()] == [6, 6]
    counts = engine.scheduler.pacer.counts
    assert counts.num_faults == 1 and counts.num_own_steps
    assert sum("paceline_fault" in record.message for record in caplog.records) == 1


def test_pacing_begins_again_under_load(
    paced_class: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Loop(paced_class)
    for number in range(8):
        engine.add(f"r{number}", 30, 200)
    for _ in range(20):
        engine.step()

    def broken(*_: Any, **__: Any) -> Any:
        raise KeyError("broken")

    monkeypatch.setattr(engine.scheduler.pacer.core, "update", broken)
    engine.run()
    assert all(tokens == list(range(200)) for tokens in engine.tokens.values())
    counts = engine.scheduler.pacer.counts
    # a second's steps, one of them empty, and then the plans of another core
    assert counts.num_faults == 1 and 90 < counts.num_own_steps < 110
    assert counts.num_steps > 80 and not engine.scheduler.pacer.core.has_unfinished
    assert "vLLM schedules by itself for a second" in caplog.text


def test_too_many_faults_end_pacing(
    paced_class: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("broken")

    monkeypatch.setattr(Pacer, "plan", broken)
    engine = Loop(paced_class)
    engine.add("a", 8, 240)
    engine.add("b", 8, 240)
    engine.run()
    engine.add("c", 8, 240)
    engine.run()
    assert [len(tokens) for tokens in engine.tokens.values()] == [240, 240, 240]
    assert engine.scheduler.pacer.counts.num_faults == 4
    assert "vLLM schedules by itself from now on" in caplog.text
    assert engine.scheduler.pacer.answer({"counts": True})["requests"] == []


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_blocks", [24, 200])
def test_every_request_gets_exactly_its_tokens(
    paced_class: Any, seed: int, num_blocks: int
) -> None:
    chance = random.Random(seed)
    engine = Loop(paced_class, num_blocks=num_blocks)
    shared = list(range(20))
    wanted, left = {}, []
    for number in range(40):
        name, prompt = f"r{number}", chance.randrange(1, 60)
        wanted[name] = chance.randrange(1, 12)
        tokens = [10_000 * number + i for i in range(prompt)]
        if chance.random() < 0.5:
            tokens[:20] = shared[:prompt]
        targets = {"ttft_ms": chance.choice([50, 5_000])} if chance.random() < 0.7 else None
        engine.add(name, prompt, wanted[name], tokens=tokens, extra_args=targets)
        for _ in range(chance.randrange(4)):
            engine.step()
        if chance.random() < 0.2 and name in engine.scheduler.requests:
            engine.scheduler.finish_requests(name, fake.RequestStatus.FINISHED_ABORTED)
            left.append(name)
    engine.run()
    for name, count in wanted.items():
        if name not in left:
            assert engine.tokens[name] == list(range(count)), name
    counts = engine.scheduler.pacer.counts
    assert not counts.num_faults and not counts.num_own_steps
    if num_blocks == 200:
        assert counts.num_amended <= 0.02 * counts.num_steps
    assert engine.scheduler.kv_cache_manager.num_free() == num_blocks


# ---------------------------------------------------------------- refused at start


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"speculative_config": object()}, "does not support --speculative-config"),
        ({"kv_transfer_config": object()}, "KV connectors"),
        (
            {"parallel_config": SimpleNamespace(pipeline_parallel_size=2)},
            "--pipeline-parallel-size",
        ),
        ({"policy": "priority"}, "--scheduling-policy priority"),
        ({"long_prefill_token_threshold": 512}, "--long-prefill-token-threshold"),
        (
            {"model_config": SimpleNamespace(max_model_len=256, runner_type="pooling")},
            "pooling models",
        ),
        (
            {
                "model_config": SimpleNamespace(
                    max_model_len=256, runner_type="generate", is_diffusion=True
                )
            },
            "diffusion models",
        ),
        ({"additional_config": {"paceline": 3}}, "paceline must be an object, got 3"),
        ({"additional_config": {"paceline": {"polcy": "fair"}}}, "paceline.polcy is not a setting"),
        (
            {"additional_config": {"paceline": {"max_predicted_wait_s": 5}}},
            "max_predicted_wait_s is now max_predicted_ttft_s",
        ),
        (
            {"additional_config": {"paceline": {"max_num_seqs": 4}}},
            "paceline.max_num_seqs is vLLM's --max-num-seqs",
        ),
        (
            {"additional_config": {"paceline": {"max_adapters": 2}}},
            "paceline.max_adapters is vLLM's --max-loras",
        ),
        (
            {"additional_config": {"paceline": {"policy": ["fair"]}}},
            "paceline.policy must be one of fcfs, sjf",
        ),
        (
            {"additional_config": {"paceline": {"policy": "best"}}},
            "paceline.policy must be one of fcfs, sjf",
        ),
        (
            {"additional_config": {"paceline": {"default_ttft_s": "2"}}},
            "paceline.default_ttft_s must be a number, got '2'",
        ),
        (
            {"additional_config": {"paceline": {"default_ttft_s": -1}}},
            "default_ttft_s must be above 0, got -1",
        ),
        (
            {"additional_config": {"paceline": {"demote_late": 1}}},
            "paceline.demote_late must be a bool, got 1",
        ),
    ],
)
def test_refused_at_start(paced_class: Any, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        paced_class(fake.Config(**config))
    assert message in str(error.value)


def test_what_was_not_tried_is_said_at_start(
    paced_class: Any, caplog: pytest.LogCaptureFixture
) -> None:
    paced_class(fake.Config())
    assert "passes through" not in caplog.text
    model = SimpleNamespace(max_model_len=256, runner_type="generate", is_multimodal_model=True)
    parallel = SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=4)
    paced_class(fake.Config(model_config=model, parallel_config=parallel))
    assert "was not tried with, multimodal inputs" in caplog.text
    assert "was not tried with, 4 data parallel ranks (targets are those of each" in caplog.text


def test_settings_have_an_effect(paced_class: Any) -> None:
    engine = Loop(paced_class, additional_config={"paceline": {"policy": "sjf"}})
    engine.add("long", 100, 4)
    engine.add("short", 8, 4)
    engine.step()
    assert next(iter(engine.steps[0])) == "short"


def test_recording_is_the_simulators(paced_class: Any, tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    engine = Loop(paced_class, additional_config={"paceline": {"record": str(path)}})
    for number in range(6):
        # one ends by a stop token, which vLLM alone sees
        stop = 2 if number == 3 else None
        engine.add(f"r{number}", 30, 5, extra_args={"ttft_ms": 900}, stop_token=stop)
    engine.add("waits", 250, 5, extra_args={"queue_ttl_ms": 1})
    engine.run()
    engine.scheduler.shutdown()
    assert engine.ended["waits"] == fake.FinishReason.ERROR
    recording = Recording.read(path)
    assert len(recording.steps) == len(engine.steps)
    found = {request.request_id: request.output_tokens for request in recording.requests}
    assert found == {f"r{n}": 3 if n == 3 else 5 for n in range(6)} | {"waits": 0}


def test_recording_of_another_rank_has_a_file_of_its_own(paced_class: Any, tmp_path: Path) -> None:
    parallel = SimpleNamespace(pipeline_parallel_size=1, data_parallel_rank=2)
    settings = {"paceline": {"record": str(tmp_path / "steps.jsonl")}}
    Loop(paced_class, additional_config=settings, parallel_config=parallel)
    assert [path.name for path in tmp_path.glob("steps*")] == ["steps.jsonl.2"]


def test_missing_names_are_named(paced_class: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(fake.Scheduler, "_reserve_prefill_lookahead")
    monkeypatch.delattr(fake.KVCacheManager, "get_computed_blocks")
    with pytest.raises(ConfigError) as error:
        paced_class(fake.Config())
    assert "Scheduler._reserve_prefill_lookahead" in str(error.value)
    assert "KVCacheManager.get_computed_blocks" in str(error.value)


def test_missing_attributes_are_named(paced_class: Any) -> None:
    class Other(paced_class):  # type: ignore[misc]
        # a property that vLLM may have renamed
        @property
        def policy(self) -> Any:
            raise AttributeError

        @policy.setter
        def policy(self, value: Any) -> None: ...

    with pytest.raises(ConfigError, match=r"lacks Scheduler\.policy\."):
        Other(fake.Config())


def test_schedule_that_cuts_no_chunks_is_refused(
    paced_class: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def schedule(self: Any) -> Any:
        return self.running, self.waiting, self.max_num_scheduled_tokens

    monkeypatch.setattr(fake.Scheduler, "schedule", schedule)
    with pytest.raises(ConfigError, match="the use of _reserve_prefill_lookahead in"):
        paced_class(fake.Config())


def test_version_that_was_not_tried_warns(
    paced_class: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.33.1")
    paced_class(fake.Config())
    assert "vLLM 0.33.1 has every name that is used, but only 0.31.*" in caplog.text
