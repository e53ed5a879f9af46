"""A gateway before any engines with OpenAI's API: it sends each request where it will be answered
soonest, elsewhere when an engine fails, and goes on with a stream whose engine died.

::

    upstream   connections to engines      kinds     what each kind of engine tells
    engines    what is known of each       routes    from a model's name to engines
    bodies     a request's few fields      pick      which engine
    exchange   one request on its way      leg       a request at one engine
    splice     one stream of several       caller    who asks, and what they allow
    app        endpoints                   lifecycle bind, serve, drain

Which engine gets a request, breakers and budgets are ``routing``'s; connections to callers, keys
and errors are ``http``'s.
"""

from paceline.gateway.app import Gateway
from paceline.gateway.config import EngineConfig, GatewayConfig, ModelConfig, read_config

__all__ = ["EngineConfig", "Gateway", "GatewayConfig", "ModelConfig", "read_config"]
