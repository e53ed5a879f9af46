"""Whatever can happen to a scheduler, drawn from a seed: settings, arrivals, aborts, times.

Three walks, two of them after those of tests/property. ``_wander`` calls a small scheduler in any
order and lets the clock do what it likes. ``_serve`` is an engine that does its turns on a machine
whose step times follow a law, under bursts and pauses, long enough for what learns to have learned.
``_speculate`` is one that few use at a time, so that next tokens are drafted.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from paceline.backends.reference.null import expected_tokens
from tests.replay import observe
from tests.replay.observe import Asked, Core
from tests.replay.rig import Rig, Seconds

# small, so that prefixes repeat and stop tokens are hit
_VOCAB = 7
_TENANTS = "abc"
_WANDER_TARGETS: Mapping[str, tuple[float | None, ...]] = {
    "ttft": (None, 0.1, 5.0, 30.0),
    "tpot": (None, 0.01, 1.5, 4.0),
    "queue_ttl": (None, None, 4.0),
    "deadline": (None, 20.0, 60.0),
}
_SERVE_TARGETS: tuple[Mapping[str, Any], ...] = (
    {},
    {},
    {"ttft": 1.0, "tpot": 0.03},
    {"ttft": 0.2},
    {"tpot": 0.05, "queue_ttl": 2.0},
    {"slo_class": "batch", "best_effort": True},
    *({"slo_class": "batch", "best_effort": True, "deadline": due} for due in (1.0, 4.0, 20.0)),
)


def play(core: Core, policy: str, seed: int) -> list[str]:
    """What ``core`` decides in the scenario of one seed, as lines."""
    return play_rig(core, policy, seed).lines


def play_rig(core: Core, policy: str, seed: int) -> Rig:
    """The same, with the scheduler as the scenario leaves it."""
    rng = random.Random(f"{policy} {seed}")
    if seed % 5 == 4:
        return _speculate(core, policy, rng)
    return (_wander if seed % 2 else _serve)(core, policy, rng)


def _flags(rng: random.Random, policy: str) -> dict[str, Any]:
    """Settings that mean the same at any pace."""
    return {
        "policy": policy,
        "max_model_len": 1024,
        "adaptive_token_budget": rng.random() < 0.75,
        "max_skip_ahead": rng.choice((0, 1, 3, 8)),
        "max_skips": rng.choice((0, 1, 3, 64)),
        "future_memory_check": rng.random() < 0.5,
        "pace_admission": rng.random() < 0.75,
        "demote_late": rng.random() < 0.75,
        "preemption": rng.choice(("auto", "swap", "recompute")),
        "pressure_threshold": rng.choice((0.5, 0.8, 0.88, 1.0)),
        "best_effort_share": rng.choice((0.0, 0.05, 0.4)),
        "coalesce_size": rng.choice((1, 3)),
    }


def _cache(rng: random.Random, num_blocks: int, block_size: int) -> dict[str, Any]:
    return {
        "num_blocks": num_blocks,
        "block_size": block_size,
        "enable_prefix_caching": rng.random() < 0.7,
        "max_idle_blocks": rng.choice((None, 0, 3)),
        "watermark": rng.choice((0.0, 0.1)),
        "num_host_blocks": rng.choice((0, 3, 40)),
        "swap_block_seconds": rng.choice((0.0, 1e-4, 0.01)),
    }


# ------------------------------------------------------------------ any order of calls


def _wander(core: Core, policy: str, rng: random.Random) -> Rig:
    max_num_seqs = rng.randint(1, 6)
    config = _flags(rng, policy) | {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_seqs + rng.randint(0, 20),
        "max_num_waiting": rng.choice((None, 4)),
        "max_predicted_ttft_s": rng.choice((None, None, 6.0)),
        "queue_timeout_s": rng.choice((None, 6.0)),
        "best_effort_step_s": rng.choice((0.03, 1.0)),
        "priority_ageing_s": 5.0,
        "coalesce_window_s": 3.0,
        "schedule_ahead_s": rng.choice((0.0, 0.5)),
    }
    paced = rng.random() < 0.7
    rig = Rig(
        core,
        config,
        _cache(rng, rng.randint(6, 40), rng.choice((1, 2, 4))),
        seconds=(lambda wide, narrow: 0.5 + 0.1 * wide + 0.05 * narrow) if paced else None,
        tell_all=rng.random() < 0.9,
        vocab=_VOCAB,
    )
    depth = rng.choice((1, 2))
    arriving = rng.choice((0.15, 0.3, 0.45))
    names: list[str] = []
    for _ in range(rng.choice((50, 120))):
        chance = rng.random()
        if chance < arriving:
            names += _arrive(rig, rng, f"r{len(rig.lines)}")
            if rng.random() < 0.05:
                rig.add(_wrong(rng, rig, names))
        elif chance < arriving + 0.03 and names:
            rig.abort(rng.choice(names))
        elif rig.num_flying and (rig.num_flying == depth or rng.random() < 0.4):
            # clocks stand still, jump, and where a machine is suspended even go back
            rig.now += rng.choice((1.0, 1.0, 1.0, 0.0, 7.0, -0.5))
            rig.settle()
        else:
            rig.plan()
    while rig.num_flying:
        rig.settle()
    rig.run(max_steps=300)
    return rig


def _arrive(rig: Rig, rng: random.Random, parent: str) -> list[str]:
    """A request and its forks. Returns those that were taken."""
    prompt = [rng.randrange(3) for _ in range(rng.randint(1, 24))]
    slo: dict[str, Any] = {}
    if rng.random() < 0.7:
        slo = {name: rng.choice(values) for name, values in _WANDER_TARGETS.items()}
        slo["best_effort"] = rng.random() < 0.5
    forks = rng.choice((0, 0, 1, 2))
    common: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": rng.randint(1, 16),
        # some come late from another process
        "arrival": rig.now - rng.choice((0.0, 0.0, 2.5)),
        "priority": rng.choice((0, 1, 2, 3, 2**63 - 1, -(2**63))),
        "salt": rng.choice((None, None, "a")),
        "stop": frozenset(rng.sample(range(_VOCAB), rng.choice((0, 0, 1)))),
        "tenant": rng.choice(_TENANTS),
        "targets": slo,
    }
    taken = []
    for index in range(forks + 1):
        asked = Asked(
            name=f"{parent}/{index}",
            fork_of=f"{parent}/0" if index else None,
            num_forks=0 if index else forks,
            **common,
        )
        fails_at = rng.randrange(asked.max_tokens) if rng.random() < 0.05 else None
        if rig.add(asked, fails_at):
            taken.append(asked.name)
        elif not index:
            break
    return taken


def _wrong(rng: random.Random, rig: Rig, names: list[str]) -> Asked:
    """What can never be served."""
    return rng.choice(
        (
            Asked("empty", [], 1, rig.now),
            Asked("long", [1, 2], 5000, rig.now),
            Asked("large", [1, 2], 900, rig.now),
            Asked("orphan", [1, 2], 1, rig.now, fork_of="no such request"),
            Asked(names[0] if names else "first", [], 1, rig.now),
        )
    )


# ------------------------------------------------------------------ an engine at work


def _serve(core: Core, policy: str, rng: random.Random) -> Rig:
    max_num_seqs = rng.choice((4, 12, 24))
    config = _flags(rng, policy) | {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": rng.choice((24, 64, 640)),
        "max_num_waiting": rng.choice((None, None, 12, 40)),
        "max_predicted_ttft_s": rng.choice((None, None, 0.5, 3.0)),
        "queue_timeout_s": rng.choice((None, None, 5.0)),
        "best_effort_step_s": rng.choice((0.03, 0.1, 0.4)),
        "priority_ageing_s": 1.0,
        "coalesce_window_s": 0.1,
        "schedule_ahead_s": rng.choice((0.002, 10.0)),
    }
    rig = Rig(
        core,
        config,
        _cache(rng, rng.choice((60, 100, 200, 2000)), 4),
        depth=rng.choice((1, 2)),
        seconds=_law(rng),
        tell_all=rng.random() < 0.9,
        tick=None,
    )
    if policy == "fair" and rng.random() < 0.5:
        observe.forget_tenants_at(rig.scheduler, rng.choice((3, 8)))
    names: list[str] = []
    rate = rng.choice((0.1, 0.3, 0.6))
    for _ in range(rng.choice((50, 100))):
        if rng.random() < rate:
            for _ in range(rng.choice((1, 1, 1, 2, 8))):
                names += _ask(rig, rng, f"r{len(rig.lines)}")
        if rng.random() < 0.04 and names:
            rig.abort(rng.choice(names))
        if rng.random() < 0.01:
            # the machine is held up, or all clients go
            rig.now += rng.choice((1.0, 11.0))
        elif rng.random() < 0.005:
            rig.abort(*rig.live)
            rig.now += 3600.0
        rig.step()
    rig.run(max_steps=300)
    return rig


def _law(rng: random.Random) -> Seconds:
    """Seconds of a step: a sum of parts, or where arithmetic hides behind reading the weights; as
    told, or with noise."""
    noise = rng.choice((0.0, 0.0, 0.2))
    slow = rng.choice((1.0, 3.0))
    hides = rng.random() < 0.3

    def seconds(wide: int, narrow: int) -> float:
        if hides:
            told = max(0.03, 0.0003 * (wide + narrow)) + 0.0002 * narrow
        else:
            told = 0.01 + 0.001 * wide + 0.001 * narrow
        return slow * told * (1.0 + noise * rng.random())

    return seconds


def _ask(rig: Rig, rng: random.Random, name: str) -> list[str]:
    """A request, and now and then a fork of it. Returns those that were taken."""
    prompt = [5] * rng.choice((0, 0, 16)) + [
        rng.randrange(97) for _ in range(rng.choice((4, 20, 60, 150)))
    ]
    common: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": rng.choice((2, 20, 40)),
        "arrival": rig.now,
        "priority": rng.randrange(3),
        "tenant": rng.choice("aaaaab") if rng.random() < 0.8 else name,
        "targets": rng.choice(_SERVE_TARGETS),
    }
    forks = 1 if rng.random() < 0.1 else 0
    fails_at = 3 if rng.random() < 0.02 else None
    taken = [name] if rig.add(Asked(name, num_forks=forks, **common), fails_at) else []
    if forks and taken:
        if rng.random() < 0.3:
            # the fork comes when its parent may have its prompt already
            rig.step()
            rig.step()
        fork = f"{name}/1"
        taken += [fork] if rig.add(Asked(fork, fork_of=name, **common)) else []
    return taken


# ------------------------------------------------------------------ an engine that speculates


def _speculate(core: Core, policy: str, rng: random.Random) -> Rig:
    by_itself = {
        "method": rng.choice(("ngram", "auto")),
        "num_speculative_tokens": rng.choice((1, 4, 8)),
        "prompt_lookup_max": 5,
        "prompt_lookup_min": rng.choice((1, 3)),
    }
    config = _flags(rng, policy) | {
        "max_num_seqs": rng.choice((2, 12)),
        "max_num_batched_tokens": rng.choice((24, 640)),
        # None: of requests that say what they expect
        "speculative_config": rng.choice((None, by_itself, by_itself)),
    }
    # of few tokens some come again as they came before
    vocab = rng.choice((_VOCAB, 97))
    rig = Rig(
        core,
        config,
        _cache(rng, rng.choice((40, 2000)), 4),
        depth=rng.choice((1, 2)),
        seconds=_law(rng) if rng.random() < 0.8 else None,
        tell_all=rng.random() < 0.9,
        tick=None if rng.random() < 0.8 else 1.0,
        vocab=vocab,
    )
    targets = rng.choice((({},), _SERVE_TARGETS))
    names: list[str] = []
    for _ in range(rng.choice((30, 60))):
        name = f"r{len(rig.lines)}"
        prompt = [rng.randrange(vocab) for _ in range(rng.choice((4, 20, 60)))]
        wrong = rng.choice((0.0, 0.1, 1.0))
        expected = [
            rng.randrange(vocab) if rng.random() < wrong else token
            for token in expected_tokens(prompt, 60, vocab)
        ]
        asked = Asked(
            name,
            prompt,
            rng.choice((2, 40, 60)),
            arrival=rig.now,
            stop=frozenset(rng.sample(range(vocab), rng.choice((0, 0, 1)))),
            targets=rng.choice(targets),
            prediction=expected if rng.random() < 0.5 else [],
        )
        if rig.add(asked, 9 if rng.random() < 0.05 else None):
            names.append(name)
        if names and rng.random() < 0.05:
            rig.abort(rng.choice(names))
        for _ in range(rng.choice((0, 20, 60))):
            rig.step()
    rig.run(max_steps=300)
    return rig
