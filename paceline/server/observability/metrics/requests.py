"""Metrics of requests: latencies, tokens, outcomes, targets met and missed; and per tenant, for a
bounded number of tenants, because callers choose their names.

Counts are per generation request (one prompt with its ``n`` choices), except
``vllm:request_success``, which counts choices, and ``vllm:inter_token_latency_seconds``, which
counts deliveries of tokens of one choice.
"""

from __future__ import annotations

from functools import partial
from typing import Final, NamedTuple

from paceline.engine.types import (
    ChoiceDelta,
    GenerationOutput,
    GenerationRequest,
    RequestTimes,
    Timeline,
    tokens_per_second,
)
from paceline.errors import NAN_LOGITS, QueueFullError, RequestError
from paceline.http.exposition import Histogram, Registry

__all__ = [
    "NO_TENANT",
    "OTHER_TENANTS",
    "RequestMetrics",
    "RequestObserver",
    "Story",
    "TenantMetrics",
    "TenantObserver",
    "series_1_2_5",
]

# bucket boundaries: vLLM's, and our own for quantities that it lacks
# fmt: off
_TTFT_BUCKETS: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)
_TOKEN_TIME_BUCKETS: Final = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)
_LATENCY_BUCKETS: Final = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)
# most requests wait a step or two; vLLM's buckets begin where a server is overloaded
_QUEUE_BUCKETS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, *_LATENCY_BUCKETS)
_CHUNK_BUCKETS: Final = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0, 128.0)
_N_BUCKETS: Final = (1.0, 2.0, 5.0, 10.0, 20.0)
_PREEMPTION_BUCKETS: Final = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
# fmt: on


