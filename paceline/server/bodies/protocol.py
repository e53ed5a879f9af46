"""Request bodies, parsed and checked: what the two generation endpoints understand.

::

    bytes --decode_object--> dict --parse_chat / parse_completion--> ChatRequest / CompletionRequest

Field names and meanings are vLLM's. A field that is known but not served is refused with a message
that says so; an unknown one is ignored and, at debug level, logged.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Final

from paceline.core.errors import InvalidRequestError, UnknownModelError
from paceline.core.sampling_params import MAX_LOGPROBS, SamplingParams
from paceline.core.slo import Slo
from paceline.core.speculation.settings import MOST_TOKENS
from paceline.http.fields import Fields, check_integer, check_string, check_token_ids, show
from paceline.server.bodies.foreign import translated
from paceline.server.bodies.messages import parse_messages
from paceline.server.bodies.prediction import parse_prediction
from paceline.server.bodies.rules import RequestRules
from paceline.server.bodies.sampling_fields import (
    INT32,
    INT64,
    check_logprob_bytes,
    logprob_count,
    or_else,
    parse_bad_words,
    parse_sampling,
)
from paceline.server.bodies.targets import CALLER_FIELDS, parse_service_tier, parse_slo
from paceline.server.bodies.tool_calls import ToolPlan, parse_tools
from paceline.server.bodies.unserved import (
    NO_EFFECT_IN_COMPLETIONS,
    REFUSED_IN_CHAT,
    REFUSED_IN_COMPLETIONS,
    note_unknown,
    refuse_unserved,
)
from paceline.server.reasoning import Thinking

__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "GenerationOptions",
    "RequestRules",
    "TemplateOptions",
    "check_model",
    "parse_chat",
    "parse_completion",
    "parse_template_options",
]

_MAX_STOPS: Final = 16
_MAX_STOP_CHARS: Final = 1024
_MAX_SALT_CHARS: Final = 1024
_REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
# what render_chat passes itself; the template must not get a second opinion
_RESERVED_KWARGS: Final = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize"}
    | {"chat_template"}
)
_EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """What both endpoints have in common."""

    # max_tokens in it is only a stand-in until the prompt's length is known
    sampling: SamplingParams
    # None: not asked for
    max_tokens: int | None
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    stop: tuple[str, ...]
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    priority: int
    cache_salt: str | None
    slo: Slo
    # who asks; "" when nothing said so
    tenant: str
    # the tier that the answer tells; None: none was asked for
    service_tier: str | None
    # what another engine has made of each choice before, None of one that has ended; () begins
    resume_output_ids: tuple[tuple[int, ...] | None, ...]
    # the caller's own id, part of the answer's
    request_id: str | None
    add_special_tokens: bool
    # keep this many prompt tokens; -1: as many as fit beside the output
    truncate_prompt_tokens: int | None
    truncation_side: str
    return_token_ids: bool
    # tell in the usage what became of each choice and why
    explain: bool
    return_tokens_as_token_ids: bool
    # not to be said; tokenised with the prompt
    bad_words: tuple[str, ...]
    # guessed at a time
    max_draft_tokens: int = MOST_TOKENS
    # what most of the answer is expected to be; None: nothing was said
    prediction: str | None = None
    # False: no text is made
    detokenize: bool = True
    # tokens of a block of the prefix cache; 0: it keeps nothing of this request
    cache_block: int = 0
    # vLLM's times go with the answer
    tells_metrics: bool = False
    # llama-server's times go with the answer
    tells_timings: bool = False
    # a max_tokens for which the context has no place is cut to what there is, not refused
    cuts_max_tokens: bool = False
    # fields that nothing has read, as they are shown
    ignored_fields: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateOptions:
    """A conversation and how to write it down."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template: str | None
    template_kwargs: dict[str, Any]
    tools: ToolPlan | None

    @property
    def speaker(self) -> str:
        """Whose the answer is: without a generation prompt the last message's role goes on."""
        role: str = "assistant" if self.add_generation_prompt else self.messages[-1]["role"]
        return role


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    options: GenerationOptions
    template: TemplateOptions
    # what goes before the text of every choice
    echo: str = ""
    # how to find thoughts in the output; None: there are none
    thinking: Thinking | None = None
    tells_reasoning: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    options: GenerationOptions
    # text or token ids, at least one
    prompts: tuple[str | list[int], ...]
    # put the prompt's text before the output, and its log-probabilities if there are any
    echo: bool
    # log-probabilities of the prompt were asked for by their own field
    tells_prompt_logprobs: bool


