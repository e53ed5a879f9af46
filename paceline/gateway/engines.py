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
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import msgspec

from paceline.gateway.abilities import UNKNOWN, Abilities, find_abilities
from paceline.gateway.asking import ask
from paceline.gateway.config import EngineConfig, EngineKind, GatewayConfig, Secret, SecretBytes
from paceline.gateway.dialects import Dialect, dialect_of
from paceline.gateway.kinds import KINDS, KindFacts, kind_of_metrics, read_contexts, read_pressure
from paceline.http.upstream import ConnectError, Headers, Origin, Pool
from paceline.routing import Breaker, EngineLoad, SlowStart

__all__ = ["Engine", "EngineModel", "Engines", "Running"]

_log = logging.getLogger("paceline.gateway")

# polls between two looks at an engine's models
_MODEL_POLLS: Final = 120
# a tick of the watch on silence, and the most that one counts: a tick that is later than this was
# kept waiting by this process itself
_TICK_SECONDS: Final = 0.1
_MOST_PER_TICK: Final = 0.15
_JITTER: Final = 0.1
# for each question of what an engine can do, at least
_PROBE_SECONDS: Final = 2.0
# of a quiet engine's next poll, at most
_MAX_POLL_WAIT: Final = 2.0


class Running(Protocol):
    """A request under way at an engine."""

    def tick(self, now: float) -> bool:
        """A tenth of a second or so has passed; whether the engine sent something meanwhile."""
        ...

    def engine_gone(self, why: str) -> None: ...


@dataclass(frozen=True, slots=True)
class EngineModel:
    """As /v1/models tells of it."""

    id: str
    # None: it does not say
    max_model_len: int | None = None
    # the whole entry
    entry: Mapping[str, Any] = field(default_factory=dict)


