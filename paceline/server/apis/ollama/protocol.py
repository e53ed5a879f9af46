"""Bodies of Ollama's ``/api/chat`` and ``/api/generate``, as bodies of chat and completions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from paceline.errors import InvalidRequestError
from paceline.http.fields import check_object, check_string, show
from paceline.server.protocol import schemas
from paceline.server.protocol.body import Body, Field, schema_of
from paceline.server.protocol.field_types import (
    INT32,
    anything,
    array,
    boolean,
    check_model,
    described,
    ignored,
    integer,
    refused,
    string,
    unread,
)
from paceline.server.protocol.generation import ChatBody, CompletionBody
from paceline.server.protocol.requests import (
    ChatRequest,
    CompletionRequest,
    RequestRules,
    parse_chat,
    parse_completion,
)
from paceline.server.protocol.rules import NamedAdapter
from paceline.server.protocol.schemas import Schema

__all__ = [
    "LINES",
    "OllamaChatBody",
    "OllamaGenerateBody",
    "OllamaOptions",
    "OllamaRequest",
    "ShowBody",
    "parse_ollama_chat",
    "parse_ollama_generate",
    "served_name",
]

# the media type of streams
LINES: Final = "application/x-ndjson"
_DEFAULT_TAG: Final = ":latest"
_EFFORTS: Final = ("low", "medium", "high")
_ROLES: Final = ("system", "user", "assistant", "tool")
_MESSAGE_NAMES: Final = frozenset(
    {"role", "content", "thinking", "images", "tool_calls", "tool_name", "name", "tool_call_id"}
)


def _undone(*harmless: Any) -> Field[None]:
    says = f"={{value}} is not served: this server samples with {_SAMPLING}"
    return refused(says, harmless, note="other ways of sampling")


_SAME_OPTIONS: Final = (
    "temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty",
    "frequency_penalty",
)  # fmt: skip
_SAMPLING: Final = ", ".join((*_SAME_OPTIONS, "repeat_penalty", "num_predict"))


class OllamaOptions(
    Body, passes=(CompletionBody, _SAME_OPTIONS), refuses_unknown="{names} is unknown"
):
    """``options``; those that are passed on are checked as fields of chat or completions."""

    repeat_penalty = anything(
        CompletionBody.repetition_penalty.schema, note="chat's `repetition_penalty`"
    )
    num_predict = integer(
        -2,
        INT32,
        schema=lambda rules: schemas.integer(-2, max(1, rules.max_model_len - 1)),
        note="below 0: as many as the context has place for",
    )
    num_ctx = integer(
        0,
        INT32,
        schema=lambda rules: schemas.integer(0, rules.max_model_len),
        note="no more than the context here; it reserves nothing",
    )
    # settings of a new runner; here it runs already
    num_keep = num_batch = num_gpu = main_gpu = num_thread = numa = low_vram = f16_kv = ignored()
    vocab_only = use_mmap = use_mlock = repeat_last_n = penalize_newline = mirostat_eta = ignored()
    mirostat_tau = embedding_only = logits_all = ignored()
    mirostat = _undone(0)
    tfs_z = typical_p = _undone(1)


def _read_options(value: Any, name: str, rules: RequestRules) -> OllamaOptions:
    # null counts as absent, under any name
    given = {key: item for key, item in check_object(value, name).items() if item is not None}
    try:
        options = OllamaOptions.read(given, rules)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{name}.{error}", f"{name}.{error.param}") from None
    if (options.num_ctx or 0) > rules.max_model_len:
        raise InvalidRequestError(
            f"{name}.num_ctx={options.num_ctx}: the maximum context length here is "
            f"{rules.max_model_len} tokens",
            f"{name}.num_ctx",
        )
    return options


def _model(value: Any, name: str, rules: RequestRules) -> str:
    asked = check_string(value, name, 1, None)
    check_model(served_name(asked, rules), rules)
    return asked


def _models(rules: RequestRules) -> Schema:
    names = rules.served_model_names
    if rules.listed_models != names:
        return schemas.STRING
    return schemas.string(*names, *(f"{n}{_DEFAULT_TAG}" for n in names if ":" not in n))


def _response_format(value: Any, name: str, _: RequestRules) -> dict[str, Any]:
    """Return chat's format; an empty string gives none."""
    if value == "json":
        return {"type": "json_object"}
    if type(value) is dict:
        return {"type": "json_schema", "json_schema": {"name": "format", "schema": value}}
    if value != "":
        raise InvalidRequestError(f"{name} must be json or a schema, got {show(value)}", name)
    return {}


