"""Recorded runs of a real vLLM, read from their folders.

A folder of runs holds, per run::

    meta.json        engine arguments; "kv_cache" and "resolved_config" where they were recorded
    requests.jsonl   lengths and timestamps
    config.json      hardware of the run: GPUs, their memory and their link

and next to the runs a folder ``profiles`` with operator times (``step_times.profile``). The layout
is that of LLMServingSim's benchmark (casys-kaist/LLMServingSim).

Values that vLLM resolved itself (number of KV blocks, graph sizes, prefix caching, asynchronous
scheduling) are taken from the run if recorded. Otherwise vLLM 0.19's defaults hold, and the number
of blocks is what the weights leave of the memory.

This module does not know how a run is simulated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Final

from paceline.errors import ConfigError
from paceline.sim.arrival import Arrival
from paceline.sim.step_times.models import ModelShape
from paceline.sim.step_times.profile import GraphPadding, Interconnect

__all__ = ["Measured", "VllmRun", "find_runs"]

_BLOCK: Final = 16
_GIB: Final = 2**30
# vLLM's share of a GPU's memory, unless the run names another
_UTILISATION: Final = 0.9
# required fields of each request; "scheduled_ts" is optional
_FIELDS: Final = (
    "input_toks", "output_toks", "arrival_time", "queued_ts", "first_token_ts", "last_token_ts",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Measured:
    """One request of a run, in seconds from the first arrival."""

    arrival: Arrival
    first_token: float
    last_token: float
    # when it was first planned; None: not recorded
    scheduled: float | None = None

    @property
    def ttft(self) -> float:
        return self.first_token - self.arrival.at

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None with fewer than two tokens."""
        tokens = self.arrival.output_tokens
        return (self.last_token - self.first_token) / (tokens - 1) if tokens > 1 else None

    @property
    def e2e(self) -> float:
        return self.last_token - self.arrival.at


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmRun:
    """One run, read from its folder."""

    name: str
    model: ModelShape
    # the GPU's name in profiles
    hardware: str
    max_num_seqs: int
    max_num_batched_tokens: int
    # longest prompt + output of a request; None: the model's own limit, which is not recorded
    max_model_len: int | None
    # GPUs of one engine
    degree: int
    # engines that share the load
    num_engines: int
    # whether experts are spread over the GPUs of all engines
    expert_parallel: bool
    link: Interconnect
    # bytes of one engine's GPUs that vLLM may use; None: not recorded
    memory: float | None
    block_size: int
    # KV blocks that vLLM counted; None: not recorded
    num_gpu_blocks: int | None
    prefix_caching: bool
    # whether the next step is planned while one runs
    async_scheduling: bool
    padding: GraphPadding
    requests: tuple[Measured, ...]

    @classmethod
    def read(cls, folder: Path, models: Sequence[ModelShape] = ()) -> VllmRun:
        """Read one run.

        Args:
            models: shapes in which the model is looked up first.

        Raises:
            ConfigError: the folder's layout differs from the module's description, or no shape is
                known for its model.
        """
        try:
            meta = _object(folder / "meta.json")
            hardware = folder / "config.json"
            config = _object(hardware) if hardware.exists() else {}
            raw = _rows(folder / "requests.jsonl")
            arguments = meta["engine_kwargs"]
            instance = config["nodes"][0]["instances"][0] if config else {}
            degree = _positive(arguments.get("tensor_parallel_size") or 1, "tensor_parallel_size")
            engines = _positive(arguments.get("data_parallel_size") or 1, "data_parallel_size")
            cache: Mapping[str, Any] = meta.get("kv_cache") or {}
            resolved: Mapping[str, Any] = meta.get("resolved_config") or {}
            scheduling = resolved.get("scheduler_config") or {}
            blocks = cache.get("num_gpu_blocks")
            max_num_seqs = _positive(arguments["max_num_seqs"], "max_num_seqs")
            budget = _positive(arguments["max_num_batched_tokens"], "max_num_batched_tokens")
            longest = arguments.get("max_model_len")
            return cls(
                name=folder.name,
                model=ModelShape.named(meta["model"], models),
                hardware=str(instance.get("hardware") or folder.name.split("-")[0]),
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=budget,
                max_model_len=None if longest is None else _positive(longest, "max_model_len"),
                degree=degree,
                num_engines=engines,
                expert_parallel=bool(arguments.get("enable_expert_parallel")),
                # the file has GB/s and ns
                link=Interconnect(
                    degree,
                    1e9 * float(config.get("link_bw", 0.0)),
                    1e-9 * float(config.get("link_latency", 0.0)),
                ),
                memory=_memory(instance, degree),
                block_size=_positive(cache.get("block_size") or _BLOCK, "block_size"),
                num_gpu_blocks=None if blocks is None else _positive(blocks, "num_gpu_blocks"),
                prefix_caching=bool(cache.get("enable_prefix_caching", True)),
                async_scheduling=bool(scheduling.get("async_scheduling", True)),
                padding=_padding(resolved, max_num_seqs),
                requests=_align(raw),
            )
        except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise ConfigError(f"{folder} is not a recorded vLLM run: {error!r}") from error

    @property
    def num_blocks(self) -> int:
        """Return the KV blocks of one engine for requests: vLLM keeps one as a placeholder
        (``BlockPool.null_block``)."""
        if self.num_gpu_blocks is not None:
            return max(1, self.num_gpu_blocks - 1)
        if self.memory is None:
            raise ConfigError(
                f"run {self.name} says neither how many KV blocks vLLM had (meta.json: "
                "kv_cache.num_gpu_blocks) nor how much memory (config.json: npu_mem.mem_size)"
            )
        model = self.model
        weights = 2.0 * model.parameters_per_engine(self.num_engines if self.expert_parallel else 1)
        block_bytes = self.block_size * model.kv_bytes_per_token()
        return max(1, int((self.memory - weights) / block_bytes) - 1)


