"""A scheduler on a machine whose step times are known, in the time that its steps take."""

from __future__ import annotations

from typing import Any

from paceline.core.predict.step_time import StepShape
from paceline.core.request import Request
from paceline.core.slo import Slo
from tests.driving import Driver, make_request


def seconds(shape: StepShape, per_key: float = 0.0) -> float:
    """10 ms a step, 1 ms a prompt token, 1 ms a row and so much for each token before it."""
    rows = 0.001 * shape.narrow_rows + per_key * shape.narrow_keys
    return 0.01 + 0.001 * shape.wide_tokens + rows


class Machine(Driver):
    """A driver whose clock moves by what its steps take, trained."""

    def __init__(self, *, per_key: float = 0.0, **config: Any) -> None:
        def takes(shape: StepShape) -> float:
            return seconds(shape, per_key)

        settings: dict[str, Any] = {
            "num_blocks": 8000,
            "enable_prefix_caching": False,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 640,
            "max_model_len": 8192,
            "policy": "deadline",
            "best_effort_step_s": 0.4,
        }
        super().__init__(seconds=takes, **(settings | config))
        self.takes = takes
        for index in range(400):
            shape = StepShape(0, 0.0, index % 5, 50 * (index % 5) * (1 + index % 3))
            if index % 2:
                shape = shape.plus(0, 32 * (1 + index % 16))
            self.scheduler.step_time.observe(shape, takes(shape))

    def step(self) -> bool:
        before = self.now
        planned = len(self.plans)
        moved = super().step()
        # the driver's own clock goes a second a step
        self.now = before
        if len(self.plans) > planned:
            self.now += self.takes(StepShape.of(self.plans[-1].rows))
        return moved

    def until_done(self) -> dict[str, float]:
        """When each request ended, in that order."""
        ends: dict[str, float] = {}
        while self.scheduler.has_unfinished:
            self.step()
            for request_id in self.finished:
                ends.setdefault(request_id, self.now)
        return ends

    def batch(self, name: str, num_tokens: int, deadline: float) -> Request:
        return make_request(
            name,
            num_tokens,
            2,
            arrival=self.now,
            slo=Slo(slo_class="batch", best_effort=True, deadline=deadline),
        )

    def late(self, name: str, num_tokens: int) -> Request:
        """A request whose first token was due before it could be started."""
        return make_request(name, num_tokens, 2, arrival=self.now, slo=Slo(ttft=0.05))
