"""The recorded cases: each a fixed, seeded trace under settings that make parts of core work.

``golden/NAME.txt.gz`` holds the decisions of each as lines.
"""

from __future__ import annotations

import gzip
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.backends.reference.null import expected_tokens
from tests.replay import observe
from tests.replay.observe import Asked, Core
from tests.replay.rig import Rig

GOLDEN = Path(__file__).with_name("golden")

_TARGETS: tuple[Mapping[str, Any], ...] = (
    {},
    {"ttft": 20.0, "tpot": 1.0},
    {"best_effort": True},
)
_ABORTS = 0.02
_CACHE = ("num_blocks", "watermark", "enable_prefix_caching", "num_host_blocks")
_DEFAULTS: Mapping[str, Any] = {
    "max_num_batched_tokens": 96,
    "max_num_seqs": 12,
    "max_model_len": 1024,
    "future_memory_check": False,
}


def _seconds(wide: int, narrow: int) -> float:
    return 0.05 + 0.01 * wide + 0.02 * narrow


def _memory_bound(wide: int, narrow: int) -> float:
    return max(0.03, 0.0003 * (wide + narrow)) + 0.0002 * narrow


# settings and, where not the same for all, what requests are drawn from
CASES: dict[str, dict[str, Any]] = {
    "fcfs-roomy": {"num_blocks": 400},
    "fcfs-tight": {"num_blocks": 60, "watermark": 0.02},
    "fcfs-planned-ahead": {"num_blocks": 60, "depth": 2},
    "priority-tight": {"num_blocks": 60, "policy": "priority", "priority_ageing_s": 20.0},
    "everything-on": {
        "num_blocks": 60,
        "depth": 2,
        "policy": "deadline",
        "future_memory_check": True,
        "num_host_blocks": 40,
        "swap_block_seconds": 1e-4,
        "pressure_threshold": 0.88,
        "max_num_waiting": 300,
        "seconds": _seconds,
    },
    "swapping": {"num_blocks": 60, "num_host_blocks": 60, "preemption": "swap"},
    "no-prefix-caching": {"num_blocks": 60, "enable_prefix_caching": False},
    "sjf": {"num_blocks": 60, "policy": "sjf"},
    "phase-aligned": {
        "num_blocks": 60,
        "policy": "phase-aligned",
        "coalesce_window_s": 3.0,
        "coalesce_size": 3,
    },
    "fair-tenants": {
        "num_blocks": 60,
        "depth": 2,
        "policy": "fair",
        "future_memory_check": True,
        "max_num_waiting": 40,
        "seconds": _seconds,
        "tenants": ("flood", "flood", "flood", "flood", "flood", "light", "other"),
        "targets": ({}, {}, {}, {"ttft": 6.0, "tpot": 1.0}),
    },
    # requests that fail alone, some of them while their next row is planned already
    "row-errors": {
        "num_blocks": 60,
        "depth": 2,
        "num_host_blocks": 20,
        "requests": 60,
        "fails": 0.3,
    },
    # the pressure valve up to the level at which best effort is preempted and requests are refused
    "valve": {
        "num_blocks": 60,
        "policy": "deadline",
        "pressure_threshold": 0.5,
        "seconds": _seconds,
        "targets": (
            {},
            {"ttft": 30.0},
            {"best_effort": True, "deadline": 90.0},
            {"best_effort": True},
        ),
    },
    # a full queue, a tenant's share of it, a wait that is predicted to be too long, one that was
    "refusals": {
        "num_blocks": 60,
        "policy": "fair",
        "max_num_waiting": 24,
        "max_predicted_ttft_s": 5.0,
        "queue_timeout_s": 12.0,
        "seconds": _seconds,
        "tenants": ("flood", "flood", "flood", "flood", "light", "other"),
        "aborts": 0.2,
    },
    # steps that take as long as reading the weights: the size of chunks is tried around what hides
    "memory-bound": {
        "num_blocks": 2000,
        "max_num_batched_tokens": 640,
        "max_num_seqs": 24,
        "requests": 60,
        "seconds": _memory_bound,
        "tick": None,
        "arrivals": (0, 0, 1),
        "longest": 500,
        "targets": ({},),
    },
    # requests that are held back, or those that run would stream too slowly
    "paced": {
        "num_blocks": 200,
        "policy": "deadline",
        "requests": 50,
        "seconds": _seconds,
        "tick": None,
        "targets": ({"ttft": 30.0, "tpot": 0.2}, {}),
    },
    # best effort that streams and presses beside requests that are paced, and background work
    "hurried": {
        "num_blocks": 400,
        "policy": "deadline",
        "max_num_batched_tokens": 40,
        "best_effort_step_s": 0.4,
        "best_effort_share": 0.2,
        "requests": 60,
        "arrivals": (0, 0, 1),
        "longest": 40,
        "most_output": 20,
        "seconds": _seconds,
        "tick": None,
        "targets": (
            {"best_effort": True},
            {"tpot": 0.2},
            {"ttft": 20.0, "tpot": 0.6},
            {"best_effort": True, "deadline": 6.0},
            {"best_effort": True, "deadline": 20.0},
            {"best_effort": True, "deadline": 40.0},
        ),
    },
    # more requests and tenants than what is remembered of them
    "flood": {
        "num_blocks": 60,
        "policy": "fair",
        "requests": 600,
        "arrivals": (0, 2, 6, 10),
        "longest": 6,
        "most_output": 3,
        "tenants": tuple(f"t{number}" for number in range(40)),
        "forget_at": 20,
    },
    # best effort that misses its deadline if all of it is served, and makes it if the others leave
    "promises": {
        "num_blocks": 200,
        "policy": "fair",
        "depth": 2,
        "requests": 70,
        "best_effort_step_s": 0.3,
        "seconds": _seconds,
        "tick": None,
        "aborts": 0.1,
        "tenants": ("flood", "flood", "flood", "flood", "light"),
        "targets": (
            {"best_effort": True, "deadline": 10.0},
            {"best_effort": True, "deadline": 25.0},
            {"best_effort": True},
            {"ttft": 1.0},
        ),
    },
    # more requests that miss their deadlines at once than a step lets go
    "crowd": {
        "num_blocks": 60,
        "requests": 100,
        "arrivals": (1,) * 30 + (90,),
        "longest": 30,
        "most_output": 3,
        "seconds": _seconds,
        "tick": None,
        "targets": ({"best_effort": True, "deadline": 6.0},),
        "aborts": 0.0,
    },
    # blocks that a fork holds are taken back for the first
    "forks-make-room": {
        "num_blocks": 26,
        "num_host_blocks": 60,
        "policy": "priority",
        "max_num_seqs": 3,
        "max_skip_ahead": 0,
        "future_memory_check": True,
        "requests": 60,
        "longest": 20,
        "aborts": 0.3,
        "forks": 0.5,
    },
    # the same once all that ran have gone, for a head that must be let in
    "nobody-runs": {
        "num_blocks": 26,
        "num_host_blocks": 60,
        "policy": "deadline",
        "depth": 2,
        "max_num_seqs": 2,
        "max_skips": 0,
        "requests": 60,
        "arrivals": (0,) * 12 + (60,),
        "most_output": 9,
        "seconds": _seconds,
        "tick": None,
        "targets": ({"ttft": 10.0}, {"best_effort": True, "deadline": 20.0}),
        "aborts": 0.1,
        "forks": 0.5,
        "leaving": 0.03,
    },
    # the same where tenants go by turns
    "fair-swapping": {
        "num_blocks": 30,
        "num_host_blocks": 20,
        "preemption": "swap",
        "policy": "fair",
        "max_num_seqs": 2,
        "max_skips": 0,
        "requests": 60,
        "most_output": 9,
        "seconds": _seconds,
        "targets": (
            {},
            {"ttft": 20.0, "tpot": 1.0},
            {"best_effort": True, "deadline": 40.0},
            {"best_effort": True, "deadline": 200.0},
        ),
        "aborts": 0.1,
        "forks": 0.5,
        "leaving": 0.03,
    },
    # all four tiers, with deadlines that press and a share of the step
    "bands": {
        "num_blocks": 90,
        "policy": "deadline",
        "future_memory_check": True,
        "best_effort_share": 0.3,
        "best_effort_step_s": 1.0,
        "seconds": _seconds,
        "targets": (
            {},
            {"ttft": 6.0, "tpot": 1.0},
            {"ttft": 2.0},
            {"best_effort": True, "deadline": 60.0},
            {"best_effort": True, "deadline": 300.0},
            {"best_effort": True},
        ),
    },
    # few at a time, whose next tokens are drafted
    "guesses": {
        "num_blocks": 60,
        "depth": 2,
        "policy": "deadline",
        "requests": 40,
        "arrivals": (0,) * 24 + (1,),
        "most_output": 60,
        "seconds": _memory_bound,
        "tick": None,
        "targets": ({}, {"tpot": 1.0}),
        "vocab": 7,
        "predicted": 0.5,
        "speculative_config": {"method": "auto", "num_speculative_tokens": 6},
    },
}


