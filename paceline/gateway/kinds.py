"""What each kind of engine tells about itself, and where: names as data.

A signal that is missing is unknown (None), never zero: a gateway that read a removed name as "no
pressure" would send everything to the engine it knows least of. Alternates are older or newer names
of the same thing. Sources: the engines' documentation of their metrics; ``vllm:`` names may also
come from a Paceline engine, which has ``paceline:ready`` beside them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from paceline.gateway.config import EngineKind
from paceline.routing.engine_load import Pressure

__all__ = [
    "KINDS", "TEXT_PATHS", "VECTOR_PATHS", "KindFacts", "is_vectors", "kind_of_metrics",
    "read_contexts", "read_pressure", "scan",
]  # fmt: skip

# endpoints whose answers are text that a model makes
TEXT_PATHS: Final = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"}
)
# beside /v1/embeddings; vLLM's, with its bodies
VECTOR_PATHS: Final = frozenset(
    {
        "/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score", "/classify", "/pooling",
    }
)  # fmt: skip


def is_vectors(path: str) -> bool:
    """Whether the answers of an endpoint are vectors or scores, and no text."""
    return path == "/v1/embeddings" or path in VECTOR_PATHS


@dataclass(frozen=True, slots=True)
class KindFacts:
    """Of one kind of engine."""

    # exposition with the signals below; "": there is none
    metrics_path: str = "/metrics"
    # by signal of ``Pressure``, names of metrics, the first that is there counts
    signals: Mapping[str, Sequence[str]] = field(default_factory=dict)
    # metric with the size of the KV cache in its labels, and those labels: tokens a block, blocks
    capacity: tuple[str, str, str] | None = None
    # sends ids with ``return_token_ids`` and goes on behind ``resume_output_ids``, exactly
    resumes: bool = False
    # goes on behind a last assistant message with ``continue_final_message``
    continues: bool = False
    # takes ``cache_salt``
    salts: bool = False
    # where it lists its models; "": nowhere
    models_path: str = "/v1/models"
    # where it says how long its contexts are, where /v1/models does not; "": nowhere
    context_path: str = ""
    # cuts prompts that are too long and says nothing
    truncates: bool = False
    # those of VECTOR_PATHS that it has, for models that are pooled
    vectors: frozenset[str] = frozenset()
    # seconds a connection may lie idle before it is used again: below what the engine keeps
    idle: float = 4.0


_VLLM_SIGNALS: Final = {
    "waiting": ("vllm:num_requests_waiting",),
    "running": ("vllm:num_requests_running",),
    "kv": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "preemptions": ("vllm:num_preemptions_total", "vllm:num_preemptions"),
}
_VLLM_CAPACITY: Final = ("vllm:cache_config_info", "block_size", "num_gpu_blocks")

KINDS: Final[Mapping[EngineKind, KindFacts]] = {
    "paceline": KindFacts(
        signals={**_VLLM_SIGNALS, "level": ("paceline:memory_pressure_level",)},
        capacity=_VLLM_CAPACITY,
        resumes=True,
        continues=True,
        salts=True,
        vectors=VECTOR_PATHS,
        idle=60.0,
    ),
    "vllm": KindFacts(
        signals=_VLLM_SIGNALS,
        capacity=_VLLM_CAPACITY,
        continues=True,
        salts=True,
        vectors=VECTOR_PATHS,
    ),
    "sglang": KindFacts(
        signals={
            "waiting": ("sglang:num_queue_reqs",),
            "running": ("sglang:num_running_reqs",),
            "kv": ("sglang:token_usage",),
        },
        capacity=("sglang:cache_config_info", "page_size", "num_pages"),
        continues=True,
        # its /v1/score has another body
        vectors=frozenset({"/v1/rerank"}),
    ),
    "llama.cpp": KindFacts(
        signals={
            "waiting": ("llamacpp:requests_deferred",),
            "running": ("llamacpp:requests_processing",),
        },
        continues=True,
        context_path="/props",
        vectors=frozenset({"/rerank", "/v1/rerank"}),
    ),
    # neither says how pressed it is: what was sent and has not ended is all there is to see
    "ollama": KindFacts(metrics_path="/api/version", context_path="/api/ps", truncates=True),
    "openai": KindFacts(metrics_path=""),
    "azure": KindFacts(metrics_path="", models_path="", idle=50.0),
    "anthropic": KindFacts(metrics_path="", idle=50.0),
}

_KIND_MARKS: Final[Sequence[tuple[bytes, EngineKind]]] = (
    (b"paceline:ready", "paceline"),
    (b"vllm:", "vllm"),
    (b"sglang:", "sglang"),
    (b"llamacpp:", "llama.cpp"),
)


def kind_of_metrics(text: bytes) -> EngineKind | None:
    """Of which kind of engine this exposition is; None: of no kind that is known."""
    for mark, kind in _KIND_MARKS:
        if mark in text:
            return kind
    return None


def scan(text: bytes, name: str) -> float | None:
    """The value of a metric, summed over its series; None where it has none.

    Looks for the name alone: an exposition is tens of kilobytes of histograms, and parsing all of
    it would cost more than the poll is worth.
    """
    wanted = name.encode()
    total: float | None = None
    at = text.find(wanted)
    while at >= 0:
        end = text.find(b"\n", at)
        line = text[at : end if end >= 0 else len(text)]
        behind = line[len(wanted) : len(wanted) + 1]
        if (at == 0 or text[at - 1 : at] == b"\n") and behind in (b"{", b" "):
            # labels may hold spaces, and a timestamp may follow the value
            rest = line.rpartition(b"}")[2] if behind == b"{" else line[len(wanted) :]
            try:
                value = float(rest.split()[0])
            except (ValueError, IndexError):
                value = float("nan")
            if value == value and abs(value) != float("inf"):
                total = value if total is None else total + value
        at = text.find(wanted, at + len(wanted))
    return total


def read_pressure(text: bytes, facts: KindFacts, now: float) -> Pressure:
    """What an exposition says of an engine. Shares of several series (data-parallel ranks) are
    averaged."""
    found: dict[str, float | None] = {}
    for signal, names in facts.signals.items():
        value = next((v for v in (scan(text, name) for name in names) if v is not None), None)
        if signal == "kv" and value is not None and value > 1.0:
            series = max(1, sum(_series(text, name) for name in names))
            value = min(1.0, value / series)
        found[signal] = value
    return Pressure(now, **found, capacity_tokens=_capacity(text, facts))


def read_contexts(body: bytes) -> Mapping[str, int]:
    """Tokens of context by model, of all models as "": llama.cpp's /props tells what one slot has,
    Ollama's /api/ps what each loaded model was loaded with. Empty where it says neither."""
    try:
        told = msgspec.json.decode(body, type=_Contexts)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return {}
    found = {entry.name: entry.context_length for entry in told.models if entry.context_length}
    if told.default_generation_settings.n_ctx:
        found[""] = told.default_generation_settings.n_ctx
    return found


class _Loaded(msgspec.Struct):
    name: str = ""
    context_length: int = 0


class _SlotSettings(msgspec.Struct, frozen=True):
    n_ctx: int = 0


class _Contexts(msgspec.Struct):
    models: list[_Loaded] = []
    default_generation_settings: _SlotSettings = _SlotSettings()


def _series(text: bytes, name: str) -> int:
    return len(re.findall(rb"(?m)^" + re.escape(name.encode()) + rb"[{ ]", text))


def _capacity(text: bytes, facts: KindFacts) -> float | None:
    if facts.capacity is None:
        return None
    name, block_label, count_label = facts.capacity
    total = 0.0
    for match in re.finditer(rb"(?m)^" + re.escape(name.encode()) + rb"\{([^\n]*)\}", text):
        labels = dict(re.findall(rb'(\w+)="([^"]*)"', match[1]))
        try:
            total += int(labels[block_label.encode()]) * int(labels[count_label.encode()])
        except (KeyError, ValueError):
            return None
    return total or None
