"""What each endpoint takes, as JSON schemas with the bounds of this server.

Fields that are refused are left out (docs/api.md names them); a null is as good as leaving a field
out. What one field says about another (``min_tokens`` and ``max_tokens``) a schema does not tell.
"""

from __future__ import annotations

from typing import Final

from paceline.core.sampling_params import MAX_BAD_WORDS, MAX_LOGPROBS, MAX_STOP_TOKENS
from paceline.core.speculation.settings import MOST_TOKENS
from paceline.server.bodies.rules import RequestRules
from paceline.server.bodies.sampling_fields import INT32, INT64, MAX_NAMED_LOGPROBS
from paceline.server.bodies.structured import STRUCTURED_KINDS
from paceline.server.bodies.targets import SERVICE_TIERS
from paceline.server.bodies.unserved import NO_EFFECT
from paceline.server.openapi.schemas import (
    ANYTHING,
    BOOLEAN,
    INTEGER,
    NULL,
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
    ref,
    string,
)
from paceline.server.openapi.vectors import vector_schemas
from paceline.server.other_apis.anthropic import NO_EFFECT as ANTHROPIC_NO_EFFECT
from paceline.server.other_apis.llama_request import NO_EFFECT as LLAMA_NO_EFFECT
from paceline.server.other_apis.llama_request import OF_UNSERVED as LLAMA_OF_UNSERVED
from paceline.server.other_apis.ollama_request import OPTIONS as OLLAMA_OPTIONS
from paceline.server.other_apis.ollama_request import (
    OPTIONS_NO_EFFECT as OLLAMA_OPTIONS_NO_EFFECT,
)
from paceline.server.other_apis.responses_request import NO_EFFECT as RESPONSES_NO_EFFECT
from paceline.server.other_apis.token_generate import BESIDE, NOT_SAMPLING
from paceline.server.pooling.bodies import max_inputs

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

_MAX_SLO_MS: Final = 86_400_000
_SALT: Final = string(low=1, high=1024)
_IGNORED: Final = bounded(ANYTHING, "accepted, without effect")
_SLO: Final = ref("Slo")
_TOOL_CHOICES: Final = ("none", "auto", "required")


def shared_schemas(rules: RequestRules) -> dict[str, Schema]:
    """What several requests hold."""
    targets = {
        name: nullable(number(0, _MAX_SLO_MS, above=True))
        for name in ("ttft_ms", "tpot_ms", "itl_ms", "deadline_ms", "queue_ttl_ms")
    }
    classes = string(*rules.slo_classes)
    parts = {"type": string("text", "input_text", "output_text"), "text": STRING}
    kinds: dict[str, Schema] = dict.fromkeys(STRUCTURED_KINDS, STRING)
    kinds |= {"json": {"type": ["object", "string", "boolean"]}, "json_object": BOOLEAN}
    kinds["choice"] = array(string(low=1), 1, 1024)
    return {
        "Slo": {"anyOf": [classes, closed(record({}, {"class": nullable(classes), **targets}))]},
        "TextPart": {"anyOf": [STRING, record(parts)]},
        "Message": record(
            {"role": string("system", "developer", "user", "assistant", "tool")},
            {
                "content": {"anyOf": [STRING, array(ref("TextPart")), NULL]},
                "name": nullable(STRING),
                "tool_calls": nullable(array(ref("CallMade"))),
                "tool_call_id": nullable(STRING),
                "reasoning": nullable(STRING),
            },
        ),
        "CallMade": record(
            {
                "function": record(
                    {"name": STRING},
                    {"arguments": bounded(STRING, "the JSON text of an object")},
                )
            },
            {"id": STRING, "type": string("function")},
        ),
        "Tool": record(
            {
                "function": record(
                    {"name": {"type": "string", "pattern": "^[A-Za-z0-9_.:/-]{1,128}$"}},
                    {"description": nullable(STRING), "parameters": nullable(OBJECT)},
                ),
            },
            {"type": string("function")},
        ),
        "ResponseFormat": {
            "anyOf": [
                record({"type": string("text", "json_object")}),
                record(
                    {
                        "type": string("json_schema"),
                        "json_schema": record({"schema": {"type": ["object", "boolean"]}}),
                    }
                ),
            ]
        },
        "StructuredOutputs": closed(
            record(
                {},
                {name: nullable(schema) for name, schema in kinds.items()}
                | {"disable_any_whitespace": nullable(BOOLEAN), "disable_fallback": _IGNORED},
            )
        ),
    }


