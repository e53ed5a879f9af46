"""A gateway before any engines with OpenAI's API: it sends each request where it will be answered
soonest, elsewhere when an engine fails, and goes on with a stream whose engine died.

::

    lifecycle      bind, serve, drain
    app            HTTP routes            admin      status, health, models
    cascade        a small model first
    proxy          one request on its way
    billing        what keys may spend    observability   metrics and traces
    routing        from a model's name to one engine
    upstreams      what is known of each engine, and APIs other than OpenAI's
    streams        one stream of several  requests   a request's few fields
    settings       the file

Each imports what stands below it. Which engine gets a request, breakers and budgets of retries
are ``paceline.routing``'s; connections to callers, keys and errors are ``http``'s.
"""

from paceline.gateway.app import Gateway
from paceline.gateway.settings.config import EngineConfig, GatewayConfig, ModelConfig, read_config

__all__ = ["EngineConfig", "Gateway", "GatewayConfig", "ModelConfig", "read_config"]
