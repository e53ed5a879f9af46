"""Reasoning that a model writes before its answer, separated from it while the text streams.

A format is two marks around the reasoning. Some models write the first mark themselves (Qwen3), for
others the chat template writes it at the end of the prompt (DeepSeek-R1). A message that is
continued may end within reasoning, and with thinking turned off a template may write both marks.
Output that follows a grammar cannot hold reasoning, so it is not searched there.

In gpt-oss's output each message names its channel::

    <|channel|>analysis<|message|>thoughts<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>
    <|start|>assistant<|channel|>final<|message|>the answer<|return|>

The prompt ends behind ``<|start|>assistant``, and no text holds the token that ends the output.
Reasoning is the channel ``analysis``; text is ``final``, and ``commentary`` without a recipient; a
call is left as ``tool_formats.harmony`` reads it. Source: see there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from paceline.engine.protocol import Tokenizer
from paceline.server.model_formats.tool_formats.base import held_back
from paceline.server.model_formats.tool_formats.harmony import CALL

__all__ = [
    "REASONING_FORMATS",
    "HarmonyReader",
    "Read",
    "Reader",
    "ReasoningFormat",
    "Thinking",
    "ThoughtReader",
    "detect_reasoning",
]


class Read(NamedTuple):
    """The next part of the output, split."""

    thoughts: str
    text: str


class Reader(Protocol):
    """Reads one output, in pieces of any size."""

    @property
    def thinking(self) -> bool:
        """Whether the model is still reasoning."""

    @property
    def ended(self) -> bool:
        """Whether the reasoning has ended."""

    def push(self, text: str) -> Read:
        """Take in more of the output; return what it adds."""

    def finish(self) -> Read:
        """Return the text held back, as the output has ended."""


_MESSAGE: Final = "<|message|>"
_START: Final = "<|start|>"
_ENDS: Final = ("<|end|>", "<|return|>", "<|call|>", _START)
_FUNCTION: Final = re.compile(r"to=functions\.([^\s<]{1,256})")
_MOST_HEADER: Final = 512


class HarmonyReader:
    """A ``Reader``.

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


