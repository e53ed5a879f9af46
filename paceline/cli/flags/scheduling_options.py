"""Flags that change the scheduler's decisions, in one table for serving and simulating."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from paceline.cli.flags.arguments import (
    bounded_float,
    bounded_int,
    json_object,
    memory_size,
    weights_by_name,
)
from paceline.cli.flags.plugins import policy_names
from paceline.cli.flags.settings import EngineSettings
from paceline.core.config import PREEMPTION_MODES
from paceline.core.policies import POLICIES
from paceline.errors import ConfigError

__all__ = [
    "ADMISSION",
    "SCHEDULING",
    "Flag",
    "add_flags",
    "default_settings",
    "given_settings",
    "ignored_flags",
    "naming_flags",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag, and the setting that it sets."""

    name: str
    # name of the setting, known to EngineSettings.of
    field: str
    help: str
    # parser of the value; with neither this nor ``choices``: --name and --no-name
    parse: Callable[[str], Any] | None = None
    choices: Callable[[], Sequence[str]] | None = None
    # name of the value in the help; None: by the parser
    metavar: str | None = None
    # units of the flag in one unit of the setting
    scale: float = 1.0
    # whether 0 stands for None
    zero_is_none: bool = False
    # default in the flag's units, where it is not the field's own
    default: Any = None
    # this package's policies that use it; (): all
    policies: tuple[str, ...] = ()
    # whether only the adaptive token budget uses it
    adaptive: bool = False

    @property
    def dest(self) -> str:
        return self.name.removeprefix("--").replace("-", "_")

    def default_of(self, settings: EngineSettings) -> Any:
        """Return the default in the flag's own units."""
        if self.default is not None:
            return self.default
        value = settings.value(self.field)
        return value * self.scale if self.scale != 1.0 else value

    def setting(self, value: Any) -> Any:
        """Return the setting for a value of the flag."""
        if value is None or (self.zero_is_none and not value):
            return None
        return value / self.scale if self.scale != 1.0 else value


