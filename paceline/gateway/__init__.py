"""Gateway in front of engines with OpenAI's API: it sends each request to the engine predicted to
answer soonest, retries on another engine after a failure, and resumes streams whose engine died.

::

    engines    state of each engine        kinds     metrics and features by kind of engine
    routes     model name -> engines       pick      choice of an engine
    aliases    model names with a *
    turns      queues for busy engines     slot_queue         the scheduler behind a queue
    bodies     request fields              config    the file
    exchange   one request, start to end   leg       one attempt: a request at one engine
    waiting    wait until it may be sent   hedge     a second engine for a late first token
    attempts   retry decisions             refusals  meaning of an engine's refusal
    answers    response to the caller      outgoing  the caller's connection
    splice     one stream out of several   shape     common parts of a stream's chunks
    bill       usage charged to the key
    dialects   APIs other than OpenAI's    caller    the caller and its permissions
    app        endpoints                   lifecycle bind, serve, drain

``routing`` holds the choice of an engine, breakers and budgets; ``http`` holds connections to
callers, keys and errors.
"""

from paceline.gateway.app import Gateway
from paceline.gateway.config import EngineConfig, GatewayConfig, ModelConfig, read_config

__all__ = ["EngineConfig", "Gateway", "GatewayConfig", "ModelConfig", "read_config"]
