"""Fields of chat and completions: a line for each, from which all else follows (``body.py``).

Field names and meanings are vLLM's. ``requests.py`` says what a value means for the answer. Fields
that other servers have and this one lacks are refused with an error, never dropped: a caller who
gets prose instead of JSON would blame the model. A field that gets served moves out of these.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from paceline.core.request import MOST_DRAFT_TOKENS
from paceline.engine.types import parse_kv_url
from paceline.errors import InvalidRequestError
from paceline.http.fields import check_integer, check_object, check_string, check_token_ids, show
from paceline.server.protocol import schemas
from paceline.server.protocol.body import Body, Field, OtherName
from paceline.server.protocol.field_types import (
    INT32,
    INT64,
    MODEL,
    NOTHING,
    anything,
    array,
    boolean,
    choice,
    described,
    ignored,
    integer,
    needed,
    nested,
    refused,
    string,
    token_schema,
)
from paceline.server.protocol.messages import MESSAGES
from paceline.server.protocol.rules import RequestRules
from paceline.server.protocol.sampling_fields import SamplingBody, logprobs_of
from paceline.server.protocol.schemas import Schema
from paceline.server.protocol.targets import SERVICE_TIERS, parse_service_tier
from paceline.server.protocol.tool_calls import ToolFields

__all__ = [
    "ChatBody",
    "CompletionBody",
    "GenerationBody",
    "TemplateBody",
    "UnservedFields",
    "undone",
]


def undone(
    what: str, *harmless: Any, asks: Callable[[Any], bool] | None = None, note: str | None = None
) -> Field[None]:
    """A field that needs ``what``, unless its value is harmless (by default: requests nothing) or
    ``asks`` says that it does not need it."""
    says = f"={{value}} is not served yet: this server does not do {what}"
    return refused(says, harmless or NOTHING, asks=asks, note=what if note is None else note)


_BEAMS: Final = (
    "beam search, which knows no token of its answer before the last, so that nothing could be "
    "streamed or paced; ask for n choices with logprobs and take the likeliest"
)
_GUIDED: Final = "guided decoding by its older names; structured_outputs does it"


class UnservedFields(Body):
    """Unserved fields of both chat and completions."""

    guided_json = guided_regex = guided_choice = guided_grammar = undone(_GUIDED)
    guided_decoding_backend = undone(_GUIDED)
    use_beam_search = undone(_BEAMS)
    length_penalty = undone(_BEAMS, 1)
    prompt_embeds = undone("a prompt of embeddings")
    thinking_token_budget = undone("a budget for thinking", asks=lambda _: True)
    spaces_between_special_tokens = undone("joining special tokens", asks=lambda v: v is False)
    kv_transfer_params = undone("KV transfer")
    ec_transfer_params = undone("encoder transfer")
    vllm_xargs = undone("engine-specific arguments")
    repetition_detection = undone("repetition detection")
    stream_interval = undone("several tokens per event", 1)
    return_prompt_text = undone("returning the prompt's text")
    return_token_offsets = undone("token offsets")
    routed_experts_prompt_start = undone("telling routed experts", asks=lambda _: True)
    moderation = undone("moderation")
    # fields of llama.cpp's server and SGLang
    mirostat = undone("Mirostat sampling", 0)
    dry_multiplier = undone("DRY sampling", 0)
    xtc_probability = undone("XTC sampling", 0)
    dynatemp_range = undone("a temperature that moves", 0)
    typical_p = undone("locally typical sampling", 1)
    tfs_z = undone("tail-free sampling", 1)
    top_n_sigma = undone("top-n-sigma sampling", -1)
    samplers = undone("samplers in another order")
    n_probs = undone("n_probs; logprobs does it", 0)
    # these describe the caller, not the answer
    metadata = ignored()
    prompt_cache_key = ignored()
    prompt_cache_options = ignored()
    prompt_cache_retention = ignored()
    session_id = ignored()
    verbosity = ignored()


_MAX_STOPS: Final = 16
_MAX_STOP_CHARS: Final = 1024
_MAX_SALT_CHARS: Final = 1024
_REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
# render_chat passes these itself; a request must not override them
_RESERVED_KWARGS: Final = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize"}
    | {"chat_template"}
)


def _stop(value: Any, name: str, _: RequestRules) -> tuple[str, ...]:
    values = [value] if type(value) is str else value
    if type(values) is not list:
        raise InvalidRequestError(
            f"{name} must be a string or a list of strings, got {show(value)}", name
        )
    if len(values) > _MAX_STOPS:
        raise InvalidRequestError(f"{name} may hold {_MAX_STOPS} strings, got {len(values)}", name)
    return tuple(check_string(item, name, 1, _MAX_STOP_CHARS) for item in values)


def _request_id(value: Any, name: str, _: RequestRules) -> str:
    if not _REQUEST_ID.fullmatch(check_string(value, name, 0, None)):
        raise InvalidRequestError(
            f"{name} must be 1 to 128 printable ASCII characters, got {show(value)}", name
        )
    return str(value)


def _truncation(value: Any, name: str, _: RequestRules) -> int:
    count = check_integer(value, name, -1, INT32)
    if count == 0:
        raise InvalidRequestError(f"{name} must be -1 (as many as fit) or at least 1, got 0", name)
    return count


def _prediction(given: Any, name: str, _: RequestRules) -> str:
    """Return the text of ``{"type": "content", "content": ...}``, as in OpenAI's API: a string or
    text parts, which hold most of the answer as the caller expects it."""
    value = check_object(given, name)
    if value.get("type") != "content":
        what = show(value.get("type"))
        raise InvalidRequestError(f'{name}.type must be "content", got {what}', name)
    content = value.get("content")
    if type(content) is str:
        return content
    if type(content) is not list:
        raise InvalidRequestError(
            f"{name}.content must be a string or text parts, got {show(content)}", name
        )
    for place, part in enumerate(content):
        if (
            type(part) is not dict
            or part.get("type") != "text"
            or type(part.get("text")) is not str
        ):
            raise InvalidRequestError(
                f'{name}.content[{place}] must be {{"type": "text", "text": ...}}, got '
                f"{show(part)}",
                name,
            )
    return "".join(part["text"] for part in content)


def _output_limit(rules: RequestRules, low: int = 1) -> Schema:
    return schemas.integer(low, max(1, rules.max_model_len - 1))


def _resumable(rules: RequestRules) -> Schema:
    ids = schemas.array(token_schema(rules))
    each = schemas.array({"anyOf": [ids, schemas.NULL]})
    return {"anyOf": [ids, each]}


class StreamOptions(Body):
    include_usage = boolean()
    continuous_usage_stats = boolean()


def _kv_url(value: Any, name: str, _: RequestRules) -> str:
    url = check_string(value, name, 1, _MAX_SALT_CHARS)
    try:
        parse_kv_url(url)
    except ValueError:
        raise InvalidRequestError(
            f"{name} must be tcp://HOST:PORT, got {show(url)}", name
        ) from None
    return url


class KvSourceBody(Body):
    url = needed(described(_kv_url, schemas.string()))
    fingerprint = needed(string(64, 64))


class SpeculationOptions(Body):
    max_tokens = integer(0, MOST_DRAFT_TOKENS, MOST_DRAFT_TOKENS)


_STOP_TEXT: Final = schemas.string(low=1, high=_MAX_STOP_CHARS)
_CALLER: Final = string(
    note="the [tenant](../understand/policies.md), where neither a key nor a header says who asks"
)


class GenerationBody(SamplingBody, UnservedFields):
    """The fields that chat and completions share."""

    max_tokens = integer(1, INT32, schema=_output_limit)
    n_predict = OtherName("max_tokens", nothing=-1, note="-1: as many as there is place for")
    max_new_tokens = OtherName("max_tokens")
    n = integer(1, lambda rules: rules.max_choices, 1, note="choices share the prompt")
    stream = boolean()
    stream_options = nested(StreamOptions, note="with `stream` alone")
    stop = described(_stop, {"anyOf": [_STOP_TEXT, schemas.array(_STOP_TEXT, 0, _MAX_STOPS)]})
    include_stop_str_in_output = boolean()
    skip_special_tokens = boolean(None)
    add_special_tokens = boolean(None)
    truncate_prompt_tokens = described(
        _truncation,
        {"anyOf": [schemas.integer(1, INT32), {"const": -1}]},
        note="-1: as many as fit",
    )
    truncation_side = choice("left", "right", default="left")
    return_token_ids = boolean()
    return_tokens_as_token_ids = boolean()
    priority = integer(
        -INT64,
        INT64 - 1,
        0,
        note="lower goes first under `priority`, and under `deadline` among requests that name no "
        "TTFT target ([policies](../understand/policies.md))",
    )
    cache_salt = string(1, _MAX_SALT_CHARS)
    request_id = described(_request_id, {"type": "string", "pattern": "^[!-~]{1,128}$"})
    slo = anything(schemas.ref("Slo"), note="latency targets, also as headers")
    service_tier = described(
        parse_service_tier,
        schemas.string(*SERVICE_TIERS),
        note="`flex` is the class `batch`, `priority` the class `interactive`; `auto`, `default` "
        "and `scale` say nothing; the answer tells which it was",
    )
    # these name the tenant, see ``CALLER_FIELDS``
    safety_identifier = user = _CALLER
    speculation = nested(
        SpeculationOptions,
        note='`{"max_tokens": 0}`: no tokens of this request are guessed; a higher number: so many '
        "at a time at most. It changes no answer",
    )
    store = boolean(
        True,
        note="false: nothing of the answer is kept to guess later ones of the same tenant and "
        "`cache_salt` from (`--speculative-config`)",
    )
    timings_per_token = boolean(
        note="llama-server's `timings` go with the answer, and with the last chunk of each choice "
        "of a stream; of one prompt"
    )
    explain = boolean(
        note="`usage.timeline` says why the request waited, what became of it and how many tokens "
        "a second it got (docs/use/why-it-waited.md); `usage.demoted` is there without it, where a "
        "target could not be met"
    )
    resume_output_ids = array(
        _resumable,
        note="ids that an engine has made of this answer before: it goes on behind them as if "
        "uncut (penalties, `min_tokens`, stops, grammar, draws of the same `seed`, usage), and "
        "tells only what is new. `max_tokens` counts them. With `n` above 1 a list of lists, one "
        "for each choice, `null` for one that has ended (its tokens are not counted again); with "
        "`tools` `stream` only, and a call that was cut goes on where it was; where results do not "
        "depend on the batch ([accuracy](../understand/accuracy.md)) the tokens are those of the "
        "uncut answer; "
        "one prompt, no `echo`",
    )
    kv_source = nested(
        KvSourceBody,
        note="another engine that has computed a part of this prompt and output, as its `/version` "
        "tells it: blocks are fetched there where that is faster than computing, and computed if "
        "they do not come; for keys of scope admin "
        "([prompts over restarts](../operate/prompts-over-restarts.md#from-another-engine))",
    )


def _own_template(value: Any, name: str, rules: RequestRules) -> str:
    template = check_string(value, name, 0, None)
    if not rules.trust_request_chat_template:
        raise InvalidRequestError(
            f"{name} in a request is not accepted: this server renders its own only "
            "(--trust-request-chat-template allows it)",
            name,
        )
    return template


def _template_kwargs(value: Any, name: str, _: RequestRules) -> dict[str, Any]:
    kwargs = check_object(value, name)
    reserved = sorted(_RESERVED_KWARGS & kwargs.keys())
    if reserved:
        raise InvalidRequestError(f"{name} must not set {', '.join(reserved)}", name)
    return kwargs


class TemplateBody(ToolFields):
    """A conversation and how it is rendered."""

    model = MODEL
    messages = needed(
        MESSAGES,
        note="roles system, developer, user, assistant, tool, and others that the chat template "
        "writes down; text content",
    )
    continue_final_message = boolean()
    add_generation_prompt = boolean(None)
    chat_template = described(
        _own_template,
        lambda rules: schemas.STRING if rules.trust_request_chat_template else schemas.NULL,
        note="only with `--trust-request-chat-template`",
    )
    chat_template_kwargs = described(_template_kwargs, schemas.OBJECT)
    reasoning_effort = choice("none", "minimal", "low", "medium", "high", "xhigh", "max")


class ChatBody(TemplateBody, GenerationBody):
    """``/v1/chat/completions``."""

    model = MODEL
    max_completion_tokens = integer(
        1,
        INT32,
        note="absent: what the context has left, or the model's own default",
        schema=_output_limit,
    )
    max_tokens = integer(1, INT32, note="the older name; the other one counts")
    logprobs = boolean(note="of the raw logits")
    top_logprobs = logprobs_of(
        "above 0 with `logprobs` alone; 20 at most, unless `--max-logprobs` says otherwise (-1: "
        "all, in answers of up to 64 MiB)"
    )
    echo = boolean(note="the answer begins with the last message, where that is of the same role")
    include_reasoning = boolean(True, note="`false`: thoughts are not told")
    prediction = described(
        _prediction,
        schemas.PREDICTION,
        note='`{"type": "content", "content": text or text parts}`: what most of the answer is '
        "expected to be. Its tokens are verified several in a step, as far as steps have room, "
        "whether the server guesses by itself or not (only with `--speculative-config "
        '\'{"method": "off"}\'` nothing is guessed); the answer stays the same. '
        "`usage.completion_tokens_details` counts those that were verified and right "
        "(`accepted_prediction_tokens`), or wrong (`rejected_prediction_tokens`, which are no "
        "completion tokens); both are 0 where nothing was verified",
    )
    functions = undone("calling by its older name; tools does it")
    function_call = undone("calling by its older name; tool_choice does it", "none")
    documents = undone("documents")
    mm_processor_kwargs = media_io_kwargs = undone("multimodal input")
    audio = undone("audio output")
    modalities = undone("output other than text", ["text"])
    web_search_options = undone("web search", asks=lambda _: True)


def _prompts(value: Any, name: str, rules: RequestRules) -> tuple[str | list[int], ...]:
    """Parse a string, a list of strings, token ids, or a list of token id lists."""
    if type(value) is str:
        return (value,)
    if type(value) is not list:
        raise InvalidRequestError(
            f"{name} must be a string, a list of strings, a list of token ids or a list of such "
            f"lists, got {show(value)}",
            name,
        )
    if not value:
        raise InvalidRequestError(f"{name} is an empty list", name)
    if type(value[0]) not in (str, list):
        return (check_token_ids(value, name, rules.vocab_size),)
    if len(value) > rules.max_prompts:
        raise InvalidRequestError(
            f"{name} holds {len(value)} prompts; at most {rules.max_prompts} in one request", name
        )
    kind = type(value[0])
    for index, item in enumerate(value):
        if type(item) is not kind:
            raise InvalidRequestError(
                f"{name}[{index}] is {show(item)}: all prompts of a request must be strings, or "
                "all lists of token ids",
                name,
            )
        if type(item) is list:
            check_token_ids(item, name, rules.vocab_size)
    return tuple(value)


def _prompts_schema(rules: RequestRules) -> Schema:
    ids = schemas.array(token_schema(rules), 1)
    kinds = (schemas.STRING, ids)
    lists = [schemas.array(kind, 1, rules.max_prompts) for kind in kinds]
    return {"anyOf": [schemas.STRING, lists[0], ids, lists[1]]}


class CompletionBody(GenerationBody):
    """``/v1/completions``."""

    model = MODEL
    prompt = needed(described(_prompts, _prompts_schema), note="a string, ids, or a list of either")
    max_tokens = integer(
        0,
        INT32,
        note="16 by default; 0 with `echo` alone: the prompt and nothing more",
        schema=lambda rules: _output_limit(rules, 0),
    )
    echo = boolean(
        note="the text begins with the prompt's; with `logprobs` these are told too, in a stream "
        "with `max_tokens` 0 alone"
    )
    logprobs = logprobs_of(
        "of the raw logits, 20 at most, unless `--max-logprobs` says otherwise (-1: all, in "
        "answers of up to 64 MiB)"
    )
    # only chat separates reasoning and reads a prediction
    include_reasoning = ignored()
    prediction = ignored()
    suffix = undone("inserting before a suffix")
    best_of = undone("best_of above 1", 1)