def decisions(case: Mapping[str, Any], core: Core | None = None) -> list[str]:
    """What a core decides about 150 requests in a bursty trace; the working tree's by default."""
    rng = random.Random(7)
    case = {**_DEFAULTS, **case}
    tenants = case.pop("tenants", None)
    targets = case.pop("targets", _TARGETS if "seconds" in case else None)
    waiting = total = case.pop("requests", 150)
    arrivals = case.pop("arrivals", (0, 0, 0, 0, 1, 6))
    longest, most_output = case.pop("longest", 60), case.pop("most_output", 40)
    fails, aborts = case.pop("fails", 0.0), case.pop("aborts", _ABORTS)
    forks, leaving = case.pop("forks", 0.1), case.pop("leaving", 0.0)
    forget_at = case.pop("forget_at", None)
    predicted, vocab = case.pop("predicted", 0.0), case.get("vocab", 997)
    rig = make_rig(core or Core(), case)
    if forget_at is not None:
        observe.forget_tenants_at(rig.scheduler, forget_at)
    while waiting or rig.scheduler.has_unfinished:
        for _ in range(min(waiting, rng.choice(arrivals))):
            name = f"r{waiting}"
            shared = list(range(24)) if rng.random() < 0.5 else []
            prompt = shared + [rng.randrange(997) for _ in range(rng.randint(1, longest))]
            asked = {
                "max_tokens": rng.randint(1, most_output),
                "arrival": rig.now,
                "priority": rng.randrange(3),
            }
            if targets is not None:
                asked["targets"] = rng.choice(targets)
            if tenants is not None:
                asked["tenant"] = rng.choice(tenants)
            waiting -= 1
            if predicted and rng.random() < predicted:
                tokens = expected_tokens(prompt, most_output, vocab)
                asked["prediction"] = [t if rng.random() < 0.9 else 0 for t in tokens]
            # nothing is drawn where nothing is asked for, so that older cases stay as they were
            fails_at = rng.randrange(4) if fails and rng.random() < fails else None
            if rig.add(Asked(name, prompt, **asked), fails_at) and rng.random() < forks:
                rig.add(Asked(f"{name}-fork", prompt, 9, arrival=rig.now, fork_of=name))
        rig.step()
        if rng.random() < aborts:
            fork = "-fork" if aborts != _ABORTS and rng.random() < 0.5 else ""
            rig.abort(f"r{rng.randrange(1, total + 1)}{fork}")
        if leaving and rng.random() < leaving:
            # all that run, or nearly
            rig.abort(*list(rig.live)[: len(rig.live) // 2])
    rig.run()
    return rig.lines


def make_rig(core: Core, case: dict[str, Any]) -> Rig:
    """A rig whose settings, those of cache and scheduler among them, are all in one row."""
    names = ("depth", "seconds", "tick", "vocab")
    own = {name: case.pop(name) for name in names if name in case}
    cache = {name: case.pop(name) for name in _CACHE if name in case}
    cache["swap_block_seconds"] = case.pop("swap_block_seconds", 0.0)
    return Rig(core, case, {"block_size": 4, "watermark": 0.0, **cache}, check=True, **own)


def recorded(name: str) -> list[str]:
    return gzip.decompress(_file(name).read_bytes()).decode().splitlines()


def record() -> None:
    """Write down what the working tree's core decides, and nothing else."""
    GOLDEN.mkdir(exist_ok=True)
    for left in GOLDEN.glob("*.txt.gz"):
        left.unlink()
    for name, case in CASES.items():
        text = "\n".join(decisions(case)) + "\n"
        # the same bytes whenever it is recorded
        _file(name).write_bytes(gzip.compress(text.encode(), mtime=0))


def _file(name: str) -> Path:
    return GOLDEN / f"{name}.txt.gz"


if __name__ == "__main__":
    record()
