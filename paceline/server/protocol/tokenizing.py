"""Bodies of ``/tokenize`` and ``/detokenize``; ``llama_cpp.info`` has those of llama-server."""

from __future__ import annotations

from typing import Final

from paceline.server.protocol.body import Body
from paceline.server.protocol.field_types import MODEL, boolean, needed, refused, string, token_ids
from paceline.server.protocol.generation import TemplateBody

__all__ = ["DetokenizeBody", "TokenizeMessagesBody", "TokenizePromptBody"]

_WITH_CONTENT: Final = refused(
    " goes with content; with prompt and messages it is add_special_tokens and return_token_strs",
    (),
)


class _Tokenize(Body):
    return_token_strs = boolean(note="not with `content`")
    add_special = parse_special = with_pieces = _WITH_CONTENT


class TokenizePromptBody(_Tokenize):
    model = MODEL
    prompt = needed(string(), note="of `prompt`, `messages` and `content` one")
    add_special_tokens = boolean(True, note="not with `content`; with `messages` false by default")


class TokenizeMessagesBody(TemplateBody, _Tokenize):
    """The fields of a chat body that affect its prompt."""

    add_special_tokens = boolean(note="not with `content`; with `messages` false by default")


class DetokenizeBody(Body):
    model = MODEL
    tokens = needed(token_ids())
