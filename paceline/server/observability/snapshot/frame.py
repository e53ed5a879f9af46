"""State of a server, and its work between two readings of its metrics, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.server.observability.snapshot.scrape import Growth, Quantiles, Scrape, ratio

__all__ = ["ClassRow", "Frame", "ModelRow", "TenantRow", "make_frame"]


@dataclass(frozen=True, slots=True)
class ClassRow:
    """One SLO class."""

    name: str
    running: int
    waiting: int
    kv_blocks: int
    # share of requests that met their targets, of those that ended in the interval, or since start
    attainment: float | None
    attainment_since_start: float | None
    # requests that ended in the interval
    ended: int
    # targets missed in the interval, by kind
    violations: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class TenantRow:
    """One tenant. Rates are per second."""

    name: str
    unfinished: int
    # requests that ended in the interval, and those of them that were refused or expired
    ended: int
    refused: int
    tokens_per_s: float
    # share of all tenants' tokens in the interval
    share: float | None
    # mean of the first tokens in the interval, seconds
    mean_ttft: float | None
    # share of requests that met their targets, of those that ended in the interval
    attainment: float | None


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One of several models. Rates are per second."""

    name: str
    state: str
    # requests that hold it in memory, and those that await it
    requests: int
    waiting: int
    output_tokens_per_s: float
    # what it takes, and the seconds of its latest load
    num_bytes: int
    load_seconds: float
    # share of the time in which it computed, and in which it waited while others did
    computed: float
    awaited: float


@dataclass(frozen=True, slots=True)
class Frame:
    """All values of one interval. Rates are per second of it."""

    model: str
    # seconds between the readings
    interval: float
    ready: bool
    # age of the numbers, if a separate listener serves them, seconds
    metrics_age: float
    running: int
    waiting: int
    classes: tuple[ClassRow, ...]
    # in order of tokens, most first; empty if the server does not count tenants
    tenants: tuple[TenantRow, ...]
    # why the head of the queue is blocked now; None: the queue is empty
    blocked_by: str | None
    # share of the time that the head of the queue was blocked, by reason; in sum at most 1
    blocked_share: Mapping[str, float]
    # steps, and mean tokens per step: of prompts, and one per generating request
    steps_per_s: float
    prefill_tokens_per_step: float | None
    decode_tokens_per_step: float | None
    # mean seconds of a step, measured and predicted
    step_seconds: float | None
    predicted_step_seconds: float | None
    # prediction error, as a share of the measured time
    step_error: float | None
    # share of the time spent in steps whose time was predicted
    step_share: float
    # draft tokens verified per second, and the accepted share of them, by their source
    drafts_per_s: Mapping[str, float]
    drafts_accepted: Mapping[str, float]
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    requests_per_s: float
    # requests that ended having met all their targets
    goodput_per_s: float
    # share of those, of all requests that ended, over all classes
    attainment: float | None
    # seconds that finished choices had waited for their start, in sum, by reason
    waited_seconds: Mapping[str, float]
    # share of looked-up prompt tokens that were found
    prefix_cache_hit_rate: float | None
    kv_usage: float
    kv_blocks: Mapping[str, int]
    kv_host_used: int
    kv_host_total: int
    # blocks of layers with a sliding window; 0 if these share the other blocks
    kv_windows_used: int
    kv_windows_total: int
    pressure_level: int
    preemptions_per_s: float
    # tokens per second, by cause
    wasted_tokens_per_s: Mapping[str, float]
    # requests refused in the interval, by reason
    refused: Mapping[str, int]
    ttft: Quantiles
    inter_token: Quantiles
    queue: Quantiles
    # distance between predicted and actual time to first token
    ttft_error: Quantiles
    cost_per_million_tokens: float | None
    # empty where the server has one model
    models: tuple[ModelRow, ...] = ()


