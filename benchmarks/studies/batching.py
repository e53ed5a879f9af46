"""Static against continuous batching: outputs of one length, uniform, and half short half long.

All requests are there at the start. Static: SLOTS of them start together, the next SLOTS when the
longest has ended; *padded* computes on for requests that have ended, *dropped* does not.
Continuous: the scheduler fills a slot when it falls free. Static batching exists only here: each
batch is a simulation of its own, and their times add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from benchmarks.studies.common import GPU, Study, replica, serve
from paceline.sim.arrival import Arrival
from paceline.sim.plan.batching import estimate_batching
from paceline.sim.plan.split import decode_step
from paceline.sim.report.table import text_table
from paceline.sim.step_times.base import FixedStepTimes, StepTimes
from paceline.sim.workload.lengths import Bimodal, Fixed, Lengths, Uniform

__all__ = ["STUDY"]

PROMPT = 128
NUM_BATCHES = 12
OUTPUTS: dict[str, Lengths] = {
    "all 260": Fixed(260),
    "uniform 1-519": Uniform(1, 519),
    "half 1-9, half 501-519": Bimodal(Uniform(1, 9), Uniform(501, 519), 0.5),
    "90 % 1-9, 10 % 501-519": Bimodal(Uniform(1, 9), Uniform(501, 519), 0.9),
}
SLOTS = (16, 64)


def _seconds(times: StepTimes, slots: int, outputs: Sequence[int]) -> float:
    requests = [Arrival(0.0, PROMPT, output) for output in outputs]
    spec = replica(times, max_num_seqs=slots)
    return serve(requests, spec).totals.end


def _rates(times: StepTimes, slots: int, outputs: Sequence[int]) -> tuple[float, float, float]:
    """Return output tokens per second: padded, dropped, continuous."""
    batches = [outputs[i : i + slots] for i in range(0, len(outputs), slots)]
    longest: dict[int, float] = {}
    padded = 0.0
    for batch in batches:
        most = max(batch)
        if most not in longest:
            longest[most] = _seconds(times, slots, [most] * slots)
        padded += longest[most]
    dropped = sum(_seconds(times, slots, batch) for batch in batches)
    continuous = _seconds(times, slots, outputs)
    total = sum(outputs)
    return total / padded, total / dropped, total / continuous


def _row_costs(slots: int, outputs: Sequence[int]) -> tuple[float, float]:
    """Return the fixed seconds of a step on the GPU, and the seconds of each row."""
    context = PROMPT + sum(outputs) // (2 * len(outputs))
    one = GPU.seconds(decode_step(1, context))
    row = (GPU.seconds(decode_step(slots, context)) - one) / max(1, slots - 1)
    return one - row, row


def tables() -> dict[str, str]:
    """Return tables of the gains, measured and by arithmetic."""
    equal_steps = FixedStepTimes(0.010)
    head = (
        "outputs",
        "slots",
        "textbook",
        "equal steps",
        "GPU, padded",
        "GPU, dropped",
        "estimate",
    )
    gains = [list(head)]
    for name, lengths in OUTPUTS.items():
        for slots in SLOTS:
            rng = Random(7)
            outputs = [lengths.sample(rng) for _ in range(slots * NUM_BATCHES)]
            fixed, row = _row_costs(slots, outputs)
            estimate = estimate_batching(outputs, slots, fixed=fixed, row=row)
            padded, _, continuous = _rates(equal_steps, slots, outputs)
            gpu = _rates(GPU, slots, outputs)
            gains.append(
                [
                    name,
                    str(slots),
                    f"{estimate.textbook_gain:.2f}x",
                    f"{continuous / padded:.2f}x",
                    f"{gpu[2] / gpu[0]:.2f}x",
                    f"{gpu[2] / gpu[1]:.2f}x",
                    f"{estimate.gain:.2f}x",
                ]
            )
    return {"gains": text_table(gains)}


STUDY = Study("batching", tables)
