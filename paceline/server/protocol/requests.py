"""Request bodies of the two generation endpoints, and their meaning.

::

    bytes --decode_object--> dict --ChatBody.read--> ChatBody --parse_chat--> ChatRequest

``generation.py`` describes each field, and refuses known fields that are not served with a message
that says so; this module checks fields against one another. Unknown ones are named in a header of
the answer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from paceline.core.request import MOST_DRAFT_TOKENS
from paceline.core.sampling_params import MAX_LOGPROBS, SamplingParams
from paceline.core.slo import Slo
from paceline.engine.types import KvSource
from paceline.errors import InvalidRequestError
from paceline.http.fields import check_token_ids, show
from paceline.server.model_formats.reasoning import Thinking
from paceline.server.protocol.generation import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    TemplateBody,
)
from paceline.server.protocol.rules import NamedAdapter, RequestRules
from paceline.server.protocol.sampling_fields import check_logprob_bytes, parse_sampling
from paceline.server.protocol.targets import parse_slo
from paceline.server.protocol.tool_calls import ToolPlan, parse_tools

__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "GenerationOptions",
    "RequestRules",
    "TemplateOptions",
    "parse_chat",
    "parse_completion",
    "parse_template_options",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """Options that both endpoints share."""

    # its max_tokens is a stand-in until the prompt's length is known
    sampling: SamplingParams
    # None: not given
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
    # name of the tenant; "": not given
    tenant: str
    # the tier named in the answer; None: not requested
    service_tier: str | None
    # output of each choice so far, from another engine; None for an ended choice; (): a new answer
    resume_output_ids: tuple[tuple[int, ...] | None, ...]
    # the caller's own id, which becomes part of the answer's
    request_id: str | None
    add_special_tokens: bool
    # number of prompt tokens to keep; -1: as many as fit with the output
    truncate_prompt_tokens: int | None
    truncation_side: str
    return_token_ids: bool
    # explain in the usage what happened to each choice and why
    explain: bool
    return_tokens_as_token_ids: bool
    # words that the output must not contain; tokenised with the prompt
    bad_words: tuple[str, ...]
    # maximum draft tokens of one step
    max_draft_tokens: int = MOST_DRAFT_TOKENS
    # the caller's prediction of most of the answer; None: not given
    prediction: str | None = None
    # the answer may be stored to draft later answers from
    store: bool = True
    # False: no text is made, only ids
    detokenize: bool = True
    # tokens of a block of the prefix cache; 0: nothing of this request is cached
    cache_block: int = 0
    # add vLLM's times to the answer
    tells_metrics: bool = False
    # add llama-server's times to the answer
    tells_timings: bool = False
    # cut max_tokens to the space left in the context instead of refusing the request
    cuts_max_tokens: bool = False
    # names of fields that were not read, as they are shown
    ignored_fields: tuple[str, ...] = ()
    # the adapter that the request names as its model; None: the model itself
    adapter: NamedAdapter | None = None
    # another engine that has computed a part of it; None: not given
    kv_source: KvSource | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateOptions:
    """A conversation and how to render it."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template: str | None
    template_kwargs: dict[str, Any]
    tools: ToolPlan | None

    @property
    def continued(self) -> str | None:
        """The text that the answer continues; None: the answer is new."""
        text: str = self.messages[-1]["content"] if self.continue_final_message else ""
        return text if text.strip() else None

    @property
    def speaker(self) -> str:
        """The role of the answer; without a generation prompt the last message's continues."""
        role: str = "assistant" if self.add_generation_prompt else self.messages[-1]["role"]
        return role


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    options: GenerationOptions
    template: TemplateOptions
    # text that precedes the text of every choice
    echo: str = ""
    # how to find reasoning in the output; None: it has none
    thinking: Thinking | None = None
    tells_reasoning: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    options: GenerationOptions
    # text or token ids, at least one
    prompts: tuple[str | list[int], ...]
    # put the prompt's text before the output, and its log-probabilities if requested
    echo: bool
    # log-probabilities of the prompt were requested by their own field
    tells_prompt_logprobs: bool
    # generate nothing: the answer is the prompt's echo
    only_prompt: bool = False


