"""Prometheus metrics under vLLM's names, buckets and labels.

Each app has a registry of its own. Updates come from the event loop's thread alone and cost a
bisection; families are only put together when somebody scrapes. Gauges and the engine's counters
are read from the latest ``EngineStats`` at that moment.

Counts are per generation request (one prompt with its ``n`` choices), except
``vllm:request_success``, which counts choices, and ``vllm:inter_token_latency_seconds``, which
counts deliveries of tokens of one choice.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from paceline.engine.types import (
    EngineInfo,
    EngineStats,
    GenerationOutput,
    GenerationRequest,
    RequestTimes,
)
from paceline.server.histograms import (
    HTTP_BUCKETS,
    HTTP_FINE_BUCKETS,
    ITERATION_TOKEN_BUCKETS,
    LATENCY_BUCKETS,
    N_BUCKETS,
    TOKEN_TIME_BUCKETS,
    TTFT_BUCKETS,
    Histogram,
    histogram_family,
    series_1_2_5,
)

__all__ = ["RequestObserver", "ServerMetrics"]

_ENGINE = "0"
_LABELS = ("model_name", "engine")


class ServerMetrics(Collector):
    """All metrics of one app. Used from one thread.

    Args:
        stats: the engine's latest snapshot.
        model_name: the label's value; names that callers send never become labels.
    """

    def __init__(
        self,
        info: EngineInfo,
        stats: Callable[[], EngineStats],
        model_name: str,
        *,
        price_per_hour: float = 0.0,
    ) -> None:
        self._info = info
        self._price_per_hour = price_per_hour
        self._started = time.monotonic()
        self._stats = stats
        self._labels = (model_name, _ENGINE)
        counts = series_1_2_5(info.max_model_len)
        # by class: requests that met every target they had
        self.goodput_requests: Counter[str] = Counter()
        # by class: all requests that ended, however
        self.judged_requests: Counter[str] = Counter()
        # by class and kind: "ttft", "tpot", "deadline", "unfinished", "refused"
        self.slo_violations: Counter[tuple[str, str]] = Counter()
        self.time_to_first_token = Histogram(TTFT_BUCKETS)
        self.inter_token_latency = Histogram(TOKEN_TIME_BUCKETS)
        self.time_per_output_token = Histogram(TOKEN_TIME_BUCKETS)
        self.e2e_latency = Histogram(LATENCY_BUCKETS)
        self.queue_time = Histogram(LATENCY_BUCKETS)
        self.inference_time = Histogram(LATENCY_BUCKETS)
        self.prefill_time = Histogram(LATENCY_BUCKETS)
        self.decode_time = Histogram(LATENCY_BUCKETS)
        self.iteration_tokens = Histogram(ITERATION_TOKEN_BUCKETS)
        self.request_prompt_tokens = Histogram(counts)
        self.request_generation_tokens = Histogram(counts)
        self.request_max_num_generation_tokens = Histogram(counts)
        self.request_params_n = Histogram(N_BUCKETS)
        self.request_params_max_tokens = Histogram(counts)
        # seconds that finished choices waited to be started, by reason
        self.waited: defaultdict[str, float] = defaultdict(float)
        # |predicted - actual| time to first token of requests that had a prediction
        self.ttft_prediction_error = Histogram(TTFT_BUCKETS)
        self.prompt_tokens = 0
        self.prompt_tokens_cached = 0
        self.generation_tokens = 0
        self.finished: Counter[str] = Counter({"stop": 0, "length": 0, "abort": 0, "error": 0})
        self._http: Counter[tuple[str, str, str]] = Counter()
        self._http_duration: dict[tuple[str, ...], Histogram] = {}
        self._http_duration_fine = Histogram(HTTP_FINE_BUCKETS)
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def observe_stats(self, stats: EngineStats) -> None:
        """Take in the token counts of the engine's latest steps; once for every snapshot."""
        for num_tokens in stats.iteration_tokens:
            self.iteration_tokens.observe(num_tokens)

    def observe_http(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Count one HTTP exchange. ``handler`` is a route's template or "none"."""
        self._http[handler, method, f"{status // 100}xx"] += 1
        duration = self._http_duration.get((handler, method))
        if duration is None:
            duration = self._http_duration[handler, method] = Histogram(HTTP_BUCKETS)
        duration.observe(seconds)
        self._http_duration_fine.observe(seconds)

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges(self._stats())
        yield from self._counters(self._stats())
        yield from self._histograms()
        yield from self._http_families()

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _gauges(self, stats: EngineStats) -> Iterator[Metric]:
        yield self._gauge(
            "num_requests_running", "Requests in the running batch.", stats.num_running
        )
        yield self._gauge("num_requests_waiting", "Requests waiting to run.", stats.num_waiting)
        reasons = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Requests waiting for memory or a place (capacity), or for an event (deferred).",
            labels=(*_LABELS, "reason"),
        )
        reasons.add_metric((*self._labels, "capacity"), stats.num_waiting_capacity)
        reasons.add_metric((*self._labels, "deferred"), stats.num_waiting_deferred)
        yield reasons
        used = 1.0 - stats.num_free_blocks / max(1, stats.num_blocks)
        yield self._gauge("kv_cache_usage_perc", "KV blocks in use; 1 is all of them.", used)
        info = self._info
        config = GaugeMetricFamily(
            "vllm:cache_config_info",
            "The KV cache's configuration.",
            labels=(
                "block_size",
                "num_gpu_blocks",
                "cache_dtype",
                "enable_prefix_caching",
                "engine",
            ),
        )
        config.add_metric(
            (
                str(info.block_size),
                str(info.num_blocks),
                info.kv_dtype,
                str(info.enable_prefix_caching),
                _ENGINE,
            ),
            1,
        )
        yield config

    def _counters(self, stats: EngineStats) -> Iterator[Metric]:
        for name, text, value in (
            (
                "num_preemptions",
                "Times a running request gave up its blocks.",
                stats.num_preemptions,
            ),
            ("prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_cache_queries),
            ("prefix_cache_hits", "Prompt tokens found there.", stats.prefix_cache_hits),
            ("prompt_tokens", "Prompt tokens processed.", self.prompt_tokens),
            (
                "prompt_tokens_cached",
                "Prompt tokens taken from the prefix cache.",
                self.prompt_tokens_cached,
            ),
            ("generation_tokens", "Output tokens.", self.generation_tokens),
        ):
            yield self._counter(name, text, value)
        success = CounterMetricFamily(
            "vllm:request_success",
            "Choices that ended, by why.",
            labels=(*_LABELS, "finished_reason"),
        )
        for reason, count in self.finished.items():
            success.add_metric((*self._labels, reason), count)
        yield success
        goodput = CounterMetricFamily(
            "paceline:goodput_requests",
            "Requests that met every target they had.",
            labels=(*_LABELS, "slo_class"),
        )
        for slo_class, count in self.goodput_requests.items():
            goodput.add_metric((*self._labels, slo_class), count)
        yield goodput
        judged = CounterMetricFamily(
            "paceline:slo_requests",
            "Requests that ended, refused ones too: goodput_requests / slo_requests is attainment.",
            labels=(*_LABELS, "slo_class"),
        )
        for slo_class, count in self.judged_requests.items():
            judged.add_metric((*self._labels, slo_class), count)
        yield judged
        violations = CounterMetricFamily(
            "paceline:slo_violations",
            "Targets missed, by class and kind.",
            labels=(*_LABELS, "slo_class", "kind"),
        )
        for (slo_class, kind), count in self.slo_violations.items():
            violations.add_metric((*self._labels, slo_class, kind), count)
        yield violations
        yield from self._scheduling(stats)

    def _scheduling(self, stats: EngineStats) -> Iterator[Metric]:
        """What the scheduler decided and why, and what it cost."""
        for name, text, label, counts in (
            ("requests_refused", "Requests refused or dropped.", "reason", dict(stats.refused)),
            (
                "queue_held_seconds",
                "Seconds the head of the queue was held up.",
                "reason",
                dict(stats.waited),
            ),
            (
                "request_waited_seconds",
                "Seconds that finished choices waited to be started.",
                "reason",
                self.waited,
            ),
            (
                "wasted_tokens",
                "Tokens computed again after a preemption, or for nobody.",
                "cause",
                {
                    "recomputed": stats.num_recomputed_tokens,
                    "discarded": stats.num_discarded_tokens,
                },
            ),
            (
                "swapped_blocks",
                "KV blocks moved to and from host memory.",
                "direction",
                {"out": stats.num_swapped_out_blocks, "in": stats.num_swapped_in_blocks},
            ),
            (
                "step_seconds",
                "Time of the steps whose time was predicted.",
                "kind",
                {
                    "predicted": stats.predicted_step_seconds,
                    "actual": stats.actual_step_seconds,
                },
            ),
        ):
            family = CounterMetricFamily(f"paceline:{name}", text, labels=(*_LABELS, label))
            for value, count in counts.items():
                family.add_metric((*self._labels, value), count)
            yield family
        relegated = CounterMetricFamily(
            "paceline:requests_relegated",
            "Requests that became best effort because their first token would be late.",
            labels=_LABELS,
        )
        relegated.add_metric(self._labels, stats.num_relegated)
        yield relegated
        pressure = GaugeMetricFamily(
            "paceline:memory_pressure_level",
            "Of the memory-pressure valve: 0 closed, 4 refusing.",
            labels=_LABELS,
        )
        pressure.add_metric(self._labels, stats.pressure_level)
        yield pressure
        if self._price_per_hour:
            spent = self._price_per_hour * (time.monotonic() - self._started) / 3600.0
            tokens = self.prompt_tokens + self.generation_tokens
            cost = GaugeMetricFamily(
                "paceline:cost_per_million_tokens",
                "Price of the time since start by tokens served, prompt and output.",
                labels=_LABELS,
            )
            cost.add_metric(self._labels, 1e6 * spent / tokens if tokens else float("nan"))
            yield cost

    def _histograms(self) -> Iterator[Metric]:
        for name, text, histogram in (
            ("time_to_first_token_seconds", "Arrival to first token.", self.time_to_first_token),
            ("inter_token_latency_seconds", "Between tokens.", self.inter_token_latency),
            (
                "request_time_per_output_token_seconds",
                "Mean time per output token after the first.",
                self.time_per_output_token,
            ),
            ("e2e_request_latency_seconds", "Arrival to the end.", self.e2e_latency),
            ("request_queue_time_seconds", "Arrival to first step.", self.queue_time),
            ("request_inference_time_seconds", "First step to last token.", self.inference_time),
            ("request_prefill_time_seconds", "First step to first token.", self.prefill_time),
            ("request_decode_time_seconds", "First token to last token.", self.decode_time),
            ("iteration_tokens_total", "Tokens computed in one step.", self.iteration_tokens),
            ("request_prompt_tokens", "Prompt tokens of a request.", self.request_prompt_tokens),
            (
                "request_generation_tokens",
                "Output tokens of a request.",
                self.request_generation_tokens,
            ),
            (
                "request_max_num_generation_tokens",
                "Output tokens of a request's longest choice.",
                self.request_max_num_generation_tokens,
            ),
            ("request_params_n", "The n parameter.", self.request_params_n),
            (
                "request_params_max_tokens",
                "The max_tokens parameter.",
                self.request_params_max_tokens,
            ),
        ):
            yield histogram_family(f"vllm:{name}", text, _LABELS, {self._labels: histogram})
        yield histogram_family(
            "paceline:ttft_prediction_error_seconds",
            "Distance between predicted and actual time to first token.",
            _LABELS,
            {self._labels: self.ttft_prediction_error},
        )

    def _http_families(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "http_requests", "HTTP requests.", labels=("handler", "method", "status")
        )
        for labels, count in self._http.items():
            requests.add_metric(labels, count)
        yield requests
        yield histogram_family(
            "http_request_duration_seconds",
            "HTTP requests, from the first to the last byte.",
            ("handler", "method"),
            self._http_duration,
        )
        yield histogram_family(
            "http_request_duration_highr_seconds",
            "The same in fine buckets and without labels.",
            (),
            {(): self._http_duration_fine},
        )


class RequestObserver:
    """Follows one generation request from arrival to its end.

    Call ``output`` for every delivery, and ``close`` in any case.
    """

    __slots__ = (
        "_arrival",
        "_finished",
        "_last",
        "_max_tokens",
        "_metrics",
        "_prompt_tokens",
        "_slo",
        "_times",
        "_tokens",
    )

    def __init__(self, metrics: ServerMetrics, request: GenerationRequest) -> None:
        n = request.n
        self._metrics = metrics
        self._arrival = request.arrival_time
        self._slo = request.slo
        # per choice: when its last tokens came (0.0: none yet), how many, whether it ended
        self._last = [0.0] * n
        self._tokens = [0] * n
        self._finished = [False] * n
        self._prompt_tokens: int | None = None
        self._times: RequestTimes | None = None
        self._max_tokens = request.sampling.max_tokens

    @property
    def num_output_tokens(self) -> int:
        return sum(self._tokens)

    def output(self, output: GenerationOutput, now: float) -> None:
        metrics = self._metrics
        if self._prompt_tokens is None and output.num_output_tokens:
            self._prompt_tokens = output.num_prompt_tokens
            metrics.prompt_tokens += output.num_prompt_tokens
            metrics.prompt_tokens_cached += output.num_cached_tokens
            metrics.time_to_first_token.observe(now - self._arrival)
        for choice in output.choices:
            index = choice.index
            count = len(choice.token_ids)
            if count:
                if self._last[index]:
                    metrics.inter_token_latency.observe(now - self._last[index])
                self._last[index] = now
                self._tokens[index] += count
                metrics.generation_tokens += count
            if choice.finish_reason is not None:
                self._finished[index] = True
                metrics.finished[choice.finish_reason] += 1
            if choice.timeline is not None:
                for reason, seconds in choice.timeline.waited:
                    metrics.waited[reason] += seconds
                predicted = choice.timeline.predicted_ttft
                if predicted is not None and output.times is not None:
                    actual = output.times.first_token - output.times.arrival
                    metrics.ttft_prediction_error.observe(abs(predicted - actual))
        if output.finished:
            self._times = output.times

    def close(self, now: float, *, refused: bool = False, shed: bool = False) -> None:
        """The end, however it came. Choices that did not end were aborted.

        ``refused``: the engine never took the request, so it counts nowhere; unless it was
        ``shed``, which is a promise not kept.
        """
        metrics = self._metrics
        if shed:
            metrics.judged_requests[self._slo.slo_class] += 1
            metrics.slo_violations[self._slo.slo_class, "refused"] += 1
        if refused:
            return
        aborted = self._finished.count(False)
        if aborted:
            metrics.finished["abort"] += aborted
        metrics.e2e_latency.observe(now - self._arrival)
        metrics.request_params_n.observe(len(self._tokens))
        metrics.request_params_max_tokens.observe(self._max_tokens)
        if self._prompt_tokens is not None:
            metrics.request_prompt_tokens.observe(self._prompt_tokens)
        metrics.request_generation_tokens.observe(sum(self._tokens))
        longest = max(self._tokens)
        metrics.request_max_num_generation_tokens.observe(longest)
        times = self._times
        self._judge(times, longest)
        if times is None:
            return
        metrics.queue_time.observe(times.first_scheduled - times.arrival)
        metrics.prefill_time.observe(times.first_token - times.first_scheduled)
        metrics.inference_time.observe(times.last_token - times.first_scheduled)
        decode = times.last_token - times.first_token
        metrics.decode_time.observe(decode)
        if longest > 1:
            metrics.time_per_output_token.observe(decode / (longest - 1))

    def _judge(self, times: RequestTimes | None, num_output: int) -> None:
        """Goodput and violations. A request that did not finish met none of its targets."""
        slo, metrics = self._slo, self._metrics
        missed: tuple[str, ...] = ("unfinished",)
        if times is not None and not self._finished.count(False):
            missed = slo.violations(times.arrival, times.first_token, times.last_token, num_output)
        metrics.judged_requests[slo.slo_class] += 1
        if not missed:
            metrics.goodput_requests[slo.slo_class] += 1
        for kind in missed:
            metrics.slo_violations[slo.slo_class, kind] += 1
