"""Who is to blame for an engine's end: evidence, verdicts, turns, and what outlives a process."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import Future
from pathlib import Path

import msgspec
import pytest

from paceline.backends.reference.null import NullBackend
from paceline.core.grammar import Grammar
from paceline.core.outputs import ScheduledRow, SchedulerOutput
from paceline.core.sampling_params import SamplingParams
from paceline.engine.core import EngineCore
from paceline.engine.process.in_flight import InFlightFile, read_in_flight
from paceline.engine.process.loop import EngineLoop
from paceline.engine.process.messages import Add, Shutdown
from paceline.engine.supervision.quarantine import Place, Quarantine, Suspect, find_guilty
from paceline.engine.testing import null_core
from paceline.engine.types import GenerationRequest
from tests.engine.process.test_client import make


def plan(*choices: str) -> SchedulerOutput:
    rows = tuple(ScheduledRow(choice, 0, 1, (), True) for choice in choices)
    return SchedulerOutput(1, rows, (), (), (), len(rows))


class TestInFlight:
    def test_the_latest_plans_and_nothing_before_them(self, tmp_path: Path) -> None:
        path = tmp_path / "in-flight"
        file = InFlightFile(path)
        assert read_in_flight(path) == frozenset()
        file.step(plan("long-name/0", "long-name/1", "b/0"))
        assert read_in_flight(path) == {"long-name", "b"}
        # the step before may still run
        file.step(plan("c/0"))
        assert read_in_flight(path) == {"long-name", "b", "c"}
        file.step(plan("c/0"))
        assert read_in_flight(path) == {"c"}
        file.aside(["compiled"])
        assert read_in_flight(path) == {"c", "compiled"}
        file.aside([])
        assert read_in_flight(path) == {"c"}
        file.close()
        assert read_in_flight(path) == {"c"}

    def test_every_plan_that_may_still_run(self, tmp_path: Path) -> None:
        path = tmp_path / "in-flight"
        for depth in (1, 2, 3, 8):
            file = InFlightFile(path, depth)
            for number in range(10):
                file.step(plan(f"r{number}/0"))
            assert read_in_flight(path) == {f"r{number}" for number in range(10 - depth, 10)}
            file.close()

    def test_nothing_is_written_while_the_same_requests_run(self, tmp_path: Path) -> None:
        path = tmp_path / "in-flight"
        file = InFlightFile(path)
        for _ in range(3):
            file.step(plan("a/0", "b/0"))
        path.write_bytes(b"\0\0\0\1x")
        file.step(plan("a/0", "b/0"))
        assert read_in_flight(path) == {"x"}
        file.step(plan("a/0"))
        assert read_in_flight(path) == {"a", "b"}
        file.close()

    def test_who_cannot_write_leaves_nobody_out(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "in-flight"
        assert read_in_flight(path) is None
        InFlightFile(tmp_path / "missing" / "in-flight").step(plan("a/0"))
        file = InFlightFile(path)
        file.step(plan("a/0"))

        def full(*_: object) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "pwrite", full)
        file.step(plan("b/0"))
        assert read_in_flight(path) is None
        file.step(plan("c/0"))


class TestWhoTheLoopWorksOn:
    """Beside its steps, which the tests of poison are about."""

    @staticmethod
    def run(
        core: EngineCore,
        path: Path,
        request: GenerationRequest,
        compiled: Future[None] | None = None,
    ) -> None:
        """One request and the end; before that, something is compiled where ``compiled`` says."""

        class Once:
            messages: tuple[Add | Shutdown, ...] = (Add(request),)

            def receive(self, timeout: float) -> tuple[Add | Shutdown, ...]:
                if not self.messages and compiled is not None:
                    compiled.set_result(None)
                    return ()
                now = self.messages
                self.messages = (Shutdown(),) if compiled is None else ()
                return now

        file = InFlightFile(path)
        try:
            EngineLoop(core, Once(), lambda message: None, in_flight=file).run()
        finally:
            file.close()
            core.close()

    def test_a_grammar_that_is_being_compiled(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        core, seen = null_core(NullBackend()), []
        assert core.matchers is not None
        compiled: Future[None] = Future()

        def prepare(grammar: Grammar) -> Future[None]:
            seen.append(read_in_flight(tmp_path / "file"))
            return compiled

        monkeypatch.setattr(core.matchers, "prepare", prepare)
        sampling = SamplingParams(max_tokens=1, grammar=Grammar("regex", "a", "regex"))
        request = make("g", max_tokens=1)
        self.run(core, tmp_path / "file", msgspec.structs.replace(request, sampling=sampling))
        assert seen == [{"g"}]
        # it still is
        assert read_in_flight(tmp_path / "file") == {"g"}

    def test_a_request_that_cannot_be_taken_in(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        core = null_core(NullBackend())

        def add_request(request: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(core, "add_request", add_request)
        with pytest.raises(ZeroDivisionError):
            self.run(core, tmp_path / "file", make("bug"))
        assert read_in_flight(tmp_path / "file") == {"bug"}

    def test_one_that_cannot_be_taken_in_once_its_grammar_is_compiled(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        core = null_core(NullBackend())
        assert core.matchers is not None
        compiled: Future[None] = Future()
        monkeypatch.setattr(core.matchers, "prepare", lambda grammar: compiled)

        def add_request(request: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(core, "add_request", add_request)
        sampling = SamplingParams(max_tokens=1, grammar=Grammar("regex", "a", "regex"))
        request = msgspec.structs.replace(make("bug", max_tokens=1), sampling=sampling)
        with pytest.raises(ZeroDivisionError):
            self.run(core, tmp_path / "file", request, compiled)
        assert read_in_flight(tmp_path / "file") == {"bug"}


def tried(point: int = 0, level: int = 1) -> Suspect:
    return Suspect(level=level, point=point, on_trial=True)


class TestVerdict:
    def test_at_first_everybody_there_is_suspect(self) -> None:
        one, other = Suspect(), Suspect()
        assert find_guilty([(one, 0), (other, 70)]) is None
        assert (one.level, one.point, one.rank) == (1, 0, 0)
        assert (other.level, other.point, other.rank) == (1, 70, 1)

    def test_alone_at_its_place_once_more(self) -> None:
        guilty, beside = tried(), Suspect(level=1, point=70)
        assert find_guilty([(guilty, 0), (beside, 12), (Suspect(), 30)]) is guilty
        # who was beside it is as suspect as before
        assert (beside.level, beside.point) == (1, 70)

    @pytest.mark.parametrize(
        ("now", "is_guilty"), [(46, True), (54, True), (45, False), (0, False)]
    )
    def test_a_place_in_its_answer(self, now: int, is_guilty: bool) -> None:
        suspect = tried(50, 2)
        assert (find_guilty([(suspect, now)]) is suspect) is is_guilty
        assert suspect.level == (2 if is_guilty else 1)

    def test_only_who_is_on_trial(self) -> None:
        suspect = Suspect(level=1, point=50)
        assert find_guilty([(suspect, 50)]) is None
        assert (suspect.level, suspect.rank) == (2, 2)

    def test_not_for_what_another_does(self) -> None:
        """An innocent one has its turn when somebody else ends the engine."""
        innocent = tried()
        # one that came back to its own place
        assert find_guilty([(innocent, 0), (Suspect(level=1, point=50), 51)]) is None
        # one whose turn ended by time
        innocent = tried()
        assert find_guilty([(innocent, 0), (tried(), 0)]) is None
        # one that is new: it gets a trial of its own, and the innocent one another
        innocent, new = tried(), Suspect()
        assert find_guilty([(innocent, 0), (new, 0)]) is None
        assert (innocent.level, new.level) == (2, 1)
        # at the second time it is no coincidence any more
        assert find_guilty([(innocent, 0), (Suspect(), 0)]) is innocent
        # it was not even begun
        assert find_guilty([(Suspect(), 0)]) is None

    @pytest.mark.parametrize(("point", "tokens"), [(0, 1), (50, 55)])
    def test_what_acquits(self, point: int, tokens: int) -> None:
        suspect = tried(point)
        assert suspect.is_past(tokens) and not suspect.is_past(tokens - 1)


def gone(*places: Place) -> list[bool]:
    return [place.turn.done() for place in places]


class TestTurns:
    async def test_the_order(self) -> None:
        quarantine = Quarantine()
        late = quarantine.join(Suspect(level=2, point=50))
        together = [quarantine.join(Suspect(level=1, point=p)) for p in (1, 2)]
        best_effort = quarantine.join(Suspect(level=1), last=True)
        urgent = quarantine.join(Suspect(level=1), priority=-1)
        first = quarantine.join(Suspect(level=1))
        places = (urgent, first, best_effort, *together, late)
        assert gone(*places) == [False] * 6
        # nobody goes before there is an engine
        quarantine.open()
        assert gone(*places) == [True, False, False, False, False, False]
        quarantine.leave(urgent)
        assert gone(*places) == [True, True, False, False, False, False]
        quarantine.leave(first)
        quarantine.leave(first)
        assert gone(*places) == [True, True, True, False, False, False]
        quarantine.leave(best_effort)
        assert gone(*places) == [True] * 6
        # those who go together hold nobody up, the last is alone again
        more = quarantine.join(Suspect(level=1, point=3))
        assert not more.turn.done()
        quarantine.leave(late)
        assert more.turn.done()

    async def test_who_does_not_wait_any_more_holds_nobody_up(self) -> None:
        quarantine = Quarantine()
        quarantine.open()
        holder, gives_up, times_out, next_one = (quarantine.join(Suspect(level=1)) for _ in "abcd")
        quarantine.leave(gives_up)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await times_out.turn
        quarantine.close()
        quarantine.leave(holder)
        assert not next_one.turn.done()
        quarantine.open()
        assert next_one.turn.done() and not next_one.turn.cancelled()
