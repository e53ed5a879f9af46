"""All that replay knows of a core: one function for each thing that it sets or reads.

A redesign of core that renames classes, attributes or folders changes this file and no other of
replay. It serves two cores at once, the one of a commit and the one of the working tree, so a
function whose quantity has moved tries one name and then the other. What it says is values in words
of its own, so that two cores with different names say the same of the same decision.
"""

from __future__ import annotations

import importlib
import inspect
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, Final

from paceline.errors import RequestError
from paceline.renamed import RENAMED


@dataclass(frozen=True)
class Asked:
    """One request as its caller asks for it, in words of no core's."""

    name: str
    prompt: Sequence[int]
    max_tokens: int
    # seconds on the rig's clock
    arrival: float = 0.0
    priority: int = 0
    salt: str | None = None
    fork_of: str | None = None
    num_forks: int = 0
    stop: frozenset[int] = frozenset()
    tenant: str = ""
    # of Slo, by name; empty: no targets, and the very object that stands for that
    targets: Mapping[str, Any] = field(default_factory=dict)
    # tokens that the caller expects
    prediction: Sequence[int] = ()


@dataclass(frozen=True)
class Core:
    """The modules of one core, found by their package, and the package of its speculation."""

    package: str = "paceline.core"
    speculation: str = "paceline.speculation"

    def find(self, name: str, *modules: str) -> Any:
        """The first ``name`` in these modules of the package.

        Raises:
            LookupError: none of them has it: it has moved, and the caller is to be told where.
        """
        for module in modules:
            try:
                return getattr(importlib.import_module(f"{self.package}.{module}"), name)
            except (ModuleNotFoundError, AttributeError):
                continue
        raise LookupError(f"{self.package} has no {name} in {', '.join(modules)}: see observe.py")


# ------------------------------------------------------------------ what goes in


def policies(core: Core) -> list[str]:
    return sorted(core.find("POLICIES", "policies"))


def make_scheduler(core: Core, config: Mapping[str, Any], cache: Mapping[str, Any]) -> Any:
    scheduler = core.find("Scheduler", "scheduler")
    make_config = core.find("SchedulerConfig", "config")
    make_cache = core.find("CacheConfig", "config")
    values = make_config(**_named_there(config, make_config)), make_cache(**cache)
    if "speculation" not in inspect.signature(scheduler).parameters:
        # an older core drafts itself
        return scheduler(*values)
    drafts = importlib.import_module(f"{core.speculation}.drafts").Drafts
    return scheduler(*values, speculation=drafts)


def _named_there(config: Mapping[str, Any], made: Any) -> dict[str, Any]:
    """Settings under the names that they have in a core, which may be an older one."""
    known = {field.name for field in fields(made)}
    older = {new: old for old, new in RENAMED.items()}
    return {name if name in known else older[name]: value for name, value in config.items()}


def make_request(core: Core, asked: Asked) -> Any:
    sampling = core.find("SamplingParams", "sampling_params", "request")
    slo = core.find("NO_SLO", "slo")
    if asked.targets:
        slo = core.find("Slo", "slo")(**asked.targets)
    values: dict[str, Any] = {
        "request_id": asked.name,
        "prompt_token_ids": list(asked.prompt),
        "sampling": sampling(max_tokens=asked.max_tokens, stop_token_ids=asked.stop),
        "arrival_time": asked.arrival,
        "priority": asked.priority,
        "cache_salt": asked.salt,
        "fork_of": asked.fork_of,
        "num_forks": asked.num_forks,
        "slo": slo,
        "tenant": asked.tenant,
        "prediction_token_ids": tuple(asked.prediction),
    }
    make = core.find("Request", "request")
    try:
        return make(core.find("RequestSpec", "request")(**values))
    except LookupError:
        return make(**values)


def make_result(
    core: Core,
    plan: Any,
    sampled: Iterable[tuple[int, ...]],
    errors: Iterable[tuple[str, str]],
    elapsed: float,
) -> Any:
    return core.find("StepResult", "outputs")(
        step_id=plan.step_id, sampled=tuple(sampled), errors=tuple(errors), elapsed=elapsed
    )


def request_errors(core: Core) -> type[Exception]:
    """The root of what ``add_request`` refuses with."""
    try:
        found: type[Exception] = core.find("RequestError", "errors")
    except LookupError:
        # errors.py has left core, so every core has those of the working tree
        return RequestError
    return found


