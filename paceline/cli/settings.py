"""What an engine is built from, as one value that survives a trip through JSON.

The server's process makes it from flags and hands it to the engine's process on standard input.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, fields
from typing import Any

from paceline.core.errors import ConfigError

__all__ = ["ENGINE_PROCESS", "EngineSettings"]

# starts a process that builds an engine from ``EngineSettings.to_json`` (``cli/engine_process.py``)
ENGINE_PROCESS = (sys.executable, "-m", "paceline.cli.engine_process")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of one engine. Ranges are checked where the values are used: by the scheduler's
    configs, by the backend, and by ``wiring.build_core`` for what only fits or not."""

    # name answers carry; also "model" in /v1/models
    model_name: str
    # folder or .gguf file; None for the null backend
    model_path: str | None
    # "torch" or "null"
    backend: str = "torch"
    # "auto", "cpu", "cuda", "cuda:1"
    device: str = "auto"
    # of weights: "auto", "float32", "bfloat16", or with native compute "int8" or "q4"
    dtype: str = "auto"
    # of the KV cache: "auto", "float32", "bfloat16" or "int8"
    kv_dtype: str = "auto"
    # what computes: "torch", "native" for the C++ library, or "auto" for whichever is faster here
    compute: str = "auto"
    # level of the native kernels, e.g. "avx2"; None: the best that runs
    isa: str | None = None
    # prompt + output tokens of one request; None: as long as the model and the KV cache allow
    max_model_len: int | None = None
    # tokens per KV block
    block_size: int = 16
    # the KV pool's size in blocks or in bytes, not both; neither: the backend chooses
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    enable_prefix_caching: bool = True
    # what cached prefixes that nobody uses may keep of it; None: see ``wiring.idle_blocks``
    prefix_cache_bytes: int | None = None
    watermark: float = 0.01
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    policy: str = "deadline"
    priority_ageing_s: float = 60.0
    adaptive_token_budget: bool = True
    coalesce_window_s: float = 0.05
    coalesce_size: int = 16
    best_effort_delay_s: float = 60.0
    bypass_window: int = 8
    max_bypasses: int = 64
    best_effort_step_s: float = 0.03
    max_token_gap_s: float | None = 0.25
    plan_lead_s: float = 0.002
    background_share: float | None = 0.1
    future_memory_check: bool = True
    pace_admission: bool = True
    relegate_late: bool = True
    # None: unlimited, as suits work that is all at hand (paceline generate)
    max_num_waiting: int | None = None
    max_predicted_wait_s: float | None = None
    queue_timeout_s: float | None = None
    preemption: str = "auto"
    # host memory for swapped KV blocks; None: half the KV cache's size
    swap_bytes: int | None = None
    pressure_threshold: float = 1.0
    pipeline_depth: int = 2
    # processor threads of the backend; None: as many as it may use of the nodes'
    threads: int | None = None
    # the NUMA nodes to compute on: "auto", "off" for all of them, or a list such as "0-1"
    numa: str = "auto"
    # of an engine that replaces one: "auto" where these nodes cannot be had any more
    numa_fallback: bool = False
    # seconds a step of the null backend takes
    null_step_time: float = 0.0
    log_level: str = "info"
    # file that every step and request is written to
    record: str | None = None
    # "text" or "json"
    log_format: str = "text"

    def __post_init__(self) -> None:
        if self.num_blocks is not None and self.kv_cache_bytes is not None:
            raise ConfigError(
                f"--num-blocks {self.num_blocks} and --kv-cache-memory {self.kv_cache_bytes} both "
                "size the KV cache: give one of them"
            )
        if self.prefix_cache_bytes is not None and not self.enable_prefix_caching:
            raise ConfigError(
                f"--prefix-cache-memory {self.prefix_cache_bytes} changes nothing with "
                "--no-enable-prefix-caching: leave one out"
            )
        if self.backend == "torch" and self.model_path is None:
            raise ConfigError("the torch backend needs a model")
        if self.backend != "null" and self.null_step_time > 0:
            raise ConfigError(
                f"--null-step-time {self.null_step_time:g} is for --backend null, not for "
                f"{self.backend}"
            )

    def to_json(self) -> bytes:
        """For the engine process's standard input."""
        import json

        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> EngineSettings:
        """Raises ConfigError for anything ``to_json`` of this version did not write."""
        import json

        try:
            values: Any = json.loads(data)
        except ValueError as error:
            raise ConfigError(f"engine settings are not JSON: {error}") from error
        known = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or set(values) != known:
            got = sorted(values) if isinstance(values, dict) else type(values).__name__
            raise ConfigError(f"engine settings must have exactly {sorted(known)}, got {got}")
        return cls(**values)
