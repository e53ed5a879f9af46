"""JSON schemas of all requests, with the bounds of this server.

Refused fields are left out (docs/use/api.md names them); null counts as absent. The schemas do not
express relations between fields (``min_tokens`` and ``max_tokens``).
"""

from __future__ import annotations

from typing import Final

from paceline.server.apis.anthropic import CountTokensBody, MessagesBody
from paceline.server.apis.llama_cpp.info import ContentBody, InfillBody
from paceline.server.apis.llama_cpp.protocol import LlamaBody
from paceline.server.apis.ollama.protocol import OllamaChatBody, OllamaGenerateBody, ShowBody
from paceline.server.apis.pooling.ollama import OllamaEmbedBody, OllamaEmbeddingsBody
from paceline.server.apis.pooling.protocol import (
    ClassifyBody,
    EmbeddingsBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
)
from paceline.server.apis.responses.protocol import ResponsesBody
from paceline.server.apis.token_ids import TokenGenerateBody
from paceline.server.protocol.body import Body, schema_of
from paceline.server.protocol.generation import ChatBody, CompletionBody, TemplateBody
from paceline.server.protocol.messages import message_schemas
from paceline.server.protocol.rules import RequestRules
from paceline.server.protocol.schemas import Schema, closed
from paceline.server.protocol.structured import StructuredOutputs, format_schema
from paceline.server.protocol.targets import slo_schema
from paceline.server.protocol.tokenizing import (
    DetokenizeBody,
    TokenizeMessagesBody,
    TokenizePromptBody,
)
from paceline.server.protocol.tool_calls import tool_schema

__all__ = ["BODIES", "EXAMPLES", "request_schemas", "shared_schemas"]

_ASKED: Final = [{"role": "user", "content": "Name the capital of France."}]
# a valid body, by path
EXAMPLES: Final[dict[str, Schema]] = {
    "/v1/chat/completions": {"messages": _ASKED, "max_tokens": 16, "temperature": 0},
    "/v1/completions": {"prompt": "One, two,", "max_tokens": 8},
    "/v1/responses": {"input": "Name the capital of France.", "max_output_tokens": 16},
    "/v1/messages": {"messages": _ASKED, "max_tokens": 16},
    "/v1/messages/count_tokens": {"messages": _ASKED},
    "/inference/v1/generate": {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4}},
    "/api/chat": {"messages": _ASKED, "stream": False, "options": {"num_predict": 16}},
    "/api/generate": {"prompt": "One, two,", "stream": False, "options": {"num_predict": 8}},
    "/completion": {"prompt": "One, two,", "n_predict": 8},
    "/completions": {"prompt": ["One, two,", [1, 2, 3]], "n_predict": 8},
    "/apply-template": {"messages": _ASKED},
    "/tokenize": {"prompt": "One, two,"},
    "/detokenize": {"tokens": [1, 2, 3]},
}

# bodies by path; several are alternatives
BODIES: Final[dict[str, tuple[type[Body], ...]]] = {
    "/v1/chat/completions": (ChatBody,),
    "/v1/completions": (CompletionBody,),
    "/invocations": (ChatBody, CompletionBody),
    "/v1/responses": (ResponsesBody,),
    "/v1/responses/input_tokens": (ResponsesBody,),
    "/v1/messages": (MessagesBody,),
    "/v1/messages/count_tokens": (CountTokensBody,),
    "/inference/v1/generate": (TokenGenerateBody,),
    "/api/chat": (OllamaChatBody,),
    "/api/generate": (OllamaGenerateBody,),
    "/api/show": (ShowBody,),
    "/completion": (LlamaBody,),
    "/completions": (LlamaBody,),
    "/infill": (InfillBody,),
    "/apply-template": (TemplateBody,),
    "/tokenize": (ContentBody, TokenizePromptBody, TokenizeMessagesBody),
    "/detokenize": (DetokenizeBody,),
    "/v1/embeddings": (EmbeddingsBody,),
    "/pooling": (PoolingBody,),
    "/api/embed": (OllamaEmbedBody,),
    "/api/embeddings": (OllamaEmbeddingsBody,),
    "/classify": (ClassifyBody,),
    "/score": (ScoreBody,),
    "/v1/score": (ScoreBody,),
    "/rerank": (RerankBody,),
    "/v1/rerank": (RerankBody,),
    "/v2/rerank": (RerankBody,),
}


def shared_schemas(rules: RequestRules) -> dict[str, Schema]:
    """Return schemas that several requests refer to."""
    return {
        **message_schemas(),
        "Slo": slo_schema(rules.slo_classes),
        "Tool": tool_schema(),
        "ResponseFormat": format_schema(),
        "StructuredOutputs": closed(schema_of(StructuredOutputs, rules)),
    }


def request_schemas(rules: RequestRules) -> dict[str, Schema]:
    """Return the schemas by path."""
    schemas: dict[str, Schema] = {}
    for path, bodies in BODIES.items():
        found = [schema_of(body, rules) for body in bodies]
        schemas[path] = found[0] if len(found) == 1 else {"anyOf": found}
    infill = schemas["/infill"]
    infill["properties"] = schemas["/completion"]["properties"] | infill["properties"]
    return schemas