def request_schemas(rules: RequestRules) -> dict[str, Schema]:
    """By path."""
    chat, completion = _chat(rules), _completion(rules)
    messages, llama = _messages(rules), _llama(rules, completion["properties"])
    count = {key: value for key, value in messages["properties"].items() if key != "max_tokens"}
    ids = _token_ids(rules)
    switches = ("add_special_tokens", "return_token_strs")
    told = {"model": _model(rules), **dict.fromkeys(switches, nullable(BOOLEAN))}
    sampling = {
        name: schema
        for name, schema in completion["properties"].items()
        if name not in {*BESIDE, *NOT_SAMPLING}
    }
    return {
        "/v1/chat/completions": chat,
        "/invocations": {"anyOf": [chat, completion]},
        "/v1/completions": completion,
        "/v1/responses": _responses(rules),
        "/v1/responses/input_tokens": _responses(rules),
        "/v1/messages": messages,
        "/api/chat": _ollama(rules, {}, {**_OLLAMA_CHAT, "tools": chat["properties"]["tools"]}),
        "/api/generate": _ollama(
            rules,
            {},
            {"prompt": nullable(STRING), "system": nullable(STRING), "raw": nullable(BOOLEAN)},
        ),
        "/api/show": record(
            {}, {"model": nullable(_ollama_model(rules)), "verbose": nullable(BOOLEAN)}
        ),
        "/v1/messages/count_tokens": closed(record({"messages": _ANTHROPIC_MESSAGES}, count)),
        "/inference/v1/generate": closed(
            record(
                {"token_ids": array(ids, 1)},
                {name: completion["properties"][name] for name in BESIDE}
                | {"sampling_params": nullable(record({}, sampling))},
            )
        ),
        **vector_schemas(
            _model(rules),
            ids,
            completion["properties"]["slo"],
            completion["properties"]["service_tier"],
            max_inputs(rules),
        ),
        "/completion": llama,
        "/completions": llama,
        "/infill": record(
            {"input_prefix": STRING, "input_suffix": STRING},
            {name: schema for name, schema in llama["properties"].items() if name != "prompt"}
            | {"input_extra": nullable(array(record({"text": STRING}, {"filename": STRING})))},
        ),
        "/apply-template": record(
            {"messages": chat["properties"]["messages"]},
            {"model": _model(rules)} | {name: chat["properties"][name] for name in _TEMPLATE},
        ),
        "/tokenize": {
            "anyOf": [
                record(
                    {"content": {"anyOf": [STRING, array({"anyOf": [STRING, ids]})]}},
                    {"model": _model(rules)}
                    | dict.fromkeys(
                        ("add_special", "parse_special", "with_pieces"), nullable(BOOLEAN)
                    ),
                ),
                record({"prompt": STRING}, told),
                record(
                    {"messages": chat["properties"]["messages"]},
                    told | {name: chat["properties"][name] for name in _TEMPLATE},
                ),
            ]
        },
        "/detokenize": record({"tokens": array(ids)}, {"model": _model(rules)}),
    }


_TEMPLATE: Final = (
    "tools", "tool_choice", "parallel_tool_calls", "add_generation_prompt",
    "continue_final_message", "chat_template_kwargs", "reasoning_effort", "chat_template",
)  # fmt: skip


def _model(rules: RequestRules) -> Schema:
    if rules.listed_models != rules.served_model_names:
        return nullable(STRING)
    return nullable(string(*rules.served_model_names))


