"""Table of engine kinds: the metrics, paths and features of each, as data.

A missing signal is unknown (None), never zero: a gateway that read a removed metric as "no
pressure" would send everything to the engine it knows least about. Alternatives are older or newer
names of the same metric. Sources: the engines' documentation of their metrics. A Paceline engine
may export ``vllm:`` names as well; it is recognised by ``paceline:ready``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from paceline.gateway.settings.config import EngineKind
from paceline.routing.engine_load import Pressure

__all__ = [
    "KINDS", "TEXT_PATHS", "VECTOR_PATHS", "KindFacts", "is_vectors", "kind_of_metrics",
    "read_contexts", "read_pressure", "scan",
]  # fmt: skip

# paths whose answers are generated text
TEXT_PATHS: Final = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"}
)
# paths in addition to /v1/embeddings; they and their bodies are vLLM's
VECTOR_PATHS: Final = frozenset(
    {
        "/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score", "/classify", "/pooling",
    }
)  # fmt: skip


def is_vectors(path: str) -> bool:
    """Whether a path answers with vectors or scores instead of text."""
    return path == "/v1/embeddings" or path in VECTOR_PATHS


@dataclass(frozen=True, slots=True)
class KindFacts:
    """Facts about one kind of engine."""

    # path with the signals below; "": none
    metrics_path: str = "/metrics"
    # signal of ``Pressure`` -> names of its metric, of which the first one present counts
    signals: Mapping[str, Sequence[str]] = field(default_factory=dict)
    # metric with the KV cache's size in its labels; the labels of tokens per block and of blocks
    capacity: tuple[str, str, str] | None = None
    # returns ids for ``return_token_ids`` and resumes exactly behind ``resume_output_ids``
    resumes: bool = False
    # continues a last assistant message with ``continue_final_message``
    continues: bool = False
    # accepts ``cache_salt``
    salts: bool = False
    # path that lists its models; "": none
    models_path: str = "/v1/models"
    # path with the context lengths that /v1/models lacks; "": none
    context_path: str = ""
    # truncates prompts that are too long without saying so
    truncates: bool = False
    # the VECTOR_PATHS that it serves with pooling models
    vectors: frozenset[str] = frozenset()
    # seconds after which an idle connection is not reused: fewer than the engine keeps it open
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
        signals={
            **_VLLM_SIGNALS,
            "level": ("paceline:memory_pressure_level",),
            "slots": ("paceline:max_num_seqs",),
        },
        capacity=_VLLM_CAPACITY,
        resumes=True,
        continues=True,
        salts=True,
        vectors=VECTOR_PATHS,
        idle=60.0,
    ),
    "vllm": KindFacts(
        # the level is there with Paceline's scheduler inside
        signals={**_VLLM_SIGNALS, "level": ("paceline:memory_pressure_level",)},
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
        # its /v1/score takes another body
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
    # these report no load: the gateway only sees what it sent and what has not ended
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
    """Recognise the kind of engine from its metrics; None: an unknown kind."""
    for mark, kind in _KIND_MARKS:
        if mark in text:
            return kind
    return None


def scan(text: bytes, name: str) -> float | None:
    """Return a metric's value, summed over its series; None if there is no series.

    It searches for the name alone: metrics hold tens of kilobytes of histograms, and to parse them
    all would cost more than a poll is worth.
    """
    wanted = name.encode()
    total: float | None = None
    at = text.find(wanted)
    while at >= 0:
        end = text.find(b"\n", at)
        line = text[at : end if end >= 0 else len(text)]
        behind = line[len(wanted) : len(wanted) + 1]
        if (at == 0 or text[at - 1 : at] == b"\n") and behind in (b"{", b" "):
            # labels may contain spaces, and a timestamp may follow the value
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
    """Read an engine's load from its metrics. Shares are averaged over series (data-parallel
    ranks)."""
    found: dict[str, float | None] = {}
    for signal, names in facts.signals.items():
        value = next((v for v in (scan(text, name) for name in names) if v is not None), None)
        if signal == "kv" and value is not None and value > 1.0:
            series = max(1, sum(_series(text, name) for name in names))
            value = min(1.0, value / series)
        found[signal] = value
    return Pressure(now, **found, capacity_tokens=_capacity(text, facts))


def read_contexts(body: bytes) -> Mapping[str, int]:
    """Return context lengths by model, "" for all models: of one slot from llama.cpp's /props, of
    each loaded model from Ollama's /api/ps. Empty if the body has none."""
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
