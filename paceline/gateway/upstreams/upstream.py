"""One engine behind the gateway: its state, and what it may be sent."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from paceline.gateway.settings.config import (
    EngineConfig,
    EngineKind,
    GatewayConfig,
    Secret,
    SecretBytes,
)
from paceline.gateway.settings.engine_types import (
    KINDS,
    KindFacts,
    kind_of_metrics,
    read_pressure,
    scan,
)
from paceline.gateway.settings.engines import PAIRED, MemberConfig
from paceline.gateway.upstreams.capabilities import Capabilities
from paceline.gateway.upstreams.dialects import Dialect, dialect_of
from paceline.gateway.upstreams.standing import Standings
from paceline.http.fields import FLEET_HEADER
from paceline.http.upstream import Headers, Origin, Pool
from paceline.routing import Breaker, BreakerState, EngineLoad, Role, SlowStart

__all__ = ["Running", "Upstream", "UpstreamModel"]

_log = logging.getLogger("paceline.gateway")

# states of one of a server's several models that a request waits for
_COLD: Final = ("known", "unloaded", "loading")
# assumed seconds to load it, or an adapter, and most that are believed
_LOAD_SECONDS: Final = 0.1
_NONE: Final[frozenset[str]] = frozenset()
_MOST_LOAD_SECONDS: Final = 60.0
# the process's start time, in Prometheus' standard metric
_STARTED: Final = "process_start_time_seconds"
# time for which any answer, to a poll or a request, shows the engine to be alive, s
_ALIVE_SECONDS: Final = 1.0
_MILDEST: Final[tuple[BreakerState, ...]] = ("closed", "half-open", "open")
# tolerance of the start time, s: some engines recompute it from a clock that may be adjusted
_STARTED_WITHIN: Final = 2.0


class Running(Protocol):
    """Request that is running at an engine."""

    def tick(self, now: float) -> bool:
        """Check the request, about every 0.1 s; return whether the engine sent anything since."""
        ...

    def engine_gone(self, why: str) -> bool:
        """React to an engine that gives no sign of life; return whether the request gives it up."""
        ...

    def move_on(self, why: str) -> bool:
        """Leave the engine, which is not at fault, if the request can go on at another one; return
        whether it leaves."""
        ...


@dataclass(frozen=True, slots=True)
class UpstreamModel:
    """A model as an engine's /v1/models lists it."""

    id: str
    # context length, tokens; None: not listed
    max_model_len: int | None = None
    # the whole entry
    entry: Mapping[str, Any] = field(default_factory=dict)
    # seconds that a request waits for it: of an adapter, or one of several models, that is not in
    # memory, as the engine says, or else usual ones
    load_seconds: float = field(init=False)

    def __post_init__(self) -> None:
        # here, as each choice reads it
        object.__setattr__(self, "load_seconds", _load_seconds(self.entry))


def _load_seconds(entry: Mapping[str, Any]) -> float:
    status, said = entry.get("status"), entry.get("load_seconds")
    if isinstance(status, Mapping):
        said = status.get("load_seconds")
        if status.get("value") == "failed":
            return _MOST_LOAD_SECONDS
        is_cold = status.get("value") in _COLD
    else:
        is_cold = status == "registered"
    if not is_cold:
        return 0.0
    if isinstance(said, (int, float)) and 0.0 < said < _MOST_LOAD_SECONDS:
        return float(said)
    return _LOAD_SECONDS


