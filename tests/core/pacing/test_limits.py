"""Which best-effort rows get into it."""

from __future__ import annotations

from tests.core.pacing.models import batch, running, trained_on_rows
from tests.driving import Driver, make_request


def test_rows_behind_a_chunk_know_how_long_it_takes() -> None:
    scheduler = Driver().scheduler
    trained_on_rows(scheduler.step_time)
    step = scheduler._paced.begin(0.0, 0.0, held=False)
    step.add(make_request("prompt", 8), 8, ())
    # room for tiles of a prompt or for rows, not for both
    step.seconds = step.model.predict(step.shape) + 0.0045
    night = batch(make_request("night", 400))
    assert step.takes(night)
    step.add(night, step.chunk(night, admission=False), ())
    assert step.rows[-1].num_tokens > 1
    assert not step.takes(batch(running(None)))


def test_whoever_saves_up_has_the_longer_patience_in_every_kind_of_step() -> None:
    scheduler, night = Driver().scheduler, batch(running(None))
    trained_on_rows(scheduler.step_time)
    # a step for a prompt with a target, one without background work, and one that leaves it little
    for seconds, background in ((0.0, 0.02), (9.0, 0.0), (9.0, 1e-3)):
        given = []
        for number in range(65):
            step = scheduler._paced.begin(0.0, 0.0, held=False)
            step.seconds, step.background_seconds = seconds, background
            step.add(make_request("prompt", 8), 8, ())
            if step.takes(night):
                given.append(number)
        assert given == [64]
