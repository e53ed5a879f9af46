"""vLLM's engine loop over the recorded interface."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any, ClassVar

from tests.vllm import fake

__all__ = ["Loop"]


class Loop:
    """vLLM's engine loop with two steps in flight, each of which takes 10 ms."""

    made: ClassVar[list[Loop]] = []

    def __init__(self, kind: Any, *, num_blocks: int = 64, **config: Any) -> None:
        self.now = 0.0

        class Clocked(kind):  # type: ignore[misc]
            clock = wall = staticmethod(lambda: self.now)

        self.scheduler = Clocked(fake.Config(**config), num_blocks=num_blocks)
        self.made.append(self)
        self.flying: deque[Any] = deque()
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, Any] = {}
        # what each step computed
        self.steps: list[dict[str, int]] = []

    def add(self, name: str, prompt: int, max_tokens: int, **more: Any) -> fake.Request:
        number = len(self.tokens) + 1
        tokens = more.pop("tokens", [1000 * number + i for i in range(prompt)])
        request = fake.Request(name, tokens, max_tokens, arrival_time=self.now, **more)
        self.tokens[name] = []
        self.scheduler.add_request(request)
        return request

    def step(self) -> None:
        """Plan a step, and take in the oldest one where two are in flight or none was planned."""
        output = self.scheduler.schedule()
        if output.num_scheduled_tokens:
            self.steps.append(output.num_scheduled_tokens)
        self.flying.append(output)
        if len(self.flying) == 2 or not output.num_scheduled_tokens:
            self.now += 0.01
            self._deliver(self.flying.popleft())

    def _deliver(self, output: Any) -> None:
        names = list(output.num_scheduled_tokens)
        sampled = [[len(self.tokens[name])] if name in output.samples else [] for name in names]
        index = {name: i for i, name in enumerate(names)}
        result = SimpleNamespace(req_id_to_index=index, sampled_token_ids=sampled)
        for each in self.scheduler.update_from_output(output, result).values():
            for news in each.outputs:
                self.tokens[news.request_id] += news.new_token_ids
                if news.finish_reason is not None:
                    self.ended[news.request_id] = news.finish_reason
        pacer = self.scheduler.pacer
        if self.scheduler._paces:
            pacer.core.check_integrity()

    def run(self, most: int = 2_000) -> None:
        for _ in range(most):
            if self.scheduler.has_requests():
                self.step()
            elif self.flying:
                self._deliver(self.flying.popleft())
            else:
                return
        raise AssertionError("requests are left")
