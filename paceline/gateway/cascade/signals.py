"""Signals that cost a request of their own: further answers of the small model, and the embedding
of the prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace as with_fields
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from paceline.errors import RequestError
from paceline.gateway.cascade.answer import without_logprobs
from paceline.gateway.cascade.asked import Asked, Relaying, Usage, without_fallback
from paceline.gateway.cascade.gate import WholeGate, behind
from paceline.gateway.cascade.prompt import Prompt
from paceline.gateway.requests.body import Body, read_body
from paceline.gateway.requests.prompt_size import measure
from paceline.http.errors import HttpError

__all__ = ["embedded", "embedding_of", "request_of_embedding", "sample_fields", "sampled"]

_EMBEDDINGS: Final = "/v1/embeddings"
# further answers are drawn, so that they can differ
_TEMPERATURE: Final = 0.7
# characters of a prompt that are embedded: its end, where the question stands
_MOST_CHARS: Final = 2000


class _Vector(msgspec.Struct):
    embedding: list[float]


class _Vectors(msgspec.Struct):
    data: list[_Vector]


def sample_fields(samples: int) -> dict[str, Any]:
    """Return the fields that ask for further answers to a chat."""
    return {"n": samples, "temperature": _TEMPERATURE}


def sampled(body: Body, samples: int) -> Body:
    """Return a chat's request for further answers, all of one prompt."""
    plain = without_logprobs(body, stream=False)
    told = {name: msgspec.json.encode(value) for name, value in sample_fields(samples).items()}
    dropped = ("logprobs", "top_logprobs", "prompt_logprobs", "seed", "best_of")
    kept = {name: value for name, value in plain.fields.items() if name not in dropped}
    return replace(plain, fields={**kept, **told}, n=samples, best_of=1, seed=None)


def request_of_embedding(text: str, model: str) -> Mapping[str, str]:
    """Return the body of a request for the embedding of a prompt."""
    return {"model": model, "input": text[-_MOST_CHARS:] or " "}


def embedding_of(data: bytes) -> list[float]:
    """Return the vector of an answer, scaled to length 1; empty: there is none."""
    try:
        found = msgspec.json.decode(data, type=_Vectors).data
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return []
    vector = found[0].embedding if len(found) == 1 else []
    length = sum(value * value for value in vector) ** 0.5
    return [value / length for value in vector] if length else []


async def embedded(
    gateway: Relaying, asked: Asked, prompt: Prompt, model: str
) -> tuple[Prompt, Usage]:
    """Return a prompt with its embedding by a model of the file, and what that used. Without an
    answer the prompt stays as it is."""
    body = read_body(msgspec.json.encode(request_of_embedding(prompt.text, model)))
    size = measure(body.fields)
    gate = WholeGate()
    incoming = with_fields(behind(asked.incoming, gate), path=_EMBEDDINGS, ticket=None)
    try:
        route = gateway.routes.find(model, asked.tokens, local_only=asked.route.local_only)
        route = route.serving(_EMBEDDINGS, body)
        # another model's vector says nothing here
        allowed = without_fallback(asked.allowed)
        asking = Asked(incoming, body, size, asked.tokens, route, allowed)
        usage = await gateway.relay(asking)
    except (HttpError, RequestError):
        return prompt, ()
    found = embedding_of(bytes(gate.body)) if gate.status == 200 else []
    return replace(prompt, embedding=found), usage
