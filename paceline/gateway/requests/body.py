"""Request body as the gateway reads it: a few decoded fields, the rest as raw bytes.

Only the top level is parsed, into the bytes of each value; a body for an engine joins those bytes
again, with some of them replaced. A duplicate field is sent once, so that gateway and engine never
read different values.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from paceline.core.slo import NO_SLO, Slo
from paceline.errors import InvalidRequestError
from paceline.gateway.requests.prompt_size import prompt_fields
from paceline.http.fields import BYTE_ORDER_MARK, show

__all__ = ["PREDICT", "Body", "decoded", "read_body"]


class _Routed(msgspec.Struct):
    """Fields that the gateway itself uses and that have these types in every API."""

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

# fields by which engines find a prompt that another one has computed
_OF_THE_GATEWAY: Final = frozenset(
    {"kv_source", "kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room"}
)
# limit of an answer, in tokens, if its caller sets none
_DEFAULT_MAX_TOKENS: Final = 1024
# names of the limit that all engines know, of chats and by path
_CHAT_LIMITS: Final = ("max_completion_tokens", "max_tokens")
_LIMITS: Final = {
    "/v1/completions": ("max_tokens",),
    "/v1/messages": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
}
# llama.cpp's own limit, which it prefers to the others
PREDICT: Final = "n_predict"
_INTEGER: Final = re.compile(rb"-?[0-9]{1,18}")
# classes that have no targets and yield to all others, on every server
_BEST_EFFORT: Final = ("batch", "best-effort")


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """Body of one request."""

    fields: Mapping[str, bytes]
    num_bytes: int
    model: str
    stream: bool
    n: int
    max_tokens: int
    # limits of the answer that the caller set, by name
    limits: Mapping[str, int]
    include_usage: bool
    return_token_ids: bool
    # prompts of a completions request; 1 for messages
    num_prompts: int
    # answers that an engine generates for each prompt, of which it returns ``n``
    best_of: int
    seed: int | None
    slo: Slo
    # lower runs sooner
    priority: int
    # the caller itself resumes behind given tokens
    resumed: bool
    # cap on an answer's tokens by the limits of its key, if its caller set none, and the prompt's
    # tokens, which share the engine's context with it
    cap: int | None = None
    prompt_tokens: float = 0.0

    @property
    def prompt(self) -> bytes:
        """The prompt as bytes of JSON."""
        names = prompt_fields(self.fields)
        return (
            self.fields[names[0]]
            if len(names) == 1
            else b"".join([self.fields[name] for name in names])
        )

    def most_tokens(self, path: str) -> int | None:
        """Most tokens that any engine would make of an answer, whichever of the given limits it
        uses; None if no limit is known to all of them, or one of them is unlimited."""
        told = [
            self.limits[name] for name in _LIMITS.get(path, _CHAT_LIMITS) if name in self.limits
        ]
        if not told:
            return None
        told.append(self.limits.get(PREDICT, 0))
        return None if min(told) < 0 else max(told)

    def most_deferred(self, path: str) -> int:
        """Tokens that a background request may still generate, if bounded, else 0."""
        is_deferred = self.fields.get("background") == b"true"
        return (self.cap or self.most_tokens(path) or 0) if is_deferred else 0

    @property
    def num_choices(self) -> int:
        return self.n * self.num_prompts

    @property
    def num_made(self) -> int:
        """Answers that are generated for the request, returned or not."""
        return max(self.n, self.best_of) * self.num_prompts

    def capped(self, cap: int, prompt_tokens: float) -> Body:
        """Return a copy whose answers have at most ``cap`` tokens."""
        most = min(self.max_tokens, cap)
        return msgspec.structs.replace(self, cap=cap, prompt_tokens=prompt_tokens, max_tokens=most)

    def encode(self, changes: Mapping[str, Any]) -> bytes:
        """Encode the body with some fields set; None removes a field."""
        fields = self.fields
        if changes:
            fields = dict(fields)
            for name, value in changes.items():
                if value is None:
                    fields.pop(name, None)
                else:
                    fields[name] = msgspec.json.encode(value)
        return b"{" + b",".join([_KEYS[k] + v for k, v in fields.items()]) + b"}"

    def stream_options(self) -> dict[str, Any]:
        """Decode the caller's ``stream_options``."""
        options = self.fields.get("stream_options")
        if options is None or options == b"null":
            return {}
        found = msgspec.json.decode(options)
        return found if isinstance(found, dict) else {}


