"""What is told about promises: families of /metrics, fields of a timeline, llm-d's headers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from paceline.backends.reference.null import NullBackend
from paceline.cli.terminal.logs import JsonFormatter
from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.outputs import Timeline
from paceline.core.sampling_params import SamplingParams
from paceline.core.slo import Slo
from paceline.engine.core import EngineCore
from paceline.engine.local import LocalEngineClient
from paceline.engine.process.loop import engine_info
from paceline.engine.testing import ByteTokenizer, null_client
from paceline.engine.types import (
    ChoiceDelta,
    EngineStats,
    GenerationOutput,
    GenerationRequest,
    RequestTimes,
    SchedulerStats,
)
from paceline.errors import EngineDeadError, QueueFullError
from paceline.http.errors import error_response, reply_to
from paceline.http.exposition import Registry
from paceline.server import ServerConfig, create_app
from paceline.server.apis.openai.answers import UsageCount
from paceline.server.app import service_of
from paceline.server.observability.metrics.requests import RequestMetrics, RequestObserver
from paceline.server.protocol.requests import parse_completion
from paceline.server.protocol.responses import DraftCount, Explanation, encode
from tests.server.helpers import VOCAB, chat_body, connect, expected_text, metric, rested, scrape
from tests.server.test_api_doc import RULES


@pytest.mark.parametrize(("seconds", "told"), [(0.2, "1"), (6.5, "7"), (44.0, "44")])
def test_retry_after_is_the_estimate_in_whole_seconds(seconds: float, told: str) -> None:
    reply = reply_to(QueueFullError("too many", seconds, "queue-full"), drain_timeout=99.0)
    answer = error_response(reply)
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == told
    assert answer.headers["x-llm-d-request-dropped-reason"] == "queue-full"


SNAPSHOT = EngineStats(
    time=0.0,
    num_steps=1,
    scheduler=SchedulerStats(
        num_recomputed_tokens=11,
        num_discarded_tokens=12,
        num_swapped_out_blocks=13,
        num_swapped_in_blocks=14,
        num_demoted=15,
        num_preemptions=16,
        num_drafts=20,
        num_draft_tokens=22,
        num_accepted_tokens=21,
        drafted=(("ngram", 23), ("prediction", 24)),
        accepted=(("ngram", 25),),
        accepted_by_place=(("0", 26), ("1", 27)),
        num_host_blocks=30,
        num_free_host_blocks=13,
        num_window_blocks=40,
        num_free_window_blocks=12,
        pressure_level=3,
        refused=(("pressure", 18), ("queue-full", 19)),
        waited=(("memory", 2.5), ("pace", 3.5)),
        predicted_step_seconds=4.5,
        actual_step_seconds=5.5,
    ),
)


async def test_every_number_of_a_snapshot_has_its_place() -> None:
    client = null_client(NullBackend(vocab_size=VOCAB))
    metrics = service_of(create_app(client, ServerConfig())).metrics
    await client.close()
    metrics._engine.update(SNAPSHOT)
    text = metrics.registry.render()
    expected: list[tuple[str, dict[str, str], float]] = [
        ("paceline:wasted_tokens_total", {"cause": "recomputed"}, 11),
        ("paceline:wasted_tokens_total", {"cause": "discarded"}, 12),
        ("paceline:swapped_blocks_total", {"direction": "out"}, 13),
        ("paceline:swapped_blocks_total", {"direction": "in"}, 14),
        ("paceline:requests_demoted_total", {}, 15),
        ("vllm:num_preemptions_total", {}, 16),
        ("vllm:spec_decode_num_drafts_total", {}, 20),
        ("vllm:spec_decode_num_draft_tokens_total", {}, 22),
        ("vllm:spec_decode_num_accepted_tokens_total", {}, 21),
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", {"position": "1"}, 27),
        ("paceline:spec_decode_draft_tokens_total", {"source": "prediction"}, 24),
        ("paceline:spec_decode_accepted_tokens_total", {"source": "ngram"}, 25),
        ("paceline:kv_host_blocks", {"state": "used"}, 17),
        ("paceline:kv_host_blocks", {"state": "free"}, 13),
        ("paceline:kv_window_blocks", {"state": "used"}, 28),
        ("paceline:kv_window_blocks", {"state": "free"}, 12),
        ("paceline:memory_pressure_level", {}, 3),
        ("paceline:requests_refused_total", {"reason": "pressure"}, 18),
        ("paceline:requests_refused_total", {"reason": "queue-full"}, 19),
        ("paceline:queue_blocked_seconds_total", {"reason": "memory"}, 2.5),
        ("paceline:queue_blocked_seconds_total", {"reason": "pace"}, 3.5),
        ("paceline:step_seconds_total", {"kind": "predicted"}, 4.5),
        ("paceline:step_seconds_total", {"kind": "actual"}, 5.5),
    ]
    for name, labels, value in expected:
        assert metric(text, name, **labels) == value, (name, labels)


async def test_the_price_of_a_token_is_the_time_so_far_by_the_tokens_so_far() -> None:
    client = null_client(NullBackend(vocab_size=VOCAB))
    async with connect(create_app(client, ServerConfig(price_per_hour=3600.0))) as http:
        body = {"prompt": [1] * 40, "max_tokens": 60, "ignore_eos": True}
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        text = await scrape(http)
    await client.close()
    spent = metric(text, "paceline:cost_total")
    assert 0.0 < spent < 60.0, "one a second"
    assert metric(text, "paceline:cost_per_million_tokens") == pytest.approx(1e6 * spent / 100)


def observed(
    slo: Slo,
    times: RequestTimes | None,
    timeline: Timeline | None = None,
    *,
    error: Exception | None = None,
) -> str:
    """The metrics once a request of three tokens came to this; None: it was cut off, by its caller
    or by an error."""
    registry = Registry({})
    request = GenerationRequest(
        request_id="r",
        prompt_token_ids=[1],
        sampling=SamplingParams(max_tokens=3),
        arrival_time=10.0,
        slo=slo,
    )
    observer = RequestObserver(RequestMetrics(registry, 512), request)
    if times is not None:
        choice = ChoiceDelta(
            index=0, text="", token_ids=(1, 2, 3), finish_reason="length", timeline=timeline
        )
        output = GenerationOutput(
            request_id="r",
            choices=(choice,),
            num_prompt_tokens=1,
            num_cached_tokens=0,
            num_output_tokens=3,
            finished=True,
            times=times,
        )
        observer.output(output, times.last_token)
    observer.end(error, 14.0)
    return registry.render()


# its first token came after 1 s, the others 1.5 s apart
TIMES = RequestTimes(arrival=10.0, first_scheduled=10.5, first_token=11.0, last_token=14.0)


@pytest.mark.parametrize(
    ("slo", "missed"),
    [
        (Slo(slo_class="own", ttft=1.1, tpot=1.6, deadline=4.1), ()),
        (Slo(slo_class="own", ttft=0.9, tpot=1.6, deadline=4.1), ("ttft",)),
        (Slo(slo_class="own", ttft=1.1, tpot=1.4, deadline=4.1), ("tpot",)),
        (Slo(slo_class="own", ttft=1.1, tpot=1.6, deadline=3.9), ("deadline",)),
        (Slo(slo_class="own", ttft=0.9, tpot=1.4, deadline=3.9), ("ttft", "tpot", "deadline")),
    ],
)
def test_each_kind_of_violation_counts_for_its_class(slo: Slo, missed: tuple[str, ...]) -> None:
    text = observed(slo, TIMES)
    assert metric(text, "paceline:slo_requests_total", slo_class="own") == 1
    assert metric(text, "paceline:goodput_requests_total", slo_class="own") == (not missed)
    for kind in missed:
        labels = {"slo_class": "own", "kind": kind}
        assert metric(text, "paceline:slo_violations_total", **labels) == 1
    assert text.count("\npaceline:slo_violations_total{") == len(missed)


def test_what_was_cut_off_kept_no_promise() -> None:
    text = observed(Slo(slo_class="own"), None, error=EngineDeadError("gone"))
    assert metric(text, "paceline:goodput_requests_total", slo_class="own") == 0
    assert metric(text, "paceline:slo_violations_total", slo_class="own", kind="unfinished") == 1


@pytest.mark.parametrize(("ttft", "late"), [(None, 0), (5.0, 0), (3.0, 1)])
def test_who_stops_an_answer_breaks_no_promise_of_the_server(ttft: float | None, late: int) -> None:
    """It is stopped after four seconds, without a token."""
    text = observed(Slo(slo_class="own", ttft=ttft), None)
    assert text.count("\npaceline:slo_violations_total{") == late
    if late:
        assert metric(text, "paceline:slo_requests_total", slo_class="own") == 1
        assert metric(text, "paceline:slo_violations_total", slo_class="own", kind="ttft") == 1
    else:
        assert "\npaceline:slo_requests_total{" not in text


TIMELINE = Timeline(
    waited=(("memory", 0.25), ("pace", 0.125)),
    num_chunks=2,
    num_preemptions=3,
    num_recomputed_tokens=4,
    num_swapped_tokens=5,
    demoted=True,
    predicted_ttft=0.75,
    drafts=(("ngram", 7, 6),),
)


def test_timelines_add_up_in_the_metrics() -> None:
    text = observed(Slo(), TIMES, TIMELINE)
    assert metric(text, "paceline:request_waited_seconds_total", reason="memory") == 0.25
    assert metric(text, "paceline:request_waited_seconds_total", reason="pace") == 0.125
    # 0.75 s were predicted, it took 1
    assert metric(text, "paceline:ttft_prediction_error_seconds_sum") == 0.25
    assert metric(text, "paceline:ttft_prediction_error_seconds_count") == 1


def test_chunks_are_counted_once_for_each_request() -> None:
    text = observed(Slo(), TIMES, TIMELINE)
    assert metric(text, "paceline:request_chunks_sum") == 2
    assert metric(text, "paceline:request_chunks_count") == 1
    assert metric(text, "paceline:request_chunks_bucket", le="1.0") == 0
    assert metric(text, "paceline:request_chunks_bucket", le="2.0") == 1
    # nothing is known of one that was cut off
    assert metric(observed(Slo(), None), "paceline:request_chunks_count") == 0


@pytest.mark.parametrize(("n", "by_stop_string"), [(1, False), (2, False), (2, True)])
async def test_a_finished_request_s_line_in_the_log_tells_its_story(
    n: int, by_stop_string: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "paceline.server")
    backend = NullBackend(vocab_size=VOCAB, step_time=0.002)
    scheduler = SchedulerConfig(max_model_len=512, max_num_batched_tokens=32, max_num_seqs=n)
    cache = CacheConfig(block_size=backend.info.block_size, num_blocks=backend.info.num_blocks)
    engine = EngineCore(backend, scheduler, cache)
    client = LocalEngineClient(
        engine, engine_info(engine, "null"), ByteTokenizer(), stall_timeout=60.0
    )
    body = {"prompt": [1] * 60, "max_tokens": 40, "ignore_eos": True, "explain": True, "n": n}
    async with connect(create_app(client, ServerConfig())) as http:
        for first in (1, 3):
            # the second time, steps can be predicted
            bodies = [body | {"prompt": [first + i] * 60} for i in range(2)]
            if by_stop_string:
                # the backend says the same whenever it is asked
                for one in bodies:
                    one["stop"] = expected_text(one["prompt"], 40)[1][20:22]
            answers = await asyncio.gather(*(http.post("/v1/completions", json=b) for b in bodies))
    await client.close()
    reason = "stop" if by_stop_string else "length"
    assert all(c["finish_reason"] == reason for a in answers for c in a.json()["choices"])
    told = {a.json()["id"]: a.json()["usage"]["timeline"] for a in answers}
    assert all(len(timeline) == n for timeline in told.values())
    lines = [r for r in caplog.records if r.getMessage().startswith("request id=")]
    assert len(lines) == 4
    for record in lines[2:]:
        found = json.loads(JsonFormatter().format(record))["fields"]
        (timeline,) = [told[name] for name in told if found["id"].startswith(name)]
        longest = max(timeline, key=lambda choice: choice["queued_ms"])
        assert found["queued"] == pytest.approx(longest["queued_ms"] / 1e3, abs=1e-4)
        waited = longest["waited_ms"]
        assert found["waited_for"] == max(waited, key=waited.__getitem__)
        for name in ("chunks", "preemptions", "recomputed_tokens"):
            assert found[name] == sum(choice[name] for choice in timeline), name
        assert found["chunks"] >= 2
        # steps take 2 ms, and a choice gets a token of each at most
        assert 0 < found["tokens_per_second"] < n * 500
        assert all(0 < choice["tokens_per_second"] < 500 for choice in timeline)
        predicted = timeline[0]["predicted_ttft_ms"] / 1e3
        assert found["predicted_ttft"] == pytest.approx(predicted, abs=1e-4)
        assert found["ttft"] == pytest.approx(timeline[0]["ttft_ms"] / 1e3, abs=0.5)
        assert f" chunks={found['chunks']} " in record.getMessage()
    # the later one had no place meanwhile
    assert max((line.args[6], line.args[7]) for line in lines[2:])[1] == "slots"  # type: ignore[index]


def test_every_field_of_a_timeline_is_told() -> None:
    assert Explanation.of(TIMELINE, 1.0, 0.25, 50.0) == Explanation(
        queued_ms=375.0,
        waited_ms={"memory": 250.0, "pace": 125.0},
        chunks=2,
        preemptions=3,
        recomputed_tokens=4,
        swapped_tokens=5,
        demoted=True,
        predicted_ttft_ms=750.0,
        ttft_ms=1000.0,
        longest_gap_ms=250.0,
        tokens_per_second=50.0,
        speculation={"ngram": DraftCount(verified_tokens=7, accepted_tokens=6)},
    )


@pytest.mark.parametrize(("demoted", "said"), [(False, {}), (True, {"demoted": True})])
def test_an_answer_says_that_its_request_was_demoted(demoted: bool, said: dict[str, bool]) -> None:
    count = UsageCount(1, parse_completion({"prompt": ""}, RULES).options)
    for timeline in (TIMELINE._replace(demoted=demoted), None):
        delta = ChoiceDelta(index=0, text="", token_ids=(1,), timeline=timeline)
        count.update(
            0,
            GenerationOutput(
                request_id="r",
                choices=(delta,),
                num_prompt_tokens=3,
                num_cached_tokens=0,
                num_output_tokens=1,
                finished=False,
            ),
        )
    usage = json.loads(encode(count.usage()))
    assert {name: usage[name] for name in usage if name == "demoted"} == said


@pytest.mark.parametrize("num_host_blocks", [0, 40])
async def test_timelines_under_pressure_say_what_the_counters_say(num_host_blocks: int) -> None:
    backend = NullBackend(
        vocab_size=VOCAB, num_blocks=8, num_host_blocks=num_host_blocks, step_time=0.001
    )
    engine = EngineCore(
        backend,
        SchedulerConfig(max_model_len=512, future_memory_check=False, preemption="swap"),
        CacheConfig(
            block_size=backend.info.block_size,
            num_blocks=8,
            enable_prefix_caching=False,
            num_host_blocks=num_host_blocks,
        ),
        pipeline_depth=2,
    )
    client = LocalEngineClient(
        engine, engine_info(engine, "null"), ByteTokenizer(), stall_timeout=60.0
    )
    async with connect(create_app(client, ServerConfig())) as http:
        body = {"prompt": [1] * 20, "max_tokens": 80, "ignore_eos": True, "explain": True}
        for _ in range(2):
            # the second time, steps can be predicted
            answers = await asyncio.gather(
                *(http.post("/v1/completions", json=body) for _ in range(3))
            )
        text = await rested(client, http)
    await client.close()
    timelines: list[dict[str, Any]] = [answer.json()["usage"]["timeline"][0] for answer in answers]
    assert all(timeline["predicted_ttft_ms"] > 0.0 for timeline in timelines)
    assert metric(text, "paceline:ttft_prediction_error_seconds_count") >= 3
    numbers = timelines[0].keys() - {"waited_ms", "speculation"}
    total = {name: sum(t[name] for t in timelines) for name in numbers}
    # both turns are alike: these are the second's
    assert 0 < total["preemptions"] < metric(text, "vllm:num_preemptions_total")
    told, other = "swapped_tokens", "recomputed_tokens"
    if not num_host_blocks:
        told, other = other, told
        wasted = metric(text, "paceline:wasted_tokens_total", cause="recomputed")
        assert total[told] < wasted
    else:
        assert metric(text, "paceline:swapped_blocks_total", direction="in") > 0
    assert total[told] > 20
    assert total[other] == 0


async def test_llm_d_headers_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    client = null_client(NullBackend(vocab_size=VOCAB))
    seen: list[GenerationRequest] = []
    generate = client.generate

    def watching(request: GenerationRequest, *rest: Any) -> Any:
        seen.append(request)
        return generate(request, *rest)

    monkeypatch.setattr(client, "generate", watching)
    headers = {
        "x-llm-d-slo-ttft-ms": "400",
        "x-llm-d-slo-tpot-ms": "30",
        "x-llm-d-inference-ttl": "1m30s",
        "x-llm-d-inference-fairness-id": "carol",
    }
    bodies = {
        "/v1/chat/completions": chat_body(max_tokens=2),
        "/v1/completions": {"prompt": "a", "max_tokens": 2},
        "/v1/responses": {"input": "a", "max_output_tokens": 16},
        "/v1/messages": chat_body(max_tokens=2, model="null"),
    }
    async with connect(create_app(client, ServerConfig())) as http:
        for path, body in bodies.items():
            answer = await http.post(path, json=body, headers=headers)
            assert answer.status_code == 200, answer.text
    await client.close()
    assert len(seen) == len(bodies)
    for request in seen:
        assert request.slo == Slo(ttft=0.4, tpot=0.03, queue_ttl=90.0)
        assert request.tenant == "carol"