def _think(value: Any, name: str, rules: RequestRules) -> bool | str:
    if not (type(value) is bool or value in _EFFORTS):
        raise InvalidRequestError(
            f"{name} must be true, false or one of {', '.join(_EFFORTS)}, got {show(value)}", name
        )
    if value and rules.thinking is None:
        raise InvalidRequestError(
            f"{name}={show(value)}: this model's chat template has no thinking; it may be false",
            name,
        )
    return value  # type: ignore[no-any-return]


_UNSERVED: Final = refused(" is not served here")
_UNCUT: Final = refused(
    " is not served here",
    note="a prompt that is too long is a 400, and nothing of it is left out in silence",
)


def _text(value: Any, name: str, _: RequestRules) -> str:
    return check_string(value, name, 0, None)


class OllamaBody(Body, passes=(ChatBody, ("slo", "priority", "cache_salt"))):
    """Fields of both bodies; those passed on are unknown to Ollama."""

    model = described(_model, _models, note="a name may end in `:latest`")
    stream = boolean(True, note="true unless it says otherwise")
    format = described(
        _response_format, {"type": ["string", "object", "null"]}, note="`json` or a schema"
    )
    options = described(
        _read_options,
        lambda rules: schema_of(OllamaOptions, rules),
        note="see [Ollama's options](#ollamas-options)",
    )
    think = described(
        _think,
        {"anyOf": [schemas.BOOLEAN, schemas.string(*_EFFORTS)]},
        note="where the model thinks",
    )
    keep_alive = ignored(note="the model is there as long as the server is")
    logprobs = top_logprobs = _UNSERVED
    truncate = shift = _UNCUT


class ShowBody(Body):
    """``/api/show``."""

    model = described(_text, _models)
    # its older name
    name = described(_text, _models)
    verbose = ignored(unless=(False,), note="tokens and tensors are not told")


def _unread_messages(values: list[Any]) -> Iterator[str]:
    for place, value in enumerate(values):
        if type(value) is dict:
            yield from unread(value, _MESSAGE_NAMES, f"[{place}]")


class OllamaChatBody(OllamaBody, refuses_unknown="{names}: not served in /api/chat"):
    """``/api/chat``."""

    messages = replace(
        array(
            schemas.array(
                schemas.record(
                    {"role": schemas.string(*_ROLES)}, {"content": schemas.nullable(schemas.STRING)}
                )
            ),
            note="none: nothing is loaded or unloaded, and the answer says `load` or `unload` as "
            "Ollama's does",
        ),
        unread=_unread_messages,
    )
    tools = array(ChatBody.tools.schema)


class OllamaGenerateBody(OllamaBody, refuses_unknown="{names}: not served in /api/generate"):
    """``/api/generate``."""

    prompt = string(note="as a chat of one message")
    system = string()
    raw = boolean(note="without the chat template")
    suffix = images = template = context = width = height = steps = _UNSERVED


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaRequest:
    """A chat or a raw prompt for the engine, or nothing, if the caller only wants the model loaded
    or unloaded."""

    asked: ChatRequest | CompletionRequest | None
    # the name as the caller sent it
    model: str
    # whether the endpoint is ``/api/chat``
    is_chat: bool
    stream: bool
    # the done_reason of an answer to nothing
    nothing: str = ""
    # absent from Ollama's bodies
    request_id: None = None
    ignored_fields: tuple[str, ...] = ()

    @property
    def adapter(self) -> NamedAdapter | None:
        return None if self.asked is None else self.asked.options.adapter


def served_name(name: str, rules: RequestRules) -> str:
    """Return a model's name without the tag that Ollama's clients add to names without one."""
    plain = name.removesuffix(_DEFAULT_TAG)
    return name if rules.serves(name) else plain


def parse_ollama_chat(
    values: dict[str, Any], rules: RequestRules, tenant: str = ""
) -> OllamaRequest:
    """Parse a chat body. Raises InvalidRequestError or UnknownModelError."""
    body = OllamaChatBody.read(values, rules)
    chat = _common(body, rules)
    messages = body.messages or []
    # without messages, the other fields are still checked
    chat["messages"] = _messages(messages) or [{"role": "user", "content": ""}]
    if body.tools:
        chat["tools"] = body.tools
    asked = parse_chat(chat, rules, tenant)
    return _request(body, rules, asked if messages else None, is_chat=True)


