"""What the endpoints that give vectors take, as JSON schemas."""

from __future__ import annotations

from paceline.server.bodies.sampling_fields import INT32, INT64
from paceline.server.openapi.schemas import (
    ANYTHING,
    BOOLEAN,
    STRING,
    Schema,
    array,
    integer,
    nullable,
    record,
    string,
)

__all__ = ["vector_schemas"]


def vector_schemas(
    model: Schema, token_ids: Schema, slo: Schema, service_tier: Schema, most: int
) -> dict[str, Schema]:
    """By path. ``most``: inputs of one request."""
    shared = {
        "model": model,
        "truncate_prompt_tokens": nullable(integer(-1, INT32)),
        "add_special_tokens": nullable(BOOLEAN),
        "priority": nullable(integer(-INT64, INT64 - 1)),
        "cache_salt": nullable(string(low=1, high=1024)),
        "slo": slo,
        "service_tier": service_tier,
        "user": ANYTHING,
        "safety_identifier": ANYTHING,
        "request_id": ANYTHING,
    }
    activation = {
        name: nullable(BOOLEAN) for name in ("use_activation", "normalize", "activation", "softmax")
    }
    some = string(low=1)
    inputs: Schema = {
        "anyOf": [
            some,
            array(some, 1, most),
            array(token_ids, 1),
            array(array(token_ids, 1), 1, most),
        ]
    }
    numbers = {
        "dimensions": nullable(integer(1, INT32)),
        "encoding_format": nullable(string("float", "base64")),
        "embed_dtype": nullable(string("float32")),
        "endianness": nullable(string("native", "little")),
        "prompt_name": nullable(STRING),
    }
    document: Schema = {"anyOf": [some, record({"text": some})]}
    documents: Schema = {"anyOf": [document, array(document, 1, most)]}
    scored = {
        "max_tokens_per_doc": nullable(integer(1, INT32)),
        "instruction": nullable(STRING),
    }
    embeddings = record({"input": inputs}, shared | activation | numbers)
    score = record(
        {},
        shared | activation | scored
        | dict.fromkeys(("text_1", "queries", "data_1"), nullable(documents))
        | dict.fromkeys(("text_2", "documents", "data_2"), nullable(documents)),
    )  # fmt: skip
    rerank = record(
        {"query": some, "documents": documents},
        shared | activation | scored
        | {"top_n": nullable(integer(0, INT32)), "return_documents": nullable(BOOLEAN)},
    )  # fmt: skip
    return {
        "/v1/embeddings": embeddings,
        "/pooling": record(
            {"input": inputs}, shared | activation | numbers | {"task": nullable(STRING)}
        ),
        "/classify": record({"input": inputs}, shared | activation),
        **dict.fromkeys(("/score", "/v1/score"), score),
        **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), rerank),
    }