def _token_ids(rules: RequestRules) -> Schema:
    return integer(0, rules.vocab_size - 1)


def _sampling(rules: RequestRules) -> dict[str, Schema]:
    """What chat and completions have in common, nullable all of it."""
    ids = _token_ids(rules)
    limit = integer(1, max(1, rules.max_model_len - 1))
    fields: dict[str, Schema] = {
        "max_tokens": limit,
        "n": integer(1, rules.max_choices),
        "stream": BOOLEAN,
        "stream_options": bounded(
            record(
                {},
                {
                    "include_usage": nullable(BOOLEAN),
                    "continuous_usage_stats": nullable(BOOLEAN),
                },
            ),
            "with stream alone",
        ),
        "stop": {"anyOf": [string(low=1, high=1024), array(string(low=1, high=1024), 0, 16)]},
        "seed": integer(-INT64, INT64 - 1),
        "temperature": number(0, 100),
        "top_p": number(0, 1, above=True),
        "top_k": bounded(integer(-1, INT32), "-1 and 0: all"),
        "min_p": number(0, 1),
        "presence_penalty": number(-2, 2),
        "frequency_penalty": number(-2, 2),
        "repetition_penalty": number(0, 100, above=True),
        "logit_bias": {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": number(-100, 100),
        },
        "stop_token_ids": array(ids, 0, MAX_STOP_TOKENS),
        "ignore_eos": BOOLEAN,
        "min_tokens": integer(0, INT32),
        "include_stop_str_in_output": BOOLEAN,
        "skip_special_tokens": BOOLEAN,
        "allowed_token_ids": array(ids, 1),
        "bad_words": array(string(low=1, high=1024), 0, MAX_BAD_WORDS[0] // 2),
        "prompt_logprobs": bounded(integer(0, MAX_LOGPROBS), "without stream"),
        "logprob_token_ids": array(ids, 0, MAX_NAMED_LOGPROBS),
        "response_format": ref("ResponseFormat"),
        "structured_outputs": ref("StructuredOutputs"),
        "add_special_tokens": BOOLEAN,
        "truncate_prompt_tokens": bounded(
            {"anyOf": [integer(1, INT32), {"const": -1}]}, "-1: as many as fit"
        ),
        "truncation_side": string("left", "right"),
        "return_token_ids": BOOLEAN,
        "return_tokens_as_token_ids": BOOLEAN,
        "priority": bounded(integer(-INT64, INT64 - 1), "lower runs sooner"),
        "cache_salt": _SALT,
        "request_id": {"type": "string", "pattern": "^[!-~]{1,128}$"},
        "slo": _SLO,
        "service_tier": bounded(
            string(*SERVICE_TIERS), "flex: class batch; priority: class interactive"
        ),
        "user": bounded(STRING, "the tenant, where neither a key nor a header says"),
        "safety_identifier": bounded(STRING, "before user"),
        "resume_output_ids": bounded(
            {"anyOf": [array(ids), array({"anyOf": [array(ids), {"type": "null"}]})]},
            "output made before, which the answer goes on behind; with n above 1 a list for each "
            "choice, null for one that has ended",
        ),
        "explain": BOOLEAN,
        "speculation": bounded(
            record({}, {"max_tokens": nullable(integer(0, MOST_TOKENS))}),
            "tokens guessed at a time; 0: none",
        ),
        "timings_per_token": BOOLEAN,
    }
    found = {name: nullable(schema) for name, schema in fields.items()}
    return {"model": _model(rules), **found, **dict.fromkeys(NO_EFFECT, _IGNORED)}


def _count(rules: RequestRules) -> Schema:
    """Of log-probabilities at one place; -1 is all, where all are told."""
    told_all = rules.max_logprobs >= rules.vocab_size
    return integer(-1 if told_all else 0, rules.max_logprobs)


def _chat(rules: RequestRules) -> Schema:
    sampling = _sampling(rules)
    fields: dict[str, Schema] = {
        "max_completion_tokens": sampling["max_tokens"],
        "max_tokens": nullable(bounded(integer(1, INT32), "the older name; the other one counts")),
        "logprobs": BOOLEAN,
        "top_logprobs": bounded(_count(rules), "above 0 with logprobs alone"),
        "tools": array(ref("Tool"), 0, 128),
        "tool_choice": {
            "anyOf": [
                string(*_TOOL_CHOICES),
                record({"type": string("function"), "function": record({"name": STRING})}),
            ]
        },
        "parallel_tool_calls": BOOLEAN,
        "chat_template_kwargs": OBJECT,
        "reasoning_effort": string("none", "minimal", "low", "medium", "high", "xhigh", "max"),
        "add_generation_prompt": BOOLEAN,
        "continue_final_message": BOOLEAN,
        "chat_template": STRING if rules.trust_request_chat_template else NULL,
        "echo": BOOLEAN,
        "include_reasoning": BOOLEAN,
    }
    found = {name: nullable(schema) for name, schema in fields.items()}
    return record({"messages": array(ref("Message"), 1)}, sampling | found)


def _completion(rules: RequestRules) -> Schema:
    ids = _token_ids(rules)
    prompt: Schema = {
        "anyOf": [
            STRING,
            array(STRING, 1, rules.max_prompts),
            array(ids, 1),
            array(array(ids, 1), 1, rules.max_prompts),
        ]
    }
    logprobs = nullable(_count(rules))
    return record(
        {"prompt": prompt},
        _sampling(rules)
        | {"echo": nullable(BOOLEAN), "logprobs": logprobs, "include_reasoning": _IGNORED},
    )


_RESPONSES_SAME: Final = (
    "model", "stream", "temperature", "top_p", "parallel_tool_calls", "reasoning_effort", "seed",
    "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "structured_outputs", "priority", "cache_salt", "request_id", "slo", "tool_choice",
    "service_tier", "user", "safety_identifier", "explain", "chat_template_kwargs",
)  # fmt: skip


def _responses(rules: RequestRules) -> Schema:
    chat = _chat(rules)["properties"]
    same = {name: chat[name] for name in _RESPONSES_SAME if name != "reasoning_effort"}
    item = record(
        {},
        {"type": string("message", "function_call", "function_call_output", "reasoning")},
    )
    tool = record(
        {"type": string("function"), "name": STRING},
        {
            "description": nullable(STRING),
            "parameters": nullable(OBJECT),
            "strict": nullable(BOOLEAN),
        },
    )
    form = record(
        {"type": string("text", "json_object", "json_schema")},
        {"name": STRING, "schema": {"type": ["object", "boolean"]}, "strict": nullable(BOOLEAN)},
    )
    includes = ("message.output_text.logprobs", "reasoning.encrypted_content")
    fields: dict[str, Schema] = {
        "instructions": STRING,
        "max_output_tokens": integer(1, INT32),
        "previous_response_id": string(low=1, high=256),
        "tools": array(tool, 0, 128),
        "tool_choice": bounded(ANYTHING, "none, auto, required or {type: function, name}"),
        "text": record({}, {"format": nullable(form)}),
        "reasoning": record({}, {"effort": chat["reasoning_effort"]}),
        "top_logprobs": integer(0, MAX_LOGPROBS),
        "include": array(string(*includes)),
        "truncation": string("auto", "disabled"),
        "store": BOOLEAN,
        "background": BOOLEAN,
        "enable_response_messages": BOOLEAN,
        "metadata": OBJECT,
    }
    ignored = dict.fromkeys((*RESPONSES_NO_EFFECT, "stream_options"), _IGNORED)
    return closed(
        record(
            {"input": {"anyOf": [STRING, array(item, 1)]}},
            {**same, **{name: nullable(schema) for name, schema in fields.items()}, **ignored},
        )
    )


_BLOCK: Final = record(
    {"type": string("text", "tool_use", "tool_result", "thinking", "redacted_thinking")}
)
_ANTHROPIC_MESSAGES: Final = array(
    record(
        {
            "role": string("user", "assistant"),
            "content": {"anyOf": [STRING, array(_BLOCK)]},
        }
    ),
    1,
)


def _messages(rules: RequestRules) -> Schema:
    sampling = _sampling(rules)
    same = (
        "model", "temperature", "top_p", "top_k", "stream", "slo", "priority", "cache_salt",
        "explain",
    )  # fmt: skip
    texts = {"anyOf": [STRING, array(record({"type": string("text"), "text": STRING}))]}
    tool = record(
        {"name": {"type": "string", "pattern": "^[A-Za-z0-9_.:/-]{1,128}$"}},
        {
            "description": nullable(STRING),
            "input_schema": nullable(OBJECT),
            "type": string("custom"),
        },
    )
    choice = record(
        {"type": string("auto", "any", "tool", "none")},
        {"name": STRING, "disable_parallel_tool_use": nullable(BOOLEAN)},
    )
    form = record({"type": string("json_schema"), "schema": {"type": ["object", "boolean"]}})
    fields: dict[str, Schema] = {
        "system": texts,
        "stop_sequences": array(string(low=1, high=1024), 0, 16),
        "tools": array(tool, 0, 128),
        "tool_choice": choice,
        "output_config": record({}, {"format": nullable(form)}),
        "thinking": record(
            {"type": string("disabled", "enabled", "adaptive")}, {"budget_tokens": ANYTHING}
        ),
        "metadata": bounded(
            record({}, {"user_id": nullable(STRING)}),
            "user_id: the tenant, where neither a key nor a header says",
        ),
    }
    optional = {name: sampling[name] for name in same}
    optional |= {name: nullable(schema) for name, schema in fields.items()}
    optional |= dict.fromkeys(ANTHROPIC_NO_EFFECT, _IGNORED)
    required = {"messages": _ANTHROPIC_MESSAGES, "max_tokens": integer(1, INT32)}
    return closed(record(required, optional))


_LLAMA_SAME: Final = (
    "model", "n", "stream", "temperature", "top_k", "top_p", "min_p", "presence_penalty",
    "frequency_penalty", "ignore_eos", "priority", "cache_salt", "slo",
)  # fmt: skip


def _llama(rules: RequestRules, completion: dict[str, Schema]) -> Schema:
    part = {"anyOf": [STRING, _token_ids(rules)]}
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


_OLLAMA_CHAT: Final[dict[str, Schema]] = {
    "messages": nullable(
        array(
            record(
                {"role": string("system", "user", "assistant", "tool")},
                {"content": nullable(STRING)},
            )
        )
    )
}


def _ollama_model(rules: RequestRules) -> Schema:
    if rules.listed_models != rules.served_model_names:
        return STRING
    names = rules.served_model_names
    return string(*names, *(f"{name}:latest" for name in names if ":" not in name))


def _ollama(
    rules: RequestRules,
    required: dict[str, Schema],
    optional: dict[str, Schema],
) -> Schema:
    sampling = _sampling(rules)
    options = {name: sampling[same] for name, same in OLLAMA_OPTIONS.items()}
    options["num_predict"] = nullable(integer(-2, max(1, rules.max_model_len - 1)))
    options |= dict.fromkeys(OLLAMA_OPTIONS_NO_EFFECT, _IGNORED)
    options["num_ctx"] = nullable(integer(0, rules.max_model_len))
    return closed(
        record(
            required,
            {
                "model": nullable(_ollama_model(rules)),
                **optional,
                "stream": nullable(bounded(BOOLEAN, "true unless it says otherwise")),
                "format": bounded({"type": ["string", "object", "null"]}, "json or a schema"),
                "options": nullable(closed(record({}, options))),
                "think": nullable({"anyOf": [BOOLEAN, string("low", "medium", "high")]}),
                "keep_alive": _IGNORED,
                **{name: sampling[name] for name in ("slo", "priority", "cache_salt")},
            },
        )
    )