def series_1_2_5(largest: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, 20, 50, ... up to and including ``largest``."""
    series: list[float] = []
    decade = 1
    while decade <= largest:
        series += [float(m * decade) for m in (1, 2, 5) if m * decade <= largest]
        decade *= 10
    return tuple(series)


class RequestMetrics:
    """The families; ``RequestObserver`` updates them.

    Args:
        max_model_len: where the buckets of token counts end.
    """

    def __init__(self, registry: Registry, max_model_len: int) -> None:
        counts = series_1_2_5(max_model_len)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return registry.histogram(f"vllm:{name}", text, buckets)

        number, numbers = partial(registry.number, "counter"), partial(registry.numbers, "counter")

        self.prompt_tokens = number("vllm:prompt_tokens", "Prompt tokens processed.")
        self.prompt_tokens_cached = number(
            "vllm:prompt_tokens_cached", "Prompt tokens taken from the prefix cache."
        )
        by_source = numbers(
            "vllm:prompt_tokens_by_source", "Prompt tokens by where they came from.", "source"
        )
        self.prompt_tokens_computed = by_source.at("local_compute")
        self.prompt_tokens_hit = by_source.at("local_cache_hit")
        self.generation_tokens = number("vllm:generation_tokens", "Output tokens.")
        self.success = numbers(
            "vllm:request_success", "Choices that ended, by why.", "finished_reason"
        )
        for reason in ("stop", "length", "abort", "error"):
            self.success.at(reason)
        self.corrupted = number(
            "vllm:corrupted_requests",
            "Choices that ended because the model computed NaN or infinity for them.",
        )
        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "Arrival to first token.", _TTFT_BUCKETS
        )
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds", "Between tokens.", _TOKEN_TIME_BUCKETS
        )
        self.time_per_output_token = histogram(
            "request_time_per_output_token_seconds",
            "Mean time per output token after the first.",
            _TOKEN_TIME_BUCKETS,
        )
        self.e2e_latency = histogram(
            "e2e_request_latency_seconds", "Arrival to the end.", _LATENCY_BUCKETS
        )
        self.queue_time = histogram(
            "request_queue_time_seconds", "Arrival to first step.", _QUEUE_BUCKETS
        )
        self.inference_time = histogram(
            "request_inference_time_seconds", "First step to last token.", _LATENCY_BUCKETS
        )
        self.prefill_time = histogram(
            "request_prefill_time_seconds", "First step to first token.", _LATENCY_BUCKETS
        )
        self.decode_time = histogram(
            "request_decode_time_seconds", "First token to last token.", _LATENCY_BUCKETS
        )
        self.num_prompt_tokens = histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", counts
        )
        self.num_generation_tokens = histogram(
            "request_generation_tokens", "Output tokens of a request.", counts
        )
        self.max_generation_tokens = histogram(
            "request_max_num_generation_tokens",
            "Output tokens of a request's longest choice.",
            counts,
        )
        self.prefill_computed = histogram(
            "request_prefill_kv_computed_tokens",
            "Prompt tokens of a request that were not in the prefix cache.",
            counts,
        )
        self.num_preemptions = histogram(
            "request_num_preemptions", "Preemptions of a request.", _PREEMPTION_BUCKETS
        )
        self.num_chunks = registry.histogram(
            "paceline:request_chunks",
            "Steps that computed more than one token of a request, 0 if all was cached.",
            _CHUNK_BUCKETS,
        )
        self.params_n = histogram("request_params_n", "The n parameter.", _N_BUCKETS)
        self.params_max_tokens = histogram(
            "request_params_max_tokens", "The max_tokens parameter.", counts
        )
        self.goodput = numbers(
            "paceline:goodput_requests", "Requests that met every target they had.", "slo_class"
        )
        self.judged = numbers(
            "paceline:slo_requests",
            "Requests that ended, refused ones too, and those whose caller left once the first "
            "token was late: goodput_requests / slo_requests is attainment.",
            "slo_class",
        )
        self.violations = numbers(
            "paceline:slo_violations",
            "Targets missed, by class and kind: ttft, tpot, itl, deadline, unfinished, refused.",
            "slo_class",
            "kind",
        )
        self.waited = numbers(
            "paceline:request_waited_seconds",
            "Seconds that finished choices waited to be started.",
            "reason",
        )
        self.ttft_prediction_error = registry.histogram(
            "paceline:ttft_prediction_error_seconds",
            "Distance between predicted and actual time to first token.",
            _TTFT_BUCKETS,
        )


class Story(NamedTuple):
    """Summary of a request for the log; None: not reached, or not reported by the engine. Choices
    are combined: the longest wait, and sums."""

    # seconds waited for a start and after preemptions, and the main reason
    queued: float | None
    waited_for: str | None
    chunks: int | None
    preemptions: int
    recomputed_tokens: int | None
    # seconds from arrival
    predicted_ttft: float | None
    ttft: float | None
    # rate of all choices together, after the first tokens
    tokens_per_second: float | None


class RequestObserver:
    """Follows one generation request from arrival to its end.

    Call ``output`` for every delivery, and ``end`` in any case.
    """

    __slots__ = (
        "_arrival",
        "_cached_tokens",
        "_finished",
        "_last",
        "_max_tokens",
        "_metrics",
        "_preemptions",
        "_prompt_tokens",
        "_slo",
        "_timelines",
        "_times",
        "_tokens",
        "has_met_targets",
        "is_finished",
        "ttft",
    )

    def __init__(self, metrics: RequestMetrics, request: GenerationRequest) -> None:
        n = request.n
        self._metrics = metrics
        self._arrival = request.arrival_time
        self._slo = request.slo
        # per choice: time of its last tokens (0.0: none yet), their number, whether it ended
        self._last = [0.0] * n
        self._tokens = [0] * n
        self._finished = [False] * n
        self._prompt_tokens: int | None = None
        self._cached_tokens = 0
        self._preemptions = 0
        # seconds from arrival
        self.ttft: float | None = None
        # timelines of ended choices, where the engine sends them
        self._timelines: list[Timeline] = []
        self._times: RequestTimes | None = None
        # everything was delivered
        self.is_finished = False
        # the request has ended and met all its targets
        self.has_met_targets = False
        # None: the request is for a vector, not for tokens
        self._max_tokens = None if request.sampling.pooling else request.sampling.max_tokens

    @property
    def num_output_tokens(self) -> int:
        return sum(self._tokens)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt; 0 until the first output token."""
        return self._prompt_tokens or 0

    @property
    def _chunks(self) -> int | None:
        timelines = self._timelines
        return sum(timeline.num_chunks for timeline in timelines) if timelines else None

    def story(self) -> Story:
        """Return a summary for the log."""
        timelines = self._timelines
        waits = [timeline.waited for timeline in timelines]
        longest = max(waits, key=lambda wait: sum(seconds for _, seconds in wait), default=())
        reason, seconds = max(longest, key=lambda entry: entry[1], default=("", 0.0))
        predicted = [t.predicted_ttft for t in timelines if t.predicted_ttft is not None]
        return Story(
            queued=round(sum(seconds for _, seconds in longest), 4) if timelines else None,
            waited_for=reason if seconds > 0.0 else None,
            chunks=self._chunks,
            preemptions=self._preemptions,
            recomputed_tokens=sum(t.num_recomputed_tokens for t in timelines)
            if timelines
            else None,
            predicted_ttft=round(predicted[0], 4) if predicted else None,
            ttft=None if self.ttft is None else round(self.ttft, 4),
            tokens_per_second=self._tokens_per_second(),
        )

    def _tokens_per_second(self) -> float | None:
        if self.ttft is None:
            return None
        begun = sum(1 for count in self._tokens if count)
        seconds = max(self._last) - self._arrival - self.ttft
        return tokens_per_second(sum(self._tokens), begun, seconds)

    def output(self, output: GenerationOutput, now: float) -> None:
        metrics = self._metrics
        self._preemptions = output.num_preemptions
        if self._prompt_tokens is None and (output.num_output_tokens or output.pooled is not None):
            prompt, cached = output.num_prompt_tokens, output.num_cached_tokens
            self._prompt_tokens, self._cached_tokens = prompt, cached
            metrics.prompt_tokens.value += prompt
            metrics.prompt_tokens_cached.value += cached
            metrics.prompt_tokens_hit.value += cached
            metrics.prompt_tokens_computed.value += prompt - cached
            self.ttft = now - self._arrival
            metrics.time_to_first_token.observe(self.ttft)
        for choice in output.choices:
            index = choice.index
            count = len(choice.token_ids)
            if count:
                if self._last[index]:
                    metrics.inter_token_latency.observe(now - self._last[index])
                self._last[index] = now
                self._tokens[index] += count
                metrics.generation_tokens.value += count
            if choice.finish_reason is not None:
                self._finished[index] = True
                self._ended(choice, output.times)
        if output.finished:
            self.is_finished = True
            self._times = output.times

    def _ended(self, choice: ChoiceDelta, times: RequestTimes | None) -> None:
        metrics, timeline = self._metrics, choice.timeline
        assert choice.finish_reason is not None
        metrics.success.at(choice.finish_reason).value += 1
        if choice.error == NAN_LOGITS:
            metrics.corrupted.value += 1
        if timeline is None:
            return
        self._timelines.append(timeline)
        for reason, seconds in timeline.waited:
            metrics.waited.at(reason).value += seconds
        if timeline.predicted_ttft is not None and times is not None:
            actual = times.first_token - times.arrival
            metrics.ttft_prediction_error.observe(abs(timeline.predicted_ttft - actual))

    def end(self, error: Exception | None, now: float) -> None:
        """Count the request's end. Choices that did not end were aborted. A request that the engine
        refused is not counted, unless admission refused it or it expired: that breaks a promise."""
        refused = isinstance(error, RequestError)
        overloaded = isinstance(error, QueueFullError)
        metrics = self._metrics
        if overloaded:
            metrics.judged.at(self._slo.slo_class).value += 1
            metrics.violations.at(self._slo.slo_class, "refused").value += 1
        if refused:
            return
        aborted = self._finished.count(False)
        if aborted:
            metrics.success.at("abort").value += aborted
        metrics.e2e_latency.observe(now - self._arrival)
        metrics.params_n.observe(len(self._tokens))
        if self._max_tokens is not None:
            metrics.params_max_tokens.observe(self._max_tokens)
        metrics.num_preemptions.observe(self._preemptions)
        if (chunks := self._chunks) is not None:
            metrics.num_chunks.observe(chunks)
        if self._prompt_tokens is not None:
            metrics.num_prompt_tokens.observe(self._prompt_tokens)
            metrics.prefill_computed.observe(self._prompt_tokens - self._cached_tokens)
        metrics.num_generation_tokens.observe(sum(self._tokens))
        longest = max(self._tokens)
        metrics.max_generation_tokens.observe(longest)
        times = self._times
        if error is None and times is None:
            self._judge_left(now)
        else:
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

    def _judge_left(self, now: float) -> None:
        """Count a request whose caller left: only a first token that was already late broke a
        promise. One that was in time is no kept promise either, as the answer's end is not
        known."""
        target = self._slo.ttft
        waited = now - self._arrival if self.ttft is None else self.ttft
        if target is None or waited <= target:
            return
        metrics, name = self._metrics, self._slo.slo_class
        metrics.judged.at(name).value += 1
        metrics.violations.at(name, "ttft").value += 1

    def _judge(self, times: RequestTimes | None, num_output: int) -> None:
        """Count goodput and violations. An unfinished request met none of its targets."""
        slo, metrics = self._slo, self._metrics
        missed: tuple[str, ...] = ("unfinished",)
        if times is not None and not self._finished.count(False):
            missed = slo.violations(
                times.arrival, times.first_token, times.last_token, num_output, times.longest_gap
            )
        # create the series at the first request, so that its rate starts there
        goodput = metrics.goodput.at(slo.slo_class)
        metrics.judged.at(slo.slo_class).value += 1
        self.has_met_targets = not missed
        goodput.value += not missed
        for kind in missed:
            metrics.violations.at(slo.slo_class, kind).value += 1


# label of requests without a tenant, and of tenants above the limit
NO_TENANT: Final = "_none"
OTHER_TENANTS: Final = "_other"


class TenantMetrics:
    """The families; ``TenantObserver`` updates them.

    Args:
        most: tenants with series of their own, in order of arrival; later ones share
            ``OTHER_TENANTS``.
        known: further tenants with series of their own, such as the names of API keys.
    """

    def __init__(self, registry: Registry, most: int, known: frozenset[str] = frozenset()) -> None:
        self._most = most + len(known)
        self._names = set(known)
        counter = partial(registry.numbers, "counter")
        self.unfinished = registry.numbers(
            "gauge", "paceline:tenant_unfinished_requests", "Requests that wait or run.", "tenant"
        )
        self.requests = counter(
            "paceline:tenant_requests", "Requests that ended, refused ones too.", "tenant"
        )
        self.goodput = counter(
            "paceline:tenant_goodput_requests", "Requests that met every target they had.", "tenant"
        )
        self.refused = counter(
            "paceline:tenant_refused_requests", "Requests refused or expired.", "tenant"
        )
        self.prompt_tokens = counter(
            "paceline:tenant_prompt_tokens", "Prompt tokens processed.", "tenant"
        )
        self.generation_tokens = counter(
            "paceline:tenant_generation_tokens", "Output tokens.", "tenant"
        )
        self.time_to_first_token = registry.histograms(
            "paceline:tenant_time_to_first_token_seconds", "Arrival to first token.", (), "tenant"
        )

    def label(self, tenant: str) -> str:
        """Return the label's value for a tenant."""
        if not tenant:
            return NO_TENANT
        if tenant not in self._names:
            if len(self._names) >= self._most:
                return OTHER_TENANTS
            self._names.add(tenant)
        return tenant

    def served(self, tenant: str) -> dict[str, float] | None:
        """Return a tenant's counts so far; None if it has no series of its own."""
        if tenant not in self._names:
            return None
        families = {
            "requests": self.requests,
            "refused": self.refused,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.generation_tokens,
        }
        return {name: family.value(tenant) for name, family in families.items()}


class TenantObserver:
    """Counts one request for its tenant at its end, from the data of ``counted``."""

    def __init__(self, metrics: TenantMetrics, tenant: str, counted: RequestObserver) -> None:
        self._metrics, self._counted = metrics, counted
        self._label = metrics.label(tenant)
        metrics.unfinished.at(self._label).value += 1

    def output(self, output: GenerationOutput, now: float) -> None:
        """Do nothing: ``counted`` sees the same output."""

    def end(self, error: Exception | None, now: float) -> None:
        """Count the request; as in ``RequestObserver.end``, one that the engine refused is not
        counted, unless admission refused it or it expired."""
        metrics, label, counted = self._metrics, self._label, self._counted
        metrics.unfinished.at(label).value -= 1
        refused = isinstance(error, QueueFullError)
        if isinstance(error, RequestError) and not refused:
            return
        metrics.requests.at(label).value += 1
        metrics.refused.at(label).value += refused
        metrics.goodput.at(label).value += counted.has_met_targets
        metrics.prompt_tokens.at(label).value += counted.num_prompt_tokens
        metrics.generation_tokens.at(label).value += counted.num_output_tokens
        if counted.ttft is not None:
            metrics.time_to_first_token.at(label).observe(counted.ttft)
