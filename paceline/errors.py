"""Every error that Paceline raises on purpose, in one tree.

::

    PacelineError
    ├── RequestError              the caller's fault; ends that request alone
    │   ├── InvalidRequestError   a field has a bad value                     -> 400
    │   ├── NeverFitsError        larger than the model or the KV cache       -> 400
    │   ├── UnknownModelError     no such model here                          -> 404
    │   └── QueueFullError        admission says no for now                   -> 429 + Retry-After
    ├── CheckpointError           a model file is missing, malformed or unsafe
    ├── AdapterRoomError          an adapter does not fit next to those in use  -> 507
    ├── ConfigError               flags that contradict each other or the machine
    └── EngineError               the engine's fault
        ├── RequestFailedError    one request failed inside the engine        -> 500
        │   └── PoisonedRequestError  the engine ended twice under it         -> 500, do not retry
        ├── EngineDrainingError   shutting down, no new work                  -> 503
        ├── EngineLostError       the engine ended; another is being started  -> 503 + Retry-After
        ├── ModelFailedError      one of several models cannot be loaded now  -> 503 + Retry-After
        ├── ModelRoomError        it does not fit into the memory for models  -> 507
        └── EngineDeadError       the engine process is gone                  -> 503

The HTTP status codes are applied in one place: ``paceline/http/errors.py``.
"""

from typing import Final

__all__ = [
    "NAN_LOGITS", "NOTHING_LEFT", "AdapterRoomError", "CheckpointError", "ConfigError",
    "EngineDeadError", "EngineDrainingError", "EngineError", "EngineLostError",
    "InvalidRequestError", "ModelFailedError", "ModelRoomError", "NeverFitsError",
    "PacelineError", "PoisonedRequestError",
    "QueueFullError", "RequestError", "RequestFailedError", "UnknownModelError",
]  # fmt: skip


# error of a request whose logits are not numbers; metrics count it apart from other failures
NAN_LOGITS: Final = "the model computed NaN or infinite logits for this request"
# how the error of a request begins that forbids every token at some position: its own fault
NOTHING_LEFT: Final = "no token is left to choose"


class PacelineError(Exception):
    """Root of the tree; the message is fit to show to a caller."""


class RequestError(PacelineError):
    """A request that cannot be served as asked; ``param`` names the field at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequestError(RequestError):
    """A field has a value outside its documented range."""


class NeverFitsError(RequestError):
    """Prompt plus output can never fit into the model's context or the KV cache."""


class UnknownModelError(RequestError):
    """The model named in the request is not served here."""


class QueueFullError(RequestError):
    """The request cannot be taken now; ``retry_after`` is the advised wait in seconds.

    ``reason`` is for programs: "queue-full", "queue-share", "predicted-ttft", "pressure" or
    "expired".
    """

    def __init__(self, message: str, retry_after: float, reason: str = "queue-full") -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.reason = reason


class CheckpointError(PacelineError):
    """A model file is missing, truncated, lies about its contents, or would run code."""


class AdapterRoomError(PacelineError):
    """An adapter does not fit into the memory for adapters next to those that requests use."""


class ConfigError(PacelineError):
    """Settings that contradict each other or do not fit this machine."""


class EngineError(PacelineError):
    """The engine failed, not the caller."""


class RequestFailedError(EngineError):
    """One request failed inside the engine; others go on."""


class PoisonedRequestError(RequestFailedError):
    """The engine ended under this request, and again when it was tried once more: asking a third
    time would end it for all others."""


class EngineDrainingError(EngineError):
    """The engine is shutting down and takes no new requests."""


class EngineLostError(EngineError):
    """The engine ended and another one is being started; ``retry_after`` is the advised wait in
    seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ModelFailedError(EngineError):
    """One of several models could not be loaded, and is not tried for ``retry_after`` seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ModelRoomError(EngineError):
    """A model does not fit into the memory for models, even if all others go that may."""


class EngineDeadError(EngineError):
    """The engine process is gone; its requests cannot be finished."""
