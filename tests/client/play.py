"""Drives a ``Machine`` in virtual time against attempts that a test writes down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from paceline.client import ClientError, Event, Policy, RetryBudget, Target
from paceline.client.machine import Machine
from paceline.client.steps import (
    Action,
    Broken,
    Closed,
    Connected,
    Data,
    Emit,
    Fail,
    Head,
    Input,
    Open,
    Request,
    Start,
    Tick,
)

SSE_HEADERS = {"content-type": "text/event-stream"}
# 24 Nov 2026, 00:00:00 UTC
WALL = 1795478400.0
SEED = 7
# of all jitter
DRAW = 0.5


class Step(NamedTuple):
    """One input, the actions that it led to, and the deadline behind it; None: over."""

    at: float
    given: Input
    actions: tuple[Action, ...]
    deadline: float | None


class Play:
    """One call. ``serve`` gives the inputs of each attempt; behind them time goes by."""

    def __init__(
        self,
        serve: Callable[[Open], Sequence[Input]],
        *,
        targets: Sequence[Target] = (Target("http://a", "m"),),
        budget: RetryBudget | None = None,
        body: dict[str, Any] | None = None,
        path: str = "/chat/completions",
        left_out: list[set[str]] | None = None,
        **policy: Any,
    ) -> None:
        self.opened: list[Open] = []
        self.opened_at: list[float] = []
        self.events: list[Event] = []
        # everything that the machine was told and said
        self.steps: list[Step] = []
        self.error: ClientError | None = None
        self.now = 1000.0
        self._serve = serve
        self.targets = targets
        self.request = Request(path, body or {"messages": []}, SEED)
        self.policy = Policy(**policy)
        self._machine = Machine(
            self.request,
            targets,
            self.policy,
            budget or RetryBudget(),
            lambda: DRAW,
            [set() for _ in targets] if left_out is None else left_out,
        )
        inputs: Sequence[Input] = [Start()]
        while not self._machine.over:
            inputs = self._hand(inputs)
            if not inputs and not self._machine.over:
                self.now = max(self.now, self._machine.deadline)
                inputs = [Tick()]
        assert self._machine.handle(Data(b"data: late\n\n"), self.now) == []

    def _hand(self, inputs: Sequence[Input]) -> Sequence[Input]:
        """The inputs that follow these."""
        for given in inputs:
            actions = self._machine.handle(given, self.now)
            deadline = None if self._machine.over else self._machine.deadline
            self.steps.append(Step(self.now, given, tuple(actions), deadline))
            for action in actions:
                self._do(action)
                if isinstance(action, Open):
                    self.opened.append(action)
                    self.opened_at.append(self.now)
                    return self._serve(action)
        return ()

    def _do(self, action: Action) -> None:
        assert self.error is None
        if isinstance(action, Emit):
            self.events.append(action.event)
        elif isinstance(action, Fail):
            self.error = action.error


def streaming(data: bytes, *, closed: bool = True, piece: int = 0) -> list[Input]:
    """An attempt that is answered with ``data``, ``piece`` bytes at a time (0: all at once)."""
    step = piece or max(1, len(data))
    parts = [Data(data[at : at + step]) for at in range(0, len(data), step)]
    return [Connected(), Head(200, SSE_HEADERS, WALL), *parts, *([Closed()] if closed else [])]


def refusing(status: int, body: bytes = b"", **headers: str) -> list[Input]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return [Connected(), Head(status, named, WALL), Data(body), Closed()]


def unreachable() -> list[Input]:
    return [Broken("no connection")]


def in_turn(*attempts: Sequence[Input]) -> Callable[[Open], Sequence[Input]]:
    """Each attempt once; AssertionError beyond them."""
    left = list(attempts)

    def serve(action: Open) -> Sequence[Input]:
        assert left, "one attempt too many"
        return left.pop(0)

    return serve
