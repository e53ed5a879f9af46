"""Jobs that can be simulated: a body's fields, checked. All are numbers and known names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from paceline.errors import InvalidRequestError
from paceline.http.fields import show

__all__ = ["MOST_RUNS", "Job", "parse_job"]

# maximum runs of one job: policies times budgets times loads
MOST_RUNS: Final = 16
_FIELDS: Final = (
    "workload", "minutes", "policies", "budgets", "loads", "max_num_seqs", "hardware", "model",
    "ttft_ms", "tpot_ms",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A checked job."""

    # "minutes" (of this server) or "trace" (the uploaded one)
    workload: str
    # how many minutes to replay
    minutes: float
    policies: tuple[str, ...]
    # maximum tokens of a step
    budgets: tuple[int, ...]
    # factors by which the workload's time is divided
    loads: tuple[float, ...]
    # maximum running requests; None: the server's own
    max_num_seqs: int | None
    # hardware whose step times are used; None: this server's
    hardware: str | None
    model: str | None
    # targets in milliseconds, for requests without any
    ttft_ms: float | None
    tpot_ms: float | None

    @property
    def num_runs(self) -> int:
        return len(self.policies) * len(self.budgets) * len(self.loads)

    @property
    def wants_frames(self) -> bool:
        return self.workload == "minutes" or self.hardware is None


def parse_job(values: Mapping[str, Any], choices: Mapping[str, Any], budget: int) -> Job:
    """Return a body as a job; absent fields take this server's values.

    Raises:
        InvalidRequestError: an unknown field or name, or a number out of range.
    """
    for name in values:
        if name not in _FIELDS:
            raise InvalidRequestError(f"{show(name)} is none of {', '.join(_FIELDS)}", name[:64])
    workload = values.get("workload", "minutes")
    if workload not in ("minutes", "trace"):
        raise InvalidRequestError(
            f"workload must be minutes or trace, got {show(workload)}", "workload"
        )
    job = Job(
        workload=workload,
        minutes=_number(values, "minutes", 0.1, 60.0) or 10.0,
        policies=_names(values, "policies", choices["policies"]),
        budgets=tuple(map(int, _numbers(values, "budgets", (budget,), 1, 1_000_000, whole=True))),
        loads=_numbers(values, "loads", (1.0,), 0.01, 100.0),
        max_num_seqs=_whole(values, "max_num_seqs", 1, 100_000),
        hardware=_name(values, "hardware", choices["hardware"]),
        model=_name(values, "model", choices["models"]),
        ttft_ms=_number(values, "ttft_ms", 0.01, 3.6e6),
        tpot_ms=_number(values, "tpot_ms", 0.01, 3.6e6),
    )
    if (job.hardware is None) != (job.model is None):
        raise InvalidRequestError(
            "hardware and model go together: step times are of one on the other",
            "model" if job.model is None else "hardware",
        )
    if job.num_runs > MOST_RUNS:
        raise InvalidRequestError(
            f"{len(job.policies)} policies, {len(job.budgets)} budgets and {len(job.loads)} loads "
            f"are {job.num_runs} simulations, at most {MOST_RUNS} are run",
            "policies",
        )
    return job


def _check(name: str, value: Any, least: float, most: float, whole: bool) -> float:
    """Return the value. Raises InvalidRequestError."""
    kinds = (int,) if whole else (int, float)
    # type(), because isinstance would accept true; the bounds exclude values that are not finite
    if type(value) not in kinds or not least <= value <= most:
        what = "a whole number" if whole else "a number"
        raise InvalidRequestError(
            f"{name} must be {what} from {least:g} to {most:g}, got {show(value)}", name
        )
    return float(value)


def _number(values: Mapping[str, Any], name: str, least: float, most: float) -> float | None:
    value = values.get(name)
    return None if value is None else _check(name, value, least, most, whole=False)


def _whole(values: Mapping[str, Any], name: str, least: int, most: int) -> int | None:
    value = values.get(name)
    return None if value is None else int(_check(name, value, least, most, whole=True))


def _numbers(
    values: Mapping[str, Any],
    name: str,
    default: tuple[float, ...],
    least: float,
    most: float,
    *,
    whole: bool = False,
) -> tuple[float, ...]:
    return tuple(
        dict.fromkeys(
            _check(name, value, least, most, whole) for value in _list(values, name, default)
        )
    )


def _names(values: Mapping[str, Any], name: str, known: Sequence[str]) -> tuple[str, ...]:
    found = dict.fromkeys(_list(values, name, ()))
    for each in found:
        if each not in known:
            raise InvalidRequestError(f"{name}: {show(each)} is none of {', '.join(known)}", name)
    return tuple(found)


def _list(values: Mapping[str, Any], name: str, default: tuple[Any, ...]) -> Sequence[Any]:
    value = values.get(name)
    if value is None and default:
        return default
    if not isinstance(value, list) or not 1 <= len(value) <= MOST_RUNS:
        raise InvalidRequestError(f"{name} must be a list of 1 to {MOST_RUNS}", name)
    if any(isinstance(each, (list, dict)) for each in value):
        raise InvalidRequestError(f"{name} must hold plain values", name)
    return value


def _name(values: Mapping[str, Any], name: str, known: Sequence[str]) -> str | None:
    value = values.get(name)
    if value is not None and value not in known:
        raise InvalidRequestError(f"{name} {show(value)} is none of {', '.join(known)}", name)
    return value
