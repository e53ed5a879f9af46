"""A request's body as the gateway reads it: a few fields, and the rest as it came.

The top level alone is taken apart, into the bytes of each value; a body for an engine is those
bytes put together again, with some replaced. A field that is there twice becomes one, so gateway
and engine never read different ones.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from paceline.core.errors import InvalidRequestError
from paceline.core.slo import NO_SLO, Slo
from paceline.http.fields import BYTE_ORDER_MARK, show

__all__ = ["Body", "decoded", "read_body"]


class _Routed(msgspec.Struct):
    """The fields that the gateway itself goes by, and that every API has of these types."""

    model: str | None = None
    stream: bool | None = None
    n: int | None = None
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    max_output_tokens: int | None = None
    seed: int | None = None
    priority: int | None = None


_decode: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_routed: Final = msgspec.json.Decoder(_Routed).decode
_KINDS: Final = {"model": (str, "a string"), "stream": (bool, "true or false")}

# where the prompt of each API lies, in the order in which engines render it
_PROMPTS: Final = (
    "tools", "system", "instructions", "messages", "prompt", "input", "query", "queries", "text_1",
    "data_1", "documents", "text_2", "data_2",
)  # fmt: skip
# most that an answer may have where the caller does not say
_DEFAULT_MAX_TOKENS: Final = 1024
_MOST_DIGITS: Final = 18
# classes of every server that have no targets and yield to all others
_BEST_EFFORT: Final = ("batch", "best-effort")
# bytes of JSON a token of the prompt stands for until engines have counted some
BYTES_PER_TOKEN: Final = 4.0


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """Of one request."""

    fields: Mapping[str, bytes]
    num_bytes: int
    model: str
    stream: bool
    n: int
    max_tokens: int
    # the most that any engine would make of an answer, whichever of several limits it goes by
    most_tokens: int
    include_usage: bool
    return_token_ids: bool
    # prompts in one request of completions; None: messages
    num_prompts: int
    seed: int | None
    slo: Slo
    # lower runs sooner
    priority: int
    # the caller goes on behind tokens itself
    resumed: bool

    @property
    def prompt(self) -> bytes:
        """The prompt's bytes, as JSON has them."""
        return b"".join(self.fields[name] for name in _PROMPTS if name in self.fields)

    @property
    def num_choices(self) -> int:
        return self.n * self.num_prompts

    def encode(self, changes: Mapping[str, Any]) -> bytes:
        """The body with some fields set; None takes a field out."""
        fields = dict(self.fields)
        for name, value in changes.items():
            if value is None:
                fields.pop(name, None)
            else:
                fields[name] = msgspec.json.encode(value)
        return b"{" + b",".join([_key(k) + v for k, v in fields.items()]) + b"}"

    def stream_options(self) -> dict[str, Any]:
        """As the caller sent them."""
        options = self.fields.get("stream_options")
        if options is None or options == b"null":
            return {}
        found = msgspec.json.decode(options)
        return found if isinstance(found, dict) else {}


def _key(name: str) -> bytes:
    # what is remembered is short, whatever callers send
    return _usual_key(name) if len(name) <= 32 else msgspec.json.encode(name) + b":"


@functools.lru_cache(maxsize=256)
def _usual_key(name: str) -> bytes:
    return msgspec.json.encode(name) + b":"


def new_seed() -> int:
    """For a request without one, so that each engine draws the same. No secret."""
    return random.getrandbits(63)


