"""Simulating a recorded vLLM run: this project's scheduler, set to decide as vLLM does.

vLLM 0.19 (``vllm/v1/core/sched/scheduler.py``) differs from this project's defaults as follows, and
the settings here follow vLLM:

* Waiting requests are admitted strictly in order of arrival. The first one that does not fit keeps
  all others out (``max_skip_ahead`` 0), and a request that fits now is admitted, whatever the
  others will still need (``future_memory_check`` and ``watermark`` 0).
* When memory is short the last running request is preempted, to be recomputed as far as the prefix
  cache no longer has its blocks (``LastInFirstOut``). A step that preempts admits no request, as
  here.
* One block of the pool is reserved (``VllmRun.num_blocks``).
* A step takes its whole token budget, and the next one is planned as soon as one starts
  (``async_scheduling``: ``pipeline_depth`` 2).

The first of these matters most to a run that is short of memory: with this project's skipping,
RTX4090-Llama-3.1-8B is preempted three times as often, and every mean is a fifth too long.

vLLM checks that the whole prompt fits before it admits a request
(``scheduler_reserve_full_isl``) but takes the blocks of each chunk when it is scheduled; here they
are taken at once. That made no difference to any recorded run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.policies import POLICIES, FcfsPolicy
from paceline.core.request import Request
from paceline.errors import ConfigError
from paceline.routing import LeastOutstanding
from paceline.sim.arrival import Served
from paceline.sim.pool import Pool, ReplicaSpec
from paceline.sim.replica import Delays, ReplicaConfig
from paceline.sim.simulator import PlanObserver, Simulator
from paceline.sim.step_times.experts import ExpertGroup
from paceline.sim.step_times.profile import ProfileStepTimes
from paceline.sim.vllm_runs.runs import VllmRun

__all__ = [
    "LAST_IN_FIRST_OUT",
    "LastInFirstOut",
    "predict",
    "register",
    "replica_config",
    "step_times",
]


def step_times(
    run: VllmRun,
    profiles: Path,
    *,
    host_seconds: float = 0.0,
    experts: ExpertGroup | None = None,
) -> ProfileStepTimes:
    """Return the operators of the run's GPU, with its link and graph sizes.

    Args:
        host_seconds: added to a step that no captured graph covers, see ``host``.
        experts: the engines that share a mixture of experts.

    Raises:
        ConfigError: no profile, or several, for the run's hardware, model and number of GPUs.
    """
    return ProfileStepTimes(
        profiles,
        _profile_for(run, profiles),
        model=run.model,
        link=run.link,
        padding=run.padding,
        host_seconds=host_seconds,
        experts=experts,
    )


def replica_config(run: VllmRun) -> ReplicaConfig:
    """Return the configuration of one engine of the run, as the module describes it."""
    register()
    longest = max(m.arrival.prompt_tokens + m.arrival.output_tokens for m in run.requests)
    return ReplicaConfig(
        scheduler=SchedulerConfig(
            max_num_batched_tokens=run.max_num_batched_tokens,
            max_num_seqs=run.max_num_seqs,
            max_model_len=run.max_model_len or longest,
            policy=LAST_IN_FIRST_OUT,
            max_skip_ahead=0,
            adaptive_token_budget=False,
            future_memory_check=False,
            pace_admission=False,
            demote_late=False,
            schedule_ahead_s=math.inf,
            preemption="recompute",
        ),
        cache=CacheConfig(
            block_size=run.block_size,
            num_blocks=run.num_blocks,
            enable_prefix_caching=run.prefix_caching,
            watermark=0.0,
        ),
        pipeline_depth=2 if run.async_scheduling else 1,
        delays=Delays(),
    )


def predict(
    run: VllmRun,
    profiles: Path,
    *,
    host_seconds: float = 0.0,
    config: ReplicaConfig | None = None,
    on_plan: PlanObserver | None = None,
) -> list[Served]:
    """Simulate a run from the operator times; return its requests in order of arrival.

    Args:
        host_seconds: added to a step that no captured graph covers; 0: operators alone.
        config: of each engine; None: result of ``replica_config``.
        on_plan: called with every plan, see ``PlanObserver``.

    Raises:
        ConfigError: no profile of the run, or one that does not match how its experts are shared.
    """
    group = _expert_group(run)
    config = config or replica_config(run)
    engines = [
        ReplicaSpec(config, step_times(run, profiles, host_seconds=host_seconds, experts=group))
        for _ in range(run.num_engines)
    ]
    served: list[Served] = []
    pool = Pool(engines, LeastOutstanding())
    Simulator(pool, served.append, on_plan=on_plan).run(m.arrival for m in run.requests)
    return sorted(served, key=lambda s: s.arrival.at)


def _expert_group(run: VllmRun) -> ExpertGroup | None:
    """Return the group of engines that share the experts; None without experts."""
    if not run.model.num_experts:
        return None
    if run.num_engines * run.degree > 1 and not run.expert_parallel:
        raise ConfigError(
            f"run {run.name}: {run.num_engines} engine(s) of {run.degree} GPU(s) without expert "
            "parallelism hold a slice of every expert, and profiles are of whole experts"
        )
    return ExpertGroup(
        run.num_engines,
        degree=run.degree,
        bandwidth=run.link.bandwidth,
        latency=run.link.latency,
    )


def _profile_for(run: VllmRun, profiles: Path) -> str:
    """Return the profile with the hardware and model in its name, and the degree at its end."""
    model = run.model.name.split("/")[-1]
    found = sorted(
        path.name.removesuffix("-dense.csv")
        for path in profiles.glob(f"{run.hardware}-{model}-*tp{run.degree}-dense.csv")
    )
    if len(found) != 1:
        raise ConfigError(
            f"{profiles} should hold one profile of {model} on {run.hardware} for {run.degree} "
            f"GPU(s), found: {', '.join(found) or 'none'}"
        )
    return found[0]


# the policy's name in a scheduler's configuration
LAST_IN_FIRST_OUT: Final = "vllm-fcfs"


class LastInFirstOut(FcfsPolicy):
    """First come, first served; the last request is preempted when memory is short.

    Running requests always arrived before waiting ones, so the last in order of arrival is the one
    admitted last: vLLM pops its list of running requests from the end. This project's own policies
    preempt the request that loses least instead.
    """

    def expendable(self, candidates: Sequence[Request]) -> Sequence[Request]:
        return candidates[-1:]


def register() -> None:
    """Register the name with this process's schedulers, as policies of other packages are when they
    are loaded. It is not meant for serving, so no command line offers it."""
    POLICIES.setdefault(LAST_IN_FIRST_OUT, LastInFirstOut)
