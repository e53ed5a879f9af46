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
        help="tokens computed in one step; smaller keeps running requests smoother, larger starts "
        "new ones faster",
    ),
    Flag(
        name="--watermark",
        field="watermark",
        parse=bounded_float(0.0, 0.99),
        metavar="SHARE",
        help="share of the pool kept free when a request joins running ones, for their growth",
    ),
    Flag(
        name="--scheduling-policy",
        field="policy",
        choices=policy_names,
        help="who goes first; docs/understand/policies.md says when each wins and loses",
    ),
    Flag(
        name="--adaptive-token-budget",
        field="adaptive_token_budget",
        help="size each step by its predicted time: the slack that requests with targets leave, "
        "and no more than makes it efficient",
    ),
    Flag(
        name="--tenant-weights",
        field="tenant_weights",
        parse=weights_by_name,
        metavar="NAME=W,...",
        policies=("fair",),
        help="with the fair policy, shares of the tenants named here; each of the others has 1",
    ),
    Flag(
        name="--coalesce-window-ms",
        field="coalesce_window_s",
        parse=bounded_float(0.0),
        metavar="MS",
        scale=1e3,
        policies=("phase-aligned",),
        help="with the phase-aligned policy, arrivals wait for each other this long",
    ),
    Flag(
        name="--coalesce-size",
        field="coalesce_size",
        parse=bounded_int(1),
        policies=("phase-aligned",),
        help="with the phase-aligned policy, so many arrivals do not wait",
    ),
    Flag(
        name="--best-effort-share",
        field="best_effort_share",
        parse=bounded_float(0.0, 0.99),
        metavar="SHARE",
        help="of the engine's seconds, what best-effort requests (slo class batch) get while they "
        "wait beside others; those without any target lengthen the steps of others by no more; 0: "
        "what others leave",
    ),
    Flag(
        name="--best-effort-step-ms",
        field="best_effort_step_s",
        parse=bounded_float(0.1),
        metavar="MS",
        scale=1e3,
        adaptive=True,
        help="a step in which all is best effort takes about so long at most, or the next arrival "
        "would wait for it; or twice as long as a single row, if that is more",
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
        help="with the deadline and fair policies and the adaptive token budget, a step beside "
        "streams is planned to take at most so long: their callers see no longer pause when a long "
        "prompt comes; 0: as long as their mean pace allows",
    ),
    Flag(
        name="--schedule-ahead-ms",
        field="schedule_ahead_s",
        parse=bounded_float(0.0),
        metavar="MS",
        scale=1e3,
        help="at a pipeline depth of 2, plan the next step this many ms before the running one is "
        "predicted to end, so that late arrivals are in it; more than a step takes: plan at once",
    ),
    Flag(
        name="--demote-late",
        field="demote_late",
        help="demote requests that can no longer meet their TTFT target: the others go first",
    ),
    Flag(
        name="--pace-admission",
        field="pace_admission",
        help="let no request in while one more would make running requests miss their TPOT targets",
    ),
    Flag(
        name="--future-memory-check",
        field="future_memory_check",
        help="let a request in only if memory is predicted to last until those running end, "
        "instead of when it fits now",
    ),
    Flag(
        name="--preemption",
        field="preemption",
        choices=lambda: PREEMPTION_MODES,
        help="what becomes of a preempted request's KV blocks: swap keeps a copy in host memory, "
        "recompute drops them, auto does what is predicted to take less time",
    ),
    Flag(
        name="--swap-space",
        field="swap_bytes",
        parse=memory_size,
        help="host memory for swapped KV blocks, in GiB if no unit follows; default: half the KV "
        "cache's size, taken as it is used; on CUDA 4GiB at most, pinned at once",
    ),
    Flag(
        name="--priority-ageing",
        field="priority_ageing_s",
        parse=bounded_float(0.001),
        metavar="SECONDS",
        policies=("priority",),
        help="with the priority policy, waiting this long counts as one level",
    ),
    Flag(
        name="--max-skip-ahead",
        field="max_skip_ahead",
        parse=bounded_int(0),
        help="waiting requests behind a head that does not fit that may skip ahead of it; 0: none",
    ),
    Flag(
        name="--max-skips",
        field="max_skips",
        parse=bounded_int(0),
        help="how often one head may be skipped before all wait for it",
    ),
    Flag(
        name="--speculative-config",
        field="speculative_config",
        parse=json_object,
        help="guess next tokens and verify several in one step, for as long as few requests run: "
        '{"method": "auto"} (with "finished_answers_bytes": 0 none from earlier answers of the '
        'same tenant), or {"method": "ngram", "num_speculative_tokens": 5, '
        '"prompt_lookup_max": 4, "prompt_lookup_min": 2}, or by a second model of the same '
        'vocabulary: {"model": NAME}, or {"method": "self"} for the served one in 4 bits, or '
        '{"method": "eagle3", "model": NAME} for an EAGLE-3 head with --compute torch, or '
        '{"method": "mtp"} for the checkpoint\'s own multi-token prediction layers, likewise. '
        '{"method": "off"}: nothing is guessed. Answers stay the same',
    ),
    Flag(
        name="--pipeline-depth",
        field="pipeline_depth",
        parse=bounded_int(1, 8),
        help="steps handed to the backend at once: 2 plans a step while the last one runs, 1 "
        "waits for it",
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
        help="with the deadline policy, the target for the first token of a request that names "
        "none; priority halves or doubles it. No request is demoted before this time, even if its "
        "own target is tighter; 0: none",
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
        help="with the deadline policy, the target for the mean time between tokens of a request "
        "that names none; 0: none",
    ),
    Flag(
        name="--max-num-waiting",
        field="max_num_waiting",
        parse=bounded_int(0),
        zero_is_none=True,
        default=2048,
        help="requests waiting at once; beyond that the answer is 429 with a predicted "
        "Retry-After; 0: no limit",
    ),
    Flag(
        name="--max-predicted-ttft",
        field="max_predicted_ttft_s",
        parse=bounded_float(0.0),
        metavar="SECONDS",
        zero_is_none=True,
        default=30.0,
        help="refuse a request (429) whose first token is predicted to take longer than this, and "
        "than four times its target; 0: never",
    ),
    Flag(
        name="--queue-timeout",
        field="queue_timeout_s",
        parse=bounded_float(0.0),
        metavar="SECONDS",
        zero_is_none=True,
        default=60.0,
        help="a request that waited this long without being started expires (429); best effort "
        "waits longer; 0: never",
    ),
    Flag(
        name="--pressure-threshold",
        field="pressure_threshold",
        parse=bounded_float(0.01, 1.0),
        metavar="SHARE",
        default=1.0,
        help="share of the KV cache in use at which the memory-pressure valve begins to open: "
        "smaller chunks, then no new best-effort work, then its preemption, then 429; 1: never",
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
