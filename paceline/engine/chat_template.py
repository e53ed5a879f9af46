"""Chat messages to prompt text, by a checkpoint's Jinja template.

What a template sees is what Hugging Face's ``apply_chat_template`` shows it: the messages, tools,
special tokens, ``raise_exception``, ``strftime_now``, a ``tojson`` that does not escape HTML,
blocks trimmed. Templates are hostile code, and run in ``template_sandbox``. Everything handed to
one is rebuilt from plain JSON values first, so no object with methods of its own gets in.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Final, NoReturn

from jinja2 import Template
from jinja2.exceptions import TemplateError, TemplateSyntaxError

from paceline.core.errors import InvalidRequestError
from paceline.engine.template_meter import TemplateLimitError, current_meter, metered
from paceline.engine.template_sandbox import TemplateSandbox

__all__ = ["RESERVED_NAMES", "ChatTemplate"]

# the longest published template has about 20,000 characters
MAX_TEMPLATE_CHARS: Final = 200_000
MAX_PROMPT_CHARS: Final = 32 << 20
MAX_DEPTH: Final = 64
MAX_TOJSON_INDENT: Final = 16

# what chat_template_kwargs cannot set: the conversation itself, what other request fields set, the
# parameters of Hugging Face's function that are not for templates, and the sandbox's functions
RESERVED_NAMES: Final = frozenset(
    (
        "messages", "conversation", "conversations", "tools", "add_generation_prompt",
        "continue_final_message", "chat_template", "template", "tokenize", "tokenizer",
        "tokenizer_kwargs", "padding", "truncation", "max_length", "return_tensors",
        "return_dict", "return_assistant_tokens_mask", "bos_token", "eos_token", "unk_token",
        "pad_token", "range", "dict", "namespace", "raise_exception", "strftime_now", "self",
        "loop", "caller", "varargs", "kwargs",
    )
)  # fmt: skip
# a directive with a width: the C library would pad to it
_STRFTIME_WIDTH: Final = re.compile(r"%[-_0^#+:]*[0-9]")


class _RefusedError(Exception):
    """The template called ``raise_exception``."""


def _raise_exception(message: Any = "") -> NoReturn:
    raise _RefusedError(str(message)[:1000])


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    meter = current_meter()
    meter.step()
    if isinstance(indent, int) and indent > MAX_TOJSON_INDENT:
        raise TemplateLimitError(f"tojson was asked to indent by {indent}")
    if isinstance(indent, str) or any(len(part) > 16 for part in separators or ()):
        raise TemplateLimitError("tojson was given an indent or separator of its own")
    before = meter.size
    meter.pay_deep(value)
    # a line per value, indented once per level; what is deeper than MAX_DEPTH does not serialise
    meter.pay((meter.size - before) * (1 + (indent or 0)))
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=(separators[0], separators[1]) if separators else None,
        sort_keys=sort_keys,
    )


def _strftime_now(form: str) -> str:
    if len(form) > 200 or _STRFTIME_WIDTH.search(form):
        raise TemplateLimitError("strftime_now was given a long format or one with a width")
    return datetime.now().strftime(form)


_SANDBOX: Final = TemplateSandbox(
    extra_filters={"tojson": _tojson},
    extra_globals={"raise_exception": _raise_exception, "strftime_now": _strftime_now},
)


@lru_cache(maxsize=32)
def _compile(source: str) -> Template:
    if len(source) > MAX_TEMPLATE_CHARS:
        raise InvalidRequestError(
            f"the chat template has {len(source)} characters, at most {MAX_TEMPLATE_CHARS} are "
            "allowed",
            "chat_template",
        )
    try:
        return _SANDBOX.from_string(source)
    except TemplateSyntaxError as error:
        message = f"the chat template does not parse: line {error.lineno}: {error.message}"
    except Exception as error:
        # nested too deeply, a number too long: whatever Jinja and Python's compiler object to in
        # somebody's template is that template's fault
        message = f"the chat template does not compile: {type(error).__name__}: {error!s:.200}"
    raise InvalidRequestError(message, "chat_template")


class ChatTemplate:
    """Renders conversations with the templates of one checkpoint.

    ``templates`` maps names to Jinja sources; "default" is used unless tools are given and there
    is "tool_use". ``special_tokens`` (``bos_token``, ``eos_token``, ...) become variables.
    Thread-safe. A render takes up to some seconds of CPU for a hostile template, so servers call
    it outside their event loop.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._templates = dict(templates)
        self._special_tokens = dict(special_tokens)

    def source(self, has_tools: bool) -> str | None:
        """The template that would be used, None if the checkpoint has none."""
        if has_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        return self._templates.get("default")

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """The prompt text; see ``engine.protocol.Tokenizer.render_chat``.

        Raises:
            InvalidRequestError: no template, arguments that contradict each other, or a template
                that refuses the messages, fails, or uses more time or memory than allowed.
        """
        if add_generation_prompt and continue_final_message:
            raise InvalidRequestError(
                "add_generation_prompt and continue_final_message cannot both be true",
                "continue_final_message",
            )
        source = chat_template if chat_template is not None else self.source(bool(tools))
        if source is None:
            raise InvalidRequestError(
                "this model has no chat template; use /v1/completions or give one",
                "chat_template",
            )
        if reserved := sorted(RESERVED_NAMES & (template_kwargs or {}).keys()):
            raise InvalidRequestError(
                f"chat_template_kwargs cannot set {', '.join(reserved)}", "chat_template_kwargs"
            )
        conversation = _plain(list(messages), "messages")
        marker = ""
        if continue_final_message:
            marker = secrets.token_hex(16)
            final_text = _mark_final_message(conversation, marker)
        variables = {
            **self._special_tokens,
            "documents": None,
            **_plain(dict(template_kwargs or {}), "chat_template_kwargs"),
            "messages": conversation,
            "tools": _plain(list(tools), "tools") if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        prompt = _render(source, variables)
        if marker:
            prompt = _cut_at_marker(prompt, marker, final_text)
        return prompt


def _render(source: str, variables: dict[str, Any]) -> str:
    template = _compile(source)
    try:
        prompt = metered(template, variables)
    except _RefusedError as error:
        message = f"the chat template refuses these messages: {error}"
    except TemplateLimitError as error:
        message = f"the chat template was stopped: {error}"
    except RecursionError:
        message = "the chat template was stopped: it recursed too deeply"
    except TemplateError as error:
        message = f"the chat template failed: {error.message!s:.500}"
    except Exception as error:
        # templates run other people's expressions on other people's messages: whatever those
        # raise (TypeError, KeyError, ZeroDivisionError, ...) fails this request alone
        message = f"the chat template failed: {type(error).__name__}: {error!s:.500}"
    else:
        if len(prompt) <= MAX_PROMPT_CHARS:
            return prompt
        message = (
            f"the chat template made {len(prompt)} characters, "
            f"at most {MAX_PROMPT_CHARS} are allowed"
        )
    raise InvalidRequestError(message, "messages")


def _plain(value: Any, param: str, depth: int = 0) -> Any:
    """A deep copy made of JSON types alone."""
    if depth > MAX_DEPTH:
        raise InvalidRequestError(f"{param} is nested deeper than {MAX_DEPTH} levels", param)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise InvalidRequestError(f"{param} has a key that is not a string", param)
        return {str(key): _plain(item, param, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, param, depth + 1) for item in value]
    raise InvalidRequestError(
        f"{param} holds a {type(value).__name__}, which is not a JSON value", param
    )


def _mark_final_message(conversation: list[Any], marker: str) -> str:
    """Append ``marker`` to the last message's text, in place; the text as it was."""
    final = conversation[-1] if conversation else None
    content = final.get("content") if isinstance(final, dict) else None
    if isinstance(final, dict) and isinstance(content, str):
        final["content"] = content + marker
        return content
    for part in reversed(content if isinstance(content, list) else []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            text: str = part["text"]
            part["text"] = text + marker
            return text
    raise InvalidRequestError(
        "continue_final_message needs a last message with text to continue",
        "continue_final_message",
    )


def _cut_at_marker(prompt: str, marker: str, final_text: str) -> str:
    position = prompt.rfind(marker)
    if position < 0 or final_text.strip() not in prompt:
        raise InvalidRequestError(
            "the chat template does not show the last message as it is, so it cannot be continued",
            "continue_final_message",
        )
    return prompt[:position]
