"""Settings that an engine is built from, as one value that can be sent as JSON.

The server's process makes it from flags and hands it to the engine's process on standard input.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Final

from paceline.backends.loading.settings import BackendSettings
from paceline.cli.flags.arguments import shown_bytes
from paceline.core.config import SchedulerConfig
from paceline.errors import ConfigError
from paceline.renamed import is_gone, is_now
from paceline.speculation.settings import SpeculationSettings

__all__ = ["ENGINE_PROCESS", "TRACE_PROCESS", "WHAT_IF_PROCESS", "EngineSettings"]

# command of a process that builds an engine from ``EngineSettings.to_json``
ENGINE_PROCESS = (sys.executable, "-m", "paceline.cli.serve.engine_process")
# command of a process that simulates it, or reads a trace for that (``cli/simulation/what_if.py``)
WHAT_IF_PROCESS = (sys.executable, "-m", "paceline.cli.simulation.what_if")
TRACE_PROCESS = (*WHAT_IF_PROCESS, "check")


_ANY: Final = BackendSettings()
# defaults of an engine that serves; other users of a scheduler name theirs
_SERVED: Final = SchedulerConfig(policy="deadline", speculative_config={"method": "auto"})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of one engine: those that the backend and the scheduler declare, and its own.
    ``of``, ``value`` and ``changed`` know all of them by name, as flags do."""

    # name in answers, and in /v1/models as "model"
    model_name: str
    # folder or .gguf file; None for the null backend
    model_path: str | None
    # "torch" or "null"
    backend: str = "torch"
    # folder or .gguf file of the weights; None: the model's
    weights_path: str | None = None
    # folder or .gguf file of the tokenizer; None: the model's
    tokenizer: str | None = None
    # source of the chat template; None: the checkpoint's
    chat_template: str | None = None
    # where sampling defaults are from: "auto", "vllm" for none, or a folder; and what wins over
    # them
    generation_config: str = "auto"
    override_generation_config: dict[str, Any] = field(default_factory=dict)
    # settings for loading and running the model; the null backend uses the sizes
    load: BackendSettings = _ANY
    # its max_model_len is set when the backend exists (``wiring.choose_max_model_len``)
    scheduler: SchedulerConfig = _SERVED
    enable_prefix_caching: bool = True
    # bytes of the KV cache that unused cached prefixes may keep; None: see
    # ``wiring.idle_blocks``
    prefix_cache_bytes: int | None = None
    watermark: float = 0.01
    pipeline_depth: int = 2
    # duration of a null backend's step, s
    null_step_time: float = 0.0
    log_level: str = "info"
    # file that receives every step and request
    record: str | None = None
    # publish every step (``engine.timeline``)
    timeline: bool = False
    # "text" or "json"
    log_format: str = "text"
    # adapters are served, in this number of bytes (None: a tenth of the memory that is free), and
    # at most this number of them in memory; ranks of a module; format of their values
    enable_lora: bool = False
    lora_bytes: int | None = None
    max_cpu_loras: int | None = None
    max_lora_rank: int | None = None
    lora_dtype: str = "auto"
    # folder of KV blocks on disk, None for none, and its most bytes; port at which peers ask for
    # blocks, None for none, and its address
    kv_store: str | None = None
    kv_store_bytes: int = 8 << 30
    kv_port: int | None = None
    kv_host: str = "127.0.0.1"
    # page of the turns with other engines of the server, and this one's weight there; None: there
    # are no others
    turn: str | None = None
    turn_weight: float = 1.0
    # processors that this engine may use; None: those of the server
    cpus: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        load = self.load
        if load.num_blocks is not None and load.kv_cache_bytes is not None:
            raise ConfigError(
                f"--num-blocks {load.num_blocks} and --kv-cache-memory "
                f"{shown_bytes(load.kv_cache_bytes)} both size the KV cache: give only one"
            )
        if self.prefix_cache_bytes is not None and not self.enable_prefix_caching:
            raise ConfigError(
                f"--prefix-cache-memory {shown_bytes(self.prefix_cache_bytes)} has no effect "
                "with --no-enable-prefix-caching: leave one out"
            )
        SpeculationSettings.of(self.scheduler.speculative_config)
        if self.backend == "torch" and self.model_path is None:
            raise ConfigError("the torch backend needs a model")
        if self.backend != "null" and self.null_step_time > 0:
            raise ConfigError(
                f"--null-step-time {self.null_step_time:g} is for --backend null, not for "
                f"{self.backend}"
            )

    @property
    def keeps_blocks(self) -> bool:
        """Tell whether KV blocks leave the engine's memory."""
        return self.kv_store is not None or self.kv_port is not None

    @classmethod
    def of(cls, **values: Any) -> EngineSettings:
        """Make settings by name, wherever they are declared; others have their defaults, and the
        backend is the null backend if there is no model."""
        return cls(model_name="", model_path=None, backend="null").changed(
            **({} if values.get("model_path") is None else {"backend": "torch"}) | values
        )

    def changed(self, **values: Any) -> EngineSettings:
        """Return a copy with these settings by name, wherever they are declared. Raises
        ConfigError for one that has another name now or is gone."""
        if answer := is_now(values, _PART) or is_gone(values):
            raise ConfigError(answer)
        parts: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            parts.setdefault(_PART.get(name, ""), {})[name] = value
        if values.get("enable_chunked_prefill") is False:
            # it is set when the backend exists, and may not exceed a step before
            parts["scheduler"]["max_model_len"] = 1
        own = parts.pop("", {})
        return replace(
            self, **own, **{part: replace(getattr(self, part), **v) for part, v in parts.items()}
        )

    def value(self, name: str) -> Any:
        """Return a setting by name, wherever it is declared."""
        part = _PART.get(name)
        return getattr(self if part is None else getattr(self, part), name)

    def to_json(self) -> bytes:
        """Encode the settings for the engine process's standard input."""
        import json

        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> EngineSettings:
        """Decode settings. Raises ConfigError unless ``to_json`` of this version wrote them."""
        import json

        try:
            values: Any = json.loads(data)
        except ValueError as error:
            raise ConfigError(f"engine settings are not JSON: {error}") from error
        values = _exactly(cls, values)
        parts = {name: made(**_exactly(made, values[name])) for name, made in _PARTS.items()}
        return cls(**{**values, **parts})


_PARTS: Final[dict[str, Any]] = {"load": BackendSettings, "scheduler": SchedulerConfig}
# part that declares a setting; max_model_len is the backend's, the length asked for
_PART: Final = {each.name: part for part in reversed(_PARTS) for each in fields(_PARTS[part])}


def _exactly(made: Any, values: Any) -> dict[str, Any]:
    """Return ``values`` if they name exactly the fields of ``made``; else raise ConfigError."""
    known = {each.name for each in fields(made)}
    if not isinstance(values, dict) or set(values) != known:
        got = sorted(values) if isinstance(values, dict) else type(values).__name__
        raise ConfigError(f"engine settings must have exactly {sorted(known)}, got {got}")
    return values