def forget_tenants_at(scheduler: Any, most: int) -> None:
    """Let the policy that keeps tenants apart forget some as soon as it knows more than ``most``,
    once, and not only when there are thousands."""
    for turns in _one_of(scheduler, "policy._queues", "policy._turns"):
        turns._most = most


# ------------------------------------------------------------------ what comes out


def plan_lines(plan: Any) -> Iterator[str]:
    """A plan in the order in which a backend applies it."""
    if plan.released:
        yield f"released {' '.join(plan.released)}"
    for swap in plan.swaps:
        yield f"swap {_swap(swap)}"
    for new in plan.new_requests:
        sampling = new.sampling
        yield (
            f"new {new.request_id} tokens {len(new.token_ids)}:{_digest(new.token_ids)} "
            f"prompt {new.num_prompt_tokens} blocks {_ids(new.block_ids)} "
            f"most {sampling.max_tokens} stop {_ids(sorted(sampling.stop_token_ids))}"
        )
    for copy in plan.block_copies:
        yield f"copy {copy.request_id}[{copy.index}] {copy.src}>{copy.dst}"
    for row in plan.rows:
        blocks = f" blocks {_ids(row.new_block_ids)}" if row.new_block_ids else ""
        samples = " samples" if row.samples else ""
        yield f"row {row.request_id} {row.start}+{row.num_tokens}{blocks}{samples}"
    for draft in plan.drafts:
        yield f"guesses {plan.rows[draft.row].request_id} {draft.source} {_ids(draft.token_ids)}"
    # an older core moves blocks after a step as well
    for swap in getattr(plan, "prefetches", ()):
        yield f"prefetch {_swap(swap)}"
    yield f"step {plan.step_id} of {plan.num_tokens} tokens"


def rows(plan: Any) -> Iterator[tuple[str, int, int, bool, tuple[int, ...]]]:
    """(request, first position, tokens before drafts, whether the last of them is sampled from,
    drafts)."""
    drafts = {draft.row: tuple(draft.token_ids) for draft in plan.drafts}
    for index, row in enumerate(plan.rows):
        own = drafts.get(index, ())
        yield row.request_id, row.start, row.num_tokens - len(own), row.samples, own


def update_line(update: Any) -> str:
    said = f"{update.request_id} {_ids(update.new_token_ids)}"
    if update.finish_reason is not None:
        said += f" ends {update.finish_reason.value} by {update.stop_reason}"
    if update.finish_reason is not None or update.timeline is not None:
        # they change with these alone, and there is a line for every token
        said += (
            f" cached {update.num_cached_tokens} first {update.first_scheduled_time!r}"
            f" preempted {update.num_preemptions}"
        )
    if update.error is not None:
        said += f" error {update.error!r}"
    if update.timeline is not None:
        said += f" told {_timeline(update.timeline)}"
    return said


def has_ended(update: Any) -> bool:
    return update.finish_reason is not None


# words of the recordings for reasons that were renamed since
_REASONS: Final = {"predicted-ttft": "predicted-wait"}


def refusal_line(error: Any) -> str:
    """The kind of an error, its message, and what it has for programs."""
    extra = "".join(
        f" {name} {_REASONS.get(value, value)!r}"
        for name in ("param", "reason", "retry_after")
        if (value := getattr(error, name, None)) is not None
    )
    return f"{type(error).__name__}{extra}: {error}"


def expiry_line(expired: Any) -> str:
    return f"{expired.request_id} with {_ids(expired.fork_ids)}: {refusal_line(expired.error)}"


def expired_names(expired: Any) -> tuple[str, ...]:
    return (expired.request_id, *expired.fork_ids)


# words of replay, and the core's statistics by attribute, the newest first. Left out is what the
# rig had told the core, seconds that steps took and sizes of memory, and what adds up the rows of
# plans
_STATS: Final = {
    "held": "blocked_by held_by",
    "running": "num_running",
    "waiting": "num_waiting",
    "capacity": "num_waiting_capacity",
    "deferred": "num_waiting_deferred",
    "free": "num_free_blocks",
    "cached-free": "num_cached_free_blocks",
    "host-free": "num_free_host_blocks",
    "preempted": "num_preemptions",
    "looked-up": "prefix_cache_queries",
    "found": "prefix_cache_hits",
    "recomputed": "num_recomputed_tokens",
    "swapped-out": "num_swapped_out_blocks",
    "swapped-in": "num_swapped_in_blocks",
    "relegated": "num_demoted num_relegated",
    "discarded": "num_discarded_tokens",
    "predicted-s": "predicted_step_seconds",
}