class Upstream:
    """State of one engine behind the gateway."""

    def __init__(self, config: EngineConfig, gateway: GatewayConfig, now: float) -> None:
        self.config = config
        self.name = config.name
        # its pool; "": it is one of the configuration's engines
        self.pool_name = config.pool if isinstance(config, MemberConfig) else ""
        self.kind: EngineKind = config.kind
        self.role: Role = config.role
        self.facts: KindFacts = KINDS["openai" if config.kind == "auto" else config.kind]
        key = os.environ.get(config.api_key_env, "") if config.api_key_env else ""
        self.key = Secret(key)
        self.dialect: Dialect = dialect_of(config.kind, config.api_version)
        self.pool = Pool(
            Origin.of(config.url), connect_timeout=gateway.connect_timeout, idle=self.facts.idle
        )
        # (path, accept) -> start of a request head; few, as configuration and engine name them
        self._starts: dict[tuple[str, bytes], SecretBytes] = {}
        self.load = EngineLoad(config.name)
        self.load.sent_at = now
        # for the engine as a whole: no connection, or no sign of life. Its answers count for one
        # model
        self.breaker = Breaker()
        self.standings = Standings()
        self.running: set[Running] = set()
        # None: not known yet
        self.models: dict[str, UpstreamModel] | None = None
        # adapters and models that requests sent since then have it load
        self._loads: set[str] = set()
        # the models as listed, without contexts from ``capabilities``, which a restart clears
        self._listed: dict[str, UpstreamModel] = {}
        # as the engine advertises them; they take precedence over its kind's table
        self.capabilities = Capabilities()
        # to be probed once it answers
        self.wants_probe = config.probe != "off"
        # monotonic time of the next probe, after one without an answer
        self.probe_again_at = math.inf
        # name of a chat's token limit, once the engine has refused another; "": the usual one
        self.limit_name = ""
        # set by an admin
        self.draining = False
        # result of the last poll; "": it answered
        self.trouble = "not polled yet"
        # whether it answered the last request for its models, an error included
        self.has_answered = False
        # monotonic time at which a request last failed through the engine's fault
        self.failed_at = -math.inf
        # time without a sign of life, s
        self.silent = 0.0
        self.num_polls = 0
        # consecutive polls without an answer or any other sign of life
        # an engine of a pool is not waited for, and gets no requests before it has answered
        self.num_misses = 1 if self.pool_name else 0
        # the last connection attempt failed
        self.is_unreachable = False
        # a proxy answered the last poll in its place
        self.is_away = False
        # it may have restarted since it was last asked, for a reason other than a lost connection
        self._is_suspect = False
        # the pool's ``num_lost`` when the engine was last asked
        self._num_lost = 0
        # monotonic time from which the next doubt counts, and the last interval between doubts
        self._doubt_again_at = -math.inf
        self._doubt_wait = 0.0
        # start time by its metrics, Unix seconds
        self._started_at: float | None = None
        # its kind is still to be read from its metrics
        self._seeks_kind = config.kind == "auto"
        # signals that its metrics once had and no longer have
        self.lost_signals: frozenset[str] = frozenset()
        self._signals: frozenset[str] = frozenset()
        # monotonic time at which it came back from being gone or drained
        self.back_at = -math.inf
        self._slow_start = SlowStart(gateway.slow_start)
        # model -> fields added by the gateway that the engine refuses
        self._left_out: dict[str, frozenset[str]] = {}

    @property
    def polled(self) -> bool:
        """Whether there is a path that can be polled at almost no cost."""
        return bool(self.facts.metrics_path) or self.kind == "auto"

    def alive(self) -> None:
        """Note a sign of life: a late poll does not count as missed."""
        self.silent = 0.0
        if self.num_misses and not self.is_unreachable:
            self.num_misses, self.trouble = 0, ""

    def missed(self, why: str, *, unreachable: bool) -> bool:
        """Note a poll that is late or failed; return whether the engine is taken for dead."""
        self.is_unreachable = unreachable
        if not unreachable and self.silent <= _ALIVE_SECONDS:
            return False
        self.num_misses += 1
        self.trouble = why
        return True

    def headers(self) -> Headers:
        """Headers of every request to this engine."""
        watched = [(FLEET_HEADER, b"1")] if self.pool_name else []
        return [(b"accept-encoding", b"identity"), *watched, *self.dialect.headers(self.key)]

    def start_of(self, target: str, accept: bytes) -> bytes:
        """Return the start of a request head, which all requests to this path share."""
        start = self._starts.get((target, accept))
        if start is None:
            headers = [(b"content-type", b"application/json"), (b"accept", accept)]
            found = self.pool.origin.start("POST", target, [*headers, *self.headers()])
            start = self._starts[target, accept] = SecretBytes(found)
        return start

    @property
    def free_slots(self) -> float:
        """Requests that it may be sent in addition to the running ones."""
        most = self.config.max_concurrent
        return max(0.0, most - len(self.load.running)) if most else math.inf

    def cooldown_left(self, now: float) -> float:
        """Seconds until the first of its models' cooldowns ends; 0.0 if one model has none."""
        return min((each.cooldown_left(now) for each in self.standings.values()), default=0.0)

    def breaker_state(self, now: float) -> BreakerState:
        """State of its own breaker; if that is closed, the mildest state of its models."""
        own = self.breaker.state(now)
        states = {each.breaker.state(now) for each in self.standings.values()} or {own}
        return own if own != "closed" else min(states, key=_MILDEST.index)

    @property
    def num_opened(self) -> int:
        """Number of times that the engine's and its models' breakers have opened."""
        return self.breaker.num_opened + self.standings.num_opened

    def share(self, now: float) -> float:
        """Share of the requests for it that it gets: below 1 for a while after it, or one of its
        models, came back."""
        return min(self.share_of(model, now) for model in self.standings or ("",))

    def share_of(self, model: str, now: float) -> float:
        """Share of one model's requests that it gets; see ``share``."""
        standing = self.standings.get(model)
        closed = -math.inf if standing is None else standing.breaker.closed_at
        return self._slow_start.share(max(self.back_at, self.breaker.closed_at, closed), now)

    def usable(self, now: float, model: str = "", path: str = "") -> str:
        """Return why it takes no requests, or none for a model at a path; empty if it takes them,
        even if only after a wait."""
        if self.draining:
            return "draining"
        if not self.breaker.allows(now):
            return f"failing ({self.breaker.state(now)})"
        if self.num_misses:
            return self.trouble
        standing = self.standings.get(model)
        return "" if standing is None else standing.trouble(path, now)

    def available(self, now: float, model: str = "", path: str = "") -> str:
        """Return why it may not be sent a request now; empty if it may."""
        if why := self.usable(now, model, path):
            return why
        most = self.config.max_concurrent
        return f"max_concurrent {most}" if most and not self.free_slots else ""

    def troubles(self, now: float) -> Mapping[str, str]:
        """Reasons why it takes no requests, by model name at the engine."""
        found = {model: each.troubles(now) for model, each in self.standings.items()}
        return {model: why for model, why in found.items() if why}

    def become(self, kind: EngineKind) -> None:
        """Set the kind, once it is known."""
        self.kind = kind
        self.pool.idle = KINDS[kind].idle
        self.forget()

    @property
    def kv_source(self) -> dict[str, str] | None:
        """The address at which other engines fetch its blocks; None: it has none, or is gone."""
        kv = self.capabilities.kv
        if kv is None or self.trouble or self.is_unreachable:
            return None
        host = self.pool.origin.host
        host = f"[{host}]" if ":" in host else host
        return {"url": f"tcp://{host}:{kv[0]}", "fingerprint": kv[1]}

    def hands_to(self, other: Upstream) -> bool:
        """Whether ``other`` can go on behind a prompt that was computed here."""
        if self.kind != other.kind or self.kind not in PAIRED:
            return False
        if self.kind != "paceline":
            return True
        source, kv = self.kv_source, other.capabilities.kv
        return source is not None and kv is not None and source["fingerprint"] == kv[1]

    def left_out(self, model: str) -> frozenset[str]:
        """Fields that the gateway would add for this model, but that the engine refuses."""
        return self._left_out.get(model, _NONE)

    def leave_out(self, model: str, names: frozenset[str]) -> None:
        """Remember fields that the engine refused: it then took the request without them."""
        _log.warning("engine_refuses engine=%s model=%s fields=%s", self.name, model, sorted(names))
        self._left_out[model] = self.left_out(model) | names

    def forget(self) -> None:
        """Drop its capabilities, which may have changed: the kind's table holds until a probe."""
        self._left_out.clear()
        self.learn(Capabilities())
        self._ask_again()

    def suspect(self) -> None:
        """Note that it may have restarted."""
        self._is_suspect = True

    def is_doubtful(self, now: float) -> bool:
        """Whether it is reachable and may have restarted since it was last asked."""
        signs = self._is_suspect or self.pool.num_lost != self._num_lost
        return signs and not self.num_misses and not self.is_away and now >= self._doubt_again_at

    def doubt(self, now: float, shortest: float, longest: float) -> None:
        """Have it probed again; its known state stands until it has answered.

        Args:
            shortest: seconds before another doubt counts; the interval doubles, up to ``longest``,
                if the next doubt follows closely.
        """
        again = now - self._doubt_again_at < self._doubt_wait
        self._doubt_wait = min(2.0 * self._doubt_wait, longest) if again else shortest
        self._doubt_again_at = now + self._doubt_wait
        self._ask_again()

    def _ask_again(self) -> None:
        self.wants_probe = self.config.probe != "off"
        self._seeks_kind = self.config.kind == "auto"
        self._is_suspect, self._num_lost = False, self.pool.num_lost

    def note_failure(self, now: float) -> None:
        """Note that a request failed through the engine's fault."""
        self.failed_at = now

    def learn_limit_name(self, name: str) -> None:
        """Use another name for a chat's token limit, as the engine refused the usual one."""
        self.limit_name = name

    def drain(self, *, on: bool, now: float) -> None:
        """Send it no new requests, or, with ``on`` false, send it some again."""
        if self.draining and not on:
            self.back_at = now
        self.draining = on

    def came_back(self, now: float) -> None:
        """Note that it is back after being gone, perhaps restarted as something else."""
        self.back_at = now
        self.load.prefixes.clear()
        self.forget()

    def learn(self, found: Capabilities) -> None:
        """Apply probed capabilities over the kind's table."""
        self.capabilities = found
        kind = KINDS["openai" if self.kind == "auto" else self.kind]
        token_ids = kind.resumes if found.token_ids is None else found.token_ids
        resume = kind.resumes if found.resume is None else found.resume
        self.facts = replace(
            kind,
            resumes=token_ids and resume,
            continues=kind.continues if found.continues is None else found.continues,
        )
        if self.models is not None:
            self.has_models(self._listed)

    def has_models(self, listed: dict[str, UpstreamModel]) -> None:
        """Set the models; contexts that the list lacks are taken from the probed capabilities."""
        contexts = self.capabilities.contexts
        self._listed = listed
        self.models = {
            name: replace(
                model, max_model_len=model.max_model_len or contexts.get(name, contexts.get(""))
            )
            for name, model in listed.items()
        }

    def load_seconds(self, name: str) -> float:
        """Return the seconds that a request waits until its model, or adapter, is loaded."""
        model = None if self.models is None else self.models.get(name)
        return 0.0 if model is None or name in self._loads else model.load_seconds

    def note_load(self, name: str) -> None:
        """Note that a request was sent there, for which the engine loads the model or adapter."""
        if self.load_seconds(name):
            self._loads.add(name)

    def lists(self, entries: Sequence[Mapping[str, Any]], contexts: Mapping[str, int]) -> None:
        """Take over its list of models; ``contexts``: context lengths that the list lacks."""
        models = {}
        self._loads.clear()
        for entry in entries:
            name, most = entry.get("id"), entry.get("max_model_len")
            if isinstance(name, str) and name:
                if not isinstance(most, int):
                    most = contexts.get(name, contexts.get(""))
                models[name] = UpstreamModel(name, most, entry)
        if _lengths(models) != _lengths(self._listed):
            # a change of models may mean a change of software
            self._ask_again()
        self.has_models(models)

    def heard(self, text: bytes, now: float) -> None:
        """Read the answer to a poll."""
        started_at = scan(text, _STARTED)
        if started_at is not None:
            # several engines may share the address: only a later start time is a restart
            before = self._started_at
            if before is not None and started_at > before + _STARTED_WITHIN:
                _log.info("engine_restarted engine=%s", self.name)
                self.came_back(now)
            self._started_at = max(started_at, before or 0.0)
        if self._seeks_kind:
            found = kind_of_metrics(text)
            if found is not None:
                if found != self.kind:
                    _log.info("engine_kind engine=%s kind=%s", self.name, found)
                    self.become(found)
                    self._signals = frozenset()
                self._seeks_kind = False
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


def _lengths(models: Mapping[str, UpstreamModel]) -> Mapping[str, Any]:
    """Return the part of a list that is the same in each answer: some engines put the time of the
    answer into each entry as the model's creation time."""
    return {name: model.entry.get("max_model_len") for name, model in models.items()}
