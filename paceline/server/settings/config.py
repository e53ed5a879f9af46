"""Settings of a server: small, frozen, validated when they are made."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

from paceline.core.sampling_params import MAX_LOGPROBS, SamplingParams
from paceline.core.slo import Slo
from paceline.errors import ConfigError, InvalidRequestError
from paceline.http.bounds import DEFAULT_BOUNDS, Bounds
from paceline.http.keys import ApiKey, KeyRing
from paceline.http.otlp import check_endpoint
from paceline.http.rate_limits.rates import NO_LIMITS, KeyLimits
from paceline.http.rate_limits.store import check_storage_url
from paceline.http.tls import check_tls_files
from paceline.ranges import Range, outside, ranges_of
from paceline.server.model_formats.reasoning import REASONING_FORMATS
from paceline.server.model_formats.tool_formats import TOOL_FORMATS

__all__ = [
    "MAX_METRICS_TENANTS",
    "MAX_MODEL_NAME_CHARS",
    "SAMPLING_DEFAULTS",
    "AdapterConfig",
    "AdapterModule",
    "BatchConfig",
    "GivenSetting",
    "ServerConfig",
    "WhatIfConfig",
    "sampling_defaults",
]

MAX_MODEL_NAME_CHARS: Final = 256
# each tenant has nine series
MAX_METRICS_TENANTS: Final = 1000
# extensions and desktop applications send origins too
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[A-Za-z0-9._\[\]:*-]+")
_HOST: Final = re.compile(r"(\*\.)?[A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\]")
_SAMPLING_KEYS: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# fields of a generation_config.json that are defaults of requests
SAMPLING_DEFAULTS: Final = (*_SAMPLING_KEYS, "max_new_tokens")

_SECONDS: Final = Range(0, below=True, too_low="0 or more seconds")


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


@dataclass(frozen=True, slots=True)
class GivenSetting:
    """A setting that differs from its default, as text without secrets."""

    # the flag that sets it
    flag: str
    # empty: the flag takes no value
    value: str
    # the default, as text; empty: not shown
    default: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfConfig:
    """How the page's what-if is computed: in a separate process, as this one serves requests."""

    # command that starts the process; it reads a job from standard input
    command: tuple[str, ...]
    # the engine's settings, as its process was given them
    settings: str
    # the policies, hardware and models that a job may name
    choices: Callable[[], Mapping[str, Any]]
    # command that checks an uploaded trace, given on standard input; empty: traces are not checked
    # before a job
    check: tuple[str, ...] = ()
    # limits per process: CPU seconds, wall-clock seconds, bytes of memory; it is ended above any
    cpu_seconds: int = 120
    seconds: float = 900.0
    memory: int = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """Settings of ``/v1/files`` and ``/v1/batches``. Raises ConfigError for a bad value."""

    # created when the first file is stored
    folder: Path
    # refuse to start if the folder cannot be used; otherwise files and batches get 503
    required: bool = False
    # maximum size of one uploaded file, bytes
    max_file_bytes: Annotated[int, Range(1)] = 200 * 2**20
    # maximum size of all contents together, bytes
    max_bytes: Annotated[int, Range(1)] = 10 * 2**30
    # maximum requests of one batch
    max_requests: Annotated[int, Range(1)] = 50_000
    # lines, over all batches, that the engine works on at once; None: half of its max_num_seqs
    concurrency: Annotated[int | None, Range(1)] = None

    def __post_init__(self) -> None:
        for _, message in outside(self, _BATCH_RANGES):
            raise ConfigError(f"batches: {message}")


