"""One streamed answer, joined from the streams of one or more engines.

An attempt is one engine's stream: its bytes go in as they arrive, and bytes for the caller come
out. The relay notes which tokens of each choice the caller has, so that another engine can resume
behind them, and removes what only the gateway asked for (token ids, usage)::

    try 1   role  "Once"  " upon"  x
    try 2                          role  " a"  " time"  finish  [DONE]
    caller  role  "Once"  " upon"        " a"  " time"  finish  [DONE]

A stream that ends without a finish reason for every choice counts as cut off, however its
connection ended; it is never passed on as a "stop". Pure: no clock, no socket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from paceline.gateway.streams.chunk_template import ChunkTemplate, RelayEvent, relay_nothing
from paceline.gateway.streams.chunks import (
    Choice,
    Chunk,
    ReportedError,
    read_chunk,
    with_choices,
    without_ids,
)
from paceline.gateway.streams.usage import Usage
from paceline.wire import fast_paths
from paceline.wire.sse import MAX_EVENT_BYTES, SseEvents, name_of, payload_of

__all__ = ["DONE", "OpenAIStreamRelay", "StreamRelay"]

DONE: Final = b"data: [DONE]\n\n"
_LF: Final = ord("\n")
# chunks of an attempt that are tried as templates
_LESSONS: Final = 16


@dataclass(slots=True, eq=False, kw_only=True)
class StreamRelay:
    """Relay of a streamed answer; see ``OpenAIStreamRelay``."""

    # the caller has a part of the answer
    emitted: bool = False
    # the answer is complete
    done: bool = False
    # why the current attempt has failed; None: it has not
    failed: str | None = None
    # the event in which the engine reported its failure; b"": none
    failure_event: bytes = b""
    prompt_tokens: int | None = None
    # cached tokens of the prompt, as the engine counts them
    cached_tokens: int = 0
    # events that were a part of the answer, even an empty one; not comments and pings
    num_events: int = 0
    # the next output begins a new part, such as a block or an item, before which the engine may be
    # silent: it thinks, or runs a tool of its own. Chat and completions have no parts: an engine
    # that is silent after its first token has stalled
    between_parts: bool = False
    # fast path for a read, valid until the next ``feed``: returns the caller's bytes if the data is
    # one event in the middle of the answer that matches the template; None: call ``feed``
    relay_event: RelayEvent = relay_nothing
    _events: SseEvents = field(default_factory=SseEvents)

    @property
    def is_in_long(self) -> bool:
        """Whether the last data belongs to an unfinished event other than a ping."""
        return self._events.is_in_long

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of all choices; without ids, the engine's count, or chunks so far."""
        raise NotImplementedError

    @property
    def num_parts(self) -> int:
        """Parts of the text so far: roughly its number of tokens."""
        return 0

    def annotate(self, note: Mapping[str, Any]) -> None:
        """Set what the last chunk of each choice tells the caller, where the API has room for
        it."""

    def begin_attempt(self, *, by_text: bool = False) -> None:
        """Start an attempt: data now comes from another engine. ``by_text``: it resumes behind the
        text, and counts that as a part of its prompt."""
        self._events.clear()
        self.failed, self.failure_event = None, b""

    def feed(self, data: bytes) -> bytes:
        """Take in data, and return what the caller gets. Once ``failed`` is set, nothing more."""
        raise NotImplementedError

    def end_attempt(self) -> bytes:
        """End the attempt, in order or not: return the rest of a complete answer; of any other
        answer, set ``failed``."""
        raise NotImplementedError

    def partial_text(self) -> str | None:
        """The text so far; None if it is unknown, or the answer holds more than text."""
        return None

    def resume_ids(self) -> list[list[int] | None] | None:
        """Return the token ids of each choice, None for one that has ended; None: not all ids are
        known."""
        return None