class Engine:
    """One engine."""

    def __init__(self, config: EngineConfig, gateway: GatewayConfig, now: float) -> None:
        self.config = config
        self.name = config.name
        self.kind: EngineKind = config.kind
        self.facts: KindFacts = KINDS["openai" if config.kind == "auto" else config.kind]
        key = os.environ.get(config.api_key_env, "") if config.api_key_env else ""
        self.key = Secret(key)
        self.dialect: Dialect = dialect_of(config.kind, config.api_version)
        self.pool = Pool(
            Origin.of(config.url), connect_timeout=gateway.connect_timeout, idle=self.facts.idle
        )
        # by path and what is accepted: few, as the configuration and the engine name them
        self._starts: dict[tuple[str, bytes], SecretBytes] = {}
        self.load = EngineLoad(config.name)
        self.load.sent_at = now
        self.breaker = Breaker()
        self.running: set[Running] = set()
        # None: the engine has not told yet
        self.models: dict[str, EngineModel] | None = None
        # what it said it can do, which stands over its kind's table
        self.abilities: Abilities = UNKNOWN
        # it is to be asked, once it answers at all
        self.wants_probe = config.probe != "off"
        # by an admin
        self.draining = False
        # of the last poll; "": it answered
        self.trouble = "not asked yet"
        # seconds in which it gave no sign
        self.silent = 0.0
        self.num_polls = 0
        self.num_misses = 0
        # signals that it once gave and gives no longer
        self.lost_signals: frozenset[str] = frozenset()
        self._signals: frozenset[str] = frozenset()
        # by the clock, when it came back from being gone or drained
        self.back_at = -math.inf
        self._slow_start = SlowStart(gateway.slow_start)
        # it asked for no requests before
        self._rests_until = 0.0

    @property
    def polled(self) -> bool:
        """Whether it can be asked anything that costs it next to nothing."""
        return bool(self.facts.metrics_path) or self.kind == "auto"

    def alive(self) -> None:
        """It gave a sign."""
        self.silent = 0.0

    def headers(self) -> Headers:
        """That every request to it has."""
        return [(b"accept-encoding", b"identity"), *self.dialect.headers(self.key)]

    def start_of(self, target: str, accept: bytes) -> bytes:
        """Of the head of a request to it, what all to this path have in common."""
        start = self._starts.get((target, accept))
        if start is None:
            headers = [(b"content-type", b"application/json"), (b"accept", accept)]
            found = self.pool.origin.start("POST", target, [*headers, *self.headers()])
            start = self._starts[target, accept] = SecretBytes(found)
        return start

    @property
    def places_in_all(self) -> float:
        """Requests that it may have at once."""
        return self.config.max_concurrent or math.inf

    @property
    def places(self) -> float:
        """Requests that it may be sent beside those that run there."""
        most = self.config.max_concurrent
        return max(0.0, most - len(self.load.running)) if most else math.inf

    def rest(self, until: float) -> None:
        """It asked to be left alone; a pause that was asked for before is not shortened."""
        self._rests_until = max(self._rests_until, until)

    def rests_for(self, now: float) -> float:
        """Seconds until it may be sent requests again."""
        return max(0.0, self._rests_until - now)

    def share(self, now: float) -> float:
        """Of the requests that would come to it, those that it is to get: 1, but for a while after
        it came back."""
        since = max(self.back_at, self.breaker.closed_at)
        return self._slow_start.share(since, now)

    def usable(self, now: float) -> str:
        """Why it takes no requests; empty where it does, if perhaps not now."""
        if self.draining:
            return "draining"
        if not self.breaker.allows(now):
            return f"failing ({self.breaker.state(now)})"
        if self.rests_for(now):
            return f"asked for a pause, {self.rests_for(now):.1f} s are left"
        return self.trouble if self.num_misses else ""

    def available(self, now: float) -> str:
        """Why it may not be sent a request now; empty where it may."""
        if why := self.usable(now):
            return why
        return "" if self.places else f"max_concurrent {self.config.max_concurrent}"

    def become(self, kind: EngineKind) -> None:
        """What it is was found out."""
        self.kind = kind
        self.pool.idle = KINDS[kind].idle
        self.forget()

    def forget(self) -> None:
        """What it can do may be something else now: its kind's table holds until it has said."""
        self.learn(UNKNOWN)
        self.wants_probe = self.config.probe != "off"

    def learn(self, found: Abilities) -> None:
        """What it can do, as far as that was found out."""
        self.abilities = found
        kind = KINDS["openai" if self.kind == "auto" else self.kind]
        token_ids = kind.resumes if found.token_ids is None else found.token_ids
        resume = kind.resumes if found.resume is None else found.resume
        self.facts = replace(
            kind,
            resumes=token_ids and resume,
            continues=kind.continues if found.continues is None else found.continues,
        )
        if self.models:
            self.models = {
                name: replace(model, max_model_len=model.max_model_len or self._context(name))
                for name, model in self.models.items()
            }

    def _context(self, model: str) -> int | None:
        """As it said when it was asked what it can do."""
        contexts = self.abilities.contexts
        return contexts.get(model, contexts.get(""))

    def lists(self, entries: Sequence[Mapping[str, Any]], contexts: Mapping[str, int]) -> None:
        """It told of its models; ``contexts``: how long those are that the list does not say."""
        models = {}
        for entry in entries:
            name, most = entry.get("id"), entry.get("max_model_len")
            if isinstance(name, str) and name:
                if not isinstance(most, int):
                    most = contexts.get(name, contexts.get("")) or self._context(name)
                models[name] = EngineModel(name, most, entry)
        self.models = models

    def heard(self, text: bytes, now: float) -> None:
        """It answered a poll with ``text``."""
        if self.kind == "auto":
            found = kind_of_metrics(text)
            if found is not None:
                _log.info("engine_kind engine=%s kind=%s", self.name, found)
                self.become(found)
        pressure = read_pressure(text, self.facts, now)
        signals = frozenset(
            name for name in self.facts.signals if getattr(pressure, name) is not None
        )
        lost = self._signals - signals
        if lost and lost != self.lost_signals:
            _log.warning("engine_signals_lost engine=%s signals=%s", self.name, sorted(lost))
        self.lost_signals = lost
        self._signals |= signals
        self.load.heard(pressure)


