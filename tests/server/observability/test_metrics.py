"""``/metrics``: names, labels and buckets of vLLM, and numbers that can be counted by hand."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Iterator

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from paceline.backends.reference.null import NullBackend
from paceline.core.sampling_params import SamplingParams
from paceline.engine.testing import null_client
from paceline.engine.types import ChoiceDelta, GenerationOutput, GenerationRequest
from paceline.errors import NAN_LOGITS
from paceline.http.exposition import Histogram, Registry
from paceline.server import ServerConfig, create_app
from paceline.server.app import service_of
from paceline.server.observability.metrics.requests import (
    RequestMetrics,
    RequestObserver,
    TenantMetrics,
    series_1_2_5,
)
from tests.server.helpers import VOCAB, chat_body, connect, metric, rested, say, scrape

LABELED = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total",
    "vllm:prompt_tokens_total",
    "vllm:prompt_tokens_cached_total",
    "vllm:generation_tokens_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:time_to_first_token_seconds_count",
    "vllm:inter_token_latency_seconds_count",
    "vllm:request_time_per_output_token_seconds_count",
    "vllm:e2e_request_latency_seconds_count",
    "vllm:request_queue_time_seconds_count",
    "vllm:request_inference_time_seconds_count",
    "vllm:request_prefill_time_seconds_count",
    "vllm:request_decode_time_seconds_count",
    "vllm:iteration_tokens_total_count",
    "vllm:request_prompt_tokens_count",
    "vllm:request_generation_tokens_count",
    "vllm:request_max_num_generation_tokens_count",
    "vllm:request_params_n_count",
    "vllm:request_params_max_tokens_count",
    "vllm:request_prefill_kv_computed_tokens_count",
    "vllm:request_num_preemptions_count",
    "vllm:corrupted_requests_total",
)


@pytest.mark.parametrize("name", LABELED)
async def test_names_and_labels(http: httpx.AsyncClient, name: str) -> None:
    lines = [line for line in (await scrape(http)).splitlines() if line.startswith(f"{name}{{")]
    assert len(lines) == 1
    assert lines[0].startswith(f'{name}{{engine="0",model_name="tiny"}} ')


async def test_the_format_is_named_as_on_the_other_port(http: httpx.AsyncClient) -> None:
    kind = (await http.get("/metrics")).headers["content-type"]
    assert kind == "text/plain; version=0.0.4; charset=utf-8"


async def test_configuration(http: httpx.AsyncClient) -> None:
    text = await scrape(http)
    labels = {"block_size": "16", "num_gpu_blocks": "1024", "engine": "0"}
    assert metric(text, "vllm:cache_config_info", **labels) == 1
    for reason in ("capacity", "deferred"):
        assert metric(text, "vllm:num_requests_waiting_by_reason", reason=reason) == 0


def buckets(text: str, name: str) -> list[str]:
    return re.findall(rf'^{name}_bucket{{.*le="([^"]+)".*$', text, flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "vllm:time_to_first_token_seconds",
            "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 "
            "80.0 160.0 640.0 2560.0 +Inf",
        ),
        (
            "vllm:inter_token_latency_seconds",
            "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 "
            "80.0 +Inf",
        ),
        (
            "vllm:e2e_request_latency_seconds",
            "0.3 0.5 0.8 1.0 1.5 2.0 2.5 5.0 10.0 15.0 20.0 30.0 40.0 50.0 60.0 120.0 240.0 480.0 "
            "960.0 1920.0 7680.0 +Inf",
        ),
        (
            "vllm:iteration_tokens_total",
            "1.0 8.0 16.0 32.0 64.0 128.0 256.0 512.0 1024.0 2048.0 4096.0 8192.0 16384.0 +Inf",
        ),
        # max_model_len is 512
        ("vllm:request_prompt_tokens", "1.0 2.0 5.0 10.0 20.0 50.0 100.0 200.0 500.0 +Inf"),
        ("vllm:request_params_n", "1.0 2.0 5.0 10.0 20.0 +Inf"),
        ("vllm:request_num_preemptions", "1.0 2.0 3.0 4.0 5.0 10.0 20.0 +Inf"),
    ],
)
async def test_buckets(http: httpx.AsyncClient, name: str, expected: str) -> None:
    assert buckets(await scrape(http), name) == expected.split()


async def test_counts() -> None:
    client = null_client(NullBackend(vocab_size=VOCAB, step_time=0.002))
    async with connect(create_app(client, ServerConfig())) as http:
        body = {"prompt": [1] * 40, "max_tokens": 30, "logit_bias": say("x"), "n": 2}
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        stop = {"prompt": "abc", "stop": "x", "logit_bias": say("x")}
        assert (await http.post("/v1/completions", json=stop)).status_code == 200
        assert (await http.post("/v1/completions", json={"prompt": []})).status_code == 400
        text = await rested(client, http)
    await client.close()
    assert metric(text, "vllm:prompt_tokens_total") == 40 + 40 + 4
    assert metric(text, "vllm:prompt_tokens_cached_total") == 32
    assert metric(text, "vllm:generation_tokens_total") == 60 + 60 + 1
    assert metric(text, "vllm:request_success_total", finished_reason="length") == 4
    assert metric(text, "vllm:request_success_total", finished_reason="stop") == 1
    assert metric(text, "vllm:request_success_total", finished_reason="abort") == 0
    assert metric(text, "vllm:request_success_total", finished_reason="error") == 0
    assert metric(text, "vllm:prefix_cache_hits_total") >= 32
    for name in ("e2e_request_latency", "time_to_first_token", "request_queue_time"):
        assert metric(text, f"vllm:{name}_seconds_count") == 3
    # waits of a step or two can be told from one another, and vLLM's bounds are there too
    for bound in ("0.001", "0.01", "0.3", "7680.0"):
        assert metric(text, "vllm:request_queue_time_seconds_bucket", le=bound) <= 3
    assert metric(text, "vllm:request_prompt_tokens_sum") == 84
    assert metric(text, "vllm:request_generation_tokens_sum") == 121
    assert metric(text, "vllm:request_max_num_generation_tokens_sum") == 61
    assert metric(text, "vllm:request_params_n_sum") == 5
    assert metric(text, "vllm:request_params_max_tokens_sum") == 76
    # one token needs no time per further token
    assert metric(text, "vllm:request_time_per_output_token_seconds_count") == 2
    # deliveries may hold several tokens; there is one fewer than tokens at most
    assert 4 <= metric(text, "vllm:inter_token_latency_seconds_count") <= 2 * 58
    # each choice's prompt, cached or not, its output, and what ran on behind a stop string
    brought = metric(text, "vllm:iteration_tokens_total_sum")
    assert 4 * 40 + 4 + 121 <= brought <= 4 * 40 + 4 + 121 + 10
    decode = metric(text, "vllm:request_decode_time_seconds_sum")
    assert decode >= 2 * 29 * 0.002
    assert metric(text, "vllm:e2e_request_latency_seconds_sum") >= decode


async def test_aborted_requests_count_as_aborted() -> None:
    client = null_client(NullBackend(vocab_size=VOCAB, step_time=0.01))
    app = create_app(client, ServerConfig())
    async with connect(app) as http:
        body = {"prompt": "x", "max_tokens": 2000, "n": 3, "logit_bias": say("x")}
        call = asyncio.create_task(http.post("/v1/completions", json=body))
        while metric(await scrape(http), "vllm:generation_tokens_total") == 0:
            await asyncio.sleep(0.01)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        text = await scrape(http)
    await client.close()
    assert metric(text, "vllm:request_success_total", finished_reason="abort") == 3
    assert metric(text, "vllm:e2e_request_latency_seconds_count") == 1


async def test_http_requests(http: httpx.AsyncClient) -> None:
    before = await scrape(http)
    await http.post("/v1/chat/completions", json=chat_body(max_tokens=1))
    await http.post("/v1/chat/completions", json={})
    await http.get("/v1/models/some/name")
    await http.get("/made/up/path")
    await http.request("BREW", "/v1/models")
    await http.get("/health")
    text = await scrape(http)
    chat = {"handler": "/v1/chat/completions", "method": "POST"}
    assert metric(text, "http_requests_total", **chat, status="2xx") >= 1
    assert metric(text, "http_requests_total", **chat, status="4xx") >= 1
    model = {"handler": "/v1/models/{name:path}", "method": "GET"}
    assert metric(text, "http_requests_total", **model, status="4xx") >= 1
    assert metric(text, "http_requests_total", handler="none", method="GET") >= 1
    assert metric(text, "http_requests_total", method="OTHER") >= 1
    assert metric(text, "http_request_duration_seconds_count", **chat) >= 2
    fine = "http_request_duration_highr_seconds_count"
    assert metric(text, fine) - metric(before, fine) == 5
    assert 'handler="/health"' not in text
    assert 'handler="/metrics"' not in text


async def test_callers_cannot_grow_the_metrics(http: httpx.AsyncClient) -> None:
    async def ask(number: int) -> None:
        await http.post("/v1/completions", json={"prompt": "x", "model": f"odd-{number}"})
        await http.get(f"/odd-{number}")
        await http.get(f"/v1/models/odd-{number}")
        await http.request(f"ODD{number}", "/v1/completions")

    await ask(0)
    size = len((await scrape(http)).splitlines())
    for number in range(1, 150):
        await ask(number)
    text = await scrape(http)
    assert len(text.splitlines()) == size
    assert "odd" not in text.lower()


async def test_two_apps_count_apart() -> None:
    clients = [
        null_client(NullBackend(vocab_size=VOCAB, num_blocks=blocks), model=f"model-{blocks}")
        for blocks in (64, 128)
    ]
    apps: list[FastAPI] = [create_app(client, ServerConfig()) for client in clients]
    async with connect(apps[0]) as first, connect(apps[1]) as second:
        await first.post("/v1/completions", json={"prompt": [1, 2, 3], "max_tokens": 2})
        texts = [await scrape(first), await scrape(second)]
        names = [(await http.get("/v1/models")).json()["data"][0]["id"] for http in (first, second)]
    for client in clients:
        await client.close()
    assert names == ["model-64", "model-128"]
    prompt = "vllm:prompt_tokens_total"
    assert metric(texts[0], prompt, model_name="model-64") == 3
    assert metric(texts[1], prompt, model_name="model-128") == 0
    assert metric(texts[1], "vllm:cache_config_info", num_gpu_blocks="128") == 1


async def test_two_apps_on_one_engine_both_see_its_steps() -> None:
    client = null_client(NullBackend(vocab_size=VOCAB))
    apps = [create_app(client, ServerConfig()) for _ in range(2)]
    async with connect(apps[0]) as first, connect(apps[1]) as second:
        await first.post("/v1/completions", json={"prompt": [1, 2, 3], "max_tokens": 5})
        texts = [await rested(client, first), await scrape(second)]
    await client.close()
    steps = [metric(text, "vllm:iteration_tokens_total_count") for text in texts]
    assert steps[0] == steps[1] == 5
    assert metric(texts[1], "vllm:generation_tokens_total") == 0


def test_histogram_counts_up_to_and_including_its_bounds() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    assert histogram.cumulative() == [2, 4, 5]
    assert histogram.sum == 14.0


def test_series() -> None:
    assert series_1_2_5(100) == (1, 2, 5, 10, 20, 50, 100)
    assert series_1_2_5(99) == (1, 2, 5, 10, 20, 50)
    assert series_1_2_5(1) == (1,)


async def test_targets_met_and_missed(http: httpx.AsyncClient) -> None:
    easy = {"slo": {"class": "interactive", "ttft_ms": 60_000, "tpot_ms": 60_000}}
    hard = {"slo": {"class": "interactive", "ttft_ms": 0.000001, "deadline_ms": 0.000001}}
    for extra in (easy, easy, hard):
        response = await http.post("/v1/chat/completions", json=chat_body() | extra)
        assert response.status_code == 200
    text = await scrape(http)
    good = metric(text, "paceline:goodput_requests_total", slo_class="interactive")
    assert good == 2
    for kind in ("ttft", "deadline"):
        assert (
            metric(text, "paceline:slo_violations_total", slo_class="interactive", kind=kind) == 1
        )


class _OneMore(Collector):
    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily("paceline:more", "Of somebody else.", labels=("kind",))
        family.add_metric(("a",), 3)
        yield family


async def test_collectors_of_prometheus_client_are_served_too() -> None:
    client = null_client(NullBackend(vocab_size=VOCAB))
    app = create_app(client, ServerConfig())
    service_of(app).metrics.registry.register(_OneMore())
    async with connect(app) as http:
        assert metric(await scrape(http), "paceline:more_total", kind="a") == 3
    await client.close()
    described = {family.name: family for family in service_of(app).metrics.families}
    assert described["paceline:more_total"].labels == ("kind",)


async def served_by_tenant(config: ServerConfig) -> str:
    """Metrics after requests of three tenants, one of them too long a name, and one of none."""
    client = null_client(NullBackend(vocab_size=VOCAB), max_num_seqs=4)
    async with connect(create_app(client, config)) as http:
        for fields in (
            {"user": "ada", "max_tokens": 3, "slo": {"ttft_ms": 60_000}},
            {"user": "unheard", "safety_identifier": "ada", "max_tokens": 5},
            {"user": "x" * 500, "max_tokens": 1, "slo": {"ttft_ms": 1e-6}},
            {"user": "late", "max_tokens": 1},
            {"max_tokens": 1},
        ):
            answer = await http.post("/v1/chat/completions", json=chat_body() | fields)
            assert answer.status_code == 200, answer.text
        anthropic = {"metadata": {"user_id": "ada"}, "max_tokens": 2}
        assert (await http.post("/v1/messages", json=chat_body() | anthropic)).status_code == 200
        text = await scrape(http)
    await client.close()
    return text


async def test_what_tenants_got() -> None:
    text = await served_by_tenant(ServerConfig(metrics_tenants=2))

    def of(tenant: str, name: str = "requests_total") -> float:
        return metric(text, f"paceline:tenant_{name}", tenant=tenant)

    assert of("ada") == of("ada", "goodput_requests_total") == 3
    assert of("ada", "generation_tokens_total") == 3 + 5 + 2
    assert of("ada", "prompt_tokens_total") > 3 and of("ada", "unfinished_requests") == 0
    assert of("ada", "time_to_first_token_seconds_count") == 3
    (digest,) = re.findall(r'tenant_requests_total\{.*tenant="(sha256:[0-9a-f]{32})"', text)
    assert of(digest) == 1 and of(digest, "goodput_requests_total") == 0
    # a third one, and a request without any
    assert of("_other") == of("_none") == 1


async def test_metrics_tell_no_tenants_apart_where_that_is_not_wanted() -> None:
    assert "paceline:tenant" not in await served_by_tenant(ServerConfig())


async def test_keys_have_series_of_their_own_however_many_there_are() -> None:
    metrics = TenantMetrics(Registry({}), 1, frozenset({"a", "b", "c"}))
    labels = [metrics.label(name) for name in ("new", "newer", "a", "c", "", "new")]
    assert labels == ["new", "_other", "a", "c", "_none", "new"]


async def test_who_holds_what_by_class() -> None:
    """Two classes run and one waits; owners of blocks add up to the pool."""
    backend = NullBackend(vocab_size=VOCAB, step_time=0.005, num_blocks=64)
    client = null_client(backend, max_num_seqs=2)
    async with connect(create_app(client, ServerConfig())) as http:
        body = {"max_tokens": 500, "logit_bias": say("x"), "ignore_eos": True}
        calls = [
            # nothing in common, or a block has several owners
            asyncio.create_task(
                http.post("/v1/completions", json=body | {"slo": name, "prompt": [first] * 40})
            )
            for first, name in enumerate(("interactive", "standard", "standard"))
        ]
        waiting = {"slo_class": "standard", "state": "waiting"}
        text = await scrape(http)
        while 'state="waiting"} 1.0' not in text:
            await asyncio.sleep(0.02)
            text = await scrape(http)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        after = await rested(client, http)
    await client.close()
    assert metric(text, "paceline:requests", **waiting) == 1
    for name in ("interactive", "standard"):
        assert metric(text, "paceline:requests", slo_class=name, state="running") == 1
        assert metric(text, "paceline:kv_blocks", owner=name) >= 3
    assert metric(text, "paceline:kv_blocks") == pytest.approx(64)
    assert metric(text, "paceline:queue_blocked", reason="slots") == 1
    # nobody is left; what was computed stays findable
    assert metric(after, "paceline:requests") == 0
    assert metric(after, "paceline:kv_blocks", owner="standard") == 0
    assert metric(after, "paceline:kv_blocks", owner="prefix_cache") > 0
    assert metric(after, "paceline:kv_blocks") == 64
    assert metric(after, "paceline:queue_blocked") == 0


async def test_prompt_tokens_by_source_and_what_was_computed() -> None:
    client = null_client(NullBackend(vocab_size=VOCAB))
    async with connect(create_app(client, ServerConfig())) as http:
        for _ in range(2):
            await http.post("/v1/completions", json={"prompt": [1] * 40, "max_tokens": 3})
        text = await rested(client, http)
    await client.close()
    by_source = "vllm:prompt_tokens_by_source_total"
    assert metric(text, by_source, source="local_cache_hit") == 32
    assert metric(text, by_source, source="local_compute") == 48
    assert metric(text, "vllm:request_prefill_kv_computed_tokens_sum") == 48
    assert metric(text, "vllm:request_num_preemptions_count") == 2
    assert metric(text, "vllm:request_num_preemptions_sum") == 0
    # prompts less what was cached, in rows of several tokens; the outputs' in rows of one
    assert metric(text, "paceline:step_tokens_total", kind="prefill") == 48
    assert metric(text, "paceline:step_tokens_total", kind="decode") >= 4


async def test_preemptions_of_requests() -> None:
    backend = NullBackend(vocab_size=VOCAB, num_blocks=8, step_time=0.001)
    client = null_client(backend, future_memory_check=False, enable_prefix_caching=False)
    async with connect(create_app(client, ServerConfig())) as http:
        body = {"prompt": [1] * 20, "max_tokens": 80, "ignore_eos": True}
        await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(3)))
        text = await rested(client, http)
    await client.close()
    preemptions = metric(text, "vllm:num_preemptions_total")
    assert metric(text, "vllm:request_num_preemptions_sum") == preemptions > 0
    assert metric(text, "paceline:wasted_tokens_total", cause="recomputed") > 0


def test_requests_with_broken_numbers_are_corrupted() -> None:
    registry = Registry({})
    metrics = RequestMetrics(registry, 512)
    request = GenerationRequest(
        request_id="r",
        prompt_token_ids=[1],
        sampling=SamplingParams(max_tokens=3),
        arrival_time=0.0,
    )
    for error in (NAN_LOGITS, "something else"):
        observer = RequestObserver(metrics, request)
        choice = ChoiceDelta(index=0, text="", token_ids=(), finish_reason="error", error=error)
        observer.output(
            GenerationOutput(
                request_id="r",
                choices=(choice,),
                num_prompt_tokens=1,
                num_cached_tokens=0,
                num_output_tokens=0,
                finished=True,
            ),
            1.0,
        )
        observer.end(None, 1.0)
    assert metric(registry.render(), "vllm:corrupted_requests_total") == 1
    assert metric(registry.render(), "vllm:request_success_total", finished_reason="error") == 2


async def test_sizes_of_bodies(http: httpx.AsyncClient) -> None:
    labels = {"handler": "/tokenize"}
    answer = await http.post("/tokenize", json={"prompt": "four"})
    text = await scrape(http)
    assert metric(text, "http_response_size_bytes_sum", **labels) == len(answer.content)
    assert metric(text, "http_request_size_bytes_sum", **labels) == len(answer.request.content)
    assert metric(text, "http_request_size_bytes_count", **labels) == 1


async def test_ready_until_it_is_not() -> None:
    client = null_client(NullBackend(vocab_size=VOCAB))
    app = create_app(client, ServerConfig())
    async with connect(app) as http:
        assert metric(await scrape(http), "paceline:ready") == 1
        service_of(app).draining = True
        assert metric(await scrape(http), "paceline:ready") == 0
    await client.close()


async def test_cost_is_there_with_a_price() -> None:
    client = null_client(NullBackend(vocab_size=VOCAB))
    async with connect(create_app(client, ServerConfig(price_per_hour=3600.0))) as http:
        before = metric(await scrape(http), "paceline:cost_total")
        await http.post("/v1/completions", json={"prompt": [1] * 7, "max_tokens": 3})
        await asyncio.sleep(0.1)
        text = await scrape(http)
    await client.close()
    spent = metric(text, "paceline:cost_total")
    # one a second
    assert spent - before >= 0.1
    assert metric(text, "paceline:cost_per_million_tokens") == pytest.approx(1e5 * spent)


def test_labels_and_numbers_are_written_as_the_format_wants() -> None:
    registry = Registry({"z": 'a"b\\c\nd'})
    family = registry.numbers("gauge", "g", "back\\slash\nline", "a")
    for label, value in (("1", 1e-9), ("2", math.inf), ("3", -math.inf), ("4", math.nan)):
        family.at(label).value = value
    (found,) = text_string_to_metric_families(registry.render())
    assert found.documentation == "back\\slash\nline"
    assert [sample.labels["z"] for sample in found.samples] == ['a"b\\c\nd'] * 4
    assert [repr(sample.value) for sample in found.samples] == ["1e-09", "inf", "-inf", "nan"]
