"""vLLM's requests as the core's: targets, tenant and priority from what ``vllm_xargs`` carry.

``admission`` writes these arguments; a client may set them itself. This module does not import
vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from paceline.core.request import AdapterUse, Request, RequestSpec, ResumedOutput
from paceline.core.sampling_params import SamplingParams
from paceline.core.slo import NO_SLO, Slo
from paceline.errors import InvalidRequestError

__all__ = [
    "ARGUMENTS",
    "CHARACTERS",
    "CLASSES",
    "TAG",
    "arguments_of",
    "core_request",
    "foreseen_request",
    "slo_arguments",
    "slo_of",
    "tenant_of",
]

# seconds on the wire are milliseconds, as in ``slo`` of a body
_TARGETS: Final = {
    "ttft_ms": "ttft", "tpot_ms": "tpot", "itl_ms": "itl", "deadline_ms": "deadline",
    "queue_ttl_ms": "queue_ttl",
}  # fmt: skip
# of a tenant's name, as in our own server's header
_MOST_CHARACTERS: Final = 128
# of our own server; the middleware resolves their targets
CLASSES: Final = ("interactive", "standard", "batch")
# the name under which the middleware asks for the request's fate
TAG: Final = "paceline_tag"
# the name under which it says how many characters the prompt has
CHARACTERS: Final = "paceline_characters"
# names of ours among the extra arguments; all others are other people's
ARGUMENTS: Final = (*_TARGETS, "slo_class", "best_effort", "tenant", TAG, CHARACTERS)


def slo_arguments(slo: Slo, tenant: str = "") -> dict[str, str | float | int]:
    """Return targets as ``vllm_xargs``, which take strings and numbers alone."""
    found: dict[str, str | float | int] = {}
    for argument, field in _TARGETS.items():
        seconds = getattr(slo, field)
        if seconds is not None:
            found[argument] = round(1e3 * seconds, 6)
    if slo.best_effort:
        found["best_effort"] = 1
    if slo.slo_class != NO_SLO.slo_class:
        found["slo_class"] = slo.slo_class
    if tenant:
        found["tenant"] = tenant
    return found


def slo_of(arguments: Mapping[str, Any]) -> Slo:
    """Return the targets in extra arguments. Raises InvalidRequestError, which names the field."""
    fields: dict[str, Any] = {}
    for argument, field in _TARGETS.items():
        value = arguments.get(argument)
        if value is not None:
            # Slo refuses numbers that are not positive
            fields[field] = _number(argument, value) / 1e3
    if "best_effort" in arguments:
        fields["best_effort"] = _number("best_effort", arguments["best_effort"]) != 0
    if "slo_class" in arguments:
        # it becomes a label of metrics, so callers must not invent any
        name = fields["slo_class"] = _name("slo_class", arguments["slo_class"])
        if name not in CLASSES:
            why = f"vllm_xargs.slo_class must be one of {', '.join(CLASSES)}, got {name!r}"
            raise InvalidRequestError(why, "slo_class")
    return Slo(**fields) if fields else NO_SLO


def tenant_of(arguments: Mapping[str, Any]) -> str:
    """Return the tenant in extra arguments; "" without one. Raises InvalidRequestError."""
    name = _name("tenant", arguments.get("tenant", ""))
    if len(name) > _MOST_CHARACTERS:
        why = f"may have {_MOST_CHARACTERS} characters, got {len(name)}"
        raise InvalidRequestError(f"vllm_xargs.tenant {why}", "tenant")
    return name


def arguments_of(theirs: Any) -> Mapping[str, Any]:
    """Return the extra arguments of one of vLLM's requests."""
    return getattr(theirs.sampling_params, "extra_args", None) or {}


def core_request(theirs: Any, max_model_len: int, arrival: float, now: float) -> Request:
    """Return the core's request for one of vLLM's; the times are of the core's clock. One that has
    output, as another core served it before a fault, goes on behind that.

    The core gets no stop tokens: vLLM says who has ended. Raises InvalidRequestError.
    """
    arguments = arguments_of(theirs)
    tokens = theirs.prompt_token_ids
    output = tuple(theirs.output_token_ids)
    if tokens is None:
        # given as vectors; only the number matters here
        tokens = [0] * theirs.num_prompt_tokens
    return Request(
        RequestSpec(
            request_id=theirs.request_id,
            prompt_token_ids=tokens,
            sampling=SamplingParams(
                max_tokens=max(1, min(theirs.max_tokens, max_model_len - theirs.num_prompt_tokens))
            ),
            arrival_time=arrival,
            priority=theirs.priority,
            adapter=_adapter(theirs),
            resumed=ResumedOutput(output, now, now) if output else None,
            slo=slo_of(arguments),
            tenant=tenant_of(arguments),
        )
    )


def foreseen_request(
    asked: Mapping[str, Any], tokens_per_character: float, max_model_len: int, now: float
) -> Request:
    """Return a request like the one that ``foresight`` asks about, cut to what the model takes.
    Raises InvalidRequestError."""
    guess = round(asked["tokens"] + tokens_per_character * asked["characters"])
    num_prompt = max(1, min(guess, max_model_len - 1))
    num_output = max(1, min(asked["max_tokens"] or max_model_len, max_model_len - num_prompt))
    return Request(
        RequestSpec(
            request_id="",
            prompt_token_ids=[0] * num_prompt,
            sampling=SamplingParams(max_tokens=num_output),
            arrival_time=now,
            priority=asked["priority"],
            num_forks=asked["num_choices"] - 1,
            slo=slo_of(asked["arguments"]),
            tenant=tenant_of(asked["arguments"]),
        )
    )


def _adapter(theirs: Any) -> AdapterUse | None:
    """Return a request's adapter, of which only counts matter: vLLM holds it, and learned step
    times have its work."""
    if theirs.lora_request is None:
        return None
    number: int = theirs.lora_request.lora_int_id
    key = number.to_bytes(32, "little")
    return AdapterUse(key=key, slot=number, scale=1.0, num_bytes=0, num_products=0)


def _number(name: str, value: Any) -> float:
    if type(value) not in (int, float):
        raise InvalidRequestError(f"vllm_xargs.{name} must be a number, got {value!r}", name)
    try:
        return float(value)
    except OverflowError:
        raise InvalidRequestError(f"vllm_xargs.{name} is too large a number", name) from None


def _name(name: str, value: Any) -> str:
    if type(value) is not str:
        raise InvalidRequestError(f"vllm_xargs.{name} must be a string, got {value!r}", name)
    return value