class Engines:
    """All of them, and the tasks that keep up with them.

    Args:
        now: seconds of a clock that never goes back.
    """

    def __init__(self, config: GatewayConfig, now: Callable[[], float]) -> None:
        self._config = config
        self._now = now
        self.by_name = {each.name: Engine(each, config, now()) for each in config.engines}
        # by engine, what follows it
        self._tasks: dict[Engine | None, asyncio.Task[None]] = {}
        # by engine, what finds out what it can do
        self._probes: dict[Engine, asyncio.Task[None]] = {}
        # no longer in the configuration, until nothing runs there
        self._retired: set[Engine] = set()
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
        while True:
            wait = self._config.poll_interval * (1.0 + _JITTER * draw.uniform(-1.0, 1.0))
            if engine.num_misses > 4 and not engine.running:
                wait = min(wait * engine.num_misses, _MAX_POLL_WAIT)
            await asyncio.sleep(wait)
            known = engine.models is not None
            if engine.polled:
                await self.poll(engine)
            else:
                await asyncio.sleep(_MAX_POLL_WAIT)
            if (not known and not engine.trouble) or engine.num_polls % _MODEL_POLLS == 0:
                await self._read_models(engine)
            elif not engine.polled:
                engine.num_polls += 1
            self._start_probe(engine)

    def _start_probe(self, engine: Engine) -> None:
        """Find out what it can do, beside everything else: no poll or request waits for it."""
        # one without metrics has its trouble, and answers all the same
        answers = engine.kind != "auto" and engine.models is not None and not engine.num_misses
        if engine.wants_probe and answers and engine not in self._probes:
            engine.wants_probe = False
            task = asyncio.create_task(self._probe(engine))
            self._probes[engine] = task
            task.add_done_callback(lambda done: self._probes.pop(engine, None))

    def is_probed(self, engine: Engine) -> bool:
        """Whether what it can do was asked for, and it has answered or not."""
        return not engine.wants_probe and engine not in self._probes

    async def _probe(self, engine: Engine) -> None:
        timeout = max(_PROBE_SECONDS, self._config.poll_timeout)

        async def asked(path: str, body: Mapping[str, Any] | None) -> tuple[int, Any]:
            sent = None if body is None else msgspec.json.encode(body)
            try:
                status, told = await ask(engine, path, timeout, sent)
                return status, msgspec.json.decode(told)
            except (ConnectError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                # whether it lives its polls and its answers show
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
        engine.learn(found)
        _log.info(
            "engine_probed engine=%s kind=%s answered=%s %s",
            engine.name, engine.kind, found.answered, found.sources,
        )  # fmt: skip

    async def poll(self, engine: Engine) -> None:
        """Ask it once how it is."""
        engine.num_polls += 1
        path = engine.facts.metrics_path or "/metrics"
        try:
            status, text = await ask(engine, path, self._config.poll_timeout)
        except ConnectError as error:
            self._missed(engine, str(error))
            return
        engine.alive()
        if engine.num_misses > 4 and engine.trouble:
            _log.info("engine_back engine=%s", engine.name)
            engine.back_at = self._now()
            engine.load.prefixes.clear()
            # it may have been started anew, as something else
            engine.forget()
        engine.num_misses = 0
        if status == 200:
            engine.trouble = ""
            engine.heard(text, self._now())
        elif engine.kind == "auto":
            # it answers, and has no metrics: nothing more is known of it
            engine.become("openai")
            engine.trouble = ""
        else:
            engine.trouble = f"{path} answers {status}"

    def _missed(self, engine: Engine, why: str) -> None:
        engine.num_misses += 1
        if not engine.trouble or engine.num_misses == 1:
            _log.warning("engine_silent engine=%s reason=%r", engine.name, why)
        engine.trouble = why

    async def _read_models(self, engine: Engine) -> None:
        path = engine.facts.models_path
        named = engine.config.models
        if named:
            engine.models = {name: EngineModel(name) for name in named}
        if named or not path:
            # nobody is asked: whether it lives, its answers show
            if not engine.polled:
                engine.trouble = ""
            return
        try:
            status, body = await ask(engine, path, max(2.0, self._config.poll_timeout))
            entries = msgspec.json.decode(body, type=_ModelList).data if status == 200 else None
        except (ConnectError, msgspec.MsgspecError, UnicodeDecodeError):
            return
        engine.alive()
        if entries is None:
            if not engine.polled:
                engine.trouble = f"{path} answers {status}"
            return
        if not engine.polled and engine.trouble:
            engine.trouble = ""
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
            self._tasks.pop(engine).cancel()
            if engine in self._probes:
                self._probes[engine].cancel()
            engine.pool.close()
        for engine in (*self.by_name.values(), *self._retired):
            heard = [running.tick(now) for running in list(engine.running)]
            engine.silent = elapsed if any(heard) else engine.silent + elapsed
            if (
                engine.silent > self._config.silence
                and engine.running
                and engine.polled
                and engine.num_polls > 1
            ):
                self._gone(engine)
        self.on_tick()

    def _gone(self, engine: Engine) -> None:
        _log.error(
            "engine_gone engine=%s silent=%.2f running=%d",
            engine.name, engine.silent, len(engine.running),
        )  # fmt: skip
        engine.breaker.trip(self._now())
        for running in list(engine.running):
            running.engine_gone(f"engine {engine.name} has given no sign for {engine.silent:.1f} s")


class _ModelList(msgspec.Struct):
    data: list[dict[str, Any]]
