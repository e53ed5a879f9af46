"""What an engine can do, as it says itself, or as a request of one token shows.

The table of kinds (``kinds``) says what engines of a kind can do in general; a version that is
older or newer, or a server that only looks like one of the kind, does something else. So each is
asked once, in what its kind says of itself:

* Paceline, vLLM, SGLang: ``/openapi.json``, which lists the fields of a chat; vLLM without it
  ``/tokenize``, which renders a chat with and without ``continue_final_message``;
* SGLang: ``/server_info``, older ``/get_server_info``: context and version;
* llama.cpp: ``/props``: context of a slot, slots, build; ``/apply-template``, whose prompt ends
  with what was said so far where that is continued;
* Ollama: ``/api/version``, and ``/api/show`` for the context that a model is configured with.

What none of these says may be tried (``probe = "try"``): a chat that asks for both
``continue_final_message`` and ``add_generation_prompt`` is refused, and costs nothing, where the
first is known; a chat of one token shows whether ids come with it. What is left open is None, and
the kind's table holds. Knows no engines and no sockets: how to ask is an argument.

Sources: vLLM 0.32.0 ``entrypoints/serve/tokenize``, llama.cpp ``tools/server/server-common.cpp``
and ``server-context.cpp`` (the releases that ``make test-upstreams`` runs); SGLang's native API,
https://docs.sglang.ai/basic_usage/native_api.html; Ollama's, https://docs.ollama.com/api.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from paceline.gateway.config import EngineKind

__all__ = ["ABILITIES", "Abilities", "Ask", "find_abilities"]

# of a path, and of a body that is posted there: status and what the JSON of the answer holds;
# (0, None) where there is no answer, or no JSON
Ask = Callable[[str, Mapping[str, Any] | None], Awaitable[tuple[int, Any]]]

Source = Literal["engine", "tried"]

# fields of a chat, by ability
ABILITIES: Final[Mapping[str, str]] = {
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
# of Ollama's models, how many are asked for
_MOST_MODELS: Final = 32


@dataclass(slots=True)
class Abilities:
    """Of one engine; what is not known is None, and the kind's table holds."""

    # sends the ids of tokens with ``return_token_ids``
    token_ids: bool | None = None
    # goes on behind ``resume_output_ids``
    resume: bool | None = None
    # goes on behind a last assistant message with ``continue_final_message``
    continues: bool | None = None
    # tokens that one request may have, by model; "": any
    contexts: dict[str, int] = field(default_factory=dict)
    # requests that it runs at once
    slots: int | None = None
    version: str = ""
    # by ability, how it was found out
    sources: dict[str, Source] = field(default_factory=dict)

    @property
    def answered(self) -> bool:
        """Whether anything was found out."""
        return bool(self.sources or self.contexts or self.slots or self.version)

    def learn(self, ability: str, value: bool, source: Source) -> None:
        setattr(self, ability, value)
        self.sources[ability] = source


async def find_abilities(
    kind: EngineKind, ask: Ask, models: Sequence[str], *, tries: bool
) -> Abilities:
    """What an engine of ``kind`` can do.

    Args:
        models: that it has.
        tries: whether it may be sent requests for a token, where it says nothing.
    """
    found = Abilities()
    if kind in ("paceline", "vllm", "sglang"):
        await _read_fields(found, ask)
        if kind == "sglang":
            await _read_sglang(found, ask)
        else:
            found.version = _text(await _object(ask, "/version"), "version")
        if kind == "vllm" and found.continues is None and models:
            await _compare_prompts(found, ask, models[0])
    elif kind == "llama.cpp":
        await _read_llama_cpp(found, ask)
    elif kind == "ollama":
        await _read_ollama(found, ask, models)
    if tries and models:
        await _try(found, ask, models[0])
    return found


