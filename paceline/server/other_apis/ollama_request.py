"""Bodies of Ollama's ``/api/chat`` and ``/api/generate`` as bodies of chat and completions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from paceline.core.errors import InvalidRequestError
from paceline.http.fields import Fields, show
from paceline.server.bodies.kinds import check_model
from paceline.server.bodies.protocol import (
    ChatRequest,
    CompletionRequest,
    RequestRules,
    parse_chat,
    parse_completion,
)

__all__ = [
    "CHAT_REFUSED",
    "GENERATE_REFUSED",
    "LINES",
    "NO_EFFECT",
    "OPTIONS",
    "OPTIONS_NO_EFFECT",
    "OPTIONS_REFUSED",
    "OllamaRequest",
    "parse_ollama_chat",
    "parse_ollama_generate",
    "served_name",
]

# the media type of streams
LINES: Final = "application/x-ndjson"
# the model stays loaded as long as the server runs; a prompt that is too long is always refused
NO_EFFECT: Final = ("keep_alive",)
CHAT_REFUSED: Final = ("logprobs", "top_logprobs", "truncate", "shift")
GENERATE_REFUSED: Final = (
    "suffix", "images", "template", "context", "logprobs", "top_logprobs", "truncate", "shift",
    "width", "height", "steps",
)  # fmt: skip
# of ``options``: what becomes of them in a body of chat or completions
OPTIONS: Final = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repeat_penalty": "repetition_penalty",
    "num_predict": "max_tokens",
}
# how a runner would be started, which runs already; num_ctx is looked at, but reserves nothing
OPTIONS_NO_EFFECT: Final = (
    "num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram",
    "f16_kv", "vocab_only", "use_mmap", "use_mlock", "repeat_last_n", "penalize_newline",
    "mirostat_eta", "mirostat_tau", "embedding_only", "logits_all",
)  # fmt: skip
# other ways of sampling, with the values that ask for none of it
OPTIONS_REFUSED: Final = {"mirostat": (0,), "tfs_z": (1, 1.0), "typical_p": (1, 1.0)}
# passed on under the same name: Ollama does not know them
_SAME: Final = ("slo", "priority", "cache_salt")
_DEFAULT_TAG: Final = ":latest"
_EFFORTS: Final = ("low", "medium", "high")
_ROLES: Final = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaRequest:
    """What is asked of the engine: a chat, a raw prompt, or nothing, where the caller only wants
    the model to be loaded, or not to be any more."""

    asked: ChatRequest | CompletionRequest | None
    # as the caller has it
    model: str
    # which of the two endpoints was asked
    is_chat: bool
    stream: bool
    # the done_reason of an answer to nothing
    nothing: str = ""
    # Ollama's bodies have none
    request_id: None = None


def served_name(name: str, rules: RequestRules) -> str:
    """A model's name without the tag that Ollama's clients add where there is none."""
    plain = name.removesuffix(_DEFAULT_TAG)
    return name if rules.serves(name) else plain


def parse_ollama_chat(body: dict[str, Any], rules: RequestRules, tenant: str = "") -> OllamaRequest:
    """Raises InvalidRequestError or UnknownModelError."""
    fields = Fields(body)
    model, chat = _common(fields, rules, CHAT_REFUSED)
    messages = fields.array("messages") or []
    # where nothing is asked, the other fields are still held to what they may be
    chat["messages"] = _messages(messages) or [{"role": "user", "content": ""}]
    tools = fields.array("tools")
    if tools:
        chat["tools"] = tools
    _done(fields, "/api/chat")
    asked = parse_chat(chat, rules, tenant)
    return _request(fields, asked if messages else None, model, is_chat=True)


def parse_ollama_generate(
    body: dict[str, Any], rules: RequestRules, tenant: str = ""
) -> OllamaRequest:
    """Raises InvalidRequestError or UnknownModelError."""
    fields = Fields(body)
    model, made = _common(fields, rules, GENERATE_REFUSED)
    prompt = fields.string("prompt") or ""
    system = fields.string("system")
    raw = fields.boolean("raw", False)
    _done(fields, "/api/generate")
    if raw and system:
        raise InvalidRequestError("system is not put into a raw prompt", "system")
    asked: ChatRequest | CompletionRequest
    if raw:
        made.pop("chat_template_kwargs", None)
        asked = parse_completion({**made, "prompt": prompt}, rules, tenant)
    else:
        said = [{"role": "system", "content": system}] if system else []
        made["messages"] = [*said, {"role": "user", "content": prompt}]
        asked = parse_chat(made, rules, tenant)
    return _request(fields, asked if prompt else None, model, is_chat=False)


def _common(
    fields: Fields, rules: RequestRules, refused: tuple[str, ...]
) -> tuple[str, dict[str, Any]]:
    """The model's name as asked, and what both bodies share in those of chat and completions."""
    model = fields.string("model", 1) or rules.served_model_names[0]
    name = served_name(model, rules)
    check_model(name, rules)
    made: dict[str, Any] = {"model": name, "stream": fields.boolean("stream", True)}
    for same in _SAME:
        value = fields.raw(same)
        if value is not None:
            made[same] = value
    made |= _options(fields.object("options") or {}, rules)
    form = fields.raw("format")
    if form == "json":
        made["response_format"] = {"type": "json_object"}
    elif type(form) is dict:
        made["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "format", "schema": form},
        }
    elif form not in (None, ""):
        raise InvalidRequestError(f"format must be json or a schema, got {show(form)}", "format")
    think = fields.raw("think")
    if not (type(think) is bool or think in (None, *_EFFORTS)):
        raise InvalidRequestError(
            f"think must be true, false or one of {', '.join(_EFFORTS)}, got {show(think)}", "think"
        )
    if think and rules.thinking is None:
        raise InvalidRequestError(
            f"think={show(think)}: this model's chat template has no thinking; it may be false",
            "think",
        )
    if think is not None:
        made["chat_template_kwargs"] = {"enable_thinking": bool(think)}
    if type(think) is str:
        made["chat_template_kwargs"]["reasoning_effort"] = think
    for name in refused:
        if fields.raw(name) not in (None, False, "", [], {}):
            raise InvalidRequestError(f"{name} is not served here", name)
    for name in NO_EFFECT:
        fields.raw(name)
    return model, made


