"""Controller of one pool: what is seen of its replicas in, commands out.

Pure: it knows no clock, no process and no network, so a loop over real processes, one over Ray and
the simulator drive the same value.

::

    starting --up--> ready --not wanted--> draining --0 requests, or late--> stopping --> gone
        '--- late, ended: a failed start, which delays the next one

A replica counts as serving once the gateways say that it is up. A version that does not come up
never ends a replica of another one: that is the roll-back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from paceline.fleet.scaling import Scale, Scaling

__all__ = ["Command", "Controller", "Members", "Replica", "Scale", "Seen", "Spec", "State"]

State = Literal["starting", "ready", "draining", "stopping"]

# seconds before the end of a drain at which streams move to other engines
_MOVE_SECONDS: Final = 2.0
# seconds for which a drained replica without requests stays: a request may be on its way
_SETTLE_SECONDS: Final = 0.5
# seconds beyond ``drain_seconds`` until a replica that was asked to end is killed
_KILL_SECONDS: Final = 10.0
# longest wait after failed starts, s
_MAX_BACKOFF: Final = 60.0
# a replica that ends within this many seconds of being ready has failed to start
_SETTLED: Final = 5.0


@dataclass(frozen=True, slots=True)
class Spec:
    """Goal of a pool."""

    # with a ``scale`` the number to begin with
    replicas: int
    # arguments of ``paceline serve``, and the name of this version of them
    args: tuple[str, ...] = ()
    version: str = ""
    # replicas beyond ``replicas`` while an update runs
    surge: int = 1
    start_timeout: float = 120.0
    # time for which a drained replica's requests go on there
    drain_seconds: float = 30.0
    # time for which a started replica of which nothing is heard counts as alive
    lease: float = 60.0
    scale: Scale | None = None
    # role of its replicas, for the gateways
    role: str = "both"


@dataclass(frozen=True, slots=True)
class Seen:
    """Sight of one replica at one moment."""

    # its address; "": it has not said one yet
    url: str = ""
    # whether its process lives; None: nothing is heard of it
    alive: bool | None = None
    # False: its host is known to be dead
    host_alive: bool | None = None
    # whether all gateways that answer say that it is up; None: none answers
    up: bool | None = None
    # requests at it, of all gateways; None: one does not answer
    requests: int | None = None
    # why it is not up, for people
    trouble: str = ""
    # predicted seconds by which the first token of a further request is later than at an idle
    # replica, the worst of all gateways; None: not known
    wait: float | None = None
    # share of its KV cache in use, and requests that it runs at once at most; None: not known
    kv: float | None = None
    slots: float | None = None


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica."""

    name: str
    version: str
    state: State
    # when the state began
    since: float
    # when it was last heard of
    heard_at: float
    url: str = ""
    up: bool = False
    requests: int | None = None
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Command:
    """Something to do with a replica: start it, ask it to end, or end it at once."""

    kind: Literal["start", "stop", "kill"]
    name: str
    # arguments and version of a start
    args: tuple[str, ...] = ()
    version: str = ""


@dataclass(frozen=True, slots=True)
class Members:
    """Word to the gateways: the engines of the pool."""

    # address by name
    engines: Mapping[str, str] = field(default_factory=dict)
    draining: tuple[str, ...] = ()
    move: tuple[str, ...] = ()
    # role of all engines
    role: str = "both"


