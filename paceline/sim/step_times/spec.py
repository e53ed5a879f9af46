"""Step times as one line of text, for the command line.

::

    roofline:HARDWARE,MODEL[,DEGREE]       hardware.json and models.json know the names
    recorded:FILE[,noise=off]              output of ``paceline serve --record FILE``
    profile:FOLDER[,PREFIX][,OPTION...]    operator tables
    fixed:SECONDS[,SECONDS_PER_TOKEN]

Options supply what a profile lacks::

    link=GB/S      bandwidth of the GPUs' link; needed where a replica has several of them (tpN)
    latency=TIME   of an empty all-reduce (default 0)
    graphs=N       steps are padded to vLLM's graph sizes for N running requests (default: not)
    host=TIME      of a step, besides its operators, where no graph covers it (default 0)

``make bench NAME=sim`` validates profiles with the first three taken from the recorded run, and the
last from other runs on the same hardware.

This module does not know the simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from paceline.errors import ConfigError
from paceline.sim.config import ReplicaConfig
from paceline.sim.step_times.base import FixedStepTimes, StepTimes
from paceline.sim.step_times.models import ModelShape

__all__ = ["Source", "open_step_times"]

_PROFILE_OPTIONS: Final = ("link", "latency", "graphs", "host")


@dataclass(frozen=True, slots=True)
class Source:
    """Step times and the settings that come with them."""

    times: StepTimes
    # the recorded engine, with its overheads; None without a recording
    config: ReplicaConfig | None = None
    # bytes that the hardware has for keys and values; None: unknown
    kv_bytes: float | None = None
    # bytes of one token's keys and values; None where the model is not known
    kv_bytes_per_token: float | None = None

    def another(self, seed: int) -> Source:
        """Return the same fit for another replica, with noise of its own, which has a state."""
        from paceline.sim.step_times.recorded import RecordedStepTimes

        if isinstance(self.times, RecordedStepTimes):
            return replace(self, times=self.times.another(seed))
        return self

    def num_blocks(self, block_size: int) -> int | None:
        """Return the KV blocks that fit; None: unknown."""
        if self.kv_bytes is None or self.kv_bytes_per_token is None:
            return None
        return max(1, int(self.kv_bytes / (block_size * self.kv_bytes_per_token)))


def open_step_times(spec: str, *, seed: int = 0, models: Sequence[ModelShape] = ()) -> Source:
    """Return the source that ``spec`` describes. Every replica needs its own: noise has a state.

    Args:
        models: shapes in which models are looked up first.

    Raises:
        ConfigError: an unknown kind or name, a missing file, a number out of range.
    """
    kind, _, rest = spec.partition(":")
    parts = rest.split(",")
    if kind == "fixed" and len(parts) <= 2:
        base, per_token = _number(spec, parts[0]), _number(spec, (*parts, "0")[1])
        if base + per_token <= 0:
            raise ConfigError(f"step times {spec!r}: a step must take more than 0 seconds")
        return Source(FixedStepTimes(base, per_token))
    if kind == "roofline" and len(parts) in (2, 3):
        from paceline.sim.step_times.roofline import HardwareCard, RooflineStepTimes

        degree = int(_number(spec, (*parts, "1")[2]))
        model = ModelShape.named(parts[1], models)
        times = RooflineStepTimes(HardwareCard.named(parts[0]), model, degree=degree)
        return Source(
            times,
            kv_bytes=times.kv_capacity_bytes,
            kv_bytes_per_token=model.kv_bytes_per_token(),
        )
    if kind == "recorded" and len(parts) <= 2:
        from paceline.sim.recording import Recording
        from paceline.sim.step_times.recorded import RecordedStepTimes, fit_delays

        if len(parts) == 2 and parts[1] not in ("noise=on", "noise=off"):
            raise ConfigError(f"step times {spec!r}: use noise=on or noise=off")
        noisy = parts[-1] != "noise=off"
        recording = Recording.read(Path(parts[0]))
        fitted = RecordedStepTimes(recording, seed=seed if noisy else None)
        return Source(fitted, replace(recording.config, delays=fit_delays(recording)))
    if kind == "profile":
        return _profile(spec, parts, models)
    raise ConfigError(
        f"step times {spec!r} are none of roofline:HARDWARE,MODEL[,DEGREE], "
        "recorded:FILE[,noise=off], profile:FOLDER[,PREFIX][,link=GB/S][,latency=TIME]"
        "[,graphs=N][,host=TIME], fixed:SECONDS[,SECONDS_PER_TOKEN]"
    )


def _profile(spec: str, parts: Sequence[str], models: Sequence[ModelShape]) -> Source:
    from paceline.sim.step_times.profile import (
        GraphPadding,
        Interconnect,
        ProfileStepTimes,
        find_profile,
        profiled_degree,
    )

    folder = Path(parts[0])
    plain = [part for part in parts[1:] if "=" not in part]
    options: dict[str, str] = {}
    for part in parts[1:]:
        name, equals, value = part.partition("=")
        if equals and (name not in _PROFILE_OPTIONS or name in options):
            raise ConfigError(
                f"step times {spec!r}: {name!r} is no option, or given twice; there are "
                f"{', '.join(_PROFILE_OPTIONS)}"
            )
        if equals:
            options[name] = value
    if len(plain) > 1:
        raise ConfigError(f"step times {spec!r}: {plain[1]!r} is a second prefix")
    prefix = plain[0] if plain else find_profile(folder)
    degree = profiled_degree(prefix)
    link = None
    if "link" in options:
        bandwidth = 1e9 * _number(spec, options["link"])
        link = Interconnect(degree, bandwidth, _seconds(options.get("latency", "0")))
    elif "latency" in options:
        raise ConfigError(f"step times {spec!r}: latency= is that of a link, which link= gives")
    if link is not None and degree < 2:
        raise ConfigError(
            f"step times {spec!r}: {prefix} was measured for one GPU, which has no link to use"
        )
    padding = None
    if "graphs" in options:
        running = _number(spec, options["graphs"])
        if running < 1 or running != int(running):
            raise ConfigError(
                f"step times {spec!r}: graphs= is a whole number of running requests, at least 1"
            )
        padding = GraphPadding.like_vllm(int(running))
    profile = ProfileStepTimes(
        folder,
        prefix,
        models=models,
        link=link,
        padding=padding,
        host_seconds=_seconds(options.get("host", "0")),
    )
    return Source(profile, kv_bytes_per_token=profile.model.kv_bytes_per_token())


def _seconds(text: str) -> float:
    from paceline.sim.workload.spec import parse_seconds

    return parse_seconds(text)


def _number(spec: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < 1e6:
        raise ConfigError(f"step times {spec!r}: {text!r} is not a number of 0 or more")
    return value
