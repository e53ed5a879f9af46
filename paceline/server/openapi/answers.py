"""JSON schemas of all answers; those of typed answers are made from their types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgspec

from paceline.server.apis.pooling.responses import (
    ClassAnswer,
    EmbeddingAnswer,
    PoolingAnswer,
    RerankAnswer,
    ScoreAnswer,
)
from paceline.server.apis.token_ids import TokenAnswer
from paceline.server.protocol.responses import (
    ChatAnswer,
    ChatChunk,
    CompletionAnswer,
    CompletionChunk,
    Timings,
)
from paceline.server.protocol.schemas import (
    BOOLEAN,
    INTEGER,
    NULL,
    OBJECT,
    STRING,
    Schema,
    array,
    integer,
    record,
    ref,
    string,
)

__all__ = ["ANSWERS", "Answer", "answer_schemas"]

_MAYBE_INTEGER: Final[Schema] = {"type": ["integer", "null"]}
_BATCH_STATUSES: Final = (
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling",
    "cancelled",
)  # fmt: skip
_TYPED: Final = (
    ChatAnswer, ChatChunk, CompletionAnswer, CompletionChunk, TokenAnswer, Timings,
    EmbeddingAnswer, PoolingAnswer, ClassAnswer, ScoreAnswer, RerankAnswer,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer with status 200."""

    description: str
    schema: Schema
    # schema of each event's data if the request asks for a stream; None: never streamed
    events: Schema | None = None
    # the stream ends with "data: [DONE]"
    ends_with_done: bool = True
    # the stream consists of JSON lines instead of events
    streams_lines: bool = False
    media_type: str = "application/json"
    # the format of errors
    error: str = "Error"


def answer_schemas() -> dict[str, Schema]:
    """Return the components by name."""
    _, typed = msgspec.json.schema_components(_TYPED, ref_template="#/components/schemas/{name}")
    maybe_text: Schema = {"type": ["string", "null"]}
    permission = record({"id": STRING, "object": string("model_permission"), "created": INTEGER})
    return {
        **typed,
        "Model": record(
            {
                "id": STRING,
                "object": string("model"),
                "created": INTEGER,
                "owned_by": STRING,
                "root": STRING,
                "parent": maybe_text,
                "max_model_len": integer(1, 2**31),
                "digest": STRING,
                "permission": array(permission),
                "meta": OBJECT,
            }
        ),
        "Error": record(
            {
                "error": record(
                    {"message": STRING, "type": STRING, "param": maybe_text, "code": INTEGER}
                )
            }
        ),
        "OllamaError": record({"error": STRING}),
        "LlamaError": record(
            {"error": record({"code": INTEGER, "message": STRING, "type": STRING})}
        ),
        "LlamaCompletion": record(
            {"index": INTEGER, "content": STRING, "tokens": array(INTEGER), "stop": BOOLEAN},
            {
                "stop_type": string("limit", "eos", "word"),
                "stopping_word": STRING,
                "tokens_predicted": INTEGER,
                "tokens_evaluated": INTEGER,
                "tokens_cached": INTEGER,
                "truncated": BOOLEAN,
                "timings": ref("Timings"),
                "generation_settings": OBJECT,
                "completion_probabilities": array(OBJECT),
            },
        ),
        "AnthropicError": record(
            {
                "type": string("error"),
                "error": record({"type": STRING, "message": STRING}),
                "request_id": STRING,
            }
        ),
        "Response": record(
            {
                "id": STRING,
                "object": string("response"),
                "created_at": INTEGER,
                "status": string(
                    "queued", "in_progress", "completed", "incomplete", "failed", "cancelled"
                ),
                "error": {"anyOf": [record({"code": STRING, "message": STRING}), NULL]},
                "incomplete_details": {"anyOf": [record({"reason": STRING}), NULL]},
                "model": STRING,
                "output": array(
                    record({"id": STRING, "type": string("message", "function_call")})
                ),
                "usage": {
                    "anyOf": [
                        record(
                            {
                                "input_tokens": INTEGER,
                                "output_tokens": INTEGER,
                                "total_tokens": INTEGER,
                            }
                        ),
                        NULL,
                    ]
                },
            }
        ),
        "InputItem": record(
            {
                "id": STRING,
                "type": string("message", "function_call", "function_call_output"),
                "status": string("completed"),
            }
        ),
        "ResponseEvent": record({"type": STRING, "sequence_number": INTEGER}),
        "MessagesAnswer": record(
            {
                "id": STRING,
                "type": string("message"),
                "role": string("assistant"),
                "model": STRING,
                "content": array(record({"type": string("text", "tool_use")})),
                "stop_reason": {"type": ["string", "null"]},
                "stop_sequence": maybe_text,
                "usage": record(
                    {
                        "input_tokens": INTEGER,
                        "output_tokens": INTEGER,
                        "cache_read_input_tokens": INTEGER,
                        "cache_creation_input_tokens": INTEGER,
                    }
                ),
            }
        ),
        "MessagesEvent": record(
            {
                "type": string(
                    "message_start", "ping", "content_block_start", "content_block_delta",
                    "content_block_stop", "message_delta", "message_stop",
                )
            }
        ),
        "File": record(
            {
                "id": STRING,
                "object": string("file"),
                "bytes": INTEGER,
                "created_at": INTEGER,
                "filename": STRING,
                "purpose": string("batch", "batch_output"),
                "status": string("processed"),
            }
        ),
        "Batch": record(
            {
                "id": STRING,
                "object": string("batch"),
                "endpoint": STRING,
                "errors": {
                    "anyOf": [
                        record({"object": string("list"), "data": array(ref("BatchFault"))}),
                        NULL,
                    ]
                },
                "input_file_id": STRING,
                "completion_window": STRING,
                "status": string(*_BATCH_STATUSES),
                "output_file_id": maybe_text,
                "error_file_id": maybe_text,
                "created_at": INTEGER,
                "expires_at": INTEGER,
                **{
                    f"{status}_at": _MAYBE_INTEGER
                    for status in _BATCH_STATUSES
                    if status != "validating"
                },
                "request_counts": record(
                    {"total": INTEGER, "completed": INTEGER, "failed": INTEGER}
                ),
                "metadata": {"type": ["object", "null"]},
            }
        ),
        "BatchFault": record(
            {"code": STRING, "message": STRING, "param": maybe_text, "line": _MAYBE_INTEGER}
        ),
        "Tokens": record(
            {
                "count": integer(0, 2**31),
                "max_model_len": integer(1, 2**31),
                "tokens": array(INTEGER),
                "token_strs": {"anyOf": [array(STRING), NULL]},
            }
        ),
    }  # fmt: skip


