"""Reader of ``paceline serve --record`` files: steps, requests, and their workload.

The layout is documented in ``engine.recorder``, which writes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.engine.recorder import RECORDING_VERSION
from paceline.errors import ConfigError
from paceline.renamed import is_now
from paceline.sim.arrival import Arrival
from paceline.sim.config import ReplicaConfig

__all__ = ["RecordedRequest", "RecordedStep", "Recording"]


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One step; times in seconds of the engine's clock."""

    planned: float
    done: float
    # duration that the backend reports
    seconds: float
    # (start, tokens) of rows of several tokens
    wide: tuple[tuple[int, int], ...]
    narrow_rows: int
    # number of positions before rows of one token: their sum, and the largest
    narrow_keys: int
    longest: int
    # rows that sampled a token
    samples: int
    # of the adapters of its rows: bytes, and products
    adapters: tuple[int, int] = (0, 0)

    @property
    def wide_tokens(self) -> int:
        return sum(tokens for _, tokens in self.wide)

    @property
    def wide_keys(self) -> float:
        """Keys that wide rows attend to, summed over their tokens."""
        return sum(tokens * (start + tokens / 2) for start, tokens in self.wide)


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One request's times in seconds of the engine's clock; None: that did not happen."""

    request_id: str
    arrival: float
    # when the engine's loop took it
    taken: float
    scheduled: float | None
    first_token: float | None
    last_token: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    preemptions: int
    end: str
    slo: dict[str, Any]
    tenant: str
    priority: int
    # a name for its adapter's contents; "": it had none
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class Recording:
    """A whole file."""

    # the recorded engine's settings
    config: ReplicaConfig
    steps: tuple[RecordedStep, ...]
    # in order of arrival
    requests: tuple[RecordedRequest, ...]
    # records that the engine dropped for lack of room; 0 in a complete recording
    num_dropped: int

    @classmethod
    def read(cls, path: Path) -> Recording:
        """Read a file. Raises ConfigError, with file and line, for lines that the engine did not
        write. A recording without its last line (the engine was killed) is read up to its end."""
        steps: list[RecordedStep] = []
        requests: list[RecordedRequest] = []
        config: ReplicaConfig | None = None
        dropped = 0
        number = 0
        try:
            with path.open(encoding="utf-8-sig") as lines:
                for line in lines:
                    number += 1
                    record: dict[str, Any] = json.loads(line)
                    if config is None:
                        config = _config(record)
                    elif "step" in record:
                        steps.append(_step(record))
                    elif "request" in record:
                        requests.append(_request(record))
                    elif "end" in record:
                        dropped = int(record["dropped"])
                    else:
                        raise KeyError("step, request or end")
        except OSError as error:
            raise ConfigError(f"cannot read the recording: {error}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}:{number} is not a line of a recording: {error!r}") from error
        if config is None:
            raise ConfigError(f"{path} is empty, not a recording")
        requests.sort(key=lambda request: request.arrival)
        return cls(config, tuple(steps), tuple(requests), dropped)

    def workload(self) -> Iterator[Arrival]:
        """Yield the requests that were answered, from the first arrival on."""
        begin = self.requests[0].arrival if self.requests else 0.0
        for request in self.requests:
            if request.output_tokens < 1:
                continue
            slo = request.slo
            yield Arrival(
                at=request.arrival - begin,
                prompt_tokens=request.prompt_tokens,
                output_tokens=request.output_tokens,
                slo_class="best-effort" if slo.get("best_effort") else slo["slo_class"],
                ttft=slo["ttft"],
                tpot=slo["tpot"],
                deadline=slo["deadline"],
                tenant=request.tenant,
                adapter=request.adapter,
                priority=request.priority,
            )


def _config(record: dict[str, Any]) -> ReplicaConfig:
    version = record.get("paceline_recording")
    if version != RECORDING_VERSION:
        raise ValueError(f"version {version!r} of the format, this reads {RECORDING_VERSION}")
    if renamed := is_now(record["scheduler"], {field.name for field in fields(SchedulerConfig)}):
        raise ValueError(f"{renamed}: record it again")
    return ReplicaConfig(
        scheduler=SchedulerConfig(**record["scheduler"]),
        # requests never wait for window blocks, so the simulation has none
        cache=CacheConfig(**record["cache"] | {"window": 0, "num_window_blocks": 0}),
        pipeline_depth=int(record["pipeline_depth"]),
    )


def _step(record: dict[str, Any]) -> RecordedStep:
    rows, keys, longest = record["narrow"]
    adapters = record.get("adapters", (0, 0))
    return RecordedStep(
        planned=float(record["planned"]),
        done=float(record["done"]),
        seconds=float(record["seconds"]),
        wide=tuple((int(start), int(tokens)) for start, tokens in record["rows"]),
        narrow_rows=int(rows),
        narrow_keys=int(keys),
        longest=int(longest),
        samples=int(record["samples"]),
        adapters=(int(adapters[0]), int(adapters[1])),
    )


def _request(record: dict[str, Any]) -> RecordedRequest:
    return RecordedRequest(
        request_id=str(record["request"]),
        arrival=float(record["arrival"]),
        taken=float(record["taken"]),
        scheduled=record["scheduled"],
        first_token=record["first_token"],
        last_token=float(record["last_token"]),
        prompt_tokens=int(record["prompt_tokens"]),
        output_tokens=int(record["output_tokens"]),
        cached_tokens=int(record["cached_tokens"]),
        preemptions=int(record["preemptions"]),
        end=str(record["end"]),
        slo=dict(record["slo"]),
        tenant=str(record["tenant"]),
        priority=int(record["priority"]),
        adapter=str(record.get("adapter", "")),
    )
