"""The controller: a value that is driven through every mishap, and what always holds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.fleet.controller import Command, Controller, Scale, Seen, Spec

SPEC = Spec(
    3, ("--backend", "null"), "v1", surge=1, start_timeout=20.0, drain_seconds=5.0, lease=10.0
)


@dataclass
class Process:
    version: str
    # "starting", "ready", "dead", "asked": to end
    state: str = "starting"
    heard: bool = True
    requests: int = 0


class World:
    """Replicas, hosts and gateways as a controller sees them."""

    def __init__(self, spec: Spec = SPEC) -> None:
        self.now = 0.0
        self.controller = Controller("chat", spec)
        self.processes: dict[str, Process] = {}
        self.gateway = True
        self.broken: set[str] = set()
        self.killed: list[str] = []

    def seen(self) -> dict[str, Seen]:
        found = {}
        for name, each in self.processes.items():
            url = f"http://{name}" if each.state in ("ready", "asked") else ""
            alive = each.state != "dead" if each.heard else None
            up = each.state == "ready" and each.heard if self.gateway else None
            found[name] = Seen(url, alive, None, up, each.requests if self.gateway else None)
        return found

    def step(self, seconds: float = 0.25) -> list[Command]:
        self.now += seconds
        commands = self.controller.step(self.now, self.seen())
        for command in commands:
            if command.kind == "start":
                assert command.name not in self.processes, "a name is used again"
                self.processes[command.name] = Process(command.version)
            elif command.kind == "stop":
                self.processes[command.name].state = "asked"
            else:
                self.processes[command.name].state = "dead"
                self.killed.append(command.name)
        self.controller.check_integrity()
        return commands

    def boot(self) -> None:
        for each in self.processes.values():
            if each.state == "starting":
                each.state = "dead" if each.version in self.broken else "ready"

    def end_asked(self) -> None:
        for each in self.processes.values():
            if each.state == "asked":
                each.state = "dead"

    def serving(self, version: str = "") -> int:
        return sum(
            each.state == "ready" and each.version.startswith(version)
            for each in self.processes.values()
        )

    def run(self, seconds: float) -> None:
        """Let time pass, in which starts and ends succeed at once."""
        until = self.now + seconds
        while self.now < until:
            self.step()
            self.boot()
            self.end_asked()


def ready_world(spec: Spec = SPEC) -> World:
    world = World(spec)
    world.run(10.0)
    assert world.controller.is_settled
    return world


def test_an_update_goes_one_by_one() -> None:
    world = ready_world()
    world.controller.change(replace(SPEC, version="v2"))
    seen = []
    for _ in range(40):
        world.step()
        seen.append((world.serving(), len([p for p in world.processes.values()
                                           if p.state != "dead"])))  # fmt: skip
        world.boot()
        world.end_asked()
    assert world.controller.is_settled and world.serving("v2") == 3
    assert min(serving for serving, _ in seen) == 3 and max(alive for _, alive in seen) == 4


def test_a_version_that_does_not_come_up_ends_nothing() -> None:
    world = ready_world()
    world.broken = {"v2"}
    world.controller.change(replace(SPEC, version="v2"))
    starts = 0
    for _ in range(480):
        starts += sum(command.kind == "start" for command in world.step())
        world.boot()
    # 1, 2, 4 ... seconds between two tries
    assert world.serving("v1") == 3 and starts in (6, 7, 8)
    assert world.controller.failures >= 5 and "chat-" in world.controller.last_failure
    # the old file again
    world.controller.change(SPEC)
    world.run(2.0)
    assert world.controller.is_settled and world.controller.failures == 0


def test_a_replica_that_never_answers_is_ended_in_time() -> None:
    world = World(replace(SPEC, replicas=1))
    for _ in range(84):
        world.step()
    assert world.killed == ["chat-1"] and "within 20 s" in world.controller.last_failure


def test_a_replica_is_not_blamed_for_its_gateways() -> None:
    world = World(replace(SPEC, replicas=1))
    world.gateway = False
    world.run(100.0)
    assert not world.killed and not world.controller.failures
    world.gateway = True
    world.run(1.0)
    assert world.controller.is_settled


def test_a_partition_does_not_double_the_fleet() -> None:
    world = ready_world()
    for each in world.processes.values():
        each.heard = False
    world.gateway = False
    for _ in range(36):
        assert not world.step()
    # a host that is known to be dead, and of which no gateway hears, is not waited for
    seen = world.seen() | {"chat-1": Seen(host_alive=False)}
    commands = world.controller.step(world.now, seen)
    assert [(c.kind, c.name) for c in commands] == [("start", "chat-4")]


def test_a_hung_replica_is_replaced_after_its_lease() -> None:
    world = ready_world()
    world.processes["chat-2"].state = "asked"
    for _ in range(44):
        world.step()
        world.boot()
    assert world.killed == ["chat-2"] and world.serving() == 3


def test_a_replica_that_waits_for_its_place_has_its_time_to_start() -> None:
    world = World(replace(SPEC, replicas=1))
    world.step()
    (only,) = world.processes.values()
    only.heard = False
    for _ in range(4):
        world.step(4.0)
    assert world.controller.failures == 0 and len(world.processes) == 1, "past its lease of 10 s"
    only.heard, only.state = True, "ready"
    world.step()
    assert world.controller.is_settled
    # and no longer
    world = World(replace(SPEC, replicas=1))
    world.step()
    for each in world.processes.values():
        each.heard = False
    world.step(21.0)
    assert world.controller.failures == 1 and world.killed == ["chat-1"]


def test_gateways_that_are_away_are_no_reason_to_end_anything() -> None:
    world = ready_world()
    world.gateway = False
    world.controller.change(replace(SPEC, version="v2"))
    world.run(100.0)
    assert world.serving("v1") == 3


def test_a_drain_ends_when_idle_and_moves_what_is_left() -> None:
    world = ready_world()
    for each in world.processes.values():
        each.requests = 4
    world.controller.change(replace(SPEC, replicas=2))
    world.step()
    members = world.controller.members(world.now)
    assert members.draining == ("chat-3",) and not members.move and len(members.engines) == 3
    for _ in range(12):
        world.step()
    assert world.controller.members(world.now).move == ("chat-3",)
    world.processes["chat-3"].requests = 0
    assert [(c.kind, c.name) for c in world.step()] == [("stop", "chat-3")]
    assert set(world.controller.members(world.now).engines) == {"chat-1", "chat-2"}


def test_a_drained_replica_that_is_needed_again_is_not_replaced() -> None:
    world = ready_world()
    world.processes["chat-3"].requests = 2
    world.controller.change(replace(SPEC, replicas=2))
    world.step()
    assert world.controller.members(world.now).draining == ("chat-3",)
    world.controller.change(SPEC)
    assert not world.step() and not world.controller.members(world.now).draining
    assert world.controller.is_settled


def test_down_is_a_pool_of_none() -> None:
    world = ready_world()
    world.controller.change(replace(SPEC, replicas=0))
    world.run(20.0)
    assert not world.controller.replicas and world.controller.is_settled


def test_a_restarted_controller_adopts() -> None:
    world = ready_world()
    world.controller = Controller("chat", SPEC, number=4)
    for name, each in world.processes.items():
        world.controller.adopt(name, each.version, f"http://{name}", world.now)
    for _ in range(8):
        assert not world.step()
    assert world.controller.is_settled


def test_a_pool_that_was_large_stays_so_over_a_restart() -> None:
    scale = Scale(1, 8, first_token=1.0)
    controller = Controller("chat", replace(SPEC, replicas=1, scale=scale), number=6)
    for number in range(1, 6):
        controller.adopt(f"chat-{number}", "v1", "http://x", 0.0)
    idle = {f"chat-{n}": Seen("http://x", True, None, True, 0, wait=0.0, kv=0.0)
            for n in range(1, 6)}  # fmt: skip
    for second in range(300):
        assert not controller.step(float(second), idle) and controller.wanted == 5
    controller.step(301.0, idle)
    assert controller.wanted == 4
    # a minute passes before the next one is given up
    for second in range(302, 361):
        controller.step(float(second), idle)
        assert controller.wanted == 4
    # the file says less now
    controller.change(replace(controller.spec, scale=Scale(1, 3)))
    assert controller.wanted == 3


class Machine(RuleBasedStateMachine):
    """Anything at any time. What always holds: an update never ends a serving replica before
    another one serves in its place, and there are never more than ``replicas + surge``."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.grown = SPEC.replicas

    @rule(seconds=st.lists(st.sampled_from([0.25, 1.0, 3.0]), min_size=1, max_size=8))
    def pass_and_boot(self, seconds: list[float]) -> None:
        for each in seconds:
            self.passes(each)
            self.world.boot()

    @rule(seconds=st.sampled_from([0.1, 0.25, 1.0, 3.0]))
    def passes(self, seconds: float) -> None:
        world = self.world
        spec, before = world.controller.spec, world.serving()
        up = before if world.gateway else 0
        well = {n for n, each in world.processes.items() if each.state == "ready" and each.heard}
        commands = world.step(seconds)
        replicas = world.controller.replicas
        draining = {n for n, each in replicas.items() if each.state in ("draining", "stopping")}
        took = {n for n in draining if n not in self.draining and world.processes[n].heard}
        took = {n for n in took if world.processes[n].state in ("ready", "asked")}
        left = sum(each.state == "ready" and n not in draining and each.heard
                   for n, each in world.processes.items())  # fmt: skip
        if took:
            assert left >= min(spec.replicas, up), (took, left)
        self.draining = draining
        assert len(replicas) <= max(self.grown, spec.replicas) + spec.surge
        if world.gateway:
            # a broken version never ends what serves
            assert not well & {each.name for each in commands if each.kind == "kill"}

    draining: set[str] = frozenset()  # type: ignore[assignment]

    @rule()
    def boots(self) -> None:
        self.world.boot()

    @rule()
    def ends(self) -> None:
        self.world.end_asked()

    @rule(number=st.integers(0, 5), what=st.sampled_from(["dead", "asked"]))
    def falls(self, number: int, what: str) -> None:
        alive = [each for each in self.world.processes.values() if each.state == "ready"]
        if number < len(alive):
            alive[number].state = what

    @rule(heard=st.booleans())
    def partition(self, heard: bool) -> None:
        for each in self.world.processes.values():
            each.heard = heard

    @rule(there=st.booleans())
    def gateway(self, there: bool) -> None:
        self.world.gateway = there

    @rule(version=st.sampled_from(["v1", "v2", "v3"]), replicas=st.integers(0, 4))
    def updates(self, version: str, replicas: int) -> None:
        self.world.controller.change(
            replace(self.world.controller.spec, version=version, replicas=replicas)
        )
        self.grown = max(self.grown, replicas)

    @rule(version=st.sampled_from(["v2", "v3"]))
    def breaks(self, version: str) -> None:
        self.world.broken ^= {version}

    @rule(requests=st.integers(0, 3))
    def load(self, requests: int) -> None:
        for each in self.world.processes.values():
            each.requests = requests

    @precondition(lambda self: self.world.controller.replicas)
    @invariant()
    def whole(self) -> None:
        self.world.controller.check_integrity()

    def teardown(self) -> None:
        """Left alone, it settles."""
        world = self.world
        world.gateway, world.broken = True, set()
        for each in world.processes.values():
            each.heard, each.requests = True, 0
        world.run(150.0)
        assert world.controller.is_settled, world.controller.replicas


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