def _positive(value: Any, name: str) -> int:
    number = int(value)
    if number < 1 or number != value:
        raise ValueError(f"{name} must be a whole number above 0, got {value!r}")
    return number


def _object(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8-sig"))
    return found


def _rows(path: Path) -> list[dict[str, float]]:
    """Return the checked fields of each request. Requests that failed lack output tokens or a
    stamp, and are left out, as in traces."""
    rows: list[dict[str, float]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), 1):
        if not line.strip():
            continue
        where = f"requests.jsonl:{number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where}: not JSON: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{where}: expected an object, got {type(row).__name__}")
        stamps = row.get("first_token_ts", 0), row.get("last_token_ts", 0)
        if row.get("output_toks") == 0 or None in stamps:
            continue
        names = _FIELDS if row.get("scheduled_ts") is None else (*_FIELDS, "scheduled_ts")
        for name in names:
            # not isinstance: True is not a number here
            if type(row.get(name)) not in (int, float) or not isfinite(row[name]):
                raise ValueError(f"{where}: {name} is {row.get(name)!r}, expected a number")
        for name in ("input_toks", "output_toks"):
            if row[name] < 1 or row[name] != int(row[name]):
                raise ValueError(f"{where}: {name} is {row[name]}, expected tokens, 1 or more")
        if not row["queued_ts"] <= row["first_token_ts"] <= row["last_token_ts"]:
            told = ", ".join(f"{name} {row[name]}" for name in _FIELDS[3:])
            raise ValueError(f"{where}: stamps are out of order: {told}")
        rows.append({name: row[name] for name in names})
    return rows


def _memory(instance: Mapping[str, Any], degree: int) -> float | None:
    memory = instance.get("npu_mem") or {}
    if "mem_size" not in memory:
        return None
    share = float(memory.get("mem_util", _UTILISATION))
    return degree * float(memory["mem_size"]) * share * _GIB


def _padding(resolved: Mapping[str, Any], max_num_seqs: int) -> GraphPadding:
    """Return the graph sizes that vLLM captured; its defaults where they are not recorded."""
    model = resolved.get("model_config") or {}
    if model.get("enforce_eager"):
        return GraphPadding()
    sizes = (resolved.get("compilation_config") or {}).get("cudagraph_capture_sizes")
    if isinstance(sizes, list) and sizes:
        return GraphPadding(tuple(sorted(int(size) for size in sizes)))
    return GraphPadding.like_vllm(max_num_seqs)


def _align(raw: list[dict[str, float]]) -> tuple[Measured, ...]:
    """Align arrivals, which are on the wall clock, with the engine's stamps on a monotonic one. No
    request was queued before it arrived, so the smallest difference is the clocks' offset plus the
    quickest transfer."""
    if not raw:
        raise ValueError("requests.jsonl has no request that ended")
    offset = max(r["arrival_time"] - r["queued_ts"] for r in raw)
    begin = min(r["arrival_time"] for r in raw)

    def at(stamp: float | None) -> float | None:
        return None if stamp is None else stamp + offset - begin

    found = [
        Measured(
            Arrival(
                at=r["arrival_time"] - begin,
                prompt_tokens=int(r["input_toks"]),
                output_tokens=int(r["output_toks"]),
            ),
            first_token=r["first_token_ts"] + offset - begin,
            last_token=r["last_token_ts"] + offset - begin,
            scheduled=at(r.get("scheduled_ts")),
        )
        for r in raw
    ]
    return tuple(sorted(found, key=lambda m: m.arrival.at))


def find_runs(folder: Path) -> tuple[Path, ...]:
    """Return the folders of runs below ``folder``, by name."""
    return tuple(sorted(path.parent for path in folder.glob("*/requests.jsonl")))