@dataclass(slots=True, eq=False, kw_only=True)
class OpenAIStreamRelay(StreamRelay):
    """Relay of chat and completions.

    Args:
        num_choices: choices of the answer; None: unknown, and it cannot be resumed.
        model: name that callers see; "": the engine's own.
        hide_ids: the caller did not ask for token ids.
        hide_usage: the caller did not ask for usage.
    """

    num_choices: int | None
    model: str = ""
    hide_ids: bool = True
    hide_usage: bool = True
    # keep the text of a single choice, for engines that only resume behind text
    keep_text: bool = False
    # sent in the last chunk of each choice, if not empty
    note: Mapping[str, Any] = field(default_factory=dict)
    _ids: dict[int, list[int]] = field(default_factory=dict)
    # tokens came without ids, so nothing can be resumed exactly
    _lost_ids: bool = False
    _roles: set[int] = field(default_factory=set)
    _finished: set[int] = field(default_factory=set)
    # parts of the text; None: the answer holds more than text, such as a call
    _text: list[str] | None = field(default_factory=list)
    # parts of the text before the current attempt
    _said_before: int = 0
    _by_text: bool = False
    _usage_out: bool = False
    # the engine has sent its token counts
    _counted: bool = False
    _completion_tokens: int = 0
    # chunks with output but without ids
    _parts: int = 0
    _attempt: int = 0
    _first_of_attempt: bool = True
    # id, created and model of the first chunk, as JSON
    _head: dict[str, bytes] = field(default_factory=dict)
    _swaps: list[tuple[bytes, bytes]] = field(default_factory=list)
    # template of the attempt's next chunks; None: not learned
    _template: ChunkTemplate | None = None
    # chunks that may still be tried as templates: in some streams no two are alike
    _lessons: int = 0

    @property
    def num_output_tokens(self) -> int:
        known = max(self._completion_tokens, sum(map(len, self._ids.values())))
        if self._counted:
            return known
        return max(known, self._parts + (0 if self._template is None else self._template.num_parts))

    def annotate(self, note: Mapping[str, Any]) -> None:
        self.note = note

    def begin_attempt(self, *, by_text: bool = False) -> None:
        StreamRelay.begin_attempt(self)
        self._by_text = by_text
        self._said_before = len(self._text or ())
        self._attempt += 1
        self._first_of_attempt = True
        self._swaps = []
        # only full parsing can keep text and show ids
        learns = self.num_choices == 1 and self.hide_ids and not self.keep_text
        learns = learns and fast_paths.are_on()
        self._lessons = _LESSONS if learns else 0
        self._forget_shape()
        self.relay_event = relay_nothing

    def feed(self, data: bytes) -> bytes:
        out = []
        for event in self._events.feed(data):
            if self.failed is not None or self.done:
                break
            template = self._template
            found = None if template is None else template.relay_event(event + b"\n\n")
            if found is None:
                found = self._event(event)
            else:
                self.num_events += 1
            out.append(found)
        if self._events.too_long and not self.done and self.failed is None:
            self.failed = f"an event of more than {MAX_EVENT_BYTES} bytes"
        goes_on = self._events.is_between and not self.done and self.failed is None
        self.relay_event = (
            self._template.relay_event if self._template is not None and goes_on else relay_nothing
        )
        return b"".join(out)

    def end_attempt(self) -> bytes:
        self.relay_event = relay_nothing
        if self.done:
            return b""
        if self._is_said:
            # only usage and the end are missing
            self.done = True
            self.failed = None
            return self._counts() + DONE
        if self.failed is None:
            self.failed = "the stream ended in the middle of the answer"
        return b""

    def partial_text(self) -> str | None:
        if not self.keep_text or self.num_choices != 1 or not self._text:
            return None
        return "".join(self._text)

    @property
    def num_parts(self) -> int:
        return len(self._text or ())

    def resume_ids(self) -> list[list[int] | None] | None:
        if self.num_choices is None or self._lost_ids or self.prompt_tokens is None:
            return None
        return [
            None if index in self._finished else self._ids.get(index, [])
            for index in range(self.num_choices)
        ]

    @property
    def _is_said(self) -> bool:
        """Whether every choice has its finish reason: later errors do not matter."""
        return self.num_choices is not None and len(self._finished) >= self.num_choices

    def _event(self, event: bytes) -> bytes:
        payload = payload_of(event) or b""
        if payload == b"[DONE]":
            if self.num_choices is not None and not self._is_said:
                self.failed = "the stream ended without a finish reason"
                return b""
            self.done = True
            self.num_events += 1
            return (b"" if self._usage_out else self._counts()) + DONE
        if _LF in payload:
            # JSON may have line breaks between its tokens, but an event's data may not
            payload = payload.replace(b"\n", b" ")
        try:
            chunk = read_chunk(name_of(event), payload)
        except (ReportedError, ValueError) as error:
            if not self._is_said:
                self.failed = str(error)
                reported = payload and isinstance(error, ReportedError)
                self.failure_event = b"data: " + payload + b"\n\n" if reported else b""
            return b""
        if chunk is None:
            # comments pass, as the engine is alive and the caller's connection must stay so
            return event.partition(b"\n")[0] + b"\n\n" if event.startswith(b":") else b""
        if chunk.choices is None:
            payload = with_choices(payload)
        return self._chunk(payload, chunk, chunk.choices or ())

    def _chunk(self, payload: bytes, chunk: Chunk, choices: Sequence[Choice]) -> bytes:
        first, whole = self._first_of_attempt, payload
        if first and (choices or b'"id":""' not in payload):
            # the first chunk of an Azure stream, about the prompt, has an empty head
            self._first_of_attempt = False
            self._begin(payload, chunk)
        has_usage = chunk.has_usage
        self.num_events += bool(choices) or has_usage
        ends = says = False
        only_roles = bool(choices)
        prompt = chunk.prompt_token_ids
        for choice in choices:
            prompt = prompt or choice.prompt_token_ids
            has_output, is_role = self._note_choice(choice)
            # some engines send "" for no reason
            ends = ends or bool(choice.finish_reason)
            says = says or has_output
            only_roles = only_roles and is_role
        if prompt and self.prompt_tokens is None:
            self.prompt_tokens = len(prompt)
        if has_usage:
            self._count(bytes(chunk.usage))
            if self._attempt > 1:
                payload = self._recounted(payload)
            if not choices:
                if self.hide_usage or self._usage_out:
                    return b""
                self._usage_out = True
        if only_roles and self._attempt > 1:
            return b""
        self.emitted = self.emitted or says or ends
        out = self._rewrite(payload, ends=ends)
        if self._lessons and says and not (first or ends or has_usage or prompt):
            self._learn(whole, out, choices)
        return out

    def _note_choice(self, choice: Choice) -> tuple[bool, bool]:
        """Take note of one choice's part; return whether it has output, and whether it only names
        a role that the caller knows."""
        index, delta = choice.index or 0, choice.delta
        speaks = bool(choice.text) or (delta is not None and delta.says)
        if choice.token_ids is not None:
            self._ids.setdefault(index, []).extend(choice.token_ids)
        elif speaks:
            self._lost_ids = True
            self._parts += 1
        if speaks and self.keep_text:
            self._remember(choice)
        if choice.finish_reason:
            self._finished.add(index)
        has_role = delta is not None and delta.role is not None
        is_known = has_role and index in self._roles
        if has_role:
            self._roles.add(index)
        is_role = is_known and not speaks and not choice.finish_reason
        return speaks or bool(choice.token_ids), is_role

    def _rewrite(self, payload: bytes, *, ends: bool) -> bytes:
        """Return the caller's event for a chunk; ``ends``: it ends a choice."""
        if self.hide_ids:
            payload = without_ids(payload)
        for old, new in self._swaps:
            payload = payload.replace(old, new, 1)
        if ends and self.note:
            payload = payload[:-1] + b',"paceline":' + msgspec.json.encode(self.note) + b"}"
        return b"data: " + payload + b"\n\n"

    def _learn(self, payload: bytes, out: bytes, choices: Sequence[Choice]) -> None:
        """Learn the template of the next chunks from one in the middle of the answer."""
        self._lessons -= 1
        self._forget_shape()
        choice = choices[0]
        delta = choice.delta
        text = choice.text if delta is None else delta.says_alone
        if len(choices) == 1 and isinstance(text, str) and text:
            has_ids = choice.token_ids is not None
            # a stream that only sometimes has ids has no template
            if has_ids != self._lost_ids:
                ids = self._ids[choice.index or 0] if has_ids else None
                self._template = ChunkTemplate.of(payload, out, ids)

    def _forget_shape(self) -> None:
        if self._template is not None:
            self._parts += self._template.num_parts
            self._template = None

    def _remember(self, choice: Choice) -> None:
        said = choice.delta.content if choice.delta is not None else choice.text
        if self._text is not None and isinstance(said, str) and said:
            self._text.append(said)
        else:
            self._text = None

    def _begin(self, payload: bytes, chunk: Chunk) -> None:
        """Read the head of an attempt's first chunk: which parts must be replaced."""
        told = (("id", chunk.id), ("created", chunk.created), ("model", chunk.model))
        head = {name: found for name, value in told if (found := bytes(value))}
        if self.model and "model" in head:
            seen = {**head, "model": msgspec.json.encode(self.model)}
        else:
            seen = head
        if not self._head:
            self._head = seen
        for name, value in head.items():
            wanted = self._head.get(name, value)
            if wanted != value:
                key = f'"{name}":'.encode()
                # some engines write a space after the colon
                for gap in (b"", b" "):
                    if key + gap + value in payload:
                        self._swaps.append((key + gap + value, key + gap + wanted))
                        break

    def _count(self, usage: bytes) -> None:
        try:
            counted = msgspec.json.decode(usage, type=Usage).used("")
        except msgspec.MsgspecError:
            return
        self._counted = True
        # the text so far is a part of this engine's prompt, at roughly a token per part
        before = self._said_before if self._by_text else 0
        self._completion_tokens = max(self._completion_tokens, counted.output + before)
        self.cached_tokens = max(self.cached_tokens, counted.cached)
        if counted.prompt and self.prompt_tokens is None and not self._ids:
            self.prompt_tokens = max(1, counted.prompt - before)

    def _recounted(self, payload: bytes) -> bytes:
        """Correct the last engine's usage, which lacks choices that had ended before it started."""
        made = sum(map(len, self._ids.values()))
        fields = msgspec.json.decode(payload, type=dict[str, msgspec.Raw])
        usage = msgspec.json.decode(fields["usage"])
        if not {"prompt_tokens", "completion_tokens"} <= set(usage):
            return payload
        if self._by_text:
            made = usage["completion_tokens"] + self._said_before
            usage["prompt_tokens"] = max(1, usage["prompt_tokens"] - self._said_before)
        elif self._lost_ids or made in (0, usage["completion_tokens"]):
            return payload
        usage["completion_tokens"] = made
        usage["total_tokens"] = usage["prompt_tokens"] + made
        fields["usage"] = msgspec.Raw(msgspec.json.encode(usage))
        return msgspec.json.encode(fields)

    def _counts(self) -> bytes:
        """Build the usage chunk that the engine did not send, from the token ids."""
        if self.hide_usage or self._usage_out or not self._head or self.resume_ids() is None:
            return b""
        self._usage_out = True
        made = sum(map(len, self._ids.values()))
        assert self.prompt_tokens is not None, "ids are known"
        usage = {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + made,
            "completion_tokens": made,
        }
        head = {name: msgspec.Raw(value) for name, value in self._head.items()}
        chunk = {**head, "choices": [], "usage": usage}
        return b"data: " + msgspec.json.encode(chunk) + b"\n\n"
