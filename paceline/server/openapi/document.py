"""The document of an app: FastAPI's list of routes, completed with data that FastAPI lacks.

Bodies are parsed by hand (``protocol/requests.py``), so that errors use the API's own terms; so
their schemas are written down too, with the bounds of this server, and tests compare them with the
parsers and with answers. Refused fields are left out (docs/use/api.md names them); null counts as
absent. The schemas do not express relations between fields (``min_tokens`` and ``max_tokens``).

Every route gets the statuses of its kind: a route of another module only has to name its own answer
(``responses=`` of ``add_api_route``), which is kept.
"""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from paceline.http.keys import ADMIN_PATHS, OPEN_PATHS
from paceline.server.apis.anthropic import CountTokensBody, MessagesBody
from paceline.server.apis.info import DetokenizeBody, TokenizeMessagesBody, TokenizePromptBody
from paceline.server.apis.llama_cpp.info import ContentBody, InfillBody
from paceline.server.apis.llama_cpp.protocol import LlamaBody
from paceline.server.apis.ollama.protocol import LINES, OllamaChatBody, OllamaGenerateBody, ShowBody
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
from paceline.server.openapi.answers import ANSWERS, Answer, answer_schemas
from paceline.server.protocol.body import Body, schema_of
from paceline.server.protocol.generation import ChatBody, CompletionBody, TemplateBody
from paceline.server.protocol.messages import message_schemas
from paceline.server.protocol.rules import RequestRules
from paceline.server.protocol.schemas import STRING, Schema, closed, record, ref
from paceline.server.protocol.structured import StructuredOutputs, format_schema
from paceline.server.protocol.targets import slo_schema
from paceline.server.protocol.tool_calls import tool_schema

__all__ = ["BODIES", "EXAMPLES", "openapi_document", "request_schemas", "shared_schemas"]

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


_SECURITY: Final = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
_DESCRIPTIONS: Final = {
    "400": "the request is at fault; the message says where, param names the field",
    "401": "no key that is known",
    "403": "a key whose scope does not reach, or a web page of another origin",
    "404": "no such model, or nothing stored by that name",
    "408": "the request did not arrive in time; the connection is closed",
    "409": "it is not in a state for that",
    "413": "the body is too long",
    "421": "Host is none of the names that the server was started to answer to",
    "429": "more than can be served now",
    "431": "the head of the request is too long or has too many lines; the connection is closed",
    "500": "the server failed on this request",
    "501": "the server was started without a place for files and batches",
    "503": "shutting down, the engine is gone, or no connection is left",
    "507": "no room for more files",
}
_RETRY: Final = frozenset({"429", "503"})
# by (method, path) of an answer with an id: the id's name in other paths, and their operations
_LINKS: Final = {
    ("post", "/v1/responses"): (
        "response_id",
        (
            ("get", "/v1/responses/{response_id}"),
            ("post", "/v1/responses/{response_id}/cancel"),
            ("delete", "/v1/responses/{response_id}"),
        ),
    ),
    ("post", "/v1/files"): (
        "file_id",
        (
            ("get", "/v1/files/{file_id}"),
            ("get", "/v1/files/{file_id}/content"),
            ("delete", "/v1/files/{file_id}"),
        ),
    ),
    ("post", "/v1/batches"): (
        "batch_id",
        (
            ("get", "/v1/batches/{batch_id}"),
            ("post", "/v1/batches/{batch_id}/cancel"),
        ),
    ),
}
# sent before a request and its path are known (``http/connections.py``)
_OF_THE_CONNECTION: Final = frozenset({"408", "431"})


def openapi_document(app: FastAPI, rules: RequestRules) -> dict[str, Any]:
    """Return the document, with the models and bounds of ``rules``."""
    document = get_openapi(
        title=app.title,
        version=app.version,
        description="The APIs of OpenAI, Anthropic, Ollama and llama-server, with vLLM's "
        "extensions; see docs/use/api.md.",
        routes=app.routes,
    )
    requests = request_schemas(rules)
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            _describe(operation, method.upper(), path, requests.get(path))
    _link(document["paths"])
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    schemas |= shared_schemas(rules) | answer_schemas()
    components["securitySchemes"] = _SECURITY
    return document


