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
