"""The table of clients and capabilities, and what a client's run is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["CAPABILITIES", "Outcome", "failures", "table"]

CAPABILITIES = (
    "models", "chat", "stream", "async", "tools", "tool stream", "tool result", "schema",
    "logprobs", "completions", "responses", "errors", "docs",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outcome:
    """One client's run."""

    # of the package, "" where it is absent
    version: str = ""
    # why it could not be installed
    absent: str | None = None
    # capability -> what went wrong, None where nothing did
    steps: Mapping[str, str | None] = field(default_factory=dict)
    # capabilities it must show: a script that ends early is a failure
    wanted: Sequence[str] = ()

    @property
    def faults(self) -> dict[str, str]:
        """Capability -> what went wrong."""
        found = {name: error for name, error in self.steps.items() if error is not None}
        for name in self.wanted:
            if self.absent is None and name not in self.steps:
                found[name] = "the script ended before it"
        return found


def table(outcomes: Mapping[str, Outcome]) -> str:
    """A row a client: "ok", "FAIL" or, where the client has no such thing, "-"."""
    width = max(len(name) for name in outcomes) + 2
    lines = [f"{'client':{width}}{'version':>10s}  " + "  ".join(CAPABILITIES)]
    for name, outcome in outcomes.items():
        if outcome.absent is not None:
            lines.append(f"{name:{width}}{'absent':>10s}  {outcome.absent}")
            continue
        faults = outcome.faults
        cells = (
            "FAIL" if capability in faults else "ok" if capability in outcome.steps else "-"
            for capability in CAPABILITIES
        )
        row = "  ".join(
            f"{cell:{len(name)}}" for cell, name in zip(cells, CAPABILITIES, strict=True)
        )
        lines.append(f"{name:{width}}{outcome.version:>10s}  {row}".rstrip())
    return "\n".join(lines)


def failures(outcomes: Mapping[str, Outcome]) -> list[str]:
    """A line for each thing that went wrong."""
    return [
        f"{name}: {capability}: {error}"
        for name, outcome in outcomes.items()
        for capability, error in outcome.faults.items()
    ]
