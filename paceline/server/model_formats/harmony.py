"""Reader of gpt-oss's output, in which each message names its channel.

::

    <|channel|>analysis<|message|>thoughts<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>
    <|start|>assistant<|channel|>final<|message|>the answer<|return|>

The prompt ends behind ``<|start|>assistant``, and no text holds the token that ends the output.
Reasoning is the channel ``analysis``; text is ``final``, and ``commentary`` without a recipient; a
call is left as ``tool_formats.harmony`` reads it. Source: see there.
"""

from __future__ import annotations

import re
from typing import Final

from paceline.server.model_formats.reasoning_reader import Read
from paceline.server.model_formats.tool_formats.base import held_back
from paceline.server.model_formats.tool_formats.harmony import CALL

__all__ = ["HarmonyReader"]

_MESSAGE: Final = "<|message|>"
_START: Final = "<|start|>"
_ENDS: Final = ("<|end|>", "<|return|>", "<|call|>", _START)
_FUNCTION: Final = re.compile(r"to=functions\.([^\s<]{1,256})")
_MOST_HEADER: Final = 512


class HarmonyReader:
    """A ``reasoning_reader.Reader``.

    Args:
        thinking: the prompt has left the channel ``analysis`` open.
    """

    def __init__(self, *, thinking: bool) -> None:
        self.thinking = thinking
        self.ended = False
        self._held = ""
        # the reader is in the body of a message, not in its header
        self._in_body = thinking
        self._is_call = False

    def push(self, text: str) -> Read:
        self._held += text
        thoughts: list[str] = []
        said: list[str] = []
        while self._held:
            if self._in_body:
                if not self._read_body(thoughts if self.thinking else said):
                    break
            elif not self._read_header(said):
                break
        return Read("".join(thoughts), "".join(said))

    def finish(self) -> Read:
        held, self._held = self._held, ""
        if self.thinking:
            return Read(held, "")
        # an unfinished header is dropped; text that only looked like one is kept
        is_header = not self._in_body and held.lstrip().startswith("<|")
        return Read("", "" if is_header else held)

    def _read_header(self, said: list[str]) -> bool:
        """Return whether a message's header is complete; any other text there is answer text."""
        header, found, rest = self._held.partition(_MESSAGE)
        begins = header.lstrip()
        known = ("<|channel|>", "to=", _START)
        if not any(begins.startswith(mark) or mark.startswith(begins) for mark in known) or (
            len(header) > _MOST_HEADER
        ):
            self._in_body = True
            return True
        if not found:
            return False
        self._held, self._in_body = rest, True
        function = _FUNCTION.search(header)
        self._is_call = function is not None
        if function is not None:
            said.append(f"{CALL}{function[1]}{_MESSAGE}")
        self.thinking = function is None and "<|channel|>analysis" in header
        return True

    def _read_body(self, into: list[str]) -> bool:
        """Return whether the message has ended."""
        found = [(place, mark) for mark in _ENDS if (place := self._held.find(mark)) >= 0]
        if not found:
            kept = max(held_back(self._held, mark) for mark in _ENDS)
            into.append(self._held[: len(self._held) - kept])
            self._held = self._held[len(self._held) - kept :]
            return False
        place, mark = min(found)
        into.append(self._held[:place])
        if self._is_call:
            into.append("<|call|>")
        self._held = self._held[place + (0 if mark == _START else len(mark)) :]
        self.ended = self.ended or self.thinking
        self._in_body = self._is_call = self.thinking = False
        return True