def _options(options: dict[str, Any], rules: RequestRules) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in options.items():
        if value is None:
            continue
        if name in OPTIONS:
            made[OPTIONS[name]] = value
        elif name in OPTIONS_REFUSED:
            if value not in OPTIONS_REFUSED[name]:
                raise InvalidRequestError(
                    f"options.{name}={show(value)} is not served: this server samples with "
                    f"{', '.join(OPTIONS)}",
                    f"options.{name}",
                )
        elif name not in OPTIONS_NO_EFFECT:
            raise InvalidRequestError(f"options.{show(name)} is unknown", "options")
    longest = Fields(options).integer("num_ctx", 0, 2**31 - 1) or 0
    if longest > rules.max_model_len:
        raise InvalidRequestError(
            f"options.num_ctx={longest}: the maximum context length here is {rules.max_model_len} "
            "tokens",
            "options.num_ctx",
        )
    limit = Fields(options).integer("num_predict", -2, 2**31 - 1)
    if limit is not None and limit < 0:
        # as many as the context has place for
        del made["max_tokens"]
    return made


def _messages(values: list[Any]) -> list[dict[str, Any]]:
    """With ids for calls, which Ollama's have not: a result is that of the latest call of its
    name, or of the latest of all."""
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


def _done(fields: Fields, path: str) -> None:
    unknown = fields.unknown()
    if unknown:
        raise InvalidRequestError(f"{', '.join(unknown)}: not served in {path}")


def _request(
    fields: Fields, asked: ChatRequest | CompletionRequest | None, model: str, *, is_chat: bool
) -> OllamaRequest:
    unloads = fields.raw("keep_alive") in (0, "0", "0s")
    return OllamaRequest(
        asked=asked,
        model=model,
        is_chat=is_chat,
        stream=fields.boolean("stream", True),
        nothing="" if asked is not None else "unload" if unloads else "load",
    )