def parse_chat(
    values: dict[str, Any], rules: RequestRules, tenant: str = "", *, cuts_max_tokens: bool = False
) -> ChatRequest:
    """Parse a chat body. Raises InvalidRequestError or UnknownModelError.

    Args:
        cuts_max_tokens: see ``GenerationOptions``.
    """
    body = ChatBody.read(values, rules)
    template = parse_template_options(body, rules)
    top = body.top_logprobs
    # 0 requests nothing: some clients send every default
    if top and not body.logprobs:
        raise InvalidRequestError(f"top_logprobs={top} needs logprobs=true", "top_logprobs")
    limit, limit_name = body.max_completion_tokens, "max_completion_tokens"
    if limit is None:
        limit, limit_name = body.max_tokens, "max_tokens"
    options = _options(
        body,
        rules,
        max_tokens=limit,
        max_tokens_name=limit_name,
        logprobs=(top or 0) if body.logprobs else None,
        tools=template.tools,
        # the template writes them itself
        add_special_tokens=False,
        tenant=tenant,
        model=body.model,
        cuts_max_tokens=cuts_max_tokens,
    )
    last = template.messages[-1]
    return ChatRequest(
        options=replace(options, prediction=body.prediction),
        template=template,
        echo=last["content"] if body.echo and last["role"] == template.speaker else "",
        # output that follows a grammar cannot hold reasoning
        thinking=rules.thinking if options.sampling.grammar is None else None,
        tells_reasoning=body.include_reasoning,
    )


