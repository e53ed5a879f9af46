"""The process for the page's what-if simulations, and what they may be asked to do.

``python -m paceline.cli.simulation.what_if`` reads one job, a line of JSON, from standard input,
and writes lines of JSON to standard output: its next step, its progress, a result for each run, or
an error. It takes the lowest priority, bounds its resources, and ends when its standard input does,
that is with its parent. With ``check`` it reads a trace through and writes how many requests it
has, or an error; then too it ends with its parent.

``web.what_if.service`` writes jobs. No field is a spec that could name a file: the paths in it are
the server's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from paceline.core.config import CacheConfig
from paceline.errors import ConfigError, PacelineError

if TYPE_CHECKING:
    from paceline.sim.arrival import Arrival
    from paceline.sim.config import ReplicaConfig
    from paceline.sim.recording import Recording
    from paceline.sim.step_times.base import StepTimes

__all__ = ["choices", "main"]

# bytes of frames that one run may leave behind
_MOST_FRAMES: Final = 3 * 2**20
# seconds between progress lines
_PROGRESS: Final = 0.2
# most classes and tenants in a result: those with the most requests
_GROUPS: Final = 20
# most tokens of a trace's request: above any model's context, and within a simulator's capacity
_MOST_TOKENS: Final = 10_000_000
_EMPTY: Final = "the trace has no request with tokens"
# most bytes of a file: a run's frames and its last lines
_MOST_FILE: Final = 64 * 2**20
# attempts to remove the server's folder
_TRIES: Final = 10


def choices() -> dict[str, Any]:
    """Return the policies, hardware cards and model shapes that a job may name."""
    from paceline.cli.flags.plugins import policy_names

    # read here, since the modules for them load numpy
    folder = Path(__file__).parents[2] / "sim" / "step_times"
    named = {
        name: [entry["name"] for entry in json.loads((folder / f"{name}.json").read_text())]
        for name in ("hardware", "models")
    }
    return {"policies": list(policy_names()), **named}


# ---------------------------------------------------------------------- the process


def main() -> int:
    line = sys.stdin.buffer.readline()
    if not line:
        return 1
    job: dict[str, Any] = json.loads(line)
    checks = sys.argv[1:] == ["check"]
    # a user waits for the check of a trace, so it gets more than idle time
    _bound(int(job["memory"]), int(job["seconds"]), idle=not checks)
    parent = threading.Thread(target=_end_with_parent, args=(job,), daemon=True)
    parent.start()
    try:
        return _tell_all(job, checks=checks)
    except BrokenPipeError:
        # the server has ended: the interpreter must not exit before the thread has cleaned up
        parent.join()
        return 1


def _tell_all(job: Mapping[str, Any], *, checks: bool) -> int:
    """Do the job and return the exit status. Raises BrokenPipeError when the reader has gone."""
    try:
        for told in [_checked(job)] if checks else _run(job):
            print(json.dumps(told), flush=True)
    except PacelineError as error:
        print(json.dumps(_said(error, job["workload"]["path"])), flush=True)
        return 1
    except MemoryError:
        print(json.dumps({"error": _too_much(job)}), flush=True)
        return 1
    return 0


def _checked(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Check whether a trace can be simulated; return its number of requests, and any doubt about
    its times."""
    from paceline.sim.workload.traces import open_trace

    try:
        stream, _ = _read(Path(asked["path"]))
        found = sum(1 for _ in stream)
        doubt = open_trace(Path(asked["path"])).doubt()
    except PacelineError as error:
        return _said(error, asked["path"])
    except MemoryError:
        return {"error": _too_much(asked)}
    told: dict[str, Any] = {"requests": found} if found else {"error": _EMPTY}
    return told | ({"doubt": doubt} if doubt else {})


def _said(error: PacelineError, path: str) -> dict[str, Any]:
    # the path of the server's own file means nothing to the user
    return {"error": str(error).replace(path, "the trace")}


def _too_much(job: Mapping[str, Any]) -> str:
    return f"it needs more memory than its limit of {int(job['memory']) // 2**20} MiB"


def _bound(memory: int, seconds: int, *, idle: bool) -> None:
    """Bound resources, before anything large is loaded."""
    if idle:
        with contextlib.suppress(OSError, AttributeError):
            # lowest priority: no other process on this machine waits for it
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (memory, hard))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_MOST_FILE, _MOST_FILE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(19)