def _simple(description: str, **fields: Any) -> Answer:
    return Answer(description, record(fields))


def _page(description: str, of: str) -> Answer:
    maybe_text: Schema = {"type": ["string", "null"]}
    return _simple(
        description,
        object=string("list"),
        data=array(ref(of)),
        first_id=maybe_text,
        last_id=maybe_text,
        has_more=BOOLEAN,
    )


def _ollama(description: str, **more: Schema) -> Answer:
    """An answer, whose stream consists of lines of the same schema."""
    line = record({"model": STRING, "created_at": STRING, "done": BOOLEAN, **more})
    return Answer(description, line, line, streams_lines=True, error="OllamaError")


def _models(description: str) -> Answer:
    model = record({"name": STRING, "model": STRING, "details": OBJECT})
    return Answer(description, record({"models": array(model, 1)}), error="OllamaError")


def _llama(description: str, *schemas: Schema) -> Answer:
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}
    return Answer(description, schema, error="LlamaError")


# response_fields selects fields, so an object may lack some
_LLAMA_ANSWER: Final = Answer(
    "continuations: one, or a list of them for a list of prompts or several completions; or what "
    "response_fields names of them",
    {"anyOf": [ref("LlamaCompletion"), array(ref("LlamaCompletion")), OBJECT, array(OBJECT)]},
    {"anyOf": [ref("LlamaCompletion"), OBJECT]},
    ends_with_done=False,
    error="LlamaError",
)