_SPACE: Final = " \t\r\n"
# tokens at the end of a prompt that are searched for the opening mark
_OPENING: Final = 64


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Marks that one family of models writes around its reasoning."""

    name: str
    begin: str
    end: str
    # text that a chat template of this format contains; "": ``end``
    sign: str = ""
    # reasoning is one of several channels (``HarmonyReader``)
    channels: bool = False
    # an answer begins with reasoning even if the opening mark is missing
    opened: bool = False

    def reader(self, *, thinking: bool, goes_on: bool = False) -> Reader:
        """Return a reader of one output.

        Args:
            thinking: the output begins within reasoning.
            goes_on: the output continues a message that already has text.
        """
        if self.channels:
            return HarmonyReader(thinking=thinking)
        return ThoughtReader(self, thinking=thinking, goes_on=goes_on)

    def left_open(self, prompt: str, *, continued: str | None = None, answers: bool = True) -> bool:
        """Return whether the text behind a rendered prompt is reasoning.

        Args:
            continued: the text of the last message, which the output continues.
            answers: the prompt ends where an answer begins.
        """
        prompt = prompt.rstrip(_SPACE)
        if continued is not None:
            begin, end = continued.rfind(self.begin), continued.rfind(self.end)
            if begin != end:
                return begin > end
            # the template may have written the opening mark before it
            before = prompt.removesuffix(continued.strip(_SPACE)).rstrip(_SPACE)
            return before != prompt and before.endswith(self.begin)
        if prompt.endswith(self.begin):
            return True
        return self.opened and answers and not prompt.endswith(self.end)


_THINK: Final = ReasoningFormat("think", "<think>", "</think>")
# named as vLLM's --reasoning-parser names them
REASONING_FORMATS: Final[dict[str, ReasoningFormat]] = {
    "think": _THINK,
    "deepseek_r1": ReasoningFormat("deepseek_r1", "<think>", "</think>", opened=True),
    "qwen3": _THINK,
    "mistral": ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
    "granite": ReasoningFormat("granite", "Here is my thought process:", "Here is my response:"),
    "openai_gptoss": ReasoningFormat(
        "openai_gptoss", "<|channel|>analysis<|message|>", "<|end|>", "<|channel|>", channels=True
    ),
}


def detect_reasoning(template: str | None) -> ReasoningFormat | None:
    """Return the format that a chat template knows, mostly by its closing mark; None: the model
    does not reason."""
    if template is None:
        return None
    formats = REASONING_FORMATS.values()
    return next((each for each in formats if (each.sign or each.end) in template), None)


@dataclass(frozen=True, slots=True)
class Thinking:
    """How one model reasons."""

    marks: ReasoningFormat
    # ids of the closing mark alone
    end_ids: tuple[int, ...]
    # the marks are special tokens, which texts leave out otherwise
    hidden: bool = False
    # the chat template can turn reasoning on and off
    switchable: bool = False

    @classmethod
    def of(cls, marks: ReasoningFormat | None, tokenizer: Tokenizer) -> Thinking | None:
        """Return how the model reasons; None without ``marks``."""
        if marks is None:
            return None
        ids = tuple(tokenizer.encode(marks.end, add_special_tokens=False))
        spelt = [tokenizer.encode(m, add_special_tokens=False) for m in (marks.begin, marks.end)]
        shown = [tokenizer.decode(each, skip_special_tokens=True) for each in spelt]
        hidden = marks.begin not in shown[0] or marks.end not in shown[1]
        source = tokenizer.chat_template_source or ""
        return cls(marks, ids, hidden, "enable_thinking" in source)

    def left_open(
        self,
        prompt: Sequence[int],
        tokenizer: Tokenizer,
        *,
        continued: str | None = None,
        answers: bool = True,
    ) -> bool:
        """Return whether reasoning follows a prompt; see ``ReasoningFormat.left_open``."""
        tail = prompt[-_OPENING - len(continued or "") :]
        end = tokenizer.decode(list(tail), skip_special_tokens=False)
        return self.marks.left_open(end, continued=continued, answers=answers)

    def count(self, token_ids: Sequence[int]) -> int:
        """Return the tokens up to the closing mark; all of them if other tokens spell the mark."""
        size = len(self.end_ids)
        for place in range(len(token_ids) - size + 1):
            if tuple(token_ids[place : place + size]) == self.end_ids:
                return place + size
        return len(token_ids)


class ThoughtReader:
    """A ``Reader`` for two marks.

    Args:
        thinking, goes_on: see ``ReasoningFormat.reader``.
    """

    def __init__(self, marks: ReasoningFormat, *, thinking: bool, goes_on: bool = False) -> None:
        self._marks = marks
        # text that may be the start of a mark, or white space before one
        self._held = ""
        # the opening mark may still come, even if the prompt has left the reasoning open
        self._before = not (thinking and goes_on)
        self.thinking = thinking
        # the closing mark has been read
        self.ended = False
        # only white space was read since the last mark
        self._at_start = self._before

    def push(self, text: str) -> Read:
        """Take in more of the output."""
        held, self._held = self._held + text, ""
        if self._before:
            held = self._look_for_begin(held)
        if self._before or not self.thinking:
            return Read("", "" if self._before else self._trimmed(held))
        thoughts, found, rest = held.partition(self._marks.end)
        if found:
            thoughts = self._trimmed(thoughts).rstrip(_SPACE)
            self.thinking, self.ended, self._at_start = False, True, True
            return Read(thoughts, self._trimmed(rest))
        # white space before the closing mark is dropped, so it is held with a possible mark
        kept = held_back(held, self._marks.end)
        whole = held[: len(held) - kept].rstrip(_SPACE)
        self._held = held[len(whole) :]
        return Read(self._trimmed(whole), "")

    def finish(self) -> Read:
        """Return the text held back, as the output has ended."""
        held, self._held, self._before = self._held, "", False
        return Read(self._trimmed(held), "") if self.thinking else Read("", self._trimmed(held))

    def _look_for_begin(self, held: str) -> str:
        """Return the text left to read, once it is known whether reasoning comes first."""
        said = held.lstrip(_SPACE)
        begin = self._marks.begin
        if said.startswith(begin):
            self._before, self.thinking = False, True
            return said.removeprefix(begin)
        if begin.startswith(said):
            self._held = held
            return ""
        self._before = False
        self._at_start = self.thinking
        return held

    def _trimmed(self, text: str) -> str:
        if not self._at_start:
            return text
        text = text.lstrip(_SPACE)
        self._at_start = not text
        return text
