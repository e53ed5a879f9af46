"""Where a stream of named events stands: within a part of its answer, or between two.

Between two parts an engine may think or run a tool, and sends pings meanwhile; within one, pings
alone mean that it has stalled. The events are those of Anthropic's Messages
(https://docs.anthropic.com/en/api/messages-streaming) and of OpenAI's Responses
(https://platform.openai.com/docs/api-reference/responses-streaming).
"""

from __future__ import annotations

from typing import Final

__all__ = ["BEGINNINGS", "is_between_parts"]

# of events with which one of several parts begins
BEGINNINGS: Final = frozenset({b"content_block_start", b"response.output_item.added"})
# how names of events end behind which no other part begins: more of this one comes, or the end of
# the answer (``message_delta``)
_WITHIN: Final = (b"delta", b".annotation.added", b"content_part.added")
# types of parts of which text comes as soon as they have begun
_TEXTS: Final = frozenset({"text", "message"})


def is_between_parts(name: bytes, begins: str) -> bool:
    """Whether the stream stands between two parts of its answer behind this event.

    Args:
        name: the event's; not a ping's, behind which a stream stands where it stood before.
        begins: the type of the part that one of ``BEGINNINGS`` begins; empty: it does not say.
    """
    is_text = name in BEGINNINGS and begins in _TEXTS
    return not (is_text or name.endswith(_WITHIN))
