"""Recorded runs of a real vLLM, and their prediction.

A folder of runs holds, per run, ``meta.json`` (engine arguments), ``requests.jsonl`` (lengths and
timestamps), ``config.json`` (hardware of the run: GPUs and their link), and beside the runs a
folder ``profiles`` with operator times (``step_times.profile``).

What is predicted is configured from the run's own settings: vLLM's limits, first come first
served, its prefix cache (prompts of these runs share nothing, so it never hits), asynchronous
scheduling (the next step is planned while one runs: ``pipeline_depth`` 2), and its captured-graph
sizes. One figure, ``HOST_SECONDS``, is measured: how much longer than the sum of its operators a
step takes that is too large for a captured graph. It comes from the first 16 seconds of one run
(Qwen3-32B), where a backlog of prompts makes every step use its whole token budget, so that the
gaps between first-token stamps are step times: 42 of them exceed the sum of their operators by 7.2
ms on average (their median is 8.0). It is used, rounded, for every run. The form (this constant for
large steps alone, attention between the mean and the longest row by two moments) was chosen with
both runs in view, so neither is a hold-out; docs/lab-log.md has what other forms gave.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.errors import ConfigError
from paceline.sim.arrival import Arrival, Served
from paceline.sim.replica import Delays, ReplicaConfig
from paceline.sim.simulator import Pool, Simulator
from paceline.sim.step_times.models import ModelShape
from paceline.sim.step_times.profile import GraphPadding, Interconnect, ProfileStepTimes

__all__ = ["HOST_SECONDS", "Measured", "VllmRun", "find_runs", "predict"]

# seconds that vLLM's host adds to a step beyond the captured sizes; see the module
HOST_SECONDS: Final = 7e-3
_BLOCK: Final = 16
_GIB: Final = 2**30


@dataclass(frozen=True, slots=True)
class Measured:
    """One request of a run, in seconds from the first arrival."""

    arrival: Arrival
    first_token: float
    last_token: float

    @property
    def ttft(self) -> float:
        return self.first_token - self.arrival.at

    @property
    def tpot(self) -> float | None:
        """None with fewer than two tokens."""
        tokens = self.arrival.output_tokens
        return (self.last_token - self.first_token) / (tokens - 1) if tokens > 1 else None

    @property
    def e2e(self) -> float:
        return self.last_token - self.arrival.at


@dataclass(frozen=True, slots=True)
class VllmRun:
    """One run, read from its folder."""

    name: str
    model: ModelShape
    max_num_seqs: int
    max_num_batched_tokens: int
    degree: int
    link: Interconnect
    # bytes of all its GPUs that vLLM may use
    memory: float
    requests: tuple[Measured, ...]

    @classmethod
    def read(cls, folder: Path) -> VllmRun:
        """Raises ConfigError for a folder that is not laid out as the module says."""
        try:
            meta: dict[str, Any] = json.loads((folder / "meta.json").read_text())
            config: dict[str, Any] = json.loads((folder / "config.json").read_text())
            lines = (folder / "requests.jsonl").read_text().splitlines()
            raw: list[dict[str, Any]] = [json.loads(line) for line in lines if line.strip()]
            arguments = meta["engine_kwargs"]
            instance = config["nodes"][0]["instances"][0]
            memory = instance["npu_mem"]
            degree = int(arguments["tensor_parallel_size"])
            return cls(
                name=folder.name,
                model=ModelShape.named(meta["model"]),
                max_num_seqs=int(arguments["max_num_seqs"]),
                max_num_batched_tokens=int(arguments["max_num_batched_tokens"]),
                degree=degree,
                # given in GB/s and ns
                link=Interconnect(
                    degree, 1e9 * float(config["link_bw"]), 1e-9 * float(config["link_latency"])
                ),
                memory=degree * float(memory["mem_size"]) * float(memory["mem_util"]) * _GIB,
                requests=_align(raw),
            )
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            raise ConfigError(f"{folder} is not a recorded vLLM run: {error!r}") from error

    @property
    def num_blocks(self) -> int:
        """KV blocks: what weights in 16 bits leave of the memory."""
        model = self.model
        weights = 2.0 * (
            model.num_layers * model.layer_parameters + 2 * model.vocab_size * model.hidden_size
        )
        free = self.memory - weights
        return max(1, int(free / (_BLOCK * model.kv_bytes_per_token())))


def _align(raw: list[dict[str, Any]]) -> tuple[Measured, ...]:
    """Arrivals are on the wall clock, the engine's stamps on a monotonic one. No request can be
    queued before it arrived, so the smallest distance between the two is the clocks' offset plus
    the quickest way from the one to the other."""
    if not raw:
        raise ValueError("requests.jsonl is empty")
    offset = max(r["arrival_time"] - r["queued_ts"] for r in raw)
    begin = min(r["arrival_time"] for r in raw)
    found = [
        Measured(
            Arrival(
                at=r["arrival_time"] - begin,
                prompt_tokens=int(r["input_toks"]),
                output_tokens=int(r["output_toks"]),
            ),
            first_token=r["first_token_ts"] + offset - begin,
            last_token=r["last_token_ts"] + offset - begin,
        )
        for r in raw
    ]
    return tuple(sorted(found, key=lambda m: m.arrival.at))


def find_runs(folder: Path) -> tuple[Path, ...]:
    """The folders of runs below ``folder``, by name."""
    return tuple(sorted(path.parent for path in folder.glob("*/requests.jsonl")))


def predict(run: VllmRun, profiles: Path, *, host_seconds: float = HOST_SECONDS) -> list[Served]:
    """Simulate a run from the operator times alone; in order of arrival."""
    prefix = _profile_for(run, profiles)
    times = ProfileStepTimes(
        profiles,
        prefix,
        model=run.model,
        link=run.link,
        padding=GraphPadding.like_vllm(run.max_num_seqs),
        host_seconds=host_seconds,
        num_tokens=run.max_num_batched_tokens,
    )
    longest = max(m.arrival.prompt_tokens + m.arrival.output_tokens for m in run.requests)
    config = ReplicaConfig(
        scheduler=SchedulerConfig(
            max_num_batched_tokens=run.max_num_batched_tokens,
            max_num_seqs=run.max_num_seqs,
            max_model_len=longest,
            # what vLLM does not do
            adaptive_token_budget=False,
            future_memory_check=False,
            pace_admission=False,
            relegate_late=False,
            plan_lead_s=math.inf,
            preemption="recompute",
        ),
        cache=CacheConfig(block_size=_BLOCK, num_blocks=run.num_blocks, watermark=0.0),
        pipeline_depth=2,
        delays=Delays(),
    )
    served: list[Served] = []
    Simulator(Pool.single(config, times), served.append).run(m.arrival for m in run.requests)
    return sorted(served, key=lambda s: s.arrival.at)


def _profile_for(run: VllmRun, profiles: Path) -> str:
    """The profile whose name holds the model's and ends in the run's degree."""
    model = run.model.name.split("/")[-1]
    hardware = run.name.split("-")[0]
    found = sorted(
        path.name.removesuffix("-dense.csv")
        for path in profiles.glob(f"{hardware}-{model}-*tp{run.degree}-dense.csv")
    )
    if len(found) != 1:
        raise ConfigError(
            f"{profiles} should hold one profile of {model} on {hardware} for {run.degree} GPU(s), "
            f"found: {', '.join(found) or 'none'}"
        )
    return found[0]
