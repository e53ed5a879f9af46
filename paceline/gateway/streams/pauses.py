"""Position of a stream of named events: within a part of its answer, or between two.

Between two parts an engine may think or run a tool, and send pings meanwhile; within a part,
nothing but pings means that it has stalled. The events are those of Anthropic's Messages
(https://docs.anthropic.com/en/api/messages-streaming) and of OpenAI's Responses
(https://platform.openai.com/docs/api-reference/responses-streaming).
"""

from __future__ import annotations

from typing import Final

__all__ = ["BEGINNINGS", "is_between_parts"]

# events that begin a part
BEGINNINGS: Final = frozenset({b"content_block_start", b"response.output_item.added"})
# suffixes of event names after which no new part begins: more of the same part follows, or the end
# of the answer (``message_delta``)
_WITHIN: Final = (b"delta", b".annotation.added", b"content_part.added")
# types of parts whose text follows their beginning at once
_TEXTS: Final = frozenset({"text", "message"})


def is_between_parts(name: bytes, begins: str) -> bool:
    """Whether the stream is between two parts of its answer after this event.

    Args:
        name: the event's name; not a ping's, which leaves the position as it was.
        begins: type of the part that one of ``BEGINNINGS`` begins; empty: not given.
    """
    is_text = name in BEGINNINGS and begins in _TEXTS
    return not (is_text or name.endswith(_WITHIN))