def statistics(scheduler: Any) -> dict[str, Any]:
    """What the scheduler says of itself, numbers but for what held the head of the queue up."""
    stats = scheduler.stats()
    found = {word: _one_of(stats, *names.split()) for word, names in _STATS.items()}
    # an IntEnum has a name, which is not ours
    found["pressure"] = int(stats.pressure_level)
    for reason, seconds in stats.waited:
        found[f"waited-{reason}"] = seconds
    for reason, count in stats.refused:
        found[f"refused-{_REASONS.get(reason, reason)}"] = count
    for source, count in stats.drafted:
        found[f"guessed-{source}"] = count
    for source, count in stats.accepted:
        found[f"guessed-right-{source}"] = count
    return found


def times(scheduler: Any) -> dict[str, Any]:
    """When the scheduler wants to be asked again, in seconds or None."""
    return {"wake": scheduler.wake_at, "plan": scheduler.plan_at}


def awaits_tokens(scheduler: Any) -> bool:
    """Whether the next plan is best made once the tokens of all steps are known."""
    found: bool = scheduler.awaits_tokens
    return found


def census_line(scheduler: Any) -> str:
    """By class: requests that run and that wait, and entries of their block tables. An older core
    counts them itself."""
    if (census := getattr(scheduler, "census", None)) is not None:
        counts = {c.slo_class: [c.num_running, c.num_waiting, c.num_blocks] for c in census()}
    else:
        counts = {}
        for request in scheduler.requests:
            own = counts.setdefault(request.asked.slo.slo_class, [0, 0, 0])
            own[request.status.name == "WAITING"] += 1
            own[2] += len(request.block_ids)
    return " ".join("{}={}+{}/{}".format(name, *own) for name, own in sorted(counts.items()))


# words of the recordings for tiers that were renamed since
_TIERS: Final = {"DEADLINE_BATCH": "promised", "DEMOTED": "relegated"}


def tier(request: Any) -> str:
    """What a live request has to lose by waiting, and what lets it go before others."""
    flags = ["promoted"] * _one_of(request, "granted", "aged", "promoted")
    flags += ["favoured"] * _one_of(request, "boosted", "favoured")
    name = _one_of(request, "tier", "band").name
    return " ".join([_TIERS.get(name, name.lower()), *flags])


def predicted_ttft(request: Any) -> str:
    """Seconds to the first token as forecast on arrival."""
    return repr(_one_of(request, "history.predicted_ttft", "predicted_ttft"))


def pressing(scheduler: Any) -> bool:
    """Whether the plan that was made last was made with deadlines that press."""
    found: bool = _one_of(
        scheduler,
        "_paced.feasibility.deadlines.pressing",
        "_last.pressing",
        "_pacing.pressing",
        "_waiting.pressing",
    )
    return found


def _one_of(holder: Any, *ways: str) -> Any:
    """What the first of these ways that exists leads to: names of attributes with dots between.

    Raises:
        LookupError: none exists: the quantity has moved, and its function here is to be told where.
    """
    for way in ways:
        try:
            return attrgetter(way)(holder)
        except AttributeError:
            continue
    raise LookupError(f"{type(holder).__name__} has none of {', '.join(ways)}: see observe.py")


# ------------------------------------------------------------------ one spelling of values


def _ids(values: Iterable[Any]) -> str:
    return ",".join(map(str, values)) or "-"


def _digest(values: Sequence[int]) -> str:
    return f"{zlib.crc32(','.join(map(str, values)).encode()):08x}"


def _swap(swap: Any) -> str:
    return f"{swap.src}>{swap.dst} {'out' if swap.to_host else 'in'}"


def _timeline(timeline: Any) -> str:
    waited = " ".join(f"{reason}={seconds!r}" for reason, seconds in timeline.waited)
    demoted = _one_of(timeline, "demoted", "relegated")
    return (
        f"waited [{waited}] chunks {timeline.num_chunks} preempted {timeline.num_preemptions} "
        f"recomputed {timeline.num_recomputed_tokens} swapped {timeline.num_swapped_tokens} "
        f"relegated {demoted} predicted {timeline.predicted_ttft!r}"
        + "".join(f" guessed {source} {right}/{n}" for source, n, right in timeline.drafts)
    )
