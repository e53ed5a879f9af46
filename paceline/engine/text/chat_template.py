"""Rendering of chat messages as prompt text, by a checkpoint's Jinja template.

A template sees the same as in Hugging Face's ``apply_chat_template``: the messages, tools, special
tokens, ``raise_exception``, ``strftime_now``, a ``tojson`` that does not escape HTML, blocks
trimmed. Templates are hostile code: ``template_sandbox`` keeps them from Python, and
``template_process`` from the server's time and memory. All arguments are rebuilt from plain JSON
values first, so that no object with methods of its own gets in.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from paceline.engine.text.template_sandbox import RendersHere
from paceline.errors import InvalidRequestError

__all__ = ["KNOWN_TEMPLATES", "RESERVED_NAMES", "ChatTemplate", "Renderer"]

# SHA-256 of templates that take time and memory in proportion to their output, for any input: they
# were read, and are rendered in this process. They belong to the models that
# ``checkpoints.hub.catalogue`` names
KNOWN_TEMPLATES: Final = frozenset(
    (
        # SmolLM2-135M-Instruct
        "872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788",
    )
)
MAX_DEPTH: Final = 64

# names that chat_template_kwargs cannot set: the conversation itself, values of other request
# fields, parameters of Hugging Face's function that are not for templates, and sandbox functions
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


class Renderer(Protocol):
    """Runs templates. ``template_process`` has one for any template, ``template_sandbox`` one for
    templates that are known to end."""

    def render(self, source: str, variables: dict[str, Any]) -> str:
        """Return the text. Thread-safe. Raises InvalidRequestError when the template does not
        compile, refuses, fails or takes too much."""

    def close(self) -> None:
        """Free the renderer's resources; a later render takes them again."""


class ChatTemplate:
    """Renders conversations with the templates of one checkpoint. Thread-safe.

    Args:
        templates: Jinja sources by name; "default" is used, except with tools if there is
            "tool_use".
        special_tokens: ``bos_token``, ``eos_token``, ...; they become variables.
        renderer: for the checkpoint's own templates, unless they are known.
        callers: for templates and arguments from callers, so that a hostile one does not delay
            plain conversations.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        *,
        renderer: Renderer,
        callers: Renderer,
    ) -> None:
        self._templates = dict(templates)
        self._special_tokens = dict(special_tokens)
        self._renderer = renderer
        self._callers = callers
        self._known = frozenset(
            source for source in self._templates.values() if _digest(source) in KNOWN_TEMPLATES
        )

    @property
    def is_known(self) -> bool:
        """Whether ``render`` takes time in proportion to the text, for requests without a template
        of their own."""
        return self._known == frozenset(self._templates.values())

    def close(self) -> None:
        """End the rendering processes; the next render that needs one starts it again."""
        self._renderer.close()
        self._callers.close()

    def source(self, has_tools: bool) -> str | None:
        """Return the template that would be used, None if the checkpoint has none."""
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
        """Return the prompt text; see ``engine.protocol.Tokenizer.render_chat``.

        Raises:
            InvalidRequestError: no template, arguments that contradict each other, or a template
                that refuses the messages, fails, or uses more time or memory than allowed.
            RequestFailedError: the renderer failed.
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
        renderer: Renderer
        if source in self._known:
            renderer = RendersHere()
        elif chat_template is not None or template_kwargs:
            renderer = self._callers
        else:
            renderer = self._renderer
        prompt = renderer.render(source, variables)
        if marker:
            prompt = _cut_at_marker(prompt, marker, final_text)
        return prompt


def _digest(source: str) -> str:
    return hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()


def _plain(value: Any, param: str, depth: int = 0) -> Any:
    """Return a deep copy made of JSON types alone."""
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
    """Append ``marker`` to the last message's text, in place; return the text before that."""
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
