"""Capabilities of an engine, as it advertises them or as one-token requests show them.

The table of kinds (``engine_types``) says what engines of a kind can do in general; an older or
newer version, or a server that only resembles the kind, may differ. So each engine is asked once,
at the paths of its kind:

* Paceline, vLLM, SGLang: ``/openapi.json``, which lists the fields of a chat; for a vLLM without it
  ``/tokenize``, which renders a chat with and without ``continue_final_message``;
* SGLang: ``/server_info``, or the older ``/get_server_info``: context length and version;
* llama.cpp: ``/props``: context of a slot, slots, build; ``/apply-template``, whose prompt ends
  with the last assistant message if the engine continues it;
* Ollama: ``/api/version``, and ``/api/show`` for the context that a model is configured with.

Whatever the engine does not advertise may be probed (``probe = "try"``): an engine that knows
``continue_final_message`` refuses a chat that also sets ``add_generation_prompt``, at no cost; a
chat of one token shows whether token ids are returned. Unknown capabilities are None and fall back
to the kind's table. This module knows no engines and no sockets: ``fetch`` is an argument.

Sources: vLLM 0.32.0 ``entrypoints/serve/tokenize``, llama.cpp ``tools/server/server-common.cpp``
and ``server-context.cpp`` (the releases that ``make test-upstreams`` runs); SGLang's native API,
https://docs.sglang.ai/basic_usage/native_api.html; Ollama's, https://docs.ollama.com/api.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from paceline.gateway.settings.config import EngineKind

__all__ = ["CAPABILITIES", "Capabilities", "Fetch", "discover_capabilities"]

# GET of a path, or POST of a body: returns the status and the decoded JSON, or (0, None) without an
# answer or without JSON
Fetch = Callable[[str, Mapping[str, Any] | None], Awaitable[tuple[int, Any]]]

Source = Literal["engine", "tried"]

# capability -> field of a chat request
CAPABILITIES: Final[Mapping[str, str]] = {
    "token_ids": "return_token_ids",
    "resume": "resume_output_ids",
    "continues": "continue_final_message",
}
_CHAT: Final = "/v1/chat/completions"
_SAID_SO_FAR: Final = "One, two, three,"
_MESSAGES: Final = (
    {"role": "user", "content": "Count."},
    {"role": "assistant", "content": _SAID_SO_FAR},
)
# models of an Ollama engine that are asked about, at most
_MOST_MODELS: Final = 32


@dataclass(slots=True)
class Capabilities:
    """Capabilities of one engine; an unknown one is None, and the kind's table holds."""

    # returns token ids for ``return_token_ids``
    token_ids: bool | None = None
    # resumes behind ``resume_output_ids``
    resume: bool | None = None
    # continues a last assistant message with ``continue_final_message``
    continues: bool | None = None
    # context length in tokens, by model; "": any model
    contexts: dict[str, int] = field(default_factory=dict)
    # requests that run at once
    slots: int | None = None
    version: str = ""
    # port at which other engines fetch its KV blocks, and what these depend on; told to keys of
    # scope admin alone. None: none is served
    kv: tuple[int, str] | None = None
    # capability -> how it was found out
    sources: dict[str, Source] = field(default_factory=dict)

    @property
    def answered(self) -> bool:
        """Whether the engine revealed anything."""
        return bool(self.sources or self.contexts or self.slots or self.version)

    def learn(self, capability: str, value: bool, source: Source) -> None:
        setattr(self, capability, value)
        self.sources[capability] = source


async def discover_capabilities(
    kind: EngineKind, fetch: Fetch, models: Sequence[str], *, tries: bool
) -> Capabilities:
    """Find out what an engine of ``kind`` can do.

    Args:
        models: the engine's models.
        tries: whether one-token requests may probe what the engine does not advertise.
    """
    found = Capabilities()
    if kind in ("paceline", "vllm", "sglang"):
        await _read_fields(found, fetch)
        if kind == "sglang":
            await _read_sglang(found, fetch)
        else:
            told = await _object(fetch, "/version")
            found.version = _text(told, "version")
            if port := _count(_at(told, "kv"), "port"):
                found.kv = port, _text(told["kv"], "fingerprint")
        if kind == "vllm" and found.continues is None and models:
            await _compare_prompts(found, fetch, models[0])
    elif kind == "llama.cpp":
        await _read_llama_cpp(found, fetch)
    elif kind == "ollama":
        await _read_ollama(found, fetch, models)
    if tries and models:
        await _try(found, fetch, models[0])
    return found


async def _object(
    fetch: Fetch, path: str, body: Mapping[str, Any] | None = None
) -> Mapping[str, Any]:
    """Return the JSON object of an answer with status 200; empty for any other answer."""
    status, told = await fetch(path, body)
    return told if status == 200 and isinstance(told, dict) else {}


