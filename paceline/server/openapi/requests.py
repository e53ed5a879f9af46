"""What each endpoint takes, as JSON schemas with the bounds of this server.

Fields that are refused are left out (docs/api.md names them); a null is as good as leaving a field
out. What one field says about another (``min_tokens`` and ``max_tokens``) a schema does not tell.
"""

from __future__ import annotations

from typing import Final

from paceline.core.sampling_params import MAX_LOGPROBS
from paceline.server.bodies.body import schema_of
from paceline.server.bodies.generation import ChatBody, CompletionBody, TemplateBody
from paceline.server.bodies.kinds import INT32, token_schema
from paceline.server.bodies.messages import message_schemas
from paceline.server.bodies.rules import RequestRules
from paceline.server.bodies.schemas import (
    ANYTHING,
    BOOLEAN,
    INTEGER,
    OBJECT,
    STRING,
    Schema,
    array,
    bounded,
    closed,
    integer,
    nullable,
    number,
    record,
    string,
)
from paceline.server.bodies.structured import StructuredOutputs, format_schema
from paceline.server.bodies.targets import slo_schema
from paceline.server.bodies.tokenizing import (
    DetokenizeBody,
    TokenizeMessagesBody,
    TokenizePromptBody,
)
from paceline.server.bodies.tool_calls import tool_schema
from paceline.server.other_apis.anthropic import CountTokensBody, MessagesBody
from paceline.server.other_apis.llama_info import ContentBody
from paceline.server.other_apis.llama_request import NO_EFFECT as LLAMA_NO_EFFECT
from paceline.server.other_apis.llama_request import OF_UNSERVED as LLAMA_OF_UNSERVED
from paceline.server.other_apis.ollama_request import (
    OllamaChatBody,
    OllamaGenerateBody,
    ShowBody,
)
from paceline.server.other_apis.responses_request import ResponsesBody
from paceline.server.other_apis.token_generate import BESIDE, NOT_SAMPLING
from paceline.server.pooling.bodies import (
    ClassifyBody,
    EmbeddingsBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
)

__all__ = ["EXAMPLES", "request_schemas", "shared_schemas"]

_ASKED: Final = [{"role": "user", "content": "What is the capital of France?"}]
# a body that is served, by path
EXAMPLES: Final[dict[str, Schema]] = {
    "/v1/chat/completions": {"messages": _ASKED, "max_tokens": 16, "temperature": 0},
    "/v1/completions": {"prompt": "One, two,", "max_tokens": 8},
    "/v1/responses": {"input": "What is the capital of France?", "max_output_tokens": 16},
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

_IGNORED: Final = bounded(ANYTHING, "accepted, without effect")


def shared_schemas(rules: RequestRules) -> dict[str, Schema]:
    """What several requests hold."""
    return {
        **message_schemas(),
        "Slo": slo_schema(rules.slo_classes),
        "Tool": tool_schema(),
        "ResponseFormat": format_schema(),
        "StructuredOutputs": closed(schema_of(StructuredOutputs, rules)),
    }


def request_schemas(rules: RequestRules) -> dict[str, Schema]:
    """By path."""
    chat, completion = schema_of(ChatBody, rules), schema_of(CompletionBody, rules)
    llama = _llama(rules, completion["properties"])
    ids = token_schema(rules)
    sampling = {
        name: schema
        for name, schema in completion["properties"].items()
        if name not in {*BESIDE, *NOT_SAMPLING}
    }
    return {
        "/v1/chat/completions": chat,
        "/invocations": {"anyOf": [chat, completion]},
        "/v1/completions": completion,
        "/v1/responses": schema_of(ResponsesBody, rules),
        "/v1/responses/input_tokens": schema_of(ResponsesBody, rules),
        "/v1/messages": schema_of(MessagesBody, rules),
        "/api/chat": schema_of(OllamaChatBody, rules),
        "/api/generate": schema_of(OllamaGenerateBody, rules),
        "/api/show": schema_of(ShowBody, rules),
        "/v1/messages/count_tokens": schema_of(CountTokensBody, rules),
        "/inference/v1/generate": closed(
            record(
                {"token_ids": array(ids, 1)},
                {name: completion["properties"][name] for name in BESIDE}
                | {"sampling_params": nullable(record({}, sampling))},
            )
        ),
        "/v1/embeddings": schema_of(EmbeddingsBody, rules),
        "/pooling": schema_of(PoolingBody, rules),
        "/classify": schema_of(ClassifyBody, rules),
        **dict.fromkeys(("/score", "/v1/score"), schema_of(ScoreBody, rules)),
        **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), schema_of(RerankBody, rules)),
        "/completion": llama,
        "/completions": llama,
        "/infill": record(
            {"input_prefix": STRING, "input_suffix": STRING},
            {name: schema for name, schema in llama["properties"].items() if name != "prompt"}
            | {"input_extra": nullable(array(record({"text": STRING}, {"filename": STRING})))},
        ),
        "/apply-template": schema_of(TemplateBody, rules),
        "/tokenize": {
            "anyOf": [
                schema_of(body, rules)
                for body in (ContentBody, TokenizePromptBody, TokenizeMessagesBody)
            ]
        },
        "/detokenize": schema_of(DetokenizeBody, rules),
    }


_LLAMA_SAME: Final = (
    "model", "n", "stream", "temperature", "top_k", "top_p", "min_p", "presence_penalty",
    "frequency_penalty", "ignore_eos", "priority", "cache_salt", "slo",
)  # fmt: skip


def _llama(rules: RequestRules, completion: dict[str, Schema]) -> Schema:
    part = {"anyOf": [STRING, token_schema(rules)]}
    prompt = {"anyOf": [STRING, array(part), record({"prompt_string": STRING})]}
    limit = bounded(integer(-2, INT32), "below 0: as many as there is place for")
    pair: Schema = {"type": "array", "minItems": 2, "maxItems": 2}
    texts = {"anyOf": [string(high=1024), array(string(high=1024), 0, 64)]}
    fields: dict[str, Schema] = {
        "max_tokens": bounded({}, "n_predict, where that is not given"),
        "n_predict": limit,
        "n_cmpl": integer(1, rules.max_choices),
        "seed": bounded(INTEGER, "-1: a random one"),
        "stop": texts,
        "repeat_penalty": number(0, 100, above=True),
        "repeat_last_n": bounded(
            integer(-1, INT32), "0: no penalties; others than -1 look at the whole context too"
        ),
        "logit_bias": {"anyOf": [OBJECT, array(pair)]},
        "n_probs": integer(0, MAX_LOGPROBS),
        "samplers": bounded(
            {"type": ["array", "string", "null"]}, "those that are done, in the order that is"
        ),
        "json_schema": bounded({"type": ["object", "string", "boolean"]}, "a schema or its text"),
        "grammar": STRING,
        "cache_prompt": BOOLEAN,
        "return_tokens": BOOLEAN,
        "timings_per_token": BOOLEAN,
        "t_max_predict_ms": integer(-1, INT32),
        "response_fields": array(string(low=1, high=256), 0, 64),
    }
    ignored = dict.fromkeys((*LLAMA_NO_EFFECT, *LLAMA_OF_UNSERVED), _IGNORED)
    return record(
        {"prompt": {"anyOf": [prompt, array(prompt, 1, rules.max_prompts)]}},
        {name: completion[name] for name in _LLAMA_SAME}
        | {name: nullable(schema) for name, schema in fields.items()}
        | ignored,
    )
