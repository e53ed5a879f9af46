"""The engines behind a gateway: what is known of each, and how it stays known.

A task an engine asks how pressed it is, several times a second over one connection, and now and
then which models it has. Whatever comes from an engine, a poll's answer or a token of a stream,
shows that it lives; one that gives no sign for ``silence`` seconds is taken for gone, and its
streams go on elsewhere. A byte that is late because this process was late does not count.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from paceline.gateway.abilities import find_abilities
from paceline.gateway.asking import ask
from paceline.gateway.config import GatewayConfig
from paceline.gateway.engine import Engine, EngineModel
from paceline.gateway.kinds import read_contexts
from paceline.http.upstream import ConnectError

__all__ = ["Engines"]

_log = logging.getLogger("paceline.gateway")

# poll intervals between two readings of an engine's models
_MODEL_POLLS: Final = 120
# and at first between two doubts: a server may close every connection after a second or two
_DOUBT_POLLS: Final = 20
# a tick of the watch on silence, and the most that one counts: a tick that is later than this was
# kept waiting by this process itself
_TICK_SECONDS: Final = 0.1
_MOST_PER_TICK: Final = 0.15
_JITTER: Final = 0.1
# for each question of what an engine can do, at least
_PROBE_SECONDS: Final = 2.0
# answers of one that is not ready, or of a proxy before it
_NOT_NOW: Final = frozenset({429, 502, 503, 504})
# those of a proxy before one that is not there, beside Cloudflare's 520 to 530
_AWAY: Final = frozenset({502, 503, 504})
# times ``poll_timeout`` and ``connect_timeout`` that a poll is waited for, the longer of both
_LATEST: Final = 4.0
_LATEST_CONNECTION: Final = 1.25
# of a quiet engine's next poll, at most
_MAX_POLL_WAIT: Final = 2.0


class Engines:
    """All of them, and the tasks that keep up with them.

    Args:
        now: seconds of a clock that never goes back.
    """

    def __init__(self, config: GatewayConfig, now: Callable[[], float]) -> None:
        self._config = config
        self._now = now
        self.by_name = {each.name: Engine(each, config, now()) for each in config.engines}
        # any of them has a bound on its requests
        self.has_bounds = _has_bounds(config)
        # by engine, what follows it
        self._tasks: dict[Engine | None, asyncio.Task[None]] = {}
        # by engine, what finds out what it can do
        self._probes: dict[Engine, asyncio.Task[None]] = {}
        # no longer in the configuration, until nothing runs there
        self._retired: set[Engine] = set()
        # configurations come one after the other
        self._changes = asyncio.Lock()
        # called every tick, for what waits on engines
        self.on_tick: Callable[[], None] = lambda: None
        # each engine was asked once
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
        """Go by another configuration; what became of engines. One that is gone from it, or is
        another one now, gets no new requests and ends what it has."""
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
            # one that came back may have others
            is_other = was != (engine.back_at, engine.kind)
            news = is_other or (not known and not engine.trouble)
            # one that is not polled shows by its list alone that it is there; a request that has
            # failed since may mean that it has gone, or was started anew with other models
            away = not engine.polled and (not engine.has_answered or engine.failed_at >= asked_at)
            asks = news or away or self._now() >= models_at
            if not is_other and engine.is_doubtful(self._now()):
                # it ended, if it did, so shortly that no poll, or few, came to nothing
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
        """When an engine whose models were read just now is asked for them again."""
        return self._now() + _MODEL_POLLS * self._config.poll_interval

    def _start_probe(self, engine: Engine) -> None:
        """Find out what it can do, beside everything else: no poll or request waits for it."""
        # one without metrics has its trouble, and answers all the same
        answers = engine.kind != "auto" and engine.models is not None and not engine.num_misses
        wanted = engine.wants_probe or self._now() >= engine.probe_again_at
        if wanted and answers and engine not in self._probes:
            engine.wants_probe, engine.probe_again_at = False, math.inf
            task = asyncio.create_task(self._probe(engine))
            self._probes[engine] = task
            task.add_done_callback(lambda done: self._probes.pop(engine, None))

    def is_probed(self, engine: Engine) -> bool:
        """Whether what it can do was asked for, and it has answered or not."""
        return not engine.wants_probe and engine not in self._probes

    def is_probing(self, engine: Engine) -> bool:
        """Whether it is being asked what it can do."""
        return engine in self._probes

    async def _probe(self, engine: Engine) -> None:
        timeout = max(_PROBE_SECONDS, self._config.poll_timeout)
        missed = False

        async def asked(path: str, body: Mapping[str, Any] | None) -> tuple[int, Any]:
            nonlocal missed
            sent = None if body is None else msgspec.json.encode(body)
            try:
                status, told = await ask(engine, path, timeout, sent)
                missed = missed or status in _NOT_NOW
                return status, msgspec.json.decode(told)
            except ConnectError:
                # whether it lives its polls and its answers show
                missed = True
                return 0, None
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                return 0, None

        models = list(engine.models or ())
        try:
            tries = engine.config.probe == "try"
            found = await find_abilities(engine.kind, asked, models, tries=tries)
        except Exception:
            # a fault of ours: the kind's table holds
            _log.exception("probe_failed engine=%s", engine.name)
            return
        if engine.wants_probe:
            # it has gone meanwhile, and is asked again
            return
        if missed:
            # it was not up yet, or too busy
            engine.probe_again_at = self._models_again()
        if found.answered or not missed:
            # one that was asked anew may say less than before
            engine.learn(found)
        _log.info(
            "engine_probed engine=%s kind=%s answered=%s %s",
            engine.name, engine.kind, found.answered, found.sources,
        )  # fmt: skip

    async def poll(self, engine: Engine) -> None:
        """Ask it once how it is."""
        engine.num_polls += 1
        path = engine.facts.metrics_path or "/metrics"
        late = self._config.poll_timeout
        # an answer that is late is still a sign of life
        longest = max(_LATEST * late, _LATEST_CONNECTION * self._config.connect_timeout)
        asking = asyncio.ensure_future(ask(engine, path, longest))
        try:
            while not (await asyncio.wait((asking,), timeout=late))[0]:
                self._missed(engine, ConnectError(f"no answer within {late:g} s"))
            status, text = asking.result()
        except ConnectError as error:
            self._missed(engine, error)
            return
        finally:
            asking.cancel()
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
            # it answers, and has no metrics: nothing more is known of it
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
            # nobody is asked: whether it lives, its answers show
            engine.has_answered = True
            if not engine.polled:
                engine.trouble = ""
            return
        try:
            status, body = await ask(engine, path, max(2.0, self._config.poll_timeout))
            # an error is an answer: asked soon again it would say the same
            engine.has_answered = not _is_away(status)
            entries = msgspec.json.decode(body, type=_ModelList).data if status == 200 else None
        except ConnectError as error:
            engine.has_answered = False
            if not engine.polled:
                # requests still go there: only missed polls keep them away
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
            # it may have been started anew, as something else
            engine.forget()
        engine.lists(entries, await self._read_contexts(engine))

    async def _read_contexts(self, engine: Engine) -> Mapping[str, int]:
        path = engine.facts.context_path
        if not path:
            return {}
        try:
            status, body = await ask(engine, path, max(2.0, self._config.poll_timeout))
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
                # a fault of ours in one request: the others are still to be watched
                _log.exception("tick_failed")

    def _tick(self, now: float, elapsed: float) -> None:
        for engine in [each for each in self._retired if not each.running]:
            self._retired.discard(engine)
            # one that was retired before it was followed has none
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
    """Whether a proxy before an engine says that there is none."""
    return status in _AWAY or 520 <= status <= 530


def _has_bounds(config: GatewayConfig) -> bool:
    return any(engine.max_concurrent for engine in config.engines)


class _ModelList(msgspec.Struct):
    data: list[dict[str, Any]]