def parse_chat(
    body: dict[str, Any], rules: RequestRules, tenant: str = "", *, cuts_max_tokens: bool = False
) -> ChatRequest:
    """Args:
        cuts_max_tokens: see ``GenerationOptions``.

    Raises InvalidRequestError or UnknownModelError.
    """
    fields = Fields(translated(body))
    check_model(fields, rules)
    refuse_unserved(fields, REFUSED_IN_CHAT)
    template = parse_template_options(fields, rules)
    wanted = fields.boolean("logprobs", False)
    top = logprob_count(fields, "top_logprobs", rules)
    # 0 asks for nothing: some clients write every default out
    if top and not wanted:
        raise InvalidRequestError(f"top_logprobs={top} needs logprobs=true", "top_logprobs")
    limit = fields.integer("max_completion_tokens", 1, INT32)
    limit_name = "max_completion_tokens"
    if limit is None:
        limit, limit_name = fields.integer("max_tokens", 1, INT32), "max_tokens"
    else:
        fields.integer("max_tokens", 1, INT32)
    options = _options(
        fields,
        rules,
        max_tokens=limit,
        max_tokens_name=limit_name,
        logprobs=(top or 0) if wanted else None,
        tools=template.tools,
        # the template writes them itself
        add_special_tokens=False,
        tenant=tenant,
        cuts_max_tokens=cuts_max_tokens,
    )
    last = template.messages[-1]
    speaks_on = fields.boolean("echo", False) and last["role"] == template.speaker
    tells_reasoning = fields.boolean("include_reasoning", True)
    prediction = parse_prediction(fields.object("prediction"))
    ignored = note_unknown(fields, strict=rules.strict_fields)
    return ChatRequest(
        options=replace(
            options,
            ignored_fields=ignored,
            prediction=prediction,
        ),
        template=template,
        echo=last["content"] if speaks_on else "",
        # a grammar leaves no place for thoughts
        thinking=rules.thinking if options.sampling.grammar is None else None,
        tells_reasoning=tells_reasoning,
    )


def parse_completion(
    body: dict[str, Any], rules: RequestRules, tenant: str = ""
) -> CompletionRequest:
    """Raises InvalidRequestError or UnknownModelError."""
    fields = Fields(translated(body))
    check_model(fields, rules)
    refuse_unserved(fields, REFUSED_IN_COMPLETIONS, NO_EFFECT_IN_COMPLETIONS)
    prompts = _prompts(fields.raw("prompt"), rules)
    echo = fields.boolean("echo", False)
    logprobs = logprob_count(fields, "logprobs", rules)
    if echo and logprobs is not None and logprobs > MAX_LOGPROBS:
        raise InvalidRequestError(
            f"logprobs={logprobs} with echo: of a prompt {MAX_LOGPROBS} are served", "logprobs"
        )
    if echo and logprobs is not None and fields.boolean("stream", False):
        raise InvalidRequestError("echo with logprobs is not served with stream=true", "echo")
    options = _options(
        fields,
        rules,
        max_tokens=fields.integer("max_tokens", 1, INT32),
        max_tokens_name="max_tokens",
        logprobs=logprobs,
        prompt_logprobs=logprobs if echo else None,
        tools=None,
        add_special_tokens=True,
        tenant=tenant,
    )
    if options.resume_output_ids and (echo or len(prompts) > 1):
        beside = "echo" if echo else f"{len(prompts)} prompts"
        raise InvalidRequestError(
            f"resume_output_ids is not served with {beside}", "resume_output_ids"
        )
    if options.tells_timings and len(prompts) > 1:
        raise InvalidRequestError(
            f"timings_per_token is of one prompt, got {len(prompts)}", "timings_per_token"
        )
    sequences = len(prompts) * options.n
    if rules.max_sequences is not None and sequences > rules.max_sequences:
        raise InvalidRequestError(
            f"{len(prompts)} prompts of {options.n} choices each are {sequences} sequences, and "
            f"{rules.max_sequences} can run and wait here at once: send fewer",
            "prompt",
        )
    ignored = note_unknown(fields, strict=rules.strict_fields)
    return CompletionRequest(
        options=replace(options, ignored_fields=ignored),
        prompts=prompts,
        echo=echo,
        tells_prompt_logprobs=fields.raw("prompt_logprobs") is not None,
    )


def check_model(fields: Fields, rules: RequestRules) -> None:
    """Raises UnknownModelError for a name that is not served; absent means the one that is."""
    name = fields.string("model")
    if name is not None and not rules.serves(name):
        raise UnknownModelError(
            f"The model {show(name)} does not exist here; served: "
            f"{', '.join(rules.served_model_names)}",
            "model",
        )


