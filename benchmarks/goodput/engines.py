"""Sets of flags to compare."""

from __future__ import annotations

from benchmarks.goodput.loads import TARGETS

__all__ = ["class_flags", "fixed"]


def fixed(budget: int, policy: str = "fcfs") -> tuple[str, ...]:
    """Return flags of the baselines: an order and a token budget."""
    return (
        "--scheduling-policy", policy, "--default-ttft-ms", "0", "--default-tpot-ms", "0",
        "--no-adaptive-token-budget", "--no-demote-late",
        "--no-pace-admission", "--no-future-memory-check", "--pressure-threshold", "1",
        "--max-num-waiting", "0", "--preemption", "recompute",
        "--schedule-ahead-ms", "10000", "--max-num-batched-tokens", str(budget),
    )  # fmt: skip


def class_flags() -> tuple[str, ...]:
    """Return flags that give a server the classes of TARGETS."""
    flags: list[str] = []
    for name, targets in TARGETS.items():
        parts = [
            f"{kind}:{value * 1e3:g}"
            for kind, value in zip(("ttft", "tpot", "deadline"), targets, strict=True)
            if value is not None
        ]
        if name == "batch":
            parts.append("best-effort")
        flags += ["--slo-class", f"{name}={','.join(parts)}"]
    return tuple(flags)
