"""The way of one request of a cascade, to one model or both::

    data policy   may the large model have it at all?
    conversation  was it handed to the large model before?
    prompt        route: the prompt's score decides, and one model is asked
    answer        cascade, prefix: the small model is asked, its answer judged, the large one asked

What a model costs is reserved for each of the two as for a request of its own. Where the large
model cannot be had, for want of budget or of an engine, and a score alone speaks against the small
one, that one answers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from paceline.errors import ConfigError
from paceline.gateway.cascade.asked import (
    NO_CASCADES,
    Answering,
    Asked,
    NoCascades,
    Relaying,
)
from paceline.gateway.cascade.judge import Decision, Judge
from paceline.gateway.cascade.prompt import read_prompt
from paceline.gateway.cascade.run import Run
from paceline.gateway.cascade.shadow import Shadows
from paceline.gateway.proxy.passthrough.kept import RESPONSES
from paceline.gateway.proxy.upstream_request import CHAT
from paceline.gateway.requests.body import Body
from paceline.gateway.routing.routes import Route
from paceline.gateway.settings.config import GatewayConfig
from paceline.gateway.settings.engine_types import TEXT_PATHS

__all__ = ["Cascades"]

_log = logging.getLogger("paceline.gateway")


class Cascades(NoCascades):
    """Cascades of one configuration. Raises ConfigError if a calibration cannot be used.

    Args:
        before: those of the configuration before this one.
    """

    def __init__(
        self, gateway: Relaying, config: GatewayConfig, before: NoCascades = NO_CASCADES
    ) -> None:
        self._gateway = gateway
        self._judges = {
            model.name: Judge(model.name, model.cascade)
            for model in config.models
            if model.cascade is not None
        }
        self._shadows = Shadows(gateway)
        if isinstance(before, Cascades):
            # a reload ends no comparison
            self._shadows = before._shadows
            for name in self._judges.keys() & before._judges.keys():
                self._judges[name].follow(before._judges[name])
        # models whose calibration was found not to hold, so that the log says it once
        self._told: set[str] = set()

    def find(self, path: str, body: Body, route: Route) -> Answering | None:
        judge = self._judges.get(route.model)
        if judge is None or path not in TEXT_PATHS or body.resumed or _is_stored(path, body):
            return None
        if route.tiers and (body.num_made != 1 or (path != CHAT and not judge.has_scores)):
            # several answers have no score; what may not leave has no choice, and needs none
            return None
        return partial(self.answer, judge)

    def status(self) -> Mapping[str, Any]:
        told = self._gateway.metrics.cascade
        return {name: judge.status() | told(name) for name, judge in self._judges.items()}

    def check(self) -> None:
        for judge in self._judges.values():
            routes = self._gateway.routes
            small = routes.find(judge.config.small, 0.0)
            if why := judge.misfit(small, routes.find(judge.model, 0.0)):
                raise ConfigError(why)

    async def answer(self, judge: Judge, asked: Asked) -> None:
        """Answer a request. Raises as the relaying of a request does."""
        run = Run(self._gateway, judge, asked)
        prompt = read_prompt(
            asked.body, asked.incoming.tenant, run.conversation_name, asked.incoming.path
        )
        small = run.small_route()
        if small is not None and not asked.route.tiers:
            await run.small(small, Decision(True, "local_only"))
            return
        if why := judge.misfit(small, asked.route) if small is not None else "":
            if judge.model not in self._told:
                self._told.add(judge.model)
                _log.error("cascade_calibration_misfit reason=%r", why)
            small = None
        if small is None or prompt is None or not asked.allowed.cascade:
            why = "forbidden" if not asked.allowed.cascade else "calibration" if why else "no small"
            await run.large(Decision(False, why), "routed")
        elif judge.conversations.is_large(prompt.conversation):
            await run.large(Decision(False, "conversation"), "routed")
        else:
            await run.decide(prompt, small)
            if judge.config.shadow and asked.incoming.path == CHAT:
                body = run.upstream_body(small, stream=False)
                self._shadows.begin(judge, asked, prompt, small, body, run.mode)

    async def close(self) -> None:
        await self._shadows.close()


def _is_stored(path: str, body: Body) -> bool:
    """Whether an engine keeps the answer, or has kept the one before: later requests go there."""
    follows = body.fields.get("previous_response_id", b"null") != b"null"
    return path == RESPONSES and (follows or body.fields.get("store") != b"false")
