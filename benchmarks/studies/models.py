"""Two models in one server, room for one: floods of both, and quiet traffic, by the length of a
swap.

The decisions are the server's own (``engine.models.states.ModelStates``). An engine of the two-core
CPU of the ablation makes a token for each of its requests in 4 ms and 0.4 ms a row; a prompt of 255
takes 106 ms. A swap is an unload, a third of its time, and a load.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Final

from benchmarks.common.statistics import percentile
from benchmarks.studies.common import Study
from paceline.engine.models.ledger import Account
from paceline.engine.models.model import ModelSpec, Ticket
from paceline.engine.models.states import Action, Load, ModelStates
from paceline.sim.report.table import text_table

__all__ = ["STUDY", "Server"]

NAMES: Final = ("a", "b")
SWAPS: Final = (0.3, 1.0, 3.0, 10.0)
TOKENS: Final = 32
STEP, ROW, PROMPT = 4e-3, 0.4e-3, 0.106
CALLERS: Final = 4
COUNT: Final = 600
# requests a second for each model
RATES: Final = (0.05, 0.2, 1.0)


@dataclass(slots=True, eq=False)
class _Asked:
    ticket: Ticket
    at: float
    left: int = TOKENS + 1
    first: float = 0.0


@dataclass(slots=True)
class Server:
    """Two models, memory for ``room`` of them, in virtual time."""

    swap: float
    room: int = 1
    now: float = 0.0
    swaps: int = 0
    # seconds until the first token of each request, and until the last of all
    firsts: list[float] = field(default_factory=list)
    _requests: list[_Asked] = field(default_factory=list)
    _doing: tuple[Action, float] | None = None
    _states: ModelStates = field(init=False)

    def __post_init__(self) -> None:
        specs = [ModelSpec(name=name, account=Account(weights=1)) for name in NAMES]
        self._states = ModelStates(specs, self.room)

    def ask(self, name: str) -> None:
        self._requests.append(_Asked(self._states.ask(name, self.now), self.now))

    def step(self, until: float) -> list[str]:
        """Go on to the next event, at most to ``until``; return the models of the requests that
        have ended."""
        states = self._states
        if self._doing is None and (action := states.next(self.now)) is not None:
            seconds = self.swap * (2 / 3 if isinstance(action, Load) else 1 / 3)
            self._doing = action, self.now + seconds
        running = [each for each in self._requests if each.ticket.is_granted]
        ends = until
        if running:
            prompts = [each for each in running if each.left > TOKENS]
            step = PROMPT if prompts else STEP + ROW * len(running)
            ends = self.now + step
        elif self._doing is None and (wake := states.wake_at(self.now)) is not None:
            ends = min(ends, wake)
        if self._doing is not None and not running:
            ends = min(ends, self._doing[1])
        self.now = max(self.now, ends)
        self._finish()
        return self._advance(running)

    def _finish(self) -> None:
        if self._doing is None or self.now < self._doing[1]:
            return
        action, self._doing = self._doing[0], None
        if isinstance(action, Load):
            model = action.model
            self._states.loaded_as(model, model.account, self.swap * 2 / 3, self.now)
            self.swaps += 1
        else:
            self._states.unloaded(action.model, action.reason)

    def _advance(self, running: list[_Asked]) -> list[str]:
        ended = []
        prompts = [each for each in running if each.left > TOKENS]
        for each in prompts[:1] or running:
            each.left -= 1
            if each.left == TOKENS:
                self.firsts.append(self.now - each.at)
            if not each.left:
                self._states.leave(each.ticket, self.now)
                self._requests.remove(each)
                ended.append(each.ticket.model.name)
        return ended


def flood(server: Server, names: tuple[str, ...]) -> float:
    """Have CALLERS for each model ask COUNT times in all; return the seconds."""
    began = server.now
    left = dict.fromkeys(names, COUNT - CALLERS)
    for name in names:
        for _ in range(CALLERS):
            server.ask(name)
    running = CALLERS * len(names)
    while running:
        for name in server.step(server.now + 60.0):
            running -= 1
            if left[name]:
                left[name] -= 1
                running += 1
                server.ask(name)
    return server.now - began


def floods() -> list[list[str]]:
    rows = [["swap", "of the rate of one swap", "swaps", "first token p50", "p99"]]
    for swap in SWAPS:
        whole = Server(swap)
        seconds = flood(whole, ("a",)) + flood(whole, ("b",))
        both = Server(swap)
        together = flood(both, NAMES)
        firsts = sorted(both.firsts)
        rows.append(
            [f"{swap:g} s", f"{seconds / together:.2f}", str(both.swaps),
             *(f"{percentile(firsts, q):.2f} s" for q in (0.5, 0.99))]
        )  # fmt: skip
    return rows


def quiet() -> list[list[str]]:
    """Return what requests wait at random times, with room for one model and for both."""
    rows = [["requests a second", "swap", "swaps a minute", "first token p50", "p90", "p99"]]
    for rate in RATES:
        for swap, room in ((0.3, 1), (3.0, 1), (3.0, 2)):
            draw = random.Random(1)
            server = Server(swap, room)
            at = 0.0
            for _ in range(COUNT):
                at += draw.expovariate(2 * rate)
                while server.now < at:
                    server.step(at)
                server.ask(draw.choice(NAMES))
            while len(server.firsts) < COUNT:
                server.step(server.now + 60.0)
            firsts = sorted(server.firsts)
            rows.append(
                [f"2 x {rate:g}", f"{swap:g} s" if room == 1 else "room for both",
                 f"{60 * server.swaps / server.now:.1f}",
                 *(f"{percentile(firsts, q):.2f} s" for q in (0.5, 0.9, 0.99))]
            )  # fmt: skip
    return rows


def tables() -> dict[str, str]:
    return {"floods": text_table(floods()), "quiet": text_table(quiet())}


STUDY = Study("models", tables)