SCHEDULING: Final = (
    Flag(
        name="--max-num-seqs",
        field="max_num_seqs",
        parse=bounded_int(1),
        help="requests running at once",
    ),
    Flag(
        name="--max-num-batched-tokens",
        field="max_num_batched_tokens",
        parse=bounded_int(1),
        help="tokens computed in one step; a smaller number keeps the time between tokens even, a "
        "larger one starts new requests sooner",
    ),
    Flag(
        name="--enable-chunked-prefill",
        field="enable_chunked_prefill",
        help="compute long prompts in several steps; off: each in one step, which then waits for "
        "room in it, and no request may be longer than --max-num-batched-tokens",
    ),
    Flag(
        name="--watermark",
        field="watermark",
        parse=bounded_float(0.0, 0.99),
        metavar="SHARE",
        help="share of the KV blocks kept free for running requests when a new one is admitted",
    ),
    Flag(
        name="--scheduling-policy",
        field="policy",
        choices=policy_names,
        help="order of requests; docs/understand/policies.md says when each policy wins and loses",
    ),
    Flag(
        name="--adaptive-token-budget",
        field="adaptive_token_budget",
        help="size each step by its predicted time: within the slack of requests with targets, "
        "and no larger than is efficient",
    ),
    Flag(
        name="--tenant-weights",
        field="tenant_weights",
        parse=weights_by_name,
        metavar="NAME=W,...",
        policies=("fair",),
        help="with the fair policy, weights of tenants; a tenant that is not listed has weight 1",
    ),
    Flag(
        name="--coalesce-window-ms",
        field="coalesce_window_s",
        parse=bounded_float(0.0),
        metavar="MS",
        scale=1e3,
        policies=("phase-aligned",),
        help="with the phase-aligned policy, how long arrivals wait to start together",
    ),
    Flag(
        name="--coalesce-size",
        field="coalesce_size",
        parse=bounded_int(1),
        policies=("phase-aligned",),
        help="with the phase-aligned policy, the number of arrivals that start without waiting",
    ),
    Flag(
        name="--best-effort-share",
        field="best_effort_share",
        parse=bounded_float(0.0, 0.99),
        metavar="SHARE",
        help="share of engine time for best-effort requests (slo class batch) while others wait "
        "too; requests without targets lengthen the steps of others by no more; 0: only spare time",
    ),
    Flag(
        name="--best-effort-step-ms",
        field="best_effort_step_s",
        parse=bounded_float(0.1),
        metavar="MS",
        scale=1e3,
        adaptive=True,
        help="longest step with best-effort work only, since the next arrival waits for it; at "
        "least the time of two steps with a single row",
    ),
    Flag(
        name="--max-token-gap-ms",
        field="max_token_gap_s",
        parse=bounded_float(0.0),
        metavar="MS",
        scale=1e3,
        zero_is_none=True,
        policies=("deadline", "fair"),
        adaptive=True,
        help="with the deadline and fair policies and the adaptive token budget, the longest "
        "planned step while streams run, so that a long prompt causes no longer pause between "
        "their tokens; 0: as long as their mean pace allows",
    ),
    Flag(
        name="--schedule-ahead-ms",
        field="schedule_ahead_s",
        parse=bounded_float(0.0),
        metavar="MS",
        scale=1e3,
        help="at a pipeline depth of 2, plan the next step this many ms before the current one is "
        "predicted to end, to include late arrivals; more than a step takes: plan at once",
    ),
    Flag(
        name="--demote-late",
        field="demote_late",
        help="demote requests that can no longer meet their TTFT target, so that others go first",
    ),
    Flag(
        name="--pace-admission",
        field="pace_admission",
        help="admit no request that would make running requests miss their TPOT targets",
    ),
    Flag(
        name="--future-memory-check",
        field="future_memory_check",
        help="admit a request only if memory is predicted to last until the running requests end, "
        "instead of when it fits now",
    ),
    Flag(
        name="--preemption",
        field="preemption",
        choices=lambda: PREEMPTION_MODES,
        help="KV blocks of a preempted request: swap copies them to host memory, recompute drops "
        "them, auto does what is predicted to be faster",
    ),
    Flag(
        name="--swap-space",
        field="swap_bytes",
        parse=memory_size,
        help="host memory for swapped KV blocks, in GiB without a unit; default: half the KV "
        "cache's size, allocated as it is used; on CUDA at most 4GiB, pinned at start",
    ),
    Flag(
        name="--priority-ageing",
        field="priority_ageing_s",
        parse=bounded_float(0.001),
        metavar="SECONDS",
        policies=("priority",),
        help="with the priority policy, waiting time that raises a request by one level",
    ),
    Flag(
        name="--max-skip-ahead",
        field="max_skip_ahead",
        parse=bounded_int(0),
        help="number of waiting requests that may skip ahead of a head that does not fit; 0: none",
    ),
    Flag(
        name="--max-skips",
        field="max_skips",
        parse=bounded_int(0),
        help="how often one head may be skipped before all other requests wait for it",
    ),
    Flag(
        name="--speculative-config",
        field="speculative_config",
        parse=json_object,
        help="draft next tokens and verify several in one step, while few requests run: "
        '{"method": "auto"} (with "finished_answers_bytes": 0: without earlier answers of the '
        'same tenant), or {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": '
        '4, "prompt_lookup_min": 2}, or {"model": NAME} for a second model with the same '
        'vocabulary, or {"method": "self"} for the served model in 4 bits, or {"method": '
        '"eagle3", "model": NAME} for an EAGLE-3 head with --compute torch, or {"method": "mtp"} '
        'for the checkpoint\'s own multi-token prediction layers, likewise. {"method": "off"}: no '
        "drafts. Answers stay the same",
    ),
    Flag(
        name="--pipeline-depth",
        field="pipeline_depth",
        parse=bounded_int(1, 8),
        help="steps in flight: 2 plans a step while the previous one runs, 1 waits for its end",
    ),
)

