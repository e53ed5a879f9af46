"""The executor that sleeps: steps queue up behind each other, and results are told at their end."""

from __future__ import annotations

from paceline.backends.reference.null import NullBackend
from paceline.backends.reference.simulated import SimulatedBackend
from paceline.core.outputs import NewRequest, ScheduledRow, SchedulerOutput
from paceline.core.sampling_params import SamplingParams


def test_steps_take_what_the_function_says_one_after_the_other() -> None:
    now = [5.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    backend = SimulatedBackend(
        NullBackend(vocab_size=100, num_blocks=4, block_size=4),
        lambda plan: 0.5 * plan.num_tokens,
        clock=lambda: now[0],
        sleep=sleep,
    )
    assert (backend.info.name, backend.info.num_blocks) == ("simulated", 4)
    new = NewRequest("a", (3, 5), 2, SamplingParams(max_tokens=3), (0,))
    prompt = SchedulerOutput(0, (ScheduledRow("a", 0, 2, (), True),), (new,), (), (), 2)
    token = SchedulerOutput(1, (ScheduledRow("a", 2, 1, (), True),), (), (), (), 1)
    first, second = backend.execute(prompt), backend.execute(token)
    # handing over takes no time
    assert now[0] == 5.0
    assert first.result().sampled == ((13,),)
    assert (now[0], first.result().elapsed) == (6.0, 1.0)
    # the null backend's second token, half a second after the first step's end
    assert second.result().sampled == ((52,),)
    assert now[0] == 6.5
    backend.close()
