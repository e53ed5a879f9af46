"""The FastAPI app over one engine client.

::

    ExchangeMiddleware            request id, HTTP metrics, requests in flight
      router -> answering()       every exception becomes an answer
        routes_generate           parse -> prompt ids -> engine -> events or one body
        vector_routes             embeddings, scores, classes
        batches/routes            files and batches, answered in the background
        routes_info               models, health, metrics, tokenizer
        page                      routes that another room brings: the page at /ui
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.exceptions import HTTPException

import paceline
from paceline.engine.protocol import EngineClient
from paceline.http.web import add_web_middleware
from paceline.server.batches.folder import Batches
from paceline.server.batches.routes import batch_router
from paceline.server.config import ServerConfig
from paceline.server.errors import refusal
from paceline.server.exchange import ExchangeMiddleware
from paceline.server.openai.routes import generate_router
from paceline.server.other_apis.llama_routes import llama_router
from paceline.server.other_apis.ollama_routes import ollama_router
from paceline.server.other_apis.routes import other_apis_router
from paceline.server.responding import http_exception
from paceline.server.routes_info import info_router
from paceline.server.service import Service, make_service
from paceline.server.vector_routes import vector_router

__all__ = ["batches_of", "create_app", "service_of"]


def create_app(
    client: EngineClient,
    config: ServerConfig,
    *,
    page: Callable[[Service], APIRouter] | None = None,
) -> FastAPI:
    """Return an app that answers with ``client``'s engine, which must be ready.

    Apps share nothing, not even metrics, unless they are given the same client. The app does not
    close the client; ``serve`` does.

    Args:
        page: makes the routes of the page, which lies above this room; used if ``config.ui``.
    """
    service = make_service(client, config)
    app = FastAPI(
        title="Paceline",
        version=paceline.__version__,
        docs_url="/docs" if config.enable_docs else None,
        redoc_url="/redoc" if config.enable_docs else None,
        openapi_url="/openapi.json" if config.enable_docs else None,
    )
    batches = Batches(service, config.batches)
    app.state.service = service
    app.state.batches = batches
    app.include_router(generate_router(service))
    app.include_router(other_apis_router(service))
    app.include_router(ollama_router(service))
    app.include_router(llama_router(service))
    app.include_router(vector_router(service))
    app.include_router(batch_router(service, batches))
    app.include_router(info_router(service))
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


def service_of(app: FastAPI) -> Service:
    """Return the service that ``create_app`` attached to an app."""
    service: Service = app.state.service
    return service


def batches_of(app: FastAPI) -> Batches:
    """Return the files and batches of an app; the maker of the app must stop them."""
    batches: Batches = app.state.batches
    return batches
