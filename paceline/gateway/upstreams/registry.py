"""The engines behind a gateway, and the tasks that keep their state up to date.

One task per engine polls its load several times a second over one connection, and its models now
and then. Anything that comes from an engine, a poll's answer or a token of a stream, is a sign of
life; an engine without one for ``silence`` seconds is taken for dead, and its streams are resumed
elsewhere. Delays of this process do not count as silence.
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
from paceline.gateway.upstreams.capabilities import discover_capabilities
from paceline.gateway.upstreams.probe import fetch_small
from paceline.gateway.upstreams.upstream import Engine, EngineModel
from paceline.http.upstream import ConnectError

__all__ = ["Engines"]

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


class Engines:
    """The engines by name, and the tasks that follow them.

    Args:
        now: clock, monotonic seconds.
    """

    def __init__(self, config: GatewayConfig, now: Callable[[], float]) -> None:
        self._config = config
        self._now = now
        self.by_name = {each.name: Engine(each, config, now()) for each in config.engines}
        # whether any engine has a bound on its requests
        self.has_bounds = _has_bounds(config)
        # polling task of each engine; None: the check for silence
        self._tasks: dict[Engine | None, asyncio.Task[None]] = {}
        # probe that is running, by engine
        self._probes: dict[Engine, asyncio.Task[None]] = {}
        # removed from the configuration, but still running requests
        self._retired: set[Engine] = set()
        # held while a configuration is applied
        self._changes = asyncio.Lock()
        # called every tick, for requests that wait for engines
        self.on_tick: Callable[[], None] = lambda: None
        # set once each engine was asked once
        self.asked = asyncio.Event()

    async def start(self) -> None:
        for engine in self.by_name.values():
            self._tasks[engine] = asyncio.create_task(self._follow(engine))
        self._tasks[None] = asyncio.create_task(self._watch())
        await asyncio.gather(*map(self._ask_first, self.by_name.values()))
        for engine in self.by_name.values():
            self._start_probe(engine)
        self.asked.set()

    async def change(self, config: GatewayConfig) -> list[str]:
        """Apply another configuration; return what changed. An engine that is removed or replaced
        gets no new requests and finishes its running ones."""
        async with self._changes:
            return await self._change(config)

    async def _change(self, config: GatewayConfig) -> list[str]:
        self._config = config
        told = []
        wanted = {each.name: each for each in config.engines}
        added = []
        for name, each in wanted.items():
            before = self.by_name.get(name)
            if before is not None and before.config == each:
                continue
            if before is not None:
                self._retire(before)
            self.by_name[name] = engine = Engine(each, config, self._now())
            engine.back_at = self._now()
            added.append(engine)
            told.append(f"engine {name} {'added' if before is None else 'replaced'}")
        for name in [name for name in self.by_name if name not in wanted]:
            self._retire(self.by_name.pop(name))
            told.append(f"engine {name} removed")
        self.has_bounds = _has_bounds(config)
        await asyncio.gather(*map(self._ask_first, added))
        for engine in added:
            self._start_probe(engine)
            self._tasks[engine] = asyncio.create_task(self._follow(engine))
        return told

    def _retire(self, engine: Engine) -> None:
        engine.draining = True
        self._retired.add(engine)

    async def close(self) -> None:
        tasks = [*self._tasks.values(), *self._probes.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for engine in (*self.by_name.values(), *self._retired):
            engine.pool.close()

    async def _ask_first(self, engine: Engine) -> None:
        if engine.polled:
            await self.poll(engine)
        await self._read_models(engine)

    async def _follow(self, engine: Engine) -> None:
        draw = random.Random(engine.name)
        await self.asked.wait()
        asked_at, models_at = self._now(), self._models_again()
        while True:
            wait = self._config.poll_interval * (1.0 + _JITTER * draw.uniform(-1.0, 1.0))
            if engine.num_misses > 4 and not engine.running:
                wait = min(wait * engine.num_misses, _MAX_POLL_WAIT)
            await asyncio.sleep(wait)
            known, was = engine.models is not None, (engine.back_at, engine.kind)
            if engine.polled:
                await self.poll(engine)
            else:
                await asyncio.sleep(_MAX_POLL_WAIT)
            # after a restart the models may be others
            is_other = was != (engine.back_at, engine.kind)
            news = is_other or (not known and not engine.trouble)
            # for an engine that is not polled, only the list of models shows that it is there; a
            # failed request may mean that it is gone, or has restarted with other models
            away = not engine.polled and (not engine.has_answered or engine.failed_at >= asked_at)
            asks = news or away or self._now() >= models_at
            if not is_other and engine.is_doubtful(self._now()):
                # if it restarted, it was down too briefly for its polls to show it
                shortest, longest = (
                    polls * self._config.poll_interval for polls in (_DOUBT_POLLS, _MODEL_POLLS)
                )
                engine.doubt(self._now(), shortest, longest)
                asks = True
            if asks:
                asked_at = self._now()
                await self._read_models(engine)
                models_at = self._models_again()
            self._start_probe(engine)

    def _models_again(self) -> float:
        """Return when the models of an engine that was just asked are due again."""
        return self._now() + _MODEL_POLLS * self._config.poll_interval

    def _start_probe(self, engine: Engine) -> None:
        """Start a probe of its capabilities in the background; no poll or request waits for it."""
        # an engine without metrics answers although it has a ``trouble``
        answers = engine.kind != "auto" and engine.models is not None and not engine.num_misses
        wanted = engine.wants_probe or self._now() >= engine.probe_again_at
        if wanted and answers and engine not in self._probes:
            engine.wants_probe, engine.probe_again_at = False, math.inf
            task = asyncio.create_task(self._probe(engine))
            self._probes[engine] = task
            task.add_done_callback(lambda done: self._probes.pop(engine, None))

    def is_probed(self, engine: Engine) -> bool:
        """Whether the last probe is over, answered or not."""
        return not engine.wants_probe and engine not in self._probes

    def is_probing(self, engine: Engine) -> bool:
        """Whether a probe is running."""
        return engine in self._probes

    async def _probe(self, engine: Engine) -> None:
        timeout = max(_PROBE_SECONDS, self._config.poll_timeout)
        missed = False

        async def fetch(path: str, body: Mapping[str, Any] | None) -> tuple[int, Any]:
            nonlocal missed
            sent = None if body is None else msgspec.json.encode(body)
            try:
                status, told = await fetch_small(engine, path, timeout, sent)
                missed = missed or status in _NOT_NOW
                return status, msgspec.json.decode(told)
            except ConnectError:
                # polls and answers tell whether it is alive
                missed = True
                return 0, None
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                return 0, None

        models = list(engine.models or ())
        try:
            tries = engine.config.probe == "try"
            found = await discover_capabilities(engine.kind, fetch, models, tries=tries)
        except Exception:
            # the gateway's fault: the kind's table holds
            _log.exception("probe_failed engine=%s", engine.name)
            return
        if engine.wants_probe:
            # the engine went away meanwhile and will be probed again
            return
        if missed:
            # it was starting or too busy
            engine.probe_again_at = self._models_again()
        if found.answered or not missed:
            # a later probe may find less than an earlier one
            engine.learn(found)
        _log.info(
            "engine_probed engine=%s kind=%s answered=%s %s",
            engine.name, engine.kind, found.answered, found.sources,
        )  # fmt: skip

    async def poll(self, engine: Engine) -> None:
        """Ask for its load once."""
        engine.num_polls += 1
        path = engine.facts.metrics_path or "/metrics"
        late = self._config.poll_timeout
        # a late answer is still a sign of life
        longest = max(_LATEST * late, _LATEST_CONNECTION * self._config.connect_timeout)
        fetching = asyncio.ensure_future(fetch_small(engine, path, longest))
        try:
            while not (await asyncio.wait((fetching,), timeout=late))[0]:
                self._missed(engine, ConnectError(f"no answer within {late:g} s"))
            status, text = fetching.result()
        except ConnectError as error:
            self._missed(engine, error)
            return
        finally:
            fetching.cancel()
        was_gone = engine.num_misses > 4
        engine.is_unreachable = False
        engine.alive()
        if was_gone:
            _log.info("engine_back engine=%s", engine.name)
            engine.came_back(self._now())
        engine.is_away = _is_away(status)
        if engine.is_away:
            engine.suspect()
            engine.trouble = f"{path} answers {status}"
        elif status == 200:
            engine.trouble = ""
            engine.heard(text, self._now())
        elif engine.kind == "auto":
            # it answers but has no metrics, so nothing more is known of it
            engine.become("openai")
            engine.trouble = ""
        else:
            engine.trouble = f"{path} answers {status}"

    def _missed(self, engine: Engine, error: ConnectError) -> None:
        gone = engine.missed(str(error), unreachable=error.unreachable)
        if gone and engine.num_misses == 1:
            _log.warning("engine_silent engine=%s reason=%r", engine.name, str(error))

    async def _read_models(self, engine: Engine) -> None:
        path = engine.facts.models_path
        named = engine.config.models
        if named:
            engine.has_models({name: EngineModel(name) for name in named})
        if named or not path:
            # nothing to ask for: its answers show whether it is alive
            engine.has_answered = True
            if not engine.polled:
                engine.trouble = ""
            return
        try:
            status, body = await fetch_small(engine, path, max(2.0, self._config.poll_timeout))
            # an error is an answer: it would be the same soon after
            engine.has_answered = not _is_away(status)
            entries = msgspec.json.decode(body, type=_ModelList).data if status == 200 else None
        except ConnectError as error:
            engine.has_answered = False
            if not engine.polled:
                # requests are still sent there: only missed polls keep them away
                engine.trouble = str(error)
                engine.is_unreachable = error.unreachable
            return
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return
        if not engine.polled:
            engine.is_unreachable = False
        engine.alive()
        if entries is None:
            if not engine.polled:
                engine.trouble = f"{path} answers {status}"
            return
        if not engine.polled and engine.trouble:
            engine.trouble = ""
            # it may have restarted as something else
            engine.forget()
        engine.lists(entries, await self._read_contexts(engine))

    async def _read_contexts(self, engine: Engine) -> Mapping[str, int]:
        path = engine.facts.context_path
        if not path:
            return {}
        try:
            status, body = await fetch_small(engine, path, max(2.0, self._config.poll_timeout))
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
        for engine in [each for each in self._retired if not each.running]:
            self._retired.discard(engine)
            # an engine retired before it was followed has no task
            task = self._tasks.pop(engine, None)
            if task is not None:
                task.cancel()
            if engine in self._probes:
                self._probes[engine].cancel()
            engine.pool.close()
        for engine in (*self.by_name.values(), *self._retired):
            heard = [running.tick(now) for running in list(engine.running)]
            engine.silent += elapsed
            if any(heard):
                engine.alive()
            if (
                engine.silent > self._config.silence
                and engine.running
                and engine.polled
                and engine.num_polls > 1
            ):
                self._gone(engine)
        self.on_tick()

    def _gone(self, engine: Engine) -> None:
        why = f"engine {engine.name} has given no sign for {engine.silent:.1f} s"
        left = [running.engine_gone(why) for running in list(engine.running)]
        if any(left):
            _log.error(
                "engine_gone engine=%s silent=%.2f running=%d",
                engine.name, engine.silent, len(left),
            )  # fmt: skip
            engine.breaker.trip(self._now())


def _is_away(status: int) -> bool:
    """Whether a proxy reports that its engine is gone."""
    return status in _AWAY or 520 <= status <= 530


def _has_bounds(config: GatewayConfig) -> bool:
    return any(engine.max_concurrent for engine in config.engines)


class _ModelList(msgspec.Struct):
    data: list[dict[str, Any]]
