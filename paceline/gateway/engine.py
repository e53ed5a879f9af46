"""One engine behind a gateway: what is known of it, and how much it may be sent."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from paceline.gateway.abilities import Abilities
from paceline.gateway.config import EngineConfig, EngineKind, GatewayConfig, Secret, SecretBytes
from paceline.gateway.dialects import Dialect, dialect_of
from paceline.gateway.kinds import KINDS, KindFacts, kind_of_metrics, read_pressure, scan
from paceline.gateway.standing import Standings
from paceline.http.upstream import Headers, Origin, Pool
from paceline.routing import Breaker, BreakerState, EngineLoad, SlowStart

__all__ = ["Engine", "EngineModel", "Running"]

_log = logging.getLogger("paceline.gateway")

# when the process began, as Prometheus' clients tell it
_STARTED: Final = "process_start_time_seconds"
# in which an engine that has answered anything, a poll or a request, is not gone
_ALIVE_SECONDS: Final = 1.0
_MILDEST: Final[tuple[BreakerState, ...]] = ("closed", "half-open", "open")
# by which that differs in one process: some work it out anew from a clock that is set meanwhile
_STARTED_WITHIN: Final = 2.0


class Running(Protocol):
    """A request under way at an engine."""

    def tick(self, now: float) -> bool:
        """A tenth of a second or so has passed; whether the engine sent something meanwhile."""
        ...

    def engine_gone(self, why: str) -> bool:
        """Its engine gives no sign; whether it is given up there, or asked again in a moment."""
        ...


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
        # of the engine as a whole: it took no connections, or gave no sign; what its answers say is
        # of a model
        self.breaker = Breaker()
        self.standings = Standings()
        self.running: set[Running] = set()
        # None: the engine has not told yet
        self.models: dict[str, EngineModel] | None = None
        # the same without what it said otherwise, which goes when the engine does
        self._listed: dict[str, EngineModel] = {}
        # what it said it can do, which stands over its kind's table
        self.abilities = Abilities()
        # it is to be asked, once it answers at all
        self.wants_probe = config.probe != "off"
        # by the clock, when it is asked again, as it gave no answer
        self.probe_again_at = math.inf
        # of the limit of an answer in a chat, where it has refused another; "": as is usual
        self.limit_name = ""
        # by an admin
        self.draining = False
        # of the last poll; "": it answered
        self.trouble = "not asked yet"
        # whether it answered, if with an error, when it was asked for its models last
        self.has_answered = False
        # by the clock, when a request last failed there through its own fault
        self.failed_at = -math.inf
        # seconds in which it gave no sign
        self.silent = 0.0
        self.num_polls = 0
        # polls without an answer while it gave no other sign either
        self.num_misses = 0
        # it took no connection when it was asked last
        self.is_unreachable = False
        # a proxy before it answered the last poll: it is not there
        self.is_away = False
        # it may have been started anew since it was asked last, for another reason than a lost
        # connection
        self._is_suspect = False
        # of its pool's lost connections, those of which it was asked since
        self._num_lost = 0
        # by the clock, when a doubt is heeded again, and how long that was from the last one
        self._doubt_again_at = -math.inf
        self._doubt_wait = 0.0
        # by its metrics, in unix time
        self._started_at: float | None = None
        # its metrics are still to tell
        self._seeks_kind = config.kind == "auto"
        # signals that it once gave and gives no longer
        self.lost_signals: frozenset[str] = frozenset()
        self._signals: frozenset[str] = frozenset()
        # by the clock, when it came back from being gone or drained
        self.back_at = -math.inf
        self._slow_start = SlowStart(gateway.slow_start)
        # by model, fields of the gateway's own that it refuses
        self._left_out: dict[str, frozenset[str]] = {}

    @property
    def polled(self) -> bool:
        """Whether it can be asked anything that costs it next to nothing."""
        return bool(self.facts.metrics_path) or self.kind == "auto"

    def alive(self) -> None:
        """It gave a sign: polls that are late do not count."""
        self.silent = 0.0
        if self.num_misses and not self.is_unreachable:
            self.num_misses, self.trouble = 0, ""

    def missed(self, why: str, *, unreachable: bool) -> bool:
        """A poll has no answer yet, or none at all; whether the engine is taken for gone."""
        self.is_unreachable = unreachable
        if not unreachable and self.silent <= _ALIVE_SECONDS:
            return False
        self.num_misses += 1
        self.trouble = why
        return True

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

    def rests_for(self, now: float) -> float:
        """Seconds until it may be sent requests again for the first of the models that it was asked
        for."""
        return min((each.rests_for(now) for each in self.standings.values()), default=0.0)

    def breaker_state(self, now: float) -> BreakerState:
        """Of the engine as a whole, else the mildest of the models that it was asked for."""
        own = self.breaker.state(now)
        states = {each.breaker.state(now) for each in self.standings.values()} or {own}
        return own if own != "closed" else min(states, key=_MILDEST.index)

    @property
    def num_opened(self) -> int:
        """Times that breakers have opened, its own and those of its models."""
        return self.breaker.num_opened + self.standings.num_opened

    def share(self, now: float) -> float:
        """Of the requests that would come to it, those that it is to get: 1, but for a while after
        it came back, or a model of it did."""
        return min(self.share_of(model, now) for model in self.standings or ("",))

    def share_of(self, model: str, now: float) -> float:
        """The same of one model's requests."""
        standing = self.standings.get(model)
        closed = -math.inf if standing is None else standing.breaker.closed_at
        return self._slow_start.share(max(self.back_at, self.breaker.closed_at, closed), now)

    def usable(self, now: float, model: str = "", path: str = "") -> str:
        """Why it takes no requests, or none for a model at a path; empty where it does, if perhaps
        not now."""
        if self.draining:
            return "draining"
        if not self.breaker.allows(now):
            return f"failing ({self.breaker.state(now)})"
        if self.num_misses:
            return self.trouble
        standing = self.standings.get(model)
        return "" if standing is None else standing.trouble(path, now)

    def available(self, now: float, model: str = "", path: str = "") -> str:
        """Why it may not be sent a request now; empty where it may."""
        if why := self.usable(now, model, path):
            return why
        most = self.config.max_concurrent
        return f"max_concurrent {most}" if most and not self.places else ""

    def troubles(self, now: float) -> Mapping[str, str]:
        """Why it takes no requests for models, by their names there."""
        found = {model: each.troubles(now) for model, each in self.standings.items()}
        return {model: why for model, why in found.items() if why}

    def become(self, kind: EngineKind) -> None:
        """What it is was found out."""
        self.kind = kind
        self.pool.idle = KINDS[kind].idle
        self.forget()

    def left_out(self, model: str) -> frozenset[str]:
        """Fields that the gateway would add to requests for this model, and the engine refuses."""
        return self._left_out.get(model, frozenset())

    def leave_out(self, model: str, names: frozenset[str]) -> None:
        """It took a request without these, which it had refused with them."""
        _log.warning("engine_refuses engine=%s model=%s fields=%s", self.name, model, sorted(names))
        self._left_out[model] = self.left_out(model) | names

    def forget(self) -> None:
        """What it can do may be something else now: its kind's table holds until it has said."""
        self._left_out.clear()
        self.learn(Abilities())
        self._ask_again()

    def suspect(self) -> None:
        """It may have been started anew."""
        self._is_suspect = True

    def is_doubtful(self, now: float) -> bool:
        """Whether it is there and may have been started anew since it was asked last."""
        signs = self._is_suspect or self.pool.num_lost != self._num_lost
        return signs and not self.num_misses and not self.is_away and now >= self._doubt_again_at

    def doubt(self, now: float, shortest: float, longest: float) -> None:
        """It is asked again; what is known of it stands until it has answered.

        Args:
            shortest: seconds before another doubt is heeded; twice as many each time, up to
                ``longest``, where one comes after the other.
        """
        again = now - self._doubt_again_at < self._doubt_wait
        self._doubt_wait = min(2.0 * self._doubt_wait, longest) if again else shortest
        self._doubt_again_at = now + self._doubt_wait
        self._ask_again()

    def _ask_again(self) -> None:
        self.wants_probe = self.config.probe != "off"
        self._seeks_kind = self.config.kind == "auto"
        self._is_suspect, self._num_lost = False, self.pool.num_lost

    def came_back(self, now: float) -> None:
        """It was gone, and may have been started anew, as something else."""
        self.back_at = now
        self.load.prefixes.clear()
        self.forget()

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
        if self.models is not None:
            self.has_models(self._listed)

    def has_models(self, listed: dict[str, EngineModel]) -> None:
        """These; how long those are that its list does not say, it may have said when it was asked
        what it can do."""
        contexts = self.abilities.contexts
        self._listed = listed
        self.models = {
            name: replace(
                model, max_model_len=model.max_model_len or contexts.get(name, contexts.get(""))
            )
            for name, model in listed.items()
        }

    def lists(self, entries: Sequence[Mapping[str, Any]], contexts: Mapping[str, int]) -> None:
        """It told of its models; ``contexts``: how long those are that the list does not say."""
        models = {}
        for entry in entries:
            name, most = entry.get("id"), entry.get("max_model_len")
            if isinstance(name, str) and name:
                if not isinstance(most, int):
                    most = contexts.get(name, contexts.get(""))
                models[name] = EngineModel(name, most, entry)
        if _lengths(models) != _lengths(self._listed):
            # where other models are, other software may be
            self._ask_again()
        self.has_models(models)

    def heard(self, text: bytes, now: float) -> None:
        """It answered a poll with ``text``."""
        started_at = scan(text, _STARTED)
        if started_at is not None:
            # one address may be that of several, each with its own: what is later is new
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


def _lengths(models: Mapping[str, EngineModel]) -> Mapping[str, Any]:
    """Of what a list says, what stays the same from one answer to the next: some name the moment
    of the answer as that in which the model was made."""
    return {name: model.entry.get("max_model_len") for name, model in models.items()}