async def _object(ask: Ask, path: str, body: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """Of a good answer; empty where there is none."""
    status, told = await ask(path, body)
    return told if status == 200 and isinstance(told, dict) else {}


def _text(told: Mapping[str, Any], name: str) -> str:
    value = told.get(name)
    return value[:64] if isinstance(value, str) else ""


def _count(told: Any, name: str) -> int | None:
    value = told.get(name) if isinstance(told, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _at(told: Any, *names: str) -> Any:
    """What lies there; None: nothing does."""
    for name in names:
        told = told.get(name) if isinstance(told, dict) else None
    return told


async def _read_fields(found: Abilities, ask: Ask) -> None:
    """The fields that the description of its API has for a chat."""
    told = await _object(ask, "/openapi.json")
    schema = _at(
        told, "paths", _CHAT, "post", "requestBody", "content", "application/json", "schema"
    )
    name = _at(schema, "$ref")
    if isinstance(name, str):
        schema = _at(told, "components", "schemas", name.rpartition("/")[2])
    fields = _at(schema, "properties")
    # one without messages describes something else
    if isinstance(fields, dict) and "messages" in fields:
        for ability, wanted in ABILITIES.items():
            found.learn(ability, wanted in fields, "engine")


async def _compare_prompts(found: Abilities, ask: Ask, model: str) -> None:
    """A chat that is gone on with lacks the end of its last message."""
    counts = []
    for goes_on in (True, False):
        body = {
            "model": model,
            "messages": _MESSAGES,
            "continue_final_message": goes_on,
            "add_generation_prompt": False,
        }
        told = await _object(ask, "/tokenize", body)
        counts.append(_count(told, "count"))
        if most := _count(told, "max_model_len"):
            found.contexts[model] = most
    if None not in counts:
        found.learn("continues", counts[0] != counts[1], "engine")


async def _read_sglang(found: Abilities, ask: Ask) -> None:
    told = await _object(ask, "/server_info") or await _object(ask, "/get_server_info")
    found.version = _text(told, "version")
    found.slots = _count(told, "max_running_requests")
    most = _count(told, "context_length") or _count(told, "max_req_input_len")
    if most:
        found.contexts[""] = most


async def _read_llama_cpp(found: Abilities, ask: Ask) -> None:
    props = await _object(ask, "/props")
    found.version = _text(props, "build_info")
    found.slots = _count(props, "total_slots")
    if most := _count(_at(props, "default_generation_settings"), "n_ctx"):
        found.contexts[""] = most
    body = {
        "messages": _MESSAGES,
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    prompt = (await _object(ask, "/apply-template", body)).get("prompt")
    if isinstance(prompt, str) and _SAID_SO_FAR in prompt:
        found.learn("continues", prompt.rstrip().endswith(_SAID_SO_FAR), "engine")


async def _read_ollama(found: Abilities, ask: Ask, models: Sequence[str]) -> None:
    found.version = _text(await _object(ask, "/api/version"), "version")
    for model in models[:_MOST_MODELS]:
        told = await _object(ask, "/api/show", {"model": model})
        parameters = told.get("parameters")
        # lines such as "num_ctx    4096"
        for line in parameters.splitlines() if isinstance(parameters, str) else ():
            name, _, value = line.strip().partition(" ")
            if name == "num_ctx" and value.strip().isdigit():
                found.contexts[model] = int(value)


async def _try(found: Abilities, ask: Ask, model: str) -> None:
    """What nothing was said of, by requests for a token each."""
    if found.continues is None:
        status, told = await ask(
            _CHAT,
            {
                "model": model,
                "messages": _MESSAGES,
                "max_tokens": 1,
                "continue_final_message": True,
                "add_generation_prompt": True,
            },
        )
        # who knows both fields refuses them together; who lists them as unknown does not say "both"
        if status == 200:
            found.learn("continues", False, "tried")
        elif _refuses(status, told, "continue_final_message"):
            found.learn("continues", "both" in str(told).lower(), "tried")
    if found.token_ids is None:
        status, told = await ask(
            _CHAT,
            {
                "model": model,
                "messages": _MESSAGES[:1],
                "max_tokens": 1,
                "return_token_ids": True,
            },
        )
        choices = _at(told, "choices")
        if status == 200 and isinstance(choices, list) and choices:
            found.learn("token_ids", isinstance(_at(choices[0], "token_ids"), list), "tried")
        elif _refuses(status, told, "return_token_ids"):
            found.learn("token_ids", False, "tried")


def _refuses(status: int, told: Any, field: str) -> bool:
    """Whether the request failed for this field of it, and not for anything else."""
    return status in (400, 422) and field in str(told).lower()