def _link(paths: dict[str, Any]) -> None:
    """Link ids in answers to the operations that use them."""

    def link(method: str, path: str, **fills: Any) -> dict[str, Any]:
        return {"operationId": paths[path][method]["operationId"], **fills}

    for (method, path), (name, targets) in _LINKS.items():
        paths[path][method]["responses"]["200"]["links"] = {
            paths[target][verb]["operationId"]: link(
                verb, target, parameters={name: "$response.body#/id"}
            )
            for verb, target in targets
        }
    # schemathesis's form of a link, and useful to it: in OpenAPI an expression is a whole body or
    # no part of it, so other programs take this one for a literal
    body = {
        "input_file_id": "$response.body#/id",
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    links = paths["/v1/files"]["post"]["responses"]["200"]["links"]
    links["batch"] = link("post", "/v1/batches", requestBody=body)


def _describe(operation: dict[str, Any], method: str, path: str, body: Schema | None) -> None:
    if body is not None and method == "POST":
        content: dict[str, Any] = {"schema": body}
        if path in EXAMPLES:
            content["example"] = EXAMPLES[path]
        operation["requestBody"] = {"required": True, "content": {"application/json": content}}
    answer = ANSWERS.get((method, path))
    responses = operation["responses"]
    if answer is not None:
        responses["200"] = {"description": answer.description, "content": _content(answer)}
    _add_parameters(operation, path)
    error = "Error" if answer is None else answer.error
    for status in _statuses(operation, method, path):
        shapes = {"Error"} if status in _OF_THE_CONNECTION else {error}
        if status == "503":
            # either the server's error or the connection's
            shapes.add("Error")
        responses.setdefault(status, _failure(status, sorted(shapes)))
    for response in responses.values():
        response.setdefault("headers", {}).setdefault(
            "X-Request-Id", {"schema": STRING, "required": True}
        )
    if path not in OPEN_PATHS:
        # empty alternative: the server has no keys
        operation.setdefault("security", [{}, *({name: []} for name in _SECURITY)])


def _content(answer: Answer) -> dict[str, Any]:
    content: dict[str, Any] = {answer.media_type: {"schema": answer.schema}}
    if answer.events is not None and answer.streams_lines:
        content[LINES] = {"schema": answer.events}
    elif answer.events is not None:
        # the schema of each event, as in OpenAPI 3.2; OpenAI's streams end with [DONE]
        event = STRING | {"contentMediaType": "application/json", "contentSchema": answer.events}
        data = {"anyOf": [{"const": "[DONE]"}, event]} if answer.ends_with_done else event
        content["text/event-stream"] = {"schema": record({"data": data}, {"event": STRING})}
    return content


def _add_parameters(operation: dict[str, Any], path: str) -> None:
    """Add names in the path, which the handlers read themselves."""
    known = {parameter["name"] for parameter in operation.get("parameters", ())}
    for part in path.split("/"):
        name = part.strip("{}").partition(":")[0]
        if part.startswith("{") and name not in known:
            operation.setdefault("parameters", []).append(
                {"name": name, "in": "path", "required": True, "schema": {**STRING, "minLength": 1}}
            )


def _statuses(operation: dict[str, Any], method: str, path: str) -> list[str]:
    """Return the statuses of failed requests."""
    found = [*_OF_THE_CONNECTION, "500", "503"]
    if path not in OPEN_PATHS:
        found += ["401", "421"]
    if path in ADMIN_PATHS or (method != "GET" and path not in OPEN_PATHS):
        found.append("403")
    if method == "POST" and path not in OPEN_PATHS:
        # a key's rate limit
        found.append("429")
    if "{" in path or path in ("/v1/files", "/v1/batches"):
        # in lists, ``after`` may name no item
        found.append("404")
    if path == "/tokenizer_info":
        # sent unless a flag is set
        found.append("404")
    if path.startswith(("/v1/files", "/v1/batches")):
        found += ["400", "409", "501"]
        if method == "POST":
            found.append("507")
    if "requestBody" in operation:
        found += ["400", "404", "413", "429"]
    return sorted(set(found))


def _failure(status: str, shapes: list[str]) -> dict[str, Any]:
    schemas = [ref(shape) for shape in shapes]
    found: dict[str, Any] = {
        "description": _DESCRIPTIONS[status],
        "content": {
            "application/json": {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}
        },
    }
    if status in _RETRY:
        seconds = {"schema": STRING, "description": "seconds"}
        found["headers"] = {"Retry-After": seconds}
    return found