# promises and refusals of a server; offline work only waits for its end, and refuses nothing
ADMISSION: Final = (
    Flag(
        name="--default-ttft-ms",
        field="default_ttft_s",
        parse=bounded_float(0.0),
        metavar="MS",
        scale=1e3,
        zero_is_none=True,
        default=1000.0,
        policies=("deadline",),
        help="with the deadline policy, TTFT target of a request without one; priority halves or "
        "doubles it. No request is demoted before this time, even if its target is tighter; 0: "
        "none",
    ),
    Flag(
        name="--default-tpot-ms",
        field="default_tpot_s",
        parse=bounded_float(0.0),
        metavar="MS",
        scale=1e3,
        zero_is_none=True,
        default=100.0,
        policies=("deadline",),
        adaptive=True,
        help="with the deadline policy, TPOT target of a request without one; 0: none",
    ),
    Flag(
        name="--max-num-waiting",
        field="max_num_waiting",
        parse=bounded_int(0),
        zero_is_none=True,
        default=2048,
        help="requests waiting at once; further ones are refused with 429 and a predicted "
        "Retry-After; 0: no limit",
    ),
    Flag(
        name="--max-predicted-ttft",
        field="max_predicted_ttft_s",
        parse=bounded_float(0.0),
        metavar="SECONDS",
        zero_is_none=True,
        default=30.0,
        help="refuse a request (429) if its first token is predicted to take longer than this and "
        "than four times its target; 0: never",
    ),
    Flag(
        name="--queue-timeout",
        field="queue_timeout_s",
        parse=bounded_float(0.0),
        metavar="SECONDS",
        zero_is_none=True,
        default=60.0,
        help="a request that has not started after this time expires (429); best effort later; 0: "
        "never",
    ),
    Flag(
        name="--pressure-threshold",
        field="pressure_threshold",
        parse=bounded_float(0.01, 1.0),
        metavar="SHARE",
        default=1.0,
        help="share of KV blocks in use at which the memory-pressure valve begins to open: "
        "smaller chunks, then no new best effort, then preemption of it, then 429; 1: never",
    ),
)


def add_flags(
    group: argparse._ArgumentGroup, flags: tuple[Flag, ...], default: EngineSettings | None
) -> None:
    """Add ``flags``; without ``default``, an omitted flag is None and its help names no default."""
    for flag in flags:
        value = None if default is None else flag.default_of(default)
        help_text = flag.help
        if value not in (None, {}):
            help_text += f" (default {_shown(value)})"
        how: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        if flag.choices is not None:
            how = {"choices": flag.choices()}
        elif flag.parse is not None:
            how = {"type": flag.parse, "metavar": flag.metavar}
        group.add_argument(flag.name, default=value, help=help_text, **how)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def default_settings(flags: tuple[Flag, ...]) -> dict[str, Any]:
    """Return settings by name where none of ``flags`` is given."""
    default = EngineSettings.of()
    return {flag.field: flag.setting(flag.default_of(default)) for flag in flags}


def ignored_flags(settings: EngineSettings) -> list[str]:
    """Return notes on flags that were changed and have no effect with the others."""
    default = EngineSettings.of()
    policy = settings.scheduler.policy
    found = []
    for flag in (*SCHEDULING, *ADMISSION):
        if settings.value(flag.field) == flag.setting(flag.default_of(default)):
            continue
        if flag.policies and policy in POLICIES and policy not in flag.policies:
            users = " and ".join(flag.policies)
            found.append(
                f"{flag.name} has no effect with --scheduling-policy {policy}: "
                f"{users} use{'s' if len(flag.policies) == 1 else ''} it"
            )
        elif flag.adaptive and not settings.scheduler.adaptive_token_budget:
            found.append(f"{flag.name} has no effect with --no-adaptive-token-budget")
    return found


def given_settings(args: argparse.Namespace, flags: tuple[Flag, ...]) -> dict[str, Any]:
    """Return settings by name, for those of ``flags`` that are in ``args``."""
    return {
        flag.field: flag.setting(value)
        for flag in flags
        if (value := getattr(args, flag.dest, None)) is not None
    }


@contextmanager
def naming_flags() -> Iterator[None]:
    """Name flags, instead of settings, in errors about settings that exclude each other."""
    try:
        yield
    except ConfigError as error:
        text = str(error)
        for flag in (*SCHEDULING, *ADMISSION):
            if flag.scale == 1.0:
                text = re.sub(rf"\b{flag.field}=\b", f"{flag.name} ", text)
        raise ConfigError(text) from None