def _end_with_parent(job: Mapping[str, Any]) -> None:
    # os.read, since a thread may not hold a buffered reader's lock when the interpreter exits
    while os.read(0, 4096):
        pass
    # a killed server could not remove it; the simulation may write another file meanwhile
    for _ in range(_TRIES):
        shutil.rmtree(job["root"], ignore_errors=True)
        if not os.path.exists(job["root"]):
            break
    # exits even in the middle of a simulation
    os._exit(1)


# ---------------------------------------------------------------------- what it computes


@dataclass(frozen=True, slots=True)
class _Run:
    policy: str
    budget: int
    load: float


def _run(job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Run a job. Raises PacelineError for one that cannot be done."""
    import gc

    yield {"doing": "reading"}
    config = _config(job)
    recording = _recording(job, config)
    arrivals, left_out, prefix_block = _arrivals(job, recording)
    if not arrivals:
        raise ConfigError(_nothing(job))
    yield {"doing": "fitting"}
    config, times = _step_times(job, config, recording)
    runs = [_Run(*each) for each in product(job["policies"], job["budgets"], job["loads"])]
    made = [_changed(config, run, job) for run in runs]
    yield {
        "doing": "simulating",
        "runs": len(runs),
        "requests": len(arrivals),
        "left_out": left_out,
        "span": arrivals[-1].at,
        "steps": 0 if recording is None else len(recording.steps),
    }
    # a simulation makes no cycles, but some objects for every token
    gc.disable()
    for number, (run, each) in enumerate(zip(runs, made, strict=True)):
        for told in _simulate(job, number, run, each, times(), arrivals, prefix_block):
            yield {"run": number, **told}
        gc.collect()


def _config(job: Mapping[str, Any]) -> ReplicaConfig:
    """Return the engine's own settings."""
    from paceline.cli.flags.settings import EngineSettings
    from paceline.sim.config import ReplicaConfig

    settings, engine = EngineSettings.from_json(job["settings"].encode()), job["engine"]
    scheduler = replace(
        settings.scheduler,
        max_model_len=engine["max_model_len"],
        max_num_seqs=engine["max_num_seqs"],
        max_num_batched_tokens=engine["max_num_batched_tokens"],
        policy=engine["policy"],
    )
    cache = CacheConfig(
        block_size=engine["block_size"],
        num_blocks=engine["num_blocks"],
        enable_prefix_caching=engine["enable_prefix_caching"],
        watermark=settings.watermark,
    )
    return ReplicaConfig(scheduler=scheduler, cache=cache, pipeline_depth=settings.pipeline_depth)


def _recording(job: Mapping[str, Any], config: ReplicaConfig) -> Recording | None:
    """Return this server's last minutes; None where the job does not need them."""
    if job["frames"] is None:
        return None
    from paceline.sim.minutes import recording_of

    return recording_of(Path(job["frames"]).read_bytes(), config)


def _arrivals(
    job: Mapping[str, Any], recording: Recording | None
) -> tuple[list[Arrival], int, int]:
    """Return the requests to simulate, the number of others, and the tokens of a prefix piece.

    Raises WorkloadError for a malformed trace.
    """
    stream: Iterator[Arrival]
    if job["workload"]["kind"] == "minutes":
        from paceline.sim.minutes import workload_of

        assert recording is not None, "the server gives frames with its minutes"
        stream, block = workload_of(recording), recording.config.cache.block_size
    else:
        stream, block = _read(Path(job["workload"]["path"]))
    targets = job["targets"]
    found = []
    for arrival in islice(stream, int(job["most_requests"])):
        if arrival.ttft is arrival.tpot is arrival.deadline is None:
            arrival = replace(arrival, ttft=targets["ttft"], tpot=targets["tpot"])
        # all requests go to this model, whichever they name
        found.append(replace(arrival, model="") if arrival.model else arrival)
    if found and found[0].at:
        begin = found[0].at
        found = [replace(arrival, at=arrival.at - begin) for arrival in found]
    return found, sum(1 for _ in stream), block


def _read(path: Path) -> tuple[Iterator[Arrival], int]:
    """Return the requests of a trace, and the tokens of a prefix piece.

    Raises WorkloadError, also while they are read, for a malformed trace or one too large.
    """
    from paceline.sim.workload.base import WorkloadError
    from paceline.sim.workload.traces import open_trace

    trace = open_trace(path)
    if trace.timeless:
        raise WorkloadError("the trace has lengths but no times: add a column with arrival times")

    def bounded() -> Iterator[Arrival]:
        for number, arrival in enumerate(trace.arrivals(), 1):
            longest = max(arrival.prompt_tokens, arrival.output_tokens)
            if longest > _MOST_TOKENS:
                raise WorkloadError(
                    f"request {number} of the trace, at {arrival.at:g} s, has {longest} tokens; "
                    f"prompts and answers of up to {_MOST_TOKENS} tokens are simulated"
                )
            yield arrival

    return bounded(), trace.prefix_block


def _nothing(job: Mapping[str, Any]) -> str:
    if job["workload"]["kind"] == "minutes":
        return "no request arrived in these minutes: send some, choose more, or give a trace"
    return _EMPTY


def _step_times(
    job: Mapping[str, Any], config: ReplicaConfig, recording: Recording | None
) -> tuple[ReplicaConfig, Any]:
    """Return (settings, a function that makes step times); each run draws the same noise.

    Raises ConfigError where there is too little data for a fit, or a name is unknown.
    """
    wanted = job["step_times"]
    if wanted["kind"] == "server":
        from paceline.sim.step_times.recorded import RecordedStepTimes, fit_delays

        assert recording is not None, "the server gives frames for its step times"
        try:
            fitted = RecordedStepTimes(recording, seed=0)
        except ConfigError as error:
            raise ConfigError(
                f"step times cannot be learned from this server's steps: {error}. Send requests, "
                "or choose a hardware and a model"
            ) from None
        return replace(config, delays=fit_delays(recording)), lambda: fitted.another(0)
    from paceline.sim.step_times.models import ModelShape
    from paceline.sim.step_times.roofline import HardwareCard, RooflineStepTimes

    model, card = ModelShape.named(wanted["model"]), HardwareCard.named(wanted["hardware"])
    times = RooflineStepTimes(card, model)
    num_blocks = times.num_blocks(config.cache.block_size)
    return replace(config, cache=replace(config.cache, num_blocks=num_blocks)), lambda: times


def _changed(config: ReplicaConfig, run: _Run, job: Mapping[str, Any]) -> ReplicaConfig:
    """Apply a run's changes. Raises ConfigError for numbers that exclude each other."""
    from paceline.cli.flags.plugins import load_policy

    load_policy(run.policy)
    scheduler = replace(
        config.scheduler,
        policy=run.policy,
        max_num_batched_tokens=run.budget,
        max_num_seqs=job["max_num_seqs"] or config.scheduler.max_num_seqs,
    )
    return replace(config, scheduler=scheduler)


def _simulate(
    job: Mapping[str, Any],
    number: int,
    run: _Run,
    config: ReplicaConfig,
    times: StepTimes,
    arrivals: Sequence[Arrival],
    prefix_block: int,
) -> Iterator[dict[str, Any]]:
    from paceline.sim.pool import Pool
    from paceline.sim.report.metrics import Metrics
    from paceline.sim.simulator import Simulator
    from paceline.sim.workload.shaping import speed_up
    from paceline.timeline.collect import Frames

    metrics, told_frames = Metrics(), bytearray()
    # timeline in the format that the page reads
    frames = Frames(config.scheduling, config.cache, told_frames.extend, most=_MOST_FRAMES)
    simulator = Simulator(
        Pool.single(config, times),
        metrics.add,
        prefix_block=prefix_block,
        recorder=lambda index, config: frames,
    )
    totals = simulator.run(_telling(speed_up(arrivals, run.load), number, len(arrivals)))
    frames.close()
    (Path(job["folder"]) / f"{number}.frames").write_bytes(told_frames)
    summary = metrics.summary(run.policy)
    told = summary.as_json()
    for groups in ("by_class", "by_tenant"):
        largest = sorted(told[groups].items(), key=lambda item: -item[1]["requests"])
        told[groups] = dict(largest[:_GROUPS])
    yield {
        "result": told
        | {
            "policy": run.policy,
            "budget": run.budget,
            "load": run.load,
            "offered_rate": len(arrivals) / arrivals[-1].at * run.load if arrivals[-1].at else 0.0,
            "steps": totals.num_steps,
            "end": totals.end,
            "busy": totals.busy_seconds[0] / totals.end if totals.end else 0.0,
            # end of the timeline; before the run's end if it has more steps than are kept
            "shown_until": frames.until if frames.is_full else totals.end,
        }
    }


def _telling(arrivals: Iterator[Arrival], number: int, total: int) -> Iterator[Arrival]:
    """Yield arrivals, and print progress as the simulator asks for the next one."""
    next_line = 0.0
    for count, arrival in enumerate(arrivals):
        now = time.monotonic()
        if now >= next_line:
            next_line = now + _PROGRESS
            print(json.dumps({"run": number, "done": count / total}), flush=True)
        yield arrival


if __name__ == "__main__":
    sys.exit(main())