def parse_template_options(fields: Fields, rules: RequestRules) -> TemplateOptions:
    """The conversation of a chat or tokenize request."""
    values = fields.array("messages")
    if values is None:
        raise InvalidRequestError("messages is missing", "messages")
    messages = parse_messages(values)
    continue_final = fields.boolean("continue_final_message", False)
    add_prompt = fields.boolean("add_generation_prompt", not continue_final)
    if continue_final and add_prompt:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt cannot both be true",
            "continue_final_message",
        )
    template = fields.string("chat_template")
    if template is not None and not rules.trust_request_chat_template:
        raise InvalidRequestError(
            "chat_template in a request is not accepted: this server renders its own only "
            "(--trust-request-chat-template allows it)",
            "chat_template",
        )
    kwargs = dict(fields.object("chat_template_kwargs") or {})
    reserved = sorted(_RESERVED_KWARGS & kwargs.keys())
    if reserved:
        raise InvalidRequestError(
            f"chat_template_kwargs must not set {', '.join(reserved)}", "chat_template_kwargs"
        )
    effort = fields.string("reasoning_effort")
    if effort is not None:
        if effort not in _EFFORTS:
            raise InvalidRequestError(
                f"reasoning_effort must be one of {', '.join(_EFFORTS)}, got {show(effort)}",
                "reasoning_effort",
            )
        kwargs.setdefault("reasoning_effort", effort)
        if effort == "none":
            # as templates that know no efforts call it
            kwargs.setdefault("enable_thinking", False)
    return TemplateOptions(
        messages=messages,
        add_generation_prompt=add_prompt,
        continue_final_message=continue_final,
        chat_template=template,
        template_kwargs=kwargs,
        tools=parse_tools(fields, rules.tool_format),
    )


def _prompts(value: Any, rules: RequestRules) -> tuple[str | list[int], ...]:
    """A string, a list of strings, token ids, or a list of token id lists."""
    if value is None:
        raise InvalidRequestError("prompt is missing", "prompt")
    if type(value) is str:
        return (value,)
    if type(value) is not list:
        raise InvalidRequestError(
            f"prompt must be a string, a list of strings, a list of token ids or a list of such "
            f"lists, got {show(value)}",
            "prompt",
        )
    if not value:
        raise InvalidRequestError("prompt is an empty list", "prompt")
    if type(value[0]) not in (str, list):
        return (check_token_ids(value, "prompt", rules.vocab_size),)
    if len(value) > rules.max_prompts:
        raise InvalidRequestError(
            f"prompt holds {len(value)} prompts; at most {rules.max_prompts} in one request",
            "prompt",
        )
    kind = type(value[0])
    for index, item in enumerate(value):
        if type(item) is not kind:
            raise InvalidRequestError(
                f"prompt[{index}] is {show(item)}: all prompts of a request must be strings, or "
                "all lists of token ids",
                "prompt",
            )
        if type(item) is list:
            check_token_ids(item, "prompt", rules.vocab_size)
    return tuple(value)


def _options(
    fields: Fields,
    rules: RequestRules,
    *,
    max_tokens: int | None,
    max_tokens_name: str,
    logprobs: int | None,
    tools: ToolPlan | None,
    add_special_tokens: bool,
    tenant: str,
    prompt_logprobs: int | None = None,
    cuts_max_tokens: bool = False,
) -> GenerationOptions:
    if max_tokens is not None and max_tokens >= rules.max_model_len and not cuts_max_tokens:
        raise InvalidRequestError(
            f"{max_tokens_name}={max_tokens} leaves no room for a prompt: this model's maximum "
            f"context length is {rules.max_model_len} tokens",
            max_tokens_name,
        )
    stream = fields.boolean("stream", False)
    stream_options = fields.object("stream_options")
    if stream_options is not None and not stream:
        raise InvalidRequestError("stream_options needs stream=true", "stream_options")
    asked = fields.integer("prompt_logprobs", 0, MAX_LOGPROBS)
    if asked is not None and stream:
        raise InvalidRequestError("prompt_logprobs needs stream=false", "prompt_logprobs")
    if asked is None:
        asked = prompt_logprobs
    include_usage, continuous = _usage_options(stream_options or {})
    explain = fields.boolean("explain", False)
    n = or_else(fields.integer("n", 1, rules.max_choices), 1)
    resumed = _resumed(fields, rules, n)
    if resumed and tools is not None and not stream:
        # half a call is of no use to anybody but who has the other half
        raise InvalidRequestError(
            "resume_output_ids with tools needs stream=true", "resume_output_ids"
        )
    check_logprob_bytes(logprobs, max_tokens or rules.max_model_len, n, "logprobs")
    service_tier, tier_class = parse_service_tier(fields.raw("service_tier"))
    for name in CALLER_FIELDS:
        # the tenant was made from them
        fields.string(name)
    return GenerationOptions(
        sampling=replace(
            parse_sampling(fields, rules, max_tokens, logprobs, tools), prompt_logprobs=asked
        ),
        max_tokens=max_tokens,
        n=n,
        stream=stream,
        # the explanation is part of the usage
        include_usage=include_usage or explain,
        continuous_usage=include_usage and continuous,
        stop=_stop(fields.raw("stop")),
        include_stop_str_in_output=fields.boolean("include_stop_str_in_output", False),
        # special tokens may be what marks a call, or thoughts
        skip_special_tokens=fields.boolean(
            "skip_special_tokens",
            not ((tools and tools.calls) or (rules.thinking and rules.thinking.hidden)),
        ),
        priority=or_else(fields.integer("priority", -INT64, INT64 - 1), 0),
        cache_salt=fields.string("cache_salt", 1, _MAX_SALT_CHARS),
        slo=parse_slo(fields.raw("slo"), rules.slo_classes, tier_class),
        tenant=tenant,
        service_tier=service_tier,
        resume_output_ids=resumed,
        request_id=_request_id(fields),
        add_special_tokens=fields.boolean("add_special_tokens", add_special_tokens),
        truncate_prompt_tokens=_truncation(fields),
        truncation_side=_truncation_side(fields),
        explain=explain,
        return_token_ids=fields.boolean("return_token_ids", False),
        return_tokens_as_token_ids=fields.boolean("return_tokens_as_token_ids", False),
        bad_words=parse_bad_words(fields.array("bad_words") or []),
        max_draft_tokens=_max_draft_tokens(fields.object("speculation")),
        # a prompt whose log-probabilities are told shares nothing
        cache_block=rules.cache_block if asked is None else 0,
        tells_metrics=rules.tells_metrics,
        tells_timings=fields.boolean("timings_per_token", False),
        cuts_max_tokens=cuts_max_tokens,
    )