def parse_completion(
    values: dict[str, Any], rules: RequestRules, tenant: str = ""
) -> CompletionRequest:
    """Parse a completions body. Raises InvalidRequestError or UnknownModelError."""
    body = CompletionBody.read(values, rules)
    prompts, echo, logprobs = body.prompt, body.echo, body.logprobs
    only_prompt = body.max_tokens == 0
    if only_prompt and not echo:
        raise InvalidRequestError(
            "max_tokens must be at least 1, got 0, which is served with echo=true", "max_tokens"
        )
    if echo and logprobs is not None and logprobs > MAX_LOGPROBS:
        raise InvalidRequestError(
            f"logprobs={logprobs} with echo: of a prompt {MAX_LOGPROBS} are served", "logprobs"
        )
    if echo and logprobs is not None and body.stream and not only_prompt:
        raise InvalidRequestError("echo with logprobs is not served with stream=true", "echo")
    options = _options(
        body,
        rules,
        # a prompt is only computed if a token is requested; the answer leaves that token out
        max_tokens=1 if only_prompt else body.max_tokens,
        max_tokens_name="max_tokens",
        logprobs=logprobs,
        prompt_logprobs=logprobs if echo else None,
        tools=None,
        add_special_tokens=True,
        tenant=tenant,
        model=body.model,
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
    return CompletionRequest(
        options=options,
        prompts=prompts,
        echo=echo,
        tells_prompt_logprobs=body.prompt_logprobs is not None,
        only_prompt=only_prompt,
    )


def parse_template_options(body: TemplateBody, rules: RequestRules) -> TemplateOptions:
    """Return the conversation of a chat or tokenize request."""
    continue_final, add_prompt = body.continue_final_message, body.add_generation_prompt
    if continue_final and add_prompt:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt cannot both be true",
            "continue_final_message",
        )
    kwargs = dict(rules.template_kwargs) | (body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
        if body.reasoning_effort == "none":
            # the name of this switch in templates without effort levels
            kwargs.setdefault("enable_thinking", False)
    return TemplateOptions(
        messages=body.messages,
        add_generation_prompt=not continue_final if add_prompt is None else add_prompt,
        continue_final_message=continue_final,
        chat_template=body.chat_template,
        template_kwargs=kwargs,
        tools=parse_tools(body, rules.tool_format, short_ids=rules.short_call_ids),
    )


def _options(
    body: GenerationBody,
    rules: RequestRules,
    *,
    max_tokens: int | None,
    max_tokens_name: str,
    logprobs: int | None,
    tools: ToolPlan | None,
    add_special_tokens: bool,
    tenant: str,
    model: str | None,
    prompt_logprobs: int | None = None,
    cuts_max_tokens: bool = False,
) -> GenerationOptions:
    if max_tokens is not None and max_tokens >= rules.max_model_len and not cuts_max_tokens:
        raise InvalidRequestError(
            f"{max_tokens_name}={max_tokens} leaves no room for a prompt: this model's maximum "
            f"context length is {rules.max_model_len} tokens",
            max_tokens_name,
        )
    stream, n = body.stream, body.n
    if body.stream_options is not None and not stream:
        raise InvalidRequestError("stream_options needs stream=true", "stream_options")
    if body.prompt_logprobs is not None:
        if stream:
            raise InvalidRequestError("prompt_logprobs needs stream=false", "prompt_logprobs")
        prompt_logprobs = body.prompt_logprobs
    usage = body.stream_options
    include_usage = usage is not None and usage.include_usage
    resumed = _resumed(body.resume_output_ids, rules, n)
    if resumed and tools is not None and not stream:
        # half a call is of use only to a caller that has the other half
        raise InvalidRequestError(
            "resume_output_ids with tools needs stream=true", "resume_output_ids"
        )
    check_logprob_bytes(logprobs, max_tokens or rules.max_model_len, n, "logprobs")
    service_tier, tier_class = body.service_tier or (None, None)
    skips, special, speculation = (
        body.skip_special_tokens,
        body.add_special_tokens,
        body.speculation,
    )
    if skips is None:
        # special tokens may mark a call, or reasoning
        skips = not ((tools and tools.calls) or (rules.thinking and rules.thinking.hidden))
    return GenerationOptions(
        sampling=parse_sampling(
            body,
            rules,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            tools=tools,
        ),
        max_tokens=max_tokens,
        n=n,
        stream=stream,
        # the explanation is part of the usage
        include_usage=include_usage or body.explain,
        continuous_usage=include_usage and usage is not None and usage.continuous_usage_stats,
        stop=body.stop or (),
        include_stop_str_in_output=body.include_stop_str_in_output,
        skip_special_tokens=skips,
        priority=body.priority,
        cache_salt=body.cache_salt,
        slo=parse_slo(body.slo, rules.slo_classes, tier_class),
        tenant=tenant,
        service_tier=service_tier,
        resume_output_ids=resumed,
        request_id=body.request_id,
        add_special_tokens=add_special_tokens if special is None else special,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side,
        explain=body.explain,
        return_token_ids=body.return_token_ids,
        return_tokens_as_token_ids=body.return_tokens_as_token_ids,
        bad_words=body.bad_words or (),
        max_draft_tokens=MOST_DRAFT_TOKENS if speculation is None else speculation.max_tokens,
        store=body.store,
        # a prompt with log-probabilities shares no blocks
        cache_block=rules.cache_block if prompt_logprobs is None else 0,
        tells_metrics=rules.tells_metrics,
        tells_timings=body.timings_per_token,
        cuts_max_tokens=cuts_max_tokens,
        ignored_fields=body.ignored_fields,
        adapter=rules.adapters.get(model or ""),
        kv_source=None
        if body.kv_source is None
        else KvSource(url=body.kv_source.url, fingerprint=body.kv_source.fingerprint),
    )


def _resumed(
    values: list[Any] | None, rules: RequestRules, n: int
) -> tuple[tuple[int, ...] | None, ...]:
    """Parse a list of ids; with several choices one list for each, null for an ended choice."""
    name = "resume_output_ids"
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
