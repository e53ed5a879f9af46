"""The FastAPI app over one engine client.

::

    ExchangeMiddleware            request id, HTTP metrics, what is in flight
      router -> answering()       every exception becomes an answer
        apis/openai               parse -> prompt ids -> engine -> events or one body
        apis                      Responses, Messages, Ollama's, llama-server's; vectors
        batches/routes            files and batches, answered in the background
        apis/info                 models, health, metrics, tokenizer
        page                      routes that another room brings: the page at /ui
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from fastapi import APIRouter, FastAPI
from starlette.exceptions import HTTPException

import paceline
from paceline.engine.protocol import EngineClient
from paceline.http.web import add_web_middleware
from paceline.server.apis.adapters import adapter_router
from paceline.server.apis.info import info_router
from paceline.server.apis.llama_cpp.routes import llama_router
from paceline.server.apis.ollama.routes import ollama_router
from paceline.server.apis.pooling.routes import vector_router
from paceline.server.apis.routes import generate_router, other_apis_router
from paceline.server.batches.folder import Batches
from paceline.server.batches.routes import batch_router
from paceline.server.generation.service import Service, make_service
from paceline.server.settings.config import ServerConfig
from paceline.server.transport.errors import refusal
from paceline.server.transport.middleware import ExchangeMiddleware
from paceline.server.transport.responses import http_exception

if TYPE_CHECKING:
    from paceline.engine.models.page import TurnUse
    from paceline.engine.models.pool import ModelPool

__all__ = ["SeveralModels", "batches_of", "create_app", "service_of"]

# make the routes whose answers depend on the model
_ROUTERS: Final = (
    generate_router, other_apis_router, ollama_router, llama_router, vector_router, info_router,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SeveralModels:
    """The models of a server that has several."""

    pool: ModelPool
    # the settings of each, by name, and the model of requests that name none
    configs: Mapping[str, Callable[[], ServerConfig]]
    first: str
    # the model of each adapter, by name
    adapters: Mapping[str, str] = field(default_factory=dict)
    # requests load the models that they name
    autoload: bool = True
    # seconds of loading above which a request is refused for now, by name; any number without
    max_waits: Mapping[str, float] = field(default_factory=dict)
    # returns the use of turns (``engine.models.turn``) by name; None: engines take none
    turns: Callable[[], Mapping[str, TurnUse]] | None = None


def create_app(
    client: EngineClient,
    config: ServerConfig,
    *,
    page: Callable[[Service], APIRouter] | None = None,
    models: SeveralModels | None = None,
) -> FastAPI:
    """Return an app that answers with ``client``'s engine, which must be ready.

    Apps share nothing, not even metrics, unless they are given the same client. The app does not
    close the client; ``serve`` does.

    Args:
        page: makes the routes of the page, which lies above this room; used if ``config.ui``.
        models: the server has several models, of which ``client`` is the first.
    """
    service = make_service(client, config)
    # first of all, as they replace routes of one model
    routers: tuple[APIRouter, ...] = () if models is None else _several(models, service)
    app = FastAPI(
        title="Paceline",
        version=paceline.__version__,
    )
    batches = Batches(service, config.batches)
    app.state.service = service
    app.state.batches = batches
    for router in routers:
        app.include_router(router)
    for make in _ROUTERS:
        app.include_router(make(service))
    app.include_router(batch_router(service, batches))
    app.include_router(adapter_router(service))
    if config.ui and page is not None:
        app.include_router(page(service))

    @lru_cache
    def document() -> dict[str, Any]:
        # imported on first use: it loads all endpoints' bodies, which would slow start-up
        from paceline.server.openapi import openapi_document

        return openapi_document(app, service.rules)

    app.openapi = document  # type: ignore[method-assign]
    app.add_exception_handler(HTTPException, http_exception)
    app.add_middleware(ExchangeMiddleware, service=service)
    add_web_middleware(
        app,
        cors_origins=config.cors_origins,
        allowed_hosts=config.allowed_hosts,
        refusal=refusal,
    )
    return app


def _several(models: SeveralModels, service: Service) -> tuple[APIRouter, ...]:
    """Have a service find the models that requests name; return the routes about them."""
    from paceline.server.models.finding import Models
    from paceline.server.models.metrics import ModelCollector
    from paceline.server.models.routes import model_routers

    found = Models(
        models.pool,
        service,
        models.configs,
        models.first,
        _ROUTERS,
        autoload=models.autoload,
        max_waits=models.max_waits,
        adapters=models.adapters,
    )
    service.models = found
    service.metrics.registry.register(ModelCollector(models.pool.states, models.turns))
    return model_routers(found)


def service_of(app: FastAPI) -> Service:
    """Return the service that ``create_app`` attached to an app."""
    service: Service = app.state.service
    return service


def batches_of(app: FastAPI) -> Batches:
    """Return the files and batches of an app; the maker of the app must stop them."""
    batches: Batches = app.state.batches
    return batches
