"""The recorded cases: each a fixed, seeded trace under settings that make parts of core work.

``golden/NAME.txt.gz`` holds the decisions of each as lines.
"""

from __future__ import annotations

import gzip
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.replay.observe import Asked, Core
from tests.replay.rig import Rig

GOLDEN = Path(__file__).with_name("golden")

_TARGETS: tuple[Mapping[str, Any], ...] = (
    {},
    {"ttft": 20.0, "tpot": 1.0},
    {"best_effort": True},
)
_CACHE = ("num_blocks", "watermark", "enable_prefix_caching", "num_host_blocks")
_DEFAULTS: Mapping[str, Any] = {
    "max_num_batched_tokens": 96,
    "max_num_seqs": 12,
    "max_model_len": 1024,
    "future_memory_check": False,
}


def _seconds(wide: int, narrow: int) -> float:
    return 0.05 + 0.01 * wide + 0.02 * narrow


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
    "boost": {"num_blocks": 60, "policy": "boost", "seconds": _seconds},
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
    # all four tiers, with deadlines that press and a share of the step
    "bands": {
        "num_blocks": 90,
        "policy": "deadline",
        "future_memory_check": True,
        "best_effort_delay_s": 20.0,
        "background_share": 0.5,
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
}


def decisions(case: Mapping[str, Any], core: Core | None = None) -> list[str]:
    """What a core decides about 150 requests in a bursty trace; the working tree's by default."""
    rng = random.Random(7)
    case = {**_DEFAULTS, **case}
    tenants = case.pop("tenants", None)
    targets = case.pop("targets", _TARGETS if "seconds" in case else None)
    rig = make_rig(core or Core(), case)
    waiting = 150
    while waiting or rig.scheduler.has_unfinished:
        for _ in range(min(waiting, rng.choice((0, 0, 0, 0, 1, 6)))):
            name = f"r{waiting}"
            shared = list(range(24)) if rng.random() < 0.5 else []
            prompt = shared + [rng.randrange(997) for _ in range(rng.randint(1, 60))]
            asked = {
                "max_tokens": rng.randint(1, 40),
                "arrival": rig.now,
                "priority": rng.randrange(3),
            }
            if targets is not None:
                asked["targets"] = rng.choice(targets)
            if tenants is not None:
                asked["tenant"] = rng.choice(tenants)
            waiting -= 1
            if rig.add(Asked(name, prompt, **asked)) and rng.random() < 0.1:
                rig.add(Asked(f"{name}-fork", prompt, 9, arrival=rig.now, fork_of=name))
        rig.step()
        if rng.random() < 0.02:
            rig.abort(f"r{rng.randrange(1, 151)}")
    rig.run()
    return rig.lines


def make_rig(core: Core, case: dict[str, Any]) -> Rig:
    """A rig whose settings, those of cache and scheduler among them, are all in one row."""
    own = {name: case.pop(name) for name in ("depth", "seconds") if name in case}
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