def parse_ollama_generate(
    values: dict[str, Any], rules: RequestRules, tenant: str = ""
) -> OllamaRequest:
    """Parse a generate body. Raises InvalidRequestError or UnknownModelError."""
    body = OllamaGenerateBody.read(values, rules)
    made, prompt = _common(body, rules), body.prompt or ""
    if body.raw and body.system:
        raise InvalidRequestError("system is not put into a raw prompt", "system")
    asked: ChatRequest | CompletionRequest
    if body.raw:
        made.pop("chat_template_kwargs", None)
        asked = parse_completion({**made, "prompt": prompt}, rules, tenant)
    else:
        said = [{"role": "system", "content": body.system}] if body.system else []
        made["messages"] = [*said, {"role": "user", "content": prompt}]
        asked = parse_chat(made, rules, tenant)
    return _request(body, rules, asked if prompt else None, is_chat=False)


def _common(body: OllamaBody, rules: RequestRules) -> dict[str, Any]:
    """Return the fields that both bodies share, as fields of chat and completions."""
    made = {"model": served_name(_name(body, rules), rules), "stream": body.stream, **body.passed()}
    options = body.options
    if options is not None:
        made |= options.passed()
        if options.repeat_penalty is not None:
            made["repetition_penalty"] = options.repeat_penalty
        if options.num_predict is not None and options.num_predict >= 0:
            made["max_tokens"] = options.num_predict
    if body.format:
        made["response_format"] = body.format
    if body.think is not None:
        made["chat_template_kwargs"] = {"enable_thinking": bool(body.think)}
    if type(body.think) is str:
        made["chat_template_kwargs"]["reasoning_effort"] = body.think
    return made


def _name(body: OllamaBody, rules: RequestRules) -> str:
    """Return the model's name, as requested."""
    return body.model or rules.served_model_names[0]


def _messages(values: list[Any]) -> list[dict[str, Any]]:
    """Add ids to calls, which Ollama's lack: a result belongs to the latest call of its name, or to
    the latest call of all."""
    messages: list[dict[str, Any]] = []
    ids: dict[str, str] = {}
    for place, value in enumerate(values):
        where = f"messages[{place}]"
        role = value.get("role") if type(value) is dict else None
        if role not in _ROLES:
            raise InvalidRequestError(
                f"{where}.role must be one of {', '.join(_ROLES)}, got {show(role)}", "messages"
            )
        if value.get("images"):
            raise InvalidRequestError(f"{where}.images: images are not served", "messages")
        content = value.get("content")
        message: dict[str, Any] = {"role": role, "content": "" if content is None else content}
        calls = value.get("tool_calls")
        if calls and role == "assistant":
            message["tool_calls"] = [
                _call(call, f"{where}.tool_calls[{index}]", f"call_{place}_{index}", ids)
                for index, call in enumerate(calls if type(calls) is list else [calls])
            ]
        if role == "tool":
            named = value.get("tool_name") or value.get("name")
            latest = next(reversed(ids.values()), "call")
            message["tool_call_id"] = ids.get(named, latest) if type(named) is str else latest
        if value.get("thinking") is not None:
            message["reasoning"] = value["thinking"]
        messages.append(message)
    return messages


def _call(call: Any, where: str, call_id: str, ids: dict[str, str]) -> dict[str, Any]:
    function = call.get("function") if type(call) is dict else None
    name = function.get("name") if type(function) is dict else None
    if type(function) is not dict or type(name) is not str:
        raise InvalidRequestError(f"{where} must have a function with a name", "messages")
    ids.pop(name, None)
    ids[name] = call_id
    arguments = function.get("arguments") or {}
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _request(
    body: OllamaBody,
    rules: RequestRules,
    asked: ChatRequest | CompletionRequest | None,
    *,
    is_chat: bool,
) -> OllamaRequest:
    unloads = body.keep_alive in (0, "0", "0s")
    return OllamaRequest(
        asked=asked,
        model=_name(body, rules),
        is_chat=is_chat,
        stream=body.stream,
        nothing="" if asked is not None else "unload" if unloads else "load",
        ignored_fields=body.ignored_fields,
    )
