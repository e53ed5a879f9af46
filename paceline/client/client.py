"""``Client`` and ``AsyncClient``: they turn a call into the request of a ``Machine``."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import msgspec

from paceline.client.async_stream import AsyncStream
from paceline.client.machine import Machine
from paceline.client.policy import DEFAULT_POLICY, Policy, RetryBudget, Target
from paceline.client.steps import Request
from paceline.client.stream import Stream
from paceline.client.transport import Address

__all__ = ["AsyncClient", "Client"]

_Messages = Sequence[Mapping[str, Any]]


class _Calls:
    """Common part of both clients. Holds no connection, so there is nothing to close."""

    def __init__(
        self,
        targets: Sequence[Target],
        *,
        policy: Policy = DEFAULT_POLICY,
        budget: RetryBudget | None = None,
    ) -> None:
        """Make a client; raises ValueError without targets.

        Args:
            targets: in order of preference.
            budget: another client's, for a process that shares one; None: one of its own.
        """
        if not targets:
            raise ValueError("a client needs at least one target")
        self._targets = tuple(targets)
        self._policy = policy
        self._budget = budget or RetryBudget()
        self._addresses = tuple(map(Address, self._targets))
        # fields that each target refuses, kept over calls
        self._left_out: tuple[set[str], ...] = tuple(set() for _ in self._targets)
        self._random = random.Random()

    def _machine(self, path: str, body: dict[str, Any], parse: type | None) -> Machine:
        for name in ("model", "stream"):
            if name in body:
                raise TypeError(f"{name} is set by the client itself: leave it out")
        if body.get("n") not in (None, 1):
            raise ValueError("n must be 1: a stream has one answer")
        parser: Callable[[str], object] | None = None
        if parse is not None:
            if body.get("response_format") is not None:
                raise TypeError("parse and response_format exclude one another")
            schema, parser = _schema_of(parse)
            name = re.sub(r"[^a-zA-Z0-9_-]", "_", parse.__name__)[:64]
            described = {"name": name, "schema": schema}
            body["response_format"] = {"type": "json_schema", "json_schema": described}
        _refuse_no_numbers(body, "")
        # 31 bits are an integer for every server
        request = Request(path, body, self._random.getrandbits(31), parser)
        draw = self._random.random
        return Machine(request, self._targets, self._policy, self._budget, draw, self._left_out)


class Client(_Calls):
    """Streams from OpenAI-compatible servers, over blocking sockets. Threads may share it."""

    def chat(self, messages: _Messages, *, parse: type | None = None, **options: Any) -> Stream:
        """Ask for an answer to a conversation.

        Args:
            parse: a dataclass, msgspec.Struct or pydantic model; the answer is JSON of that type,
                and ``Finished.parsed`` an instance.
            options: further fields of the body, such as max_tokens, passed on unchanged.

        Raises TypeError and ValueError for options that the client sets itself, and ValueError for
        NaN and infinities.
        """
        body = {**options, "messages": list(messages)}
        return Stream(self._machine("/chat/completions", body, parse), self._addresses)

    def complete(self, prompt: str | Sequence[int], **options: Any) -> Stream:
        """Ask for the continuation of ``prompt``, text or token ids. Raises as ``chat`` does."""
        body = {**options, "prompt": prompt}
        return Stream(self._machine("/completions", body, None), self._addresses)


class AsyncClient(_Calls):
    """Streams from OpenAI-compatible servers, with asyncio."""

    def chat(
        self, messages: _Messages, *, parse: type | None = None, **options: Any
    ) -> AsyncStream:
        """Ask for an answer to a conversation, see ``Client.chat``."""
        body = {**options, "messages": list(messages)}
        return AsyncStream(self._machine("/chat/completions", body, parse), self._addresses)

    def complete(self, prompt: str | Sequence[int], **options: Any) -> AsyncStream:
        """Ask for the continuation of ``prompt``, see ``Client.complete``."""
        body = {**options, "prompt": prompt}
        return AsyncStream(self._machine("/completions", body, None), self._addresses)


def _refuse_no_numbers(value: object, path: str) -> None:
    """Raise ValueError for NaN and infinities, which would be sent as null: another request."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{path} is {value}, which JSON has no number for")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _refuse_no_numbers(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _refuse_no_numbers(item, f"{path}[{index}]")


class _Pydantic(Protocol):
    """A model of pydantic, which is not a dependency: its own methods are called."""

    def model_json_schema(self) -> dict[str, Any]: ...

    def model_validate_json(self, text: str) -> object: ...


def _schema_of(kind: type) -> tuple[dict[str, Any], Callable[[str], object]]:
    """Return a JSON schema, and a parser of matching text, which raises ValueError."""
    if hasattr(kind, "model_json_schema") and hasattr(kind, "model_validate_json"):
        model = cast(_Pydantic, kind)
        return model.model_json_schema(), model.model_validate_json
    schema = msgspec.json.schema(kind)
    reference = schema.get("$ref")
    if reference is not None:
        # servers want an object at the top; the definition itself may be recursive
        definitions = schema["$defs"]
        schema = {**definitions[reference.rpartition("/")[2]], "$defs": definitions}
    decode: Callable[[str], object] = msgspec.json.Decoder(kind).decode

    def parse(text: str) -> object:
        try:
            return decode(text)
        except msgspec.DecodeError as error:
            raise ValueError(str(error)) from None

    return schema, parse