@dataclass(frozen=True, slots=True)
class AdapterModule:
    """An adapter that a server is started with."""

    name: str
    path: str
    # it stays in memory
    pinned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """Sources of adapters."""

    modules: tuple[AdapterModule, ...] = ()
    # requests with a key of scope admin, or all without keys, may load and unload
    allow_runtime: bool = False
    # folders, absolute, that requests may load from
    roots: tuple[Path, ...] = ()
    # folder in which an unknown model's name is looked for; None: nowhere
    resolve: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of one HTTP server. Raises ConfigError with the numbers for a bad value."""

    # names that requests may use; * stands for any characters, except in the first name, which
    # answers and metrics carry. Empty: the engine's name
    served_model_names: tuple[str, ...] = ()
    # seconds for which running requests may continue after SIGTERM before they are aborted
    drain_timeout: Annotated[float, _SECONDS] = 30.0
    # time without a request that has the header of a fleet, and without any running one, after
    # which the server ends, s; 0: never
    exit_unwatched: Annotated[float, _SECONDS] = 0.0
    # maximum size of a request body, bytes; a larger one is refused with 413
    max_body_bytes: Annotated[int, Range(1)] = 8 * 2**20
    # maximum choices (n) of one prompt; the engine's max_num_seqs bounds it too
    max_choices: Annotated[int, Range(1)] = 128
    # maximum prompts of one completions request
    max_prompts: Annotated[int, Range(1)] = 1024
    # defaults of a request, usually from generation_config.json: temperature, top_p, top_k, min_p,
    # repetition_penalty, and max_new_tokens as the default of max_tokens
    default_sampling: Mapping[str, float] = field(default_factory=dict)
    # seed of the draws for requests without one; None: a random one
    seed: int | None = None
    # arguments of the chat template where a request has none of that name
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    # render templates that requests carry: a hostile one can loop for ever
    trust_request_chat_template: bool = False
    # refuse chat and completions with fields that are not read, instead of naming them in a header
    strict_fields: bool = False
    # maximum log-probabilities a request may ask for at each position; -1: the whole vocabulary
    max_logprobs: Annotated[int, Range(-1, 2**31, below=True)] = MAX_LOGPROBS
    # serve GET /tokenizer_info, which shows the chat template
    enable_tokenizer_info: bool = False
    # add vLLM's per-request times to each answer
    enable_per_request_metrics: bool = False
    # targets by class name; they add to or replace the built-in classes
    slo_classes: Mapping[str, Slo] = field(default_factory=dict)
    # cost of the machine per hour, in any currency; 0: cost is not reported
    price_per_hour: Annotated[float, Range(0, below=True)] = 0.0
    # tenants without keys that get metrics of their own, in order of arrival. Callers choose their
    # names, and every reader of metrics sees them
    metrics_tenants: Annotated[int, Range(0, MAX_METRICS_TENANTS)] = 0
    # how the model writes tool calls, a name of tool_formats; None: detected from its chat template
    tool_call_parser: str | None = None
    # how the model marks reasoning, a name of server/model_formats/reasoning.py, or "none":
    # reasoning is sent as text; None: detected from its chat template
    reasoning_parser: str | None = None
    # seconds without an event after which a stream gets a comment, also while queued; 0: never
    sse_keep_alive: Annotated[float, _SECONDS] = 15.0
    # seconds for which a caller may leave more than a full buffer unread, unless it reads at 4
    # KiB/s; 0: unlimited
    slow_reader_timeout: Annotated[float, _SECONDS] = 60.0
    # PEM files of a certificate chain and its key, which the first may hold too; None: plain HTTP
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    # keys that callers need; empty: every caller is served
    api_keys: tuple[ApiKey, ...] = ()
    # OTLP/HTTP URL that traces are sent to; None: no traces
    otlp_endpoint: str | None = None
    # where files and batches are kept; None: they are not served
    batches: BatchConfig | None = None
    # serve the page at /ui
    ui: bool = True
    # the page's files, read again at each request; None: those of the package, read once
    ui_dir: Path | None = None
    # maximum size of the page's timeline, bytes; 0: no timeline
    timeline_history: int = 8 * 2**20
    # how the page's what-if is computed; None: the page has no what-if
    what_if: WhatIfConfig | None = None
    # bounds of connections, heads and JSON
    bounds: Bounds = DEFAULT_BOUNDS
    # limits of every caller; a key's own limits override them
    limits: KeyLimits = NO_LIMITS
    # URL of a Redis that several servers share for their counts; None: each counts by itself. Not
    # shown, because it may hold a password
    rate_limit_storage: str | None = field(default=None, repr=False)
    # origins of web pages that may send requests and read answers, "*" for all, and within one for
    # any characters; empty: none
    cors_origins: tuple[str, ...] = ()
    # values of the Host header that are accepted; empty: all
    allowed_hosts: tuple[str, ...] = ()
    # share cached prefixes between keys: a caller can then infer what another one has sent
    share_prefix_cache: bool = False
    # where adapters come from; without effect on an engine that has none
    adapters: AdapterConfig = AdapterConfig()
    # settings of the server and of its engine that differ from their defaults, for display
    given: tuple[GivenSetting, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        for _, message in outside(self, _RANGES):
            raise ConfigError(message)
        _require(
            not self.served_model_names or "*" not in self.served_model_names[0],
            "the first served model name is the one that answers carry, so it may not hold *: got "
            f"{self.served_model_names[:1]}",
        )
        for name in self.served_model_names:
            _require(
                0 < len(name) <= MAX_MODEL_NAME_CHARS,
                f"a served model name must have 1 to {MAX_MODEL_NAME_CHARS} characters, "
                f"got {len(name)}",
            )
        _require(
            self.reasoning_parser in (None, "none", *REASONING_FORMATS),
            f"reasoning_parser must be none or one of {', '.join(REASONING_FORMATS)}, "
            f"got {self.reasoning_parser!r}",
        )
        _require(
            self.tool_call_parser is None or self.tool_call_parser in TOOL_FORMATS,
            f"tool_call_parser must be one of {', '.join(TOOL_FORMATS)}, "
            f"got {self.tool_call_parser!r}",
        )
        _require(
            self.timeline_history == 0 or self.timeline_history >= 65536,
            f"timeline_history must be at least 64 KiB, or 0: none is kept, "
            f"got {self.timeline_history}",
        )
        _require(
            self.ui_dir is None or (self.ui and (self.ui_dir / "index.html").is_file()),
            f"ui_dir {self.ui_dir} must hold an index.html, and the page be served",
        )
        if self.otlp_endpoint is not None:
            check_endpoint(self.otlp_endpoint)
        if self.ssl_certfile is not None:
            check_tls_files(self.ssl_certfile, self.ssl_keyfile)
        _require(
            self.ssl_keyfile is None or self.ssl_certfile is not None,
            f"ssl_keyfile {self.ssl_keyfile} needs ssl_certfile: its certificate",
        )
        # raises for duplicates
        KeyRing(self.api_keys)
        if self.rate_limit_storage is not None:
            check_storage_url(self.rate_limit_storage)
            own = [key.limits.get(kind) for key in self.api_keys for kind in ("requests", "tokens")]
            _require(
                any(rate is not None for rate in (self.limits.requests, self.limits.tokens, *own)),
                "rate_limit_storage counts requests and tokens, and no rate of either is limited: "
                "set one, or leave it out",
            )
        for origin in self.cors_origins:
            _require(
                origin == "*" or _ORIGIN.fullmatch(origin) is not None,
                f"a CORS origin is * or like https://example.org, got {origin[:80]!r}",
            )
        for host in self.allowed_hosts:
            _require(
                _HOST.fullmatch(host) is not None,
                f"an allowed host is a name or address without port, got {host[:80]!r}",
            )
        unknown = sorted(set(self.default_sampling) - set(SAMPLING_DEFAULTS))
        _require(not unknown, f"default_sampling does not know {unknown}")
        try:
            SamplingParams(
                max_tokens=int(self.default_sampling.get("max_new_tokens", 1)),
                temperature=self.default_sampling.get("temperature", 1.0),
                top_k=int(self.default_sampling.get("top_k", 0)),
                top_p=self.default_sampling.get("top_p", 1.0),
                min_p=self.default_sampling.get("min_p", 0.0),
                repetition_penalty=self.default_sampling.get("repetition_penalty", 1.0),
            )
        except InvalidRequestError as error:
            raise ConfigError(f"default_sampling: {error}") from error


_RANGES: Final = ranges_of(ServerConfig)
_BATCH_RANGES: Final = ranges_of(BatchConfig)


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, float]:
    """Return the part of a ``generation_config.json`` that is a ``ServerConfig.default_sampling``.

    Null and absent entries are left out, and so are those the server has no field for. Raises
    ConfigError for a value that is not a number.
    """
    found: dict[str, float] = {}
    for key in SAMPLING_DEFAULTS:
        value = generation_config.get(key)
        if value is None:
            continue
        _require(
            type(value) in (int, float) and math.isfinite(value),
            f"generation_config has {key}={value!r}, which is not a number",
        )
        found[key] = value
    return found