def make_frame(before: Scrape, after: Scrape) -> Frame:
    """Return the frame of two readings; ``after`` must be later. Counters that fell (after a
    restart) count from zero."""
    grown = Growth.since(before, after, "paceline:steps_total")
    seconds, grew, grew_by = grown.seconds, grown.total, grown.by
    steps = grew("paceline:steps_total")
    # time of steps with a prediction, which are all but the first few
    actual = grew("paceline:step_seconds_total", kind="actual")
    predicted = grew("paceline:step_seconds_total", kind="predicted")
    blocked = after.by("paceline:queue_blocked", "reason")
    good = grew("paceline:goodput_requests_total")
    host = after.by("paceline:kv_host_blocks", "state")
    windows = after.by("paceline:kv_window_blocks", "state")
    queries = grew("vllm:prefix_cache_queries_total")
    waited = grew_by("paceline:queue_blocked_seconds_total", "reason")
    drafted = grew_by("paceline:spec_decode_draft_tokens_total", "source")
    right = grew_by("paceline:spec_decode_accepted_tokens_total", "source")
    # the engine counts per step, so a reading may cover more time than the interval
    blocked_time = max(seconds, sum(waited.values()))
    return Frame(
        model=after.label("vllm:num_requests_running", "model_name") or "",
        interval=seconds,
        # vLLM with our scheduler inside answers while it is ready
        ready=after.one("paceline:ready") != 0,
        metrics_age=after.one("paceline:metrics_age_seconds") or 0.0,
        running=int(after.total("vllm:num_requests_running")),
        waiting=int(after.total("vllm:num_requests_waiting")),
        classes=_classes(grown),
        tenants=_tenants(grown),
        blocked_by=next((reason for reason, on in blocked.items() if on), None),
        blocked_share={reason: waits / blocked_time for reason, waits in waited.items()},
        steps_per_s=steps / seconds,
        prefill_tokens_per_step=ratio(grew("paceline:step_tokens_total", kind="prefill"), steps),
        decode_tokens_per_step=ratio(grew("paceline:step_tokens_total", kind="decode"), steps),
        step_seconds=ratio(actual, steps) if actual else None,
        predicted_step_seconds=ratio(predicted, steps) if predicted else None,
        step_error=ratio(abs(predicted - actual), actual) if predicted else None,
        step_share=min(1.0, actual / seconds),
        drafts_per_s={source: count / seconds for source, count in drafted.items()},
        drafts_accepted={source: right.get(source, 0.0) / n for source, n in drafted.items()},
        prompt_tokens_per_s=grew("vllm:prompt_tokens_total") / seconds,
        output_tokens_per_s=grew("vllm:generation_tokens_total") / seconds,
        requests_per_s=grew("vllm:e2e_request_latency_seconds_count") / seconds,
        goodput_per_s=good / seconds,
        attainment=ratio(good, grew("paceline:slo_requests_total")),
        waited_seconds=grew_by("paceline:request_waited_seconds_total", "reason"),
        prefix_cache_hit_rate=ratio(grew("vllm:prefix_cache_hits_total"), queries),
        kv_usage=after.total("vllm:kv_cache_usage_perc"),
        kv_blocks={
            owner: round(count)
            for owner, count in after.by("paceline:kv_blocks", "owner").items()
            if round(count)
        },
        kv_host_used=int(host.get("used", 0)),
        kv_host_total=int(sum(host.values())),
        kv_windows_used=int(windows.get("used", 0)),
        kv_windows_total=int(sum(windows.values())),
        pressure_level=int(after.total("paceline:memory_pressure_level")),
        preemptions_per_s=grew("vllm:num_preemptions_total") / seconds,
        wasted_tokens_per_s={
            cause: tokens / seconds
            for cause, tokens in grew_by("paceline:wasted_tokens_total", "cause").items()
        },
        refused={
            reason: int(count)
            for reason, count in grew_by("paceline:requests_refused_total", "reason").items()
        },
        ttft=grown.quantiles("vllm:time_to_first_token_seconds"),
        inter_token=grown.quantiles("vllm:inter_token_latency_seconds"),
        queue=grown.quantiles("vllm:request_queue_time_seconds"),
        ttft_error=grown.quantiles("paceline:ttft_prediction_error_seconds"),
        cost_per_million_tokens=after.one("paceline:cost_per_million_tokens"),
        models=_models(grown),
    )


