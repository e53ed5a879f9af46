"""Messages between client and engine: msgspec structs in MessagePack, and nothing else.

::

    client -> engine   Add  Abort  LoadAdapter  UnloadAdapter  Shutdown
    engine -> client   Ready  Outputs  TimelineNews  AdapterStatus  Refused  Dead

``Outputs`` is the frequent one: one message per step carries the updates of all requests, as arrays
without field names. Nothing is ever unpickled.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from paceline.core.outputs import RequestUpdate, TokenLogprobs
from paceline.engine.types import AdapterStatus, EngineInfo, EngineStats, GenerationRequest
from paceline.errors import (
    CheckpointError,
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    NeverFitsError,
    PacelineError,
    QueueFullError,
    RequestError,
    UnknownModelError,
)

__all__ = [
    "IPC",
    "Abort",
    "Add",
    "ClientMessage",
    "Dead",
    "EngineMessage",
    "Launch",
    "LoadAdapter",
    "Outputs",
    "Ready",
    "Refused",
    "Shutdown",
    "TimelineNews",
    "UnloadAdapter",
    "decode_client_message",
    "decode_engine_message",
    "encode",
]

# prefix of the addresses in ``Launch``
IPC: Final = "ipc://"


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """The one line of JSON that an engine process reads from stdin."""

    # ipc:// addresses: the engine binds its inbox and connects to its outbox
    inbox: str
    outbox: str
    # file of ``in_flight``
    in_flight: str
    # settings for the builder of the engine; opaque here
    config: bytes


class Add(msgspec.Struct, frozen=True, tag="add", array_like=True):
    """Start a request, all its choices together."""

    request: GenerationRequest


class Abort(msgspec.Struct, frozen=True, tag="abort", array_like=True):
    """End choices now. Ids are those of ``fanout``; unknown ones are ignored."""

    request_ids: tuple[str, ...]
    # a stop string ended them: their answers are complete
    stopped: bool = False


class LoadAdapter(msgspec.Struct, frozen=True, tag="load_adapter", array_like=True):
    """Check and load an adapter; an AdapterStatus answers."""

    # not used before
    key: str
    path: str
    # see ``AdapterStore.register``
    digest: str = ""
    pinned: bool = False


class UnloadAdapter(msgspec.Struct, frozen=True, tag="unload_adapter", array_like=True):
    """Forget an adapter; its memory goes with the last request that uses it."""

    key: str


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown", array_like=True):
    """Stop the loop. ``reason`` is empty when the client sent it."""

    reason: str = ""


class Ready(msgspec.Struct, frozen=True, tag="ready", array_like=True):
    """The model is loaded; requests may come."""

    info: EngineInfo


class Outputs(msgspec.Struct, frozen=True, tag="outputs", array_like=True):
    """The updates of one step, or a heartbeat without any."""

    updates: tuple[RequestUpdate, ...]
    stats: EngineStats
    # see StepResult
    prompt_logprobs: tuple[tuple[str, tuple[TokenLogprobs, ...]], ...] = ()
    pooled: tuple[tuple[str, bytes], ...] = ()


class TimelineNews(msgspec.Struct, frozen=True, tag="timeline", array_like=True):
    """Complete frames of ``engine.timeline``, for viewers."""

    frames: bytes


class Refused(msgspec.Struct, frozen=True, tag="refused", array_like=True):
    """A request was refused, on arrival or before it was started, or one of its choices was, which
    the failed first choice had left behind: the whole request has ended."""

    request_id: str
    # key of _REQUEST_ERRORS
    kind: str
    message: str
    param: str | None
    retry_after: float
    # the reason of a QueueFullError
    reason: str

    @classmethod
    def of(cls, request_id: str, error: RequestError) -> Refused:
        retry_after, reason = 0.0, ""
        if isinstance(error, QueueFullError):
            retry_after, reason = error.retry_after, error.reason
        kind = type(error).__name__
        return cls(request_id, kind, str(error), error.param, retry_after, reason)

    def error(self) -> RequestError:
        """Return the exception that the engine raised."""
        if self.kind == QueueFullError.__name__:
            return QueueFullError(self.message, self.retry_after, self.reason)
        return _REQUEST_ERRORS.get(self.kind, RequestError)(self.message, self.param)


class Dead(msgspec.Struct, frozen=True, tag="dead", array_like=True):
    """The last message of an engine that cannot go on."""

    # class name of the error
    kind: str
    message: str

    @classmethod
    def of(cls, error: Exception) -> Dead:
        known = isinstance(error, PacelineError)
        text = str(error) if known else f"{type(error).__name__}: {error}"
        return cls(type(error).__name__, text)

    def error(self) -> PacelineError:
        """Return ConfigError and CheckpointError as they were, others as EngineDeadError."""
        return _START_ERRORS.get(self.kind, EngineDeadError)(self.message)


ClientMessage: TypeAlias = Add | Abort | LoadAdapter | UnloadAdapter | Shutdown
EngineMessage: TypeAlias = Ready | Outputs | TimelineNews | AdapterStatus | Refused | Dead

_REQUEST_ERRORS: Final[dict[str, type[RequestError]]] = {
    error.__name__: error for error in (InvalidRequestError, NeverFitsError, UnknownModelError)
}
_START_ERRORS: Final[dict[str, type[PacelineError]]] = {
    error.__name__: error for error in (ConfigError, CheckpointError)
}
_ENCODER: Final = msgspec.msgpack.Encoder()
_CLIENT_DECODER: Final[msgspec.msgpack.Decoder[ClientMessage]] = msgspec.msgpack.Decoder(
    ClientMessage
)
_ENGINE_DECODER: Final[msgspec.msgpack.Decoder[EngineMessage]] = msgspec.msgpack.Decoder(
    EngineMessage
)


def encode(message: ClientMessage | EngineMessage) -> bytes:
    return _ENCODER.encode(message)


def decode_client_message(data: bytes) -> ClientMessage:
    """Decode a message; raises msgspec.DecodeError on anything but a ClientMessage."""
    return _CLIENT_DECODER.decode(data)


def decode_engine_message(data: bytes) -> EngineMessage:
    """Decode a message; raises msgspec.DecodeError on anything but an EngineMessage."""
    return _ENGINE_DECODER.decode(data)
