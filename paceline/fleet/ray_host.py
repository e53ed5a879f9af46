"""Replicas on the nodes of a Ray cluster (the extra ``paceline[ray]``).

Ray places replicas and watches nodes; no request and no token passes through it. One actor for each
replica runs where that runs, and starts it as a process of its own session, so a replica outlives
its actor, the raylet and the head. Actors are detached: the next controller finds them by name. An
actor that is gone is made again on the same node, where it finds the replica by its file.

Keys of the replicas come from the environment of ``ray start`` on their node: the head would keep
arguments in plain text.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paceline.errors import ConfigError
from paceline.files import make_private_folder, write_private
from paceline.fleet.controller import Command
from paceline.fleet.host import Look
from paceline.fleet.replica import Record, read_records, start_replica
from paceline.fleet.spec import PoolSettings, lacks

__all__ = ["RayHost"]

_log = logging.getLogger("paceline.fleet")

# longest wait for one answer of Ray, s
_TIMEOUT: Final = 1.0
_INIT_TIMEOUT: Final = 60.0
_CONNECT_TIMEOUT: Final = 5.0
# resources that Ray has options of their own for
_OWN: Final = {"CPU": "num_cpus", "GPU": "num_gpus"}


class EngineHost:
    """Actor of one replica, on the node where that runs."""

    def __init__(self, folder: str, name: str) -> None:
        self._folder, self._name = Path(folder), name
        make_private_folder(self._folder)
        self._record: Record | None = next(
            (each for each in read_records(self._folder) if each.name == name), None
        )

    def start(
        self, args: Sequence[str], version: str, exit_unwatched: float, resources: dict[str, float]
    ) -> None:
        """Start the replica, unless an actor before this one has."""
        import ray

        if self._record is not None:
            return
        if not any(word == "--host" or word.startswith("--host=") for word in args):
            args = [*args, "--host", ray.util.get_node_ip_address()]
        # the cluster's token lets its holder run code on all nodes
        environ = {n: value for n, value in os.environ.items() if not n.startswith("RAY_")}
        self._record = start_replica(
            self._folder, self._name, args, version,
            exit_unwatched=exit_unwatched, resources=resources, environ=environ,
            # where its raylet has ended Ray kills an actor's children, of other sessions too
            as_child=False,
        )  # fmt: skip

    def look(self) -> tuple[str, str, str, bool, str]:
        """Return node, version, URL, whether its process lives, and why not."""
        import ray

        node, record = ray.get_runtime_context().get_node_id(), self._record
        if record is None:
            return node, "", "", False, "it was not started"
        if record.lives():
            return node, record.version, record.url(self._folder), True, ""
        last = record.last_words(self._folder)
        return node, record.version, "", False, f"its process ended: {last}"

    def end(self, kill: bool) -> None:
        """Ask the replica to end, or end it at once."""
        if self._record is not None:
            self._record.end(kill=kill)
            if kill and not self._record.lives():
                self._record.forget(self._folder)


@dataclass
class _Placed:
    """One replica as this process knows it."""

    actor: Any
    version: str
    pool: PoolSettings | None = None
    # its node; "": it is not placed yet, or was not looked at
    node: str = ""
    # the look that is under way
    asked: Any = None
    # the word to end that is under way
    ending: Any = None
    last: Look | None = None


class RayHost:
    """Replicas of a cluster; see ``Host``. Every wait for Ray is bounded.

    Args:
        pools: those whose actors may run already.

    Raises:
        ConfigError: Ray is not installed, or there is no cluster at ``address``.
    """

    def __init__(
        self, address: str, folder: Path, exit_unwatched: float, pools: Sequence[PoolSettings]
    ) -> None:
        try:
            import ray
        except ImportError:
            raise ConfigError('ray = "..." needs Ray: pip install "paceline[ray]"') from None
        self._ray: Any = ray
        self._folder = folder
        self._exit_unwatched = exit_unwatched
        self._namespace = f"paceline-{folder.name}"
        if os.environ.get("RAY_AUTH_MODE") != "token":
            _log.warning("ray_open: every client that can reach the cluster may run code on it; "
                         "RAY_AUTH_MODE=token closes it")  # fmt: skip
        try:
            host, _, port = address.rpartition(":")
            if host and port.isdigit():
                # Ray itself would try for minutes
                socket.create_connection((host, int(port)), _CONNECT_TIMEOUT).close()
            ray.init(
                address=address, namespace=self._namespace, log_to_driver=False,
                configure_logging=False,
            )  # fmt: skip
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigError(f"there is no Ray cluster at {address!r}: {error}") from None
        self._host_class = ray.remote(EngineHost)
        self._placed: dict[str, _Placed] = {}
        by_name = {pool.name: pool for pool in pools}
        for each in ray.util.list_named_actors(all_namespaces=True):
            if each["namespace"] == self._namespace:
                actor = ray.get_actor(each["name"], namespace=self._namespace)
                pool = by_name.get(each["name"].rpartition("-")[0])
                self._placed[each["name"]] = _Placed(actor, "", pool)
        # the first look waits longer: replicas that run already are to be known first
        self._is_first = True

    async def look(self) -> Mapping[str, Look]:
        return await asyncio.to_thread(self._look)

    async def start(self, command: Command, pool: PoolSettings) -> None:
        await asyncio.to_thread(self._start, command, pool)

    async def end(self, name: str, *, kill: bool) -> None:
        await asyncio.to_thread(self._end, name, kill)

    async def close(self) -> None:
        # actors are detached, and stay
        await asyncio.to_thread(self._ray.shutdown)

    # ---------------------------------------------------------------- in a thread

    def _start(self, command: Command, pool: PoolSettings) -> None:
        # the name is used, also where the replica's own files lie on another host
        log = self._folder / f"{command.name}.log"
        if not log.exists():
            write_private(log, "")
        placed = _Placed(None, command.version, pool)
        self._placed[command.name] = placed
        try:
            placed.actor = self._make(command.name, pool)
            placed.actor.start.remote(
                list(command.args), command.version, self._exit_unwatched, pool.resources
            )
        except Exception as error:
            placed.last = Look(command.version, alive=False, trouble=f"Ray refuses it: {error}")

    def _make(self, name: str, pool: PoolSettings, node: str = "") -> Any:
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "lifetime": "detached"}
        others = {}
        for resource, amount in pool.resources.items():
            if resource in _OWN:
                options[_OWN[resource]] = amount
            else:
                others[resource] = amount
        if others:
            options["resources"] = others
        if pool.labels:
            options["label_selector"] = pool.labels
        if node:
            where = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
            options["scheduling_strategy"] = where(node_id=node, soft=False)
        made = self._host_class.options(name=name, namespace=self._namespace, **options)
        return made.remote(str(self._folder), name)

    def _look(self) -> Mapping[str, Look]:
        ray = self._ray
        for placed in self._placed.values():
            if placed.asked is None and placed.actor is not None:
                with contextlib.suppress(Exception):
                    placed.asked = placed.actor.look.remote()
        asked = {each.asked: name for name, each in self._placed.items() if each.asked is not None}
        done: Sequence[Any] = ()
        timeout, self._is_first = (_INIT_TIMEOUT if self._is_first else _TIMEOUT), False
        if asked:
            done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=timeout)
        for ref in done:
            self._take_in(asked[ref], ref)
        dead = self._dead_nodes()
        found = {}
        for name, placed in self._placed.items():
            if placed.asked is None and placed.last is not None:
                found[name] = placed.last
            else:
                gone = placed.node in dead if placed.node else None
                url = placed.last.url if placed.last is not None else ""
                found[name] = Look(placed.version, url, None, False if gone else None,
                                   self._why_waits(placed))  # fmt: skip
        return found

    def _take_in(self, name: str, ref: Any) -> None:
        placed = self._placed[name]
        placed.asked = None
        try:
            node, version, url, alive, trouble = self._ray.get(ref, timeout=_TIMEOUT)
        except Exception as error:
            self._actor_lost(name, placed, error)
            return
        placed.node, placed.version = node, version or placed.version
        placed.last = Look(placed.version, url, alive, None, trouble)

    def _actor_lost(self, name: str, placed: _Placed, error: Exception) -> None:
        """Make a replica's actor again where the replica is, as that may well live."""
        url = placed.last.url if placed.last is not None else ""
        if not placed.node or placed.pool is None or placed.node in self._dead_nodes():
            alive, host = (None, False) if placed.node in self._dead_nodes() else (False, None)
            why = f"its actor ended: {error}"[:300]
            placed.last = Look(placed.version, url, alive, host, why)
            return
        _log.warning("actor_lost name=%s node=%s", name, placed.node)
        placed.last = Look(placed.version, url, None, None, "its actor is made again")
        with contextlib.suppress(Exception):
            placed.actor = self._make(name, placed.pool, placed.node)

    def _dead_nodes(self) -> frozenset[str]:
        try:
            nodes = self._ray.nodes()
        except Exception:
            # the head does not answer
            return frozenset()
        return frozenset(each["NodeID"] for each in nodes if not each["Alive"])

    def _why_waits(self, placed: _Placed) -> str:
        """Return what no node has, for a replica that Ray has not placed."""
        if placed.node or placed.pool is None:
            return ""
        try:
            nodes = [each for each in self._ray.nodes() if each["Alive"]]
        except Exception:
            return "the head does not answer"
        free = {each["NodeID"]: dict(each["Resources"]) for each in nodes}
        for other in self._placed.values():
            if other.node in free and other.pool is not None:
                for name, amount in other.pool.resources.items():
                    free[other.node][name] = free[other.node].get(name, 0.0) - amount
        missing = [lacks(placed.pool.resources, has) for has in free.values()]
        if missing and all(missing):
            least = min(missing, key=lambda each: len(each))
            return f"every node lacks {', '.join(least)}"
        return "it waits for its actor"

    def _end(self, name: str, kill: bool) -> None:
        placed = self._placed.get(name)
        if placed is None:
            return
        with contextlib.suppress(Exception):
            # said again only once it was heard: a node that is cut off would be sent it for ever
            if placed.ending is None or self._ray.wait([placed.ending], timeout=0)[0]:
                placed.ending = placed.actor.end.remote(kill)
                if placed.node:
                    self._ray.wait([placed.ending], timeout=_TIMEOUT)
        has_ended = placed.last is not None and placed.last.alive is False
        if kill and (not placed.node or has_ended or placed.node in self._dead_nodes()):
            # an actor that was never placed has started nothing
            with contextlib.suppress(Exception):
                self._ray.kill(placed.actor)
            del self._placed[name]
