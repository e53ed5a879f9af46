"""Forecast for a request that has no tokens yet, which the middleware asks of the engine: whether
it would be refused now, and when its first token is predicted.

A refusal before vLLM's tokenizer and queue costs neither of them anything. The engine answers from
the state that its own door decides by. The number of tokens is estimated there, by characters; so a
request is refused here only where it would be whether or not its prompt is cached. The door in the
engine decides again, exactly.

This module does not import vLLM.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, NamedTuple

from paceline.errors import QueueFullError
from paceline.vllm.channel import ask
from paceline.vllm.requests import ARGUMENTS

__all__ = ["Size", "best_forecast", "early_refusal", "question", "size_of"]

# seconds after which a request goes on to the engine's own door
_PATIENCE: Final = 0.5
# more tokens than any model takes, and the highest priority that is told
_MOST: Final = 2**31
# fields of the four routes with text that becomes part of a prompt, and with the most tokens
_TEXTS: Final = ("prompt", "messages", "system", "input", "instructions", "tools")
_LIMITS: Final = ("max_completion_tokens", "max_output_tokens", "max_tokens")


class Size(NamedTuple):
    """Size of a body's prompts."""

    # of text, and tokens that are given by number
    characters: int
    tokens: int
    num_prompts: int


def size_of(body: Mapping[str, Any]) -> Size:
    """Return the size of a body's prompts. Names of JSON count for the template's own tokens; data
    of images and sounds does not count."""
    prompt = body.get("prompt")
    # a list of numbers is one prompt
    prompts = [each for each in prompt if type(each) is not int] if type(prompt) is list else []
    num_prompts = max(1, len(prompts))
    characters, tokens = 0, body.get("prompt_tokens")
    tokens = max(0, min(tokens, _MOST)) if type(tokens) is int else 0
    left: list[Any] = [body.get(name) for name in _TEXTS]
    while left:
        value = left.pop()
        if isinstance(value, str):
            characters += 0 if value.startswith("data:") else len(value)
        elif isinstance(value, list):
            if value and type(value[0]) is int:
                # tokens, of which there may be very many
                tokens += len(value)
            else:
                left += value
        elif isinstance(value, dict):
            left += value
            left += value.values()
    return Size(characters, tokens, num_prompts)


def question(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the engine must know of a body that was made for vLLM."""
    characters, tokens, num_prompts = size_of(body)
    numbers = [value for name in _LIMITS if type(value := body.get(name)) is int and value > 0]
    priority, num_choices = body.get("priority"), body.get("n")
    return {
        "characters": characters // num_prompts,
        "tokens": tokens // num_prompts,
        "max_tokens": numbers[0] if numbers else None,
        "priority": max(-_MOST, min(priority, _MOST)) if type(priority) is int else 0,
        "num_choices": max(1, num_choices if type(num_choices) is int else 1) * num_prompts,
        "arguments": {k: v for k, v in body["vllm_xargs"].items() if k in ARGUMENTS},
    }


async def early_refusal(
    asked: Mapping[str, Any], has_key: Callable[[], Awaitable[bool]]
) -> QueueFullError | None:
    """Return why all engines would refuse a request; None if it must be passed on. Its caller is
    told: the refusal counts at one engine. ``has_key`` is called before that."""
    told = await ask({"foresee": asked}, _PATIENCE)
    if not told or any(each["refusal"] is None for each in told) or not await has_key():
        return None
    soonest = min(told, key=lambda each: each["refusal"]["retry_after"])
    for each in await ask({"foresee": asked, "counts": soonest["engine"]}, _PATIENCE):
        if (refusal := each["refusal"]) is not None:
            return QueueFullError(refusal["message"], refusal["retry_after"], refusal["reason"])
    return None


async def best_forecast(asked: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the forecast of the engine that would answer first; None without an engine. Nothing is
    queued or counted."""
    told = await ask({"foresee": asked}, _PATIENCE)

    def place(each: Mapping[str, Any]) -> tuple[bool, float]:
        return each["refusal"] is not None, each["predicted_ttft"] or 0.0

    return min(told, key=place, default=None)
