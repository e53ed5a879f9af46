"""The engines behind a gateway, and the tasks that keep their state up to date.

One task per engine polls its load several times a second over one connection, and its models now
and then. Anything that comes from an engine, a poll's answer or a token of a stream, is a sign of
life; an engine without one for ``liveness_timeout`` seconds is taken for dead, and its streams are
resumed elsewhere. Delays of this process do not count as silence.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from paceline.gateway.settings.config import GatewayConfig
from paceline.gateway.settings.engine_types import read_contexts
from paceline.gateway.settings.engines import EngineConfig, MemberConfig, PoolMembers
from paceline.gateway.upstreams.capabilities import discover_capabilities
from paceline.gateway.upstreams.pools import UNHEARD_SECONDS, Pools
from paceline.gateway.upstreams.upstream import Upstream, UpstreamModel
from paceline.http.errors import HttpError
from paceline.http.small import fetch
from paceline.http.upstream import ConnectError

__all__ = ["UpstreamRegistry", "fetch_small"]


async def fetch_small(
    upstream: Upstream, path: str, timeout: float, body: bytes | None = None
) -> tuple[int, bytes]:
    """Return status and body of a GET, or of a POST of ``body`` (JSON). Raises ConnectError."""
    method = "GET" if body is None else "POST"
    return await fetch(upstream.pool, method, path, upstream.headers(), timeout, body)


_log = logging.getLogger("paceline.gateway")

# poll intervals between two requests for an engine's models
_MODEL_POLLS: Final = 120
# at first, between two doubts: a server may close every connection after a second or two
_DOUBT_POLLS: Final = 20
# interval of the check for silence, s, and the most that one interval counts: a later tick was
# delayed by this process itself
_TICK_SECONDS: Final = 0.1
_MOST_PER_TICK: Final = 0.15
_JITTER: Final = 0.1
# minimum timeout of a probe request, s
_PROBE_SECONDS: Final = 2.0
# answers of an engine that is not ready, or of a proxy in front of it
_NOT_NOW: Final = frozenset({429, 502, 503, 504})
# answers of a proxy whose engine is gone, in addition to Cloudflare's 520 to 530
_AWAY: Final = frozenset({502, 503, 504})
# a poll is awaited for the longer of these multiples of ``poll_timeout`` and ``connect_timeout``
_LATEST: Final = 4.0
_LATEST_CONNECTION: Final = 1.25
# longest poll interval of a silent engine, s
_MAX_POLL_WAIT: Final = 2.0


class UpstreamRegistry:
    """The engines by name, and the tasks that follow them.

    Args:
        now: clock, monotonic seconds.
        on_tick: called every tick, for requests that wait for engines.
    """

    def __init__(
        self,
        config: GatewayConfig,
        now: Callable[[], float],
        on_tick: Callable[[], None] = lambda: None,
    ) -> None:
        self._config = config
        self._now = now
        self.by_name = {each.name: Upstream(each, config, now()) for each in config.engines}
        self.pools = Pools(config)
        # whether any engine has a bound on its requests
        self.has_bounds = self._has_bounds()
        # polling task of each engine; None: the check for silence
        self._tasks: dict[Upstream | None, asyncio.Task[None]] = {}
        # probe that is running, by engine
        self._probes: dict[Upstream, asyncio.Task[None]] = {}
        # removed from the configuration, but still running requests
        self._retired: set[Upstream] = set()
        # held while a configuration is applied
        self._changes = asyncio.Lock()
        self._on_tick = on_tick
        # set once each engine was asked once
        self.asked = asyncio.Event()

    async def start(self) -> None:
        for upstream in self.by_name.values():
            self._tasks[upstream] = asyncio.create_task(self._follow(upstream))
        self._tasks[None] = asyncio.create_task(self._watch())
        await asyncio.gather(*map(self._ask_first, self.by_name.values()))
        for upstream in self.by_name.values():
            self._start_probe(upstream)
        self.asked.set()

    def set_pool(self, name: str, told: PoolMembers) -> bool:
        """Apply what a pool's controller says, at once: an engine gets requests as soon as it has
        answered. Return whether there is a change.

        Raises:
            HttpError: 409, a later word is known; 400, a name is another engine's.
        """
        pool = self.pools[name]
        configs = told.configs(pool.config)
        taken = [n for n in configs if n in self.by_name and self.by_name[n].pool_name != name]
        if taken:
            raise HttpError(400, f"pool {name}: there is another engine named {taken[0]!r}")
        now = self._now()
        changed = pool.tell(told, now)
        if changed:
            before = [each for each in self.by_name.values() if each.pool_name == name]
            for upstream in before:
                if configs.get(upstream.name) != upstream.config:
                    self._retire(self.by_name.pop(upstream.name))
            for each in configs.values():
                if each.name not in self.by_name:
                    self._add_member(each)
            for upstream in (*self.by_name.values(), *self._retired):
                if upstream.pool_name == name and upstream.name in changed.redrained:
                    upstream.drain(on=upstream.name in pool.draining, now=now)
            self.has_bounds = self._has_bounds()
        # asked again each time: a stream that could not leave may be able to now
        for upstream in (*self.by_name.values(), *self._retired):
            if upstream.pool_name == name and upstream.name in told.move:
                for running in list(upstream.running):
                    running.move_on(f"engine {upstream.name} is drained")
        return bool(changed)

    def _add_member(self, config: MemberConfig) -> None:
        peers = [each.load for each in self.by_name.values() if each.pool_name == config.pool]
        upstream = self._make(config)
        upstream.load.expect_like(peers)
        self._tasks[upstream] = asyncio.create_task(self._follow_member(upstream))

    def _make(self, config: EngineConfig) -> Upstream:
        self.by_name[config.name] = upstream = Upstream(config, self._config, self._now())
        upstream.back_at = self._now()
        # the same word comes again, but only a change of it drains
        if (pool := self.pools.get(upstream.pool_name)) and upstream.name in pool.draining:
            upstream.drain(on=True, now=self._now())
        return upstream

    async def _follow_member(self, upstream: Upstream) -> None:
        await self._ask_first(upstream)
        await self._follow(upstream)

    async def change(self, config: GatewayConfig) -> list[str]:
        """Apply another configuration; return what changed. An engine that is removed or replaced
        gets no new requests and finishes its running ones."""
        async with self._changes:
            return await self._change(config)

    async def _change(self, config: GatewayConfig) -> list[str]:
        told = self.pools.change(config)
        self._config = config
        wanted: dict[str, EngineConfig] = {each.name: each for each in config.engines}
        wanted |= self.pools.members()
        added = []
        for name, each in wanted.items():
            before = self.by_name.get(name)
            if before is not None and before.config == each:
                continue
            if before is not None:
                self._retire(before)
            added.append(self._make(each))
            told.append(f"engine {name} {'added' if before is None else 'replaced'}")
        for name in [name for name in self.by_name if name not in wanted]:
            self._retire(self.by_name.pop(name))
            told.append(f"engine {name} removed")
        self.has_bounds = self._has_bounds()
        await asyncio.gather(*map(self._ask_first, added))
        for upstream in added:
            # a pool's controller may have removed it meanwhile
            if self.by_name.get(upstream.name) is upstream:
                self._start_probe(upstream)
                self._tasks[upstream] = asyncio.create_task(self._follow(upstream))
        return told

    def all_of(self, pool: str) -> list[Upstream]:
        """Return the engines of a pool, and those that left it and still run requests."""
        found = [each for each in self.by_name.values() if each.pool_name == pool]
        there = {each.name for each in found}
        gone = (each for each in self._retired if each.pool_name == pool)
        return found + [each for each in gone if each.running and each.name not in there]

    def _has_bounds(self) -> bool:
        return any(each.config.max_concurrent for each in self.by_name.values())

    def _retire(self, upstream: Upstream) -> None:
        upstream.drain(on=True, now=self._now())
        self._retired.add(upstream)

    async def close(self) -> None:
        tasks = [*self._tasks.values(), *self._probes.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for upstream in (*self.by_name.values(), *self._retired):
            upstream.pool.close()

    async def _ask_first(self, upstream: Upstream) -> None:
        if upstream.polled:
            await self.poll(upstream)
        await self._read_models(upstream)

    async def _follow(self, upstream: Upstream) -> None:
        draw = random.Random(upstream.name)
        await self.asked.wait()
        asked_at, models_at = self._now(), self._models_again()
        while True:
            wait = self._config.poll_interval * (1.0 + _JITTER * draw.uniform(-1.0, 1.0))
            if upstream.num_misses > 4 and not upstream.running:
                wait = min(wait * upstream.num_misses, _MAX_POLL_WAIT)
            await asyncio.sleep(wait)
            known, was = upstream.models is not None, (upstream.back_at, upstream.kind)
            if upstream.polled:
                await self.poll(upstream)
            else:
                await asyncio.sleep(_MAX_POLL_WAIT)
            # after a restart the models may be others
            is_other = was != (upstream.back_at, upstream.kind)
            news = is_other or (not known and not upstream.trouble)
            # for an engine that is not polled, only the list of models shows that it is there; a
            # failed request may mean that it is gone, or has restarted with other models
            away = not upstream.polled and (
                not upstream.has_answered or upstream.failed_at >= asked_at
            )
            asks = news or away or self._now() >= models_at
            if not is_other and upstream.is_doubtful(self._now()):
                # if it restarted, it was down too briefly for its polls to show it
                shortest, longest = (
                    polls * self._config.poll_interval for polls in (_DOUBT_POLLS, _MODEL_POLLS)
                )
                upstream.doubt(self._now(), shortest, longest)
                asks = True
            if asks:
                asked_at = self._now()
                await self._read_models(upstream)
                models_at = self._models_again()
            self._start_probe(upstream)

    def _models_again(self) -> float:
        """Return when the models of an engine that was just asked are due again."""
        return self._now() + _MODEL_POLLS * self._config.poll_interval

    def _start_probe(self, upstream: Upstream) -> None:
        """Start a probe of its capabilities in the background; no poll or request waits for it."""
        # an engine without metrics answers although it has a ``trouble``
        answers = (
            upstream.kind != "auto" and upstream.models is not None and not upstream.num_misses
        )
        wanted = upstream.wants_probe or self._now() >= upstream.probe_again_at
        if wanted and answers and upstream not in self._probes:
            upstream.wants_probe, upstream.probe_again_at = False, math.inf
            task = asyncio.create_task(self._probe(upstream))
            self._probes[upstream] = task
            task.add_done_callback(lambda done: self._probes.pop(upstream, None))

    def is_probed(self, upstream: Upstream) -> bool:
        """Whether the last probe is over, answered or not."""
        return not upstream.wants_probe and upstream not in self._probes

    def is_probing(self, upstream: Upstream) -> bool:
        """Whether a probe is running."""
        return upstream in self._probes

    async def _probe(self, upstream: Upstream) -> None:
        timeout = max(_PROBE_SECONDS, self._config.poll_timeout)
        missed = False

        async def fetch(path: str, body: Mapping[str, Any] | None) -> tuple[int, Any]:
            nonlocal missed
            sent = None if body is None else msgspec.json.encode(body)
            try:
                status, told = await fetch_small(upstream, path, timeout, sent)
                missed = missed or status in _NOT_NOW
                return status, msgspec.json.decode(told)
            except ConnectError:
                # polls and answers tell whether it is alive
                missed = True
                return 0, None
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                return 0, None

        models = list(upstream.models or ())
        try:
            tries = upstream.config.probe == "try"
            found = await discover_capabilities(upstream.kind, fetch, models, tries=tries)
        except Exception:
            # the gateway's fault: the kind's table holds
            _log.exception("probe_failed engine=%s", upstream.name)
            return
        if upstream.wants_probe:
            # the engine went away meanwhile and will be probed again
            return
        if missed:
            # it was starting or too busy
            upstream.probe_again_at = self._models_again()
        if found.answered or not missed:
            # a later probe may find less than an earlier one
            upstream.learn(found)
        _log.info(
            "engine_probed engine=%s kind=%s answered=%s %s",
            upstream.name, upstream.kind, found.answered, found.sources,
        )  # fmt: skip

    async def poll(self, upstream: Upstream) -> None:
        """Ask for its load once."""
        upstream.num_polls += 1
        path = upstream.facts.metrics_path or "/metrics"
        late = self._config.poll_timeout
        # a late answer is still a sign of life
        longest = max(_LATEST * late, _LATEST_CONNECTION * self._config.connect_timeout)
        fetching = asyncio.ensure_future(fetch_small(upstream, path, longest))
        try:
            while not (await asyncio.wait((fetching,), timeout=late))[0]:
                self._missed(upstream, ConnectError(f"no answer within {late:g} s"))
            status, text = fetching.result()
        except ConnectError as error:
            self._missed(upstream, error)
            return
        finally:
            fetching.cancel()
        was_gone = upstream.num_misses > 4
        upstream.is_unreachable = False
        upstream.alive()
        if was_gone:
            _log.info("engine_back engine=%s", upstream.name)
            upstream.came_back(self._now())
        upstream.is_away = _is_away(status)
        if upstream.is_away:
            upstream.suspect()
            upstream.trouble = f"{path} answers {status}"
        elif status == 200:
            upstream.trouble = ""
            upstream.heard(text, self._now())
        elif upstream.kind == "auto":
            # it answers but has no metrics, so nothing more is known of it
            upstream.become("openai")
            upstream.trouble = ""
        else:
            upstream.trouble = f"{path} answers {status}"

    def _missed(self, upstream: Upstream, error: ConnectError) -> None:
        gone = upstream.missed(str(error), unreachable=error.unreachable)
        if gone and upstream.num_misses == 1:
            _log.warning("engine_unreachable engine=%s reason=%r", upstream.name, str(error))

    async def _read_models(self, upstream: Upstream) -> None:
        path = upstream.facts.models_path
        named = upstream.config.models
        if named:
            upstream.has_models({name: UpstreamModel(name) for name in named})
        if named or not path:
            # nothing to ask for: its answers show whether it is alive
            upstream.has_answered = True
            if not upstream.polled:
                upstream.trouble = ""
            return
        try:
            status, body = await fetch_small(upstream, path, max(2.0, self._config.poll_timeout))
            # an error is an answer: it would be the same soon after
            upstream.has_answered = not _is_away(status)
            entries = msgspec.json.decode(body, type=_ModelList).data if status == 200 else None
        except ConnectError as error:
            upstream.has_answered = False
            if not upstream.polled:
                # requests are still sent there: only missed polls keep them away
                upstream.trouble = str(error)
                upstream.is_unreachable = error.unreachable
            return
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return
        if not upstream.polled:
            upstream.is_unreachable = False
        upstream.alive()
        if entries is None:
            if not upstream.polled:
                upstream.trouble = f"{path} answers {status}"
            return
        if not upstream.polled and upstream.trouble:
            upstream.trouble = ""
            # it may have restarted as something else
            upstream.forget()
        upstream.lists(entries, await self._read_contexts(upstream))

    async def _read_contexts(self, upstream: Upstream) -> Mapping[str, int]:
        path = upstream.facts.context_path
        if not path:
            return {}
        try:
            status, body = await fetch_small(upstream, path, max(2.0, self._config.poll_timeout))
        except ConnectError:
            return {}
        return read_contexts(body) if status == 200 else {}

    async def _watch(self) -> None:
        before = self._now()
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            now = self._now()
            elapsed = min(now - before, _MOST_PER_TICK)
            before = now
            try:
                self._tick(now, elapsed)
            except Exception:
                # a fault in one request: the others must still be watched
                _log.exception("tick_failed")

    def _tick(self, now: float, elapsed: float) -> None:
        for upstream in [each for each in self._retired if not each.running]:
            self._retired.discard(upstream)
            # an engine retired before it was followed has no task
            task = self._tasks.pop(upstream, None)
            if task is not None:
                task.cancel()
            if upstream in self._probes:
                self._probes[upstream].cancel()
            upstream.pool.close()
        for upstream in (*self.by_name.values(), *self._retired):
            heard = [running.tick(now) for running in list(upstream.running)]
            upstream.silent += elapsed
            if any(heard):
                upstream.alive()
            if (
                upstream.silent > self._config.liveness_timeout
                and upstream.running
                and upstream.polled
                and upstream.num_polls > 1
            ):
                self._gone(upstream)
        for name in self.pools.unheard(now):
            _log.warning("pool_unheard pool=%s seconds=%g", name, UNHEARD_SECONDS)
        self._on_tick()

    def _gone(self, upstream: Upstream) -> None:
        why = f"engine {upstream.name} has not answered for {upstream.silent:.1f} s"
        left = [running.engine_gone(why) for running in list(upstream.running)]
        if any(left):
            _log.error(
                "engine_gone engine=%s silent=%.2f running=%d",
                upstream.name, upstream.silent, len(left),
            )  # fmt: skip
            upstream.breaker.trip(self._now())


def _is_away(status: int) -> bool:
    """Whether a proxy reports that its engine is gone."""
    return status in _AWAY or 520 <= status <= 530


class _ModelList(msgspec.Struct):
    data: list[dict[str, Any]]