def read_body(data: bytes) -> Body:
    """Raises InvalidRequestError for what no engine would take."""
    data = data.removeprefix(BYTE_ORDER_MARK)
    try:
        raw = _decode(data)
    except RecursionError:
        raise InvalidRequestError("the request body is nested too deeply") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        if data.lstrip()[:1] != b"{":
            raise InvalidRequestError("the request body must be a JSON object") from None
        raise InvalidRequestError(f"the request body is not valid JSON: {error}") from None
    fields = {name: bytes(value) for name, value in raw.items()}
    routed = _routed(data, fields)
    limits = (routed.max_completion_tokens, routed.max_tokens, routed.max_output_tokens)
    told = [n if n >= 0 else _DEFAULT_MAX_TOKENS for n in limits if n is not None]
    # llama.cpp's own name for it, which others do not read
    predict = fields.get("n_predict", b"")
    if predict.isdigit() and len(predict) <= _MOST_DIGITS:
        told.append(int(predict))
    prompt = fields.get("prompt", b"")
    options = _loose(fields, "stream_options")
    return Body(
        fields=fields,
        num_bytes=len(data),
        model=routed.model or "",
        stream=routed.stream or False,
        n=max(1, routed.n or 1),
        # some engines take a number below 0 for no limit
        max_tokens=next((n for n in limits if n is not None and n >= 0), _DEFAULT_MAX_TOKENS),
        most_tokens=max(told, default=_DEFAULT_MAX_TOKENS),
        include_usage=options.get("include_usage") is True,
        return_token_ids=_loose_bool(fields, "return_token_ids"),
        num_prompts=_num_prompts(prompt),
        seed=routed.seed,
        slo=_slo(fields),
        priority=routed.priority or 0,
        resumed="resume_output_ids" in fields,
    )


def _routed(data: bytes, fields: Mapping[str, bytes]) -> _Routed:
    try:
        return _decode_routed(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        # which of them is of another type is told; of one that is there twice the last counts
        return _Routed(**{name: _read(fields, name) for name in _Routed.__struct_fields__})


def _read(fields: Mapping[str, bytes], name: str) -> Any:
    """One of the routed fields. Raises InvalidRequestError."""
    kind, words = _KINDS.get(name, (int, "an integer"))
    value = fields.get(name, b"null")
    try:
        return msgspec.json.decode(value, type=kind | None)
    except UnicodeDecodeError:
        raise InvalidRequestError(f"{name} must be UTF-8", name) from None
    except msgspec.MsgspecError:
        pass
    try:
        shown = show(msgspec.json.decode(value))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequestError(
            f"{name} must be {words}, and cannot be read: {error}", name
        ) from None
    raise InvalidRequestError(f"{name} must be {words}, got {shown}", name)


def _loose(fields: Mapping[str, bytes], name: str) -> Mapping[str, Any]:
    """An object, if it is one: what else it may be is the engine's to refuse."""
    value = fields.get(name)
    if value is None or not value.startswith(b"{"):
        return {}
    found: Mapping[str, Any] = decoded(name, value)
    return found


def decoded(name: str, value: bytes) -> Any:
    """A field's value. Raises InvalidRequestError for what JSON cannot say: bytes that are not
    UTF-8, numbers beyond a double."""
    try:
        return msgspec.json.decode(value)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{name} cannot be read: {error}", name) from None


def _loose_bool(fields: Mapping[str, bytes], name: str) -> bool:
    return fields.get(name) == b"true"


def _slo(fields: Mapping[str, bytes]) -> Slo:
    """The targets in ``slo`` that the gateway goes by; what is wrong there the engine says."""
    value = fields.get("slo", b"")
    if not value:
        return NO_SLO
    told = {"class": decoded("slo", value)} if value[:1] == b'"' else _loose(fields, "slo")
    name = told.get("class")
    try:
        return Slo(
            slo_class=name if isinstance(name, str) else "standard",
            ttft=_milliseconds(told.get("ttft_ms")),
            tpot=_milliseconds(told.get("tpot_ms")),
            deadline=_milliseconds(told.get("deadline_ms")),
            best_effort=name in _BEST_EFFORT,
            queue_ttl=_milliseconds(told.get("queue_ttl_ms")),
        )
    except InvalidRequestError:
        return NO_SLO


def _milliseconds(value: object) -> float | None:
    return float(value) / 1000.0 if isinstance(value, (int, float)) and value > 0 else None


def _num_prompts(prompt: bytes) -> int:
    """How many a ``prompt`` of completions holds: a list of texts or of lists of ids."""
    if not prompt.startswith(b"["):
        return 1
    items = msgspec.json.decode(prompt, type=list[msgspec.Raw])
    if items and bytes(items[0])[:1] in (b'"', b"["):
        return len(items)
    return 1