def _max_draft_tokens(speculation: dict[str, Any] | None) -> int:
    """``{"max_tokens": 0}`` keeps a request from being guessed."""
    try:
        return or_else(Fields(speculation or {}).integer("max_tokens", 0, MOST_TOKENS), MOST_TOKENS)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"speculation.{error}", "speculation") from None


def _usage_options(stream_options: dict[str, Any]) -> tuple[bool, bool]:
    """``include_usage`` and ``continuous_usage_stats``."""
    fields = Fields(stream_options)
    try:
        usage = fields.boolean("include_usage", False)
        return usage, fields.boolean("continuous_usage_stats", False)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"stream_options.{error}", "stream_options") from None


def _resumed(fields: Fields, rules: RequestRules, n: int) -> tuple[tuple[int, ...] | None, ...]:
    """A list of ids, or with several choices one for each, null for one that has ended."""
    name = "resume_output_ids"
    values = fields.array(name)
    if not values:
        return ()
    if n == 1 and type(values[0]) is not list:
        values = [values]
    if len(values) != n:
        raise InvalidRequestError(
            f"{name} holds {len(values)} lists of tokens for n={n} choices: give each its own, and "
            "null to one that has ended",
            name,
        )
    if all(ids is None for ids in values):
        raise InvalidRequestError(f"{name}: all {n} choices have ended", name)
    found: list[tuple[int, ...] | None] = []
    for ids in values:
        if ids is None:
            found.append(None)
            continue
        if type(ids) is not list:
            raise InvalidRequestError(f"{name} must hold lists of tokens, got {show(ids)}", name)
        check_token_ids(ids, name, rules.vocab_size)
        if len(ids) >= rules.max_model_len:
            raise InvalidRequestError(
                f"{name} holds {len(ids)} tokens: this model's maximum context length is "
                f"{rules.max_model_len} tokens",
                name,
            )
        found.append(tuple(ids))
    return tuple(found) if any(found) or None in found else ()


def _stop(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    values = [value] if type(value) is str else value
    if type(values) is not list:
        raise InvalidRequestError(
            f"stop must be a string or a list of strings, got {show(value)}", "stop"
        )
    if len(values) > _MAX_STOPS:
        raise InvalidRequestError(f"stop may hold {_MAX_STOPS} strings, got {len(values)}", "stop")
    return tuple(check_string(item, "stop", 1, _MAX_STOP_CHARS) for item in values)


def _request_id(fields: Fields) -> str | None:
    value = fields.string("request_id")
    if value is not None and not _REQUEST_ID.fullmatch(value):
        raise InvalidRequestError(
            f"request_id must be 1 to 128 printable ASCII characters, got {show(value)}",
            "request_id",
        )
    return value


def _truncation(fields: Fields) -> int | None:
    value = fields.raw("truncate_prompt_tokens")
    if value is None:
        return None
    count = check_integer(value, "truncate_prompt_tokens", -1, INT32)
    if count == 0:
        raise InvalidRequestError(
            "truncate_prompt_tokens must be -1 (as many as fit) or at least 1, got 0",
            "truncate_prompt_tokens",
        )
    return count


def _truncation_side(fields: Fields) -> str:
    side = fields.string("truncation_side") or "left"
    if side not in ("left", "right"):
        raise InvalidRequestError(
            f"truncation_side must be left or right, got {show(side)}", "truncation_side"
        )
    return side