def _text(told: Mapping[str, Any], name: str) -> str:
    value = told.get(name)
    return value[:64] if isinstance(value, str) else ""


def _count(told: Any, name: str) -> int | None:
    value = told.get(name) if isinstance(told, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _at(told: Any, *names: str) -> Any:
    """Return the value at a path of names; None if it is missing."""
    for name in names:
        told = told.get(name) if isinstance(told, dict) else None
    return told


async def _read_fields(found: Capabilities, fetch: Fetch) -> None:
    """Read the chat fields that ``/openapi.json`` lists."""
    told = await _object(fetch, "/openapi.json")
    schema = _at(
        told, "paths", _CHAT, "post", "requestBody", "content", "application/json", "schema"
    )
    name = _at(schema, "$ref")
    if isinstance(name, str):
        schema = _at(told, "components", "schemas", name.rpartition("/")[2])
    fields = _at(schema, "properties")
    # a schema without messages describes something else
    if isinstance(fields, dict) and "messages" in fields:
        for capability, wanted in CAPABILITIES.items():
            found.learn(capability, wanted in fields, "engine")


async def _compare_prompts(found: Capabilities, fetch: Fetch, model: str) -> None:
    """Tell from two token counts whether a chat is continued: then its last message has no end."""
    counts = []
    for goes_on in (True, False):
        body = {
            "model": model,
            "messages": _MESSAGES,
            "continue_final_message": goes_on,
            "add_generation_prompt": False,
        }
        told = await _object(fetch, "/tokenize", body)
        counts.append(_count(told, "count"))
        if most := _count(told, "max_model_len"):
            found.contexts[model] = most
    if None not in counts:
        found.learn("continues", counts[0] != counts[1], "engine")


async def _read_sglang(found: Capabilities, fetch: Fetch) -> None:
    told = await _object(fetch, "/server_info") or await _object(fetch, "/get_server_info")
    found.version = _text(told, "version")
    found.slots = _count(told, "max_running_requests")
    most = _count(told, "context_length") or _count(told, "max_req_input_len")
    if most:
        found.contexts[""] = most


async def _read_llama_cpp(found: Capabilities, fetch: Fetch) -> None:
    props = await _object(fetch, "/props")
    found.version = _text(props, "build_info")
    found.slots = _count(props, "total_slots")
    if most := _count(_at(props, "default_generation_settings"), "n_ctx"):
        found.contexts[""] = most
    body = {"messages": _MESSAGES, "continue_final_message": True, "add_generation_prompt": False}
    prompt = (await _object(fetch, "/apply-template", body)).get("prompt")
    if isinstance(prompt, str) and _SAID_SO_FAR in prompt:
        found.learn("continues", prompt.rstrip().endswith(_SAID_SO_FAR), "engine")


async def _read_ollama(found: Capabilities, fetch: Fetch, models: Sequence[str]) -> None:
    found.version = _text(await _object(fetch, "/api/version"), "version")
    for model in models[:_MOST_MODELS]:
        told = await _object(fetch, "/api/show", {"model": model})
        parameters = told.get("parameters")
        # lines such as "num_ctx    4096"
        for line in parameters.splitlines() if isinstance(parameters, str) else ():
            name, _, value = line.strip().partition(" ")
            if name == "num_ctx" and value.strip().isdigit():
                found.contexts[model] = int(value)


async def _try(found: Capabilities, fetch: Fetch, model: str) -> None:
    """Probe, with one-token requests, what the engine did not advertise."""
    if found.continues is None:
        status, told = await fetch(
            _CHAT,
            {
                "model": model,
                "messages": _MESSAGES,
                "max_tokens": 1,
                "continue_final_message": True,
                "add_generation_prompt": True,
            },
        )
        # if both fields are known, their combination is refused; other refusals do not say "both"
        if status == 200:
            found.learn("continues", False, "tried")
        elif _refuses(status, told, "continue_final_message"):
            found.learn("continues", "both" in str(told).lower(), "tried")
    if found.token_ids is None:
        status, told = await fetch(
            _CHAT,
            {"model": model, "messages": _MESSAGES[:1], "max_tokens": 1, "return_token_ids": True},
        )
        choices = _at(told, "choices")
        if status == 200 and isinstance(choices, list) and choices:
            found.learn("token_ids", isinstance(_at(choices[0], "token_ids"), list), "tried")
        elif _refuses(status, told, "return_token_ids"):
            found.learn("token_ids", False, "tried")


def _refuses(status: int, told: Any, field: str) -> bool:
    """Whether the request was refused because of this field."""
    return status in (400, 422) and field in str(told).lower()