def _models(grown: Growth) -> tuple[ModelRow, ...]:
    after, seconds = grown.after, grown.seconds
    states = {
        labels["model_name"]: labels["state"]
        for labels, on in after.samples.get("paceline:model_state", ())
        if on
    }
    return tuple(
        ModelRow(
            name=name,
            state=state,
            requests=int(after.total("paceline:model_leases", model_name=name)),
            waiting=int(after.total("paceline:model_waiting", model_name=name)),
            output_tokens_per_s=grown.total("vllm:generation_tokens_total", model_name=name)
            / seconds,
            num_bytes=int(after.total("paceline:ledger_bytes", model_name=name)),
            load_seconds=after.total("paceline:model_load_seconds", model_name=name),
            computed=grown.total("paceline:turn_seconds_total", model_name=name) / seconds,
            awaited=grown.total("paceline:turn_wait_seconds_total", model_name=name) / seconds,
        )
        for name, state in states.items()
    )


def _classes(grown: Growth) -> tuple[ClassRow, ...]:
    after = grown.after
    requests, judged = "paceline:requests", "paceline:slo_requests_total"
    names = {*after.by(requests, "slo_class"), *after.by(judged, "slo_class")}
    blocks = after.by("paceline:kv_blocks", "owner")
    rows = []
    for name in sorted(names):
        ended = after.total(judged, slo_class=name)
        good = after.total("paceline:goodput_requests_total", slo_class=name)
        new = grown.total(judged, slo_class=name)
        new_good = grown.total("paceline:goodput_requests_total", slo_class=name)
        violations = {}
        for labels, _ in after.samples.get("paceline:slo_violations_total", ()):
            if labels.get("slo_class") == name:
                kind = labels["kind"]
                count = grown.total("paceline:slo_violations_total", slo_class=name, kind=kind)
                if count > 0:
                    violations[kind] = int(count)
        rows.append(
            ClassRow(
                name=name,
                running=int(after.total(requests, slo_class=name, state="running")),
                waiting=int(after.total(requests, slo_class=name, state="waiting")),
                kv_blocks=round(blocks.get(name, 0.0)),
                attainment=ratio(new_good, new),
                attainment_since_start=ratio(good, ended),
                ended=int(new),
                violations=violations,
            )
        )
    return tuple(rows)


def _tenants(grown: Growth) -> tuple[TenantRow, ...]:
    counts: dict[str, dict[str, float]] = {}

    def grew(name: str, tenant: str) -> float:
        # grouped by tenant once per name, as there may be many tenants and names
        found = counts.get(name)
        if found is None:
            found = counts[name] = grown.by(f"paceline:tenant_{name}", "tenant")
        return found.get(tenant, 0.0)

    unfinished = grown.after.by("paceline:tenant_unfinished_requests", "tenant")
    tokens = {
        name: grew("prompt_tokens_total", name) + grew("generation_tokens_total", name)
        for name in unfinished
    }
    total = sum(tokens.values())
    rows = []
    for name in sorted(unfinished, key=lambda name: (-tokens[name], -unfinished[name], name)):
        ended = grew("requests_total", name)
        ttft = "time_to_first_token_seconds"
        rows.append(
            TenantRow(
                name=name,
                unfinished=int(unfinished[name]),
                ended=int(ended),
                refused=int(grew("refused_requests_total", name)),
                tokens_per_s=tokens[name] / grown.seconds,
                share=ratio(tokens[name], total),
                mean_ttft=ratio(grew(f"{ttft}_sum", name), grew(f"{ttft}_count", name)),
                attainment=ratio(grew("goodput_requests_total", name), ended),
            )
        )
    return tuple(rows)