class Controller:
    """Controller of one pool.

    Args:
        name: of the pool; replicas are NAME-1, NAME-2 and so on.
        number: of the first replica; a name is never used again, as an index of prefixes goes by
            it.
    """

    def __init__(self, name: str, spec: Spec, *, number: int = 1) -> None:
        self.name = name
        self.spec = spec
        self.replicas: dict[str, Replica] = {}
        # starts of the present version that failed in a row, and when the next one may begin
        self.failures = 0
        self.backoff_until = -math.inf
        # why the last one failed, for people
        self.last_failure = ""
        self._failed_at = -math.inf
        self._scaling = Scaling()
        # replicas that the pool shall have now
        self.wanted = spec.replicas
        self._number = number

    def adopt(self, name: str, version: str, url: str, now: float) -> None:
        """Take over a replica that runs already; ``url``: "" if it was not ready yet."""
        state: State = "ready" if url else "starting"
        self.replicas[name] = replica = Replica(name, version, state, now, now, url)
        # its files may lie on another host
        self._number = max(self._number, 1 + _number_of(replica))
        # a pool that has grown stays so until its load says otherwise
        self.wanted = _within(self.spec, max(self.wanted, len(self.replicas)))

    def change(self, spec: Spec) -> None:
        """Set what the pool shall be from now on."""
        if spec.version != self.spec.version:
            self.failures, self.backoff_until, self.last_failure = 0, -math.inf, ""
        self.spec = spec
        self.wanted = _within(spec, self.wanted)

    def step(self, now: float, seen: Mapping[str, Seen]) -> list[Command]:
        """Take in what is seen of the replicas, and return what to do."""
        commands: list[Command] = []
        for replica in list(self.replicas.values()):
            self._look(replica, seen.get(replica.name, Seen()), now, commands)
        if self.spec.scale is not None:
            serving = [
                seen[n] for n, each in self.replicas.items() if each.state == "ready" and each.up
            ]
            self.wanted = self._scaling.wanted(now, self.spec.scale, serving, self.wanted)
        self._end_drained(now, commands)
        self._retire_unwanted(now, commands)
        self._start_missing(now, commands)
        return commands

    def members(self, now: float) -> Members:
        """Return what the gateways are to be told now."""
        there = [each for each in self.replicas.values() if each.url and each.state != "stopping"]
        draining = [each for each in there if each.state == "draining"]
        moves_at = max(0.0, self.spec.drain_seconds - _MOVE_SECONDS)
        return Members(
            {each.name: each.url for each in there},
            tuple(each.name for each in draining),
            tuple(each.name for each in draining if now - each.since >= moves_at),
            self.spec.role,
        )

    @property
    def is_settled(self) -> bool:
        """Whether the pool is as it shall be."""
        return len(self.replicas) == self.wanted and all(
            each.state == "ready" and each.up and each.version == self.spec.version
            for each in self.replicas.values()
        )

    def check_integrity(self) -> None:
        """Check what always holds."""
        assert self.failures >= 0
        for name, each in self.replicas.items():
            assert name == each.name and (each.url or each.state in ("starting", "stopping"))
            assert int(name.rpartition("-")[2]) < self._number, "a name would be used again"

    # ---------------------------------------------------------------- what is seen

    def _look(self, replica: Replica, seen: Seen, now: float, commands: list[Command]) -> None:
        """Take in what is seen of one replica; forget it if it is gone."""
        starts = replica.state == "starting"
        # a process that lives is heard of, unless gateways answer and hear nothing from it
        unasked = seen.up is None or replica.state in ("starting", "stopping")
        heard = bool(seen.up) or (bool(seen.alive) and unasked)
        replica = replace(
            replica,
            url=seen.url or replica.url,
            up=bool(seen.up),
            requests=seen.requests,
            trouble=seen.trouble,
            heard_at=now if heard else replica.heard_at,
        )
        if starts and replica.url and seen.up is None:
            # no gateway answers, which is not the replica's fault
            replica = replace(replica, since=now)
        self.replicas[replica.name] = replica
        if seen.alive is False:
            self._gone(replica, now, seen.trouble or "its process ended")
        elif seen.host_alive is False and not seen.up:
            self._gone(replica, now, "its host is dead")
        elif starts and replica.url and replica.up:
            self._becomes(replica, "ready", now)
        elif starts and now - replica.since > self.spec.start_timeout:
            why = f"it was not up within {self.spec.start_timeout:g} s"
            self._failed(replica, now, f"{why} ({seen.trouble})" if seen.trouble else why)
            self._end_unready(replica, now, commands)
        elif not starts and now - replica.heard_at > self.spec.lease:
            # should it come back, it is to end
            commands.append(Command("kill", replica.name))
            self._gone(replica, now, f"nothing was heard of it for {self.spec.lease:g} s")

    def _gone(self, replica: Replica, now: float, why: str) -> None:
        del self.replicas[replica.name]
        is_new = replica.state == "ready" and now - replica.since < _SETTLED
        if replica.state == "starting" or is_new:
            self._failed(replica, now, why)

    def _failed(self, replica: Replica, now: float, why: str) -> None:
        if replica.version == self.spec.version:
            self.failures += 1
            self._failed_at, self.last_failure = now, f"{replica.name}: {why}"
            self.backoff_until = now + min(_MAX_BACKOFF, 2.0 ** min(self.failures - 1, 10))

    def _becomes(self, replica: Replica, state: State, now: float) -> None:
        self.replicas[replica.name] = replace(replica, state=state, since=now)

    # ---------------------------------------------------------------- what to do

    def _end_drained(self, now: float, commands: list[Command]) -> None:
        spec = self.spec
        for replica in list(self.replicas.values()):
            past = now - replica.since
            if replica.state == "draining":
                is_idle = replica.requests == 0 and past >= _SETTLE_SECONDS
                if is_idle or past >= spec.drain_seconds:
                    commands.append(Command("stop", replica.name))
                    self._becomes(replica, "stopping", now)
            elif replica.state == "stopping" and past >= spec.drain_seconds + _KILL_SECONDS:
                # asked for until its process is gone
                commands.append(Command("kill", replica.name))

    def _retire_unwanted(self, now: float, commands: list[Command]) -> None:
        """Drain what the pool does not need: replicas of another version once new ones serve in
        their place, and those beyond the wanted number."""
        spec = self.spec
        active = self._in("starting", "ready")
        new = [each for each in active if each.version == spec.version]
        if any(
            each.state == "ready" and now - _SETTLED >= each.since > self._failed_at for each in new
        ):
            self.failures, self.last_failure = 0, ""
        # a replica that is not ready takes no requests: ending it costs nothing
        starting = [each for each in new if each.state == "starting"]
        kept = starting[: max(0, self.wanted - (len(new) - len(starting)))]
        for each in active:
            if each.state == "starting" and each not in kept:
                self._end_unready(each, now, commands)
        ready = self._in("ready")
        serving = sum(each.up for each in ready)
        excess = sum(each.version == spec.version for each in ready) - self.wanted
        # other versions first, then those that are not up, then the latest
        ready.sort(key=lambda each: (each.version == spec.version, each.up, -_number_of(each)))
        for each in ready:
            if each.version == spec.version and excess <= 0:
                break
            if serving - each.up < self.wanted:
                # none ends before enough others serve
                break
            serving -= each.up
            excess -= each.version == spec.version
            self._becomes(each, "draining", now)

    def _end_unready(self, replica: Replica, now: float, commands: list[Command]) -> None:
        commands.append(Command("kill", replica.name))
        self._becomes(replica, "stopping", now)

    def _start_missing(self, now: float, commands: list[Command]) -> None:
        spec = self.spec
        for each in self._in("draining"):
            # it is needed again, and quicker than a new one
            if each.version == spec.version and self._num_new < self.wanted:
                self._becomes(each, "ready", now)
        if now < self.backoff_until:
            return
        room = self.wanted + spec.surge - len(self.replicas)
        missing = min(self.wanted - self._num_new, room)
        if self.failures:
            # one at a time, until one comes up
            missing = min(missing, 1 - len(self._in("starting")))
        for _ in range(missing):
            name = f"{self.name}-{self._number}"
            self._number += 1
            self.replicas[name] = Replica(name, spec.version, "starting", now, now)
            commands.append(Command("start", name, spec.args, spec.version))

    @property
    def _num_new(self) -> int:
        active = self._in("starting", "ready")
        return sum(each.version == self.spec.version for each in active)

    def _in(self, *states: State) -> list[Replica]:
        return [each for each in self.replicas.values() if each.state in states]


def _within(spec: Spec, wanted: int) -> int:
    """Return the number of replicas for a changed goal."""
    scale = spec.scale
    return spec.replicas if scale is None else min(scale.max, max(scale.min, wanted))


def _number_of(replica: Replica) -> int:
    return int(replica.name.rpartition("-")[2])
