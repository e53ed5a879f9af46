"""A gateway before any engines with OpenAI's API: it sends each request where it will be answered
soonest, elsewhere when an engine fails, and goes on with a stream whose engine died.

::

    engines    what is known of each       kinds     what each kind of engine tells
    routes     from a model's name to engines        pick      which engine
    aliases    names with a *
    turns      whose turn it is            slot_queue         the scheduler of that
    bodies     a request's few fields      config    the file
    exchange   one request on its way      leg       a request at one engine
    waiting    until it may be sent        hedge     a second engine for a late first token
    attempts   whether it may be tried once more     refusals  what a refusal means
    answers    what its caller is told     outgoing  the caller's connection
    splice     one stream of several       shape     what its chunks have in common
    bill       what its key is charged
    dialects   APIs other than OpenAI's    caller    who asks, and what they allow
    app        endpoints                   lifecycle bind, serve, drain

Which engine gets a request, breakers and budgets are ``routing``'s; connections to callers, keys
and errors are ``http``'s.
"""

from paceline.gateway.app import Gateway
from paceline.gateway.config import EngineConfig, GatewayConfig, ModelConfig, read_config

__all__ = ["EngineConfig", "Gateway", "GatewayConfig", "ModelConfig", "read_config"]