class _Keys(dict[str, bytes]):
    """Names of fields, as JSON has them."""

    def __missing__(self, name: str) -> bytes:
        key = msgspec.json.encode(name) + b":"
        # callers cannot fill the memory with names
        if len(self) < 256 and len(name) <= 32:
            self[name] = key
        return key


_KEYS: Final = _Keys()


def new_seed() -> int:
    """Draw a seed for a request without one, so that each engine samples the same. Not a secret."""
    return random.getrandbits(63)


def read_body(data: bytes) -> Body:
    """Parse a request body. Raises InvalidRequestError for one that no engine would take."""
    if data[:1] != b"{":
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
    if not _OF_THE_GATEWAY.isdisjoint(fields):
        # an engine would connect there with the gateway's right to say so
        name = next(iter(_OF_THE_GATEWAY.intersection(fields)))
        raise InvalidRequestError(f"{name} is not taken from callers", name)
    try:
        routed = _decode_routed(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        routed = _routed(fields)
    told, most = _limits(fields, routed)
    return Body(
        fields=fields,
        num_bytes=len(data),
        model=routed.model or "",
        stream=routed.stream or False,
        n=routed.n if routed.n is not None and routed.n > 1 else 1,
        max_tokens=most,
        limits=told,
        include_usage="stream_options" in fields
        and _loose(fields, "stream_options").get("include_usage") is True,
        return_token_ids="return_token_ids" in fields and fields["return_token_ids"] == b"true",
        num_prompts=_num_prompts(fields["prompt"]) if "prompt" in fields else 1,
        best_of=(_loose_int(fields["best_of"]) or 1) if "best_of" in fields else 1,
        seed=routed.seed,
        slo=_slo(fields) if "slo" in fields else NO_SLO,
        priority=routed.priority or 0,
        resumed="resume_output_ids" in fields,
    )


def _routed(fields: Mapping[str, bytes]) -> _Routed:
    """Decode fields one by one, to name a wrong one; of a duplicate field the last one counts."""
    return _Routed(**{name: _read(fields, name) for name in _Routed.__struct_fields__})


def _limits(fields: Mapping[str, bytes], routed: _Routed) -> tuple[Mapping[str, int], int]:
    """Return the limits by name, and the first that is not negative, which may mean no limit."""
    told: dict[str, int] = {}
    most = -1
    for name, limit in (
        ("max_completion_tokens", routed.max_completion_tokens),
        ("max_tokens", routed.max_tokens),
        ("max_output_tokens", routed.max_output_tokens),
    ):
        if limit is not None:
            told[name] = limit
            most = limit if most < 0 else most
    if PREDICT in fields and (limit := _loose_int(fields[PREDICT])) is not None:
        told[PREDICT] = limit
    return told, most if most >= 0 else _DEFAULT_MAX_TOKENS


def _read(fields: Mapping[str, bytes], name: str) -> Any:
    """Decode one of the routed fields. Raises InvalidRequestError."""
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
    """Decode an object; empty for any other type, which is left to the engine to refuse."""
    value = fields.get(name)
    if value is None or not value.startswith(b"{"):
        return {}
    found: Mapping[str, Any] = decoded(name, value)
    return found


def decoded(name: str, value: bytes) -> Any:
    """Decode a field's value. Raises InvalidRequestError for bytes that are not UTF-8 and for
    numbers beyond a double."""
    try:
        return msgspec.json.decode(value)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{name} cannot be read: {error}", name) from None


def _loose_int(value: bytes) -> int | None:
    """Decode an integer; None for anything else."""
    found = _INTEGER.fullmatch(value)
    return None if found is None else int(found[0])


def _slo(fields: Mapping[str, bytes]) -> Slo:
    """Read the targets in ``slo`` that the gateway uses; the engine reports what is wrong there."""
    value = fields["slo"]
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
    """Count the prompts in ``prompt`` of completions: a list of texts or of lists of ids."""
    if not prompt.startswith(b"["):
        return 1
    items = msgspec.json.decode(prompt, type=list[msgspec.Raw])
    if items and bytes(items[0])[:1] in (b'"', b"["):
        return len(items)
    return 1