# by method and path
ANSWERS: Final[dict[tuple[str, str], Answer]] = {
    ("POST", "/v1/chat/completions"): Answer("a message", ref("ChatAnswer"), ref("ChatChunk")),
    ("POST", "/invocations"): Answer(
        "as of the endpoint whose body it is",
        {"anyOf": [ref("ChatAnswer"), ref("CompletionAnswer")]},
        {"anyOf": [ref("ChatChunk"), ref("CompletionChunk")]},
    ),
    ("GET", "/tokenizer_info"): Answer("fields of its tokenizer_config.json", OBJECT),
    ("POST", "/v1/completions"): Answer(
        "continuations of the prompts", ref("CompletionAnswer"), ref("CompletionChunk")
    ),
    ("POST", "/inference/v1/generate"): Answer("token ids", ref("TokenAnswer"), ref("TokenAnswer")),
    ("POST", "/v1/responses"): Answer(
        "a response", ref("Response"), ref("ResponseEvent"), ends_with_done=False
    ),
    ("POST", "/v1/responses/input_tokens"): _simple(
        "the prompt's length", object=string("response.input_tokens"), input_tokens=INTEGER
    ),
    ("GET", "/v1/responses/{response_id}/input_items"): _page("the latest first", "InputItem"),
    ("GET", "/v1/responses/{response_id}"): Answer("a stored response", ref("Response")),
    ("DELETE", "/v1/responses/{response_id}"): _simple(
        "it is forgotten", id=STRING, object=string("response"), deleted=BOOLEAN
    ),
    ("POST", "/v1/responses/{response_id}/cancel"): Answer("as it is now", ref("Response")),
    ("POST", "/v1/messages"): Answer(
        "a message",
        ref("MessagesAnswer"),
        ref("MessagesEvent"),
        ends_with_done=False,
        error="AnthropicError",
    ),
    ("POST", "/v1/messages/count_tokens"): Answer(
        "the prompt's length", record({"input_tokens": INTEGER}), error="AnthropicError"
    ),
    ("POST", "/api/chat"): _ollama("a message", message=OBJECT),
    ("POST", "/api/generate"): _ollama("the rest of the prompt", response=STRING),
    ("POST", "/api/show"): Answer(
        "one of them",
        record({"model_info": OBJECT, "capabilities": array(STRING)}),
        error="OllamaError",
    ),
    ("GET", "/api/tags"): _models("what is served"),
    ("GET", "/api/ps"): _models("what is loaded"),
    ("GET", "/api/version"): Answer(
        "this server's", record({"version": STRING}), error="OllamaError"
    ),
    ("POST", "/completion"): _LLAMA_ANSWER,
    ("POST", "/completions"): _LLAMA_ANSWER,
    ("POST", "/infill"): _LLAMA_ANSWER,
    ("POST", "/apply-template"): _llama("the text of a conversation", record({"prompt": STRING})),
    ("GET", "/props"): _llama(
        "how the server is",
        record({"default_generation_settings": OBJECT, "total_slots": INTEGER}),
    ),
    ("GET", "/slots"): _llama(
        "requests under way, and free places",
        array(record({"id": INTEGER, "n_ctx": INTEGER, "is_processing": BOOLEAN})),
    ),
    ("GET", "/lora-adapters"): _llama(
        "the adapters, and which of them requests that name the model use",
        array(record({"id": INTEGER, "path": STRING, "scale": {"type": "number"}})),
    ),
    ("POST", "/lora-adapters"): _llama("done", record({"success": BOOLEAN})),
    ("POST", "/v1/load_lora_adapter"): Answer("a sentence that it is loaded", STRING),
    ("POST", "/v1/unload_lora_adapter"): Answer("a sentence that it is unloaded", STRING),
    ("POST", "/v1/embeddings"): Answer("a vector for each input", ref("EmbeddingAnswer")),
    ("POST", "/pooling"): Answer("a vector for each input", ref("PoolingAnswer")),
    ("POST", "/api/embed"): Answer(
        "a vector of length 1 for each input",
        record(
            {
                "model": STRING,
                "embeddings": array(array({"type": "number"})),
                "total_duration": INTEGER,
                "load_duration": INTEGER,
                "prompt_eval_count": INTEGER,
            }
        ),
        error="OllamaError",
    ),
    ("POST", "/api/embeddings"): Answer(
        "a vector", record({"embedding": array({"type": "number"})}), error="OllamaError"
    ),
    ("POST", "/classify"): Answer("classes of each input", ref("ClassAnswer")),
    **dict.fromkeys(
        (("POST", "/score"), ("POST", "/v1/score")),
        Answer("a score for each pair", ref("ScoreAnswer")),
    ),
    **dict.fromkeys(
        (("POST", "/rerank"), ("POST", "/v1/rerank"), ("POST", "/v2/rerank")),
        Answer("the documents, the best first", ref("RerankAnswer")),
    ),
    ("POST", "/v1/files"): Answer("what is kept now", ref("File")),
    ("GET", "/v1/files"): _page("what is kept", "File"),
    ("GET", "/v1/files/{file_id}"): Answer("one of them", ref("File")),
    ("DELETE", "/v1/files/{file_id}"): _simple(
        "it is forgotten", id=STRING, object=string("file"), deleted=BOOLEAN
    ),
    ("GET", "/v1/files/{file_id}/content"): Answer(
        "its bytes", STRING | {"format": "binary"}, media_type="application/octet-stream"
    ),
    ("POST", "/v1/batches"): Answer("what will be answered", ref("Batch")),
    ("GET", "/v1/batches"): _page("newest first", "Batch"),
    ("GET", "/v1/batches/{batch_id}"): Answer("as it is now", ref("Batch")),
    ("POST", "/v1/batches/{batch_id}/cancel"): Answer("as it is now", ref("Batch")),
    ("GET", "/v1/models"): _simple(
        "what is served", object=string("list"), data=array(ref("Model"), 1)
    ),
    ("GET", "/v1/models/{name}"): Answer("one of them", ref("Model")),
    ("POST", "/tokenize"): Answer(
        "ids; of content as llama-server tells them",
        {"anyOf": [ref("Tokens"), record({"tokens": {"type": "array"}})]},
    ),
    ("POST", "/detokenize"): _simple("text, under two names", prompt=STRING, content=STRING),
    ("GET", "/health"): _simple("tokens flow", status=string("ok")),
    ("GET", "/health/ready"): _simple("tokens flow", status=string("ok")),
    ("GET", "/health/live"): Answer("the server has not given up on its engine", OBJECT),
    ("GET", "/ping"): Answer("tokens flow", OBJECT),
    ("POST", "/ping"): Answer("tokens flow", OBJECT),
    ("GET", "/load"): _simple("requests under way", server_load=integer(0, 2**31)),
    ("GET", "/version"): _simple("this server's", version=STRING),
    ("GET", "/metrics"): Answer("Prometheus's text format", STRING, media_type="text/plain"),
}
