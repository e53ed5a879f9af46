"""Plan of a run's requests: arrivals, prompts of a length, bodies. Equal options and seeds give
equal plans.

No tokenizer is needed. A prompt of N tokens has the number of words that take N tokens on this
server, measured by two requests before the run (``Words.fit``): common words of four letters, each
one token in most vocabularies and five bytes in those of bytes. ``usage`` has the real number.

This module does not know clocks or sockets.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, Final

import msgspec

from paceline.errors import ConfigError
from paceline.sim.arrival import Arrival
from paceline.sim.workload.shaping import limit
from paceline.sim.workload.spec import open_workload
from paceline.sim.workload.traces import open_trace

__all__ = ["ARRIVALS", "ENDPOINTS", "Bodies", "Plan", "PromptFile", "Words"]

ENDPOINTS: Final[Mapping[str, str]] = {"chat": "/chat/completions", "completions": "/completions"}
# coefficients of variation of the gaps between arrivals
ARRIVALS: Final[Mapping[str, float]] = {"poisson": 1.0, "constant": 0.0, "bursty": 3.0}
# default without a number and a duration
_NUMBER: Final = 100
# names of a limit in a line of prompts, and fields of a line that are not sent: those that the run
# sets for all requests, and a line's own name
_MOST: Final = ("max_tokens", "max_completion_tokens")
_OF_THE_RUN: Final = frozenset({"model", "stream", "stream_options", "custom_id"})

_WORDS: Final = (
    "also back been book both call care city does down draw each ease even farm feet find food "
    "form four from give good grow hard have head help here into keep kind last late left life "
    "like line live long look make many mark mean mile more most move much must name near need "
    "next open over page part play rain real said same seem self show side some such tell that "
    "them then they this time took tree turn very walk well went what when will with work year "
    "your"
)
_VOCABULARY: Final = tuple(f" {word}" for word in _WORDS.split())


@dataclass(frozen=True, slots=True)
class Plan:
    """Requests and their send times.

    Open loop (``concurrency`` is None): each at its ``at``, whatever the server does. Closed loop:
    always ``concurrency`` at once, each sent as soon as another has ended, none after ``duration``.
    """

    # the workload in words, for reports
    name: str
    arrivals: Iterable[Arrival]
    # tokens per entry of ``Arrival.prefix``
    prefix_block: int
    concurrency: int | None = None
    # seconds; None: until the arrivals end
    duration: float | None = None

    @classmethod
    def make(
        cls,
        *,
        rate: float | None = None,
        concurrency: int | None = None,
        cv: float = 1.0,
        trace: str = "",
        input_len: str = "256",
        output_len: str = "128",
        number: int | None = None,
        duration: float | None = None,
        ttft: float | None = None,
        tpot: float | None = None,
        e2e: float | None = None,
        seed: int = 0,
    ) -> Plan:
        """Make a plan from options.

        Args:
            rate: requests a second; with a trace, its lengths at new times.
            trace: a file or description as ``open_workload`` reads it.
            input_len, output_len: as ``parse_lengths`` reads them.
            ttft, tpot, e2e: targets in seconds of the requests that have none of their own.

        Raises:
            ConfigError: a bad length, rate or trace, or no option that says when to send.
        """
        if rate is None and concurrency is None and not trace:
            raise ConfigError("give --rate, --concurrency or --trace")
        if rate is not None and concurrency is not None:
            raise ConfigError("--rate is an open loop and --concurrency a closed one: give one")
        if number is None and duration is None and (not trace or rate is not None):
            number = _NUMBER
        # a closed loop sends when it can, so the times do not matter
        times = f"rate={rate or 1.0!r},cv={cv!r},n={number or 10**9}"
        name = trace
        if not trace:
            name = f"synthetic:{times},prompt={input_len},output={output_len}"
        elif rate is not None:
            name = f"lengths:{trace}?{times}"
        stream: Iterable[Arrival]
        if name == trace and concurrency is not None and Path(trace).is_file():
            read = open_trace(Path(trace), timed=False)
            stream, block = _Restartable(read), read.prefix_block
        else:
            workload = open_workload(name, seed=seed)
            stream, block = workload, workload.prefix_block
        seconds = None if concurrency is not None else duration
        limited = _Limited(stream, number, seconds, (ttft, tpot, e2e))
        return cls(name, limited, block, concurrency, duration)


class _Restartable:
    def __init__(self, trace: Any) -> None:
        self._trace = trace

    def __iter__(self) -> Iterator[Arrival]:
        found: Iterator[Arrival] = self._trace.arrivals()
        return found


@dataclass(frozen=True, slots=True)
class _Limited:
    """A limited number of arrivals, with targets."""

    arrivals: Iterable[Arrival]
    number: int | None
    seconds: float | None
    targets: tuple[float | None, float | None, float | None]

    def __iter__(self) -> Iterator[Arrival]:
        ttft, tpot, e2e = self.targets
        for arrival in limit(self.arrivals, number=self.number, seconds=self.seconds):
            if arrival.ttft is arrival.tpot is arrival.deadline is None:
                arrival = replace(arrival, ttft=ttft, tpot=tpot, deadline=e2e)
            yield arrival


@dataclass(frozen=True, slots=True)
class Words:
    """Makes prompts of about a given number of tokens."""

    seed: int
    prefix_block: int = 512
    # measured with this server's tokenizer and template
    per_word: float = 1.0
    overhead: float = 0.0

    def fit(self, samples: Sequence[tuple[int, int]]) -> Words:
        """Fit to two prompts, (words, tokens) each. Returns itself if the result makes no sense."""
        (words, tokens), (more_words, more_tokens) = samples
        per_word = (more_tokens - tokens) / (more_words - words)
        if not 0.2 <= per_word <= 20:
            return self
        return replace(self, per_word=per_word, overhead=tokens - per_word * words)

    def text(self, arrival: Arrival, number: int) -> str:
        """Return the prompt of an arrival; ``number`` distinguishes arrivals. Prompts with equal
        leading ``prefix`` identities begin with the same text."""
        count = max(1, round((arrival.prompt_tokens - self.overhead) / self.per_word))
        piece = max(1, round(self.prefix_block / self.per_word))
        words: list[str] = []
        for identity in arrival.prefix:
            if len(words) >= count:
                break
            words += self.words(f"prefix/{identity}", min(piece, count - len(words)))
        words += self.words(f"prompt/{number}", count - len(words))
        return "".join(words)[1:]

    def words(self, name: str, count: int) -> list[str]:
        """Return words chosen by ``name`` and the seed, each with a space before it."""
        return Random(f"{self.seed}/{name}").choices(_VOCABULARY, k=count)


@dataclass(frozen=True, slots=True)
class _Prompt:
    text: str | None
    messages: list[dict[str, Any]] | None
    # by the name used in the line
    most: Mapping[str, int]
    # the rest of the line, such as ``temperature``: sent unchanged
    fields: Mapping[str, Any]


class PromptFile:
    """JSON lines, each with ``prompt`` or ``messages`` and optional other fields of a request; used
    in turn, again from the first after the last. The run sets the model, and how it streams.

    Raises:
        ConfigError: it cannot be read, or a line is something else; the message says which.
    """

    def __init__(self, path: Path) -> None:
        try:
            # split only at line feeds: JSON strings may hold other line ends of Unicode
            lines = path.read_text(encoding="utf-8-sig").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: cannot be read: {error}") from error
        self._prompts = [
            _parse_prompt(line, f"{path}:{number}")
            for number, line in enumerate(lines, 1)
            if line.strip()
        ]
        if not self._prompts:
            raise ConfigError(f'{path}: has no prompts; write lines such as {{"prompt": "Hi"}}')

    def __getitem__(self, number: int) -> _Prompt:
        return self._prompts[number % len(self._prompts)]

    @property
    def messages(self) -> bool:
        """Whether any line has messages."""
        return any(prompt.messages is not None for prompt in self._prompts)


def _parse_prompt(line: str, where: str) -> _Prompt:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    row = {"prompt": row} if isinstance(row, str) else row
    if isinstance(row, dict):
        given = {name: row.pop(name, None) for name in ("prompt", "messages", *_MOST)}
        text, messages = given["prompt"], given["messages"]
        most = {name: given[name] for name in _MOST if given[name] is not None}
        right = isinstance(text, str) != isinstance(messages, list)
        if right and len(most) < 2 and all(type(m) is int and m >= 1 for m in most.values()):
            fields = {name: value for name, value in row.items() if name not in _OF_THE_RUN}
            return _Prompt(text, messages, most, fields)
    raise ConfigError(
        f'{where}: expected {{"prompt": "..."}} or {{"messages": [...]}}, optionally with '
        f'"{_MOST[0]}" or "{_MOST[1]}": a whole number'
    )


@dataclass(frozen=True, slots=True)
class Bodies:
    """Makes the JSON bodies of requests.

    Raises:
        ConfigError: messages for an endpoint that takes a prompt.
    """

    model: str
    # "chat" or "completions"
    endpoint: str
    words: Words
    prompts: PromptFile | None = None
    # send the field that asks for ``usage``; a few servers refuse it
    include_usage: bool = True
    ignore_eos: bool = False
    # send the targets in the body, as Paceline's servers read them
    send_slo: bool = False
    # more fields, which override others
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.endpoint == "completions" and self.prompts is not None and self.prompts.messages:
            raise ConfigError("--prompts has messages, which --endpoint completions cannot send")

    def make(self, arrival: Arrival, number: int) -> tuple[bytes, int | None, int]:
        """Return the body, and the prompt and output tokens that it asks for; the prompt tokens are
        None for a prompt from a file."""
        asked = None
        text: str | None
        messages: list[dict[str, Any]] | None = None
        limit: Mapping[str, int] = {_MOST[0]: arrival.output_tokens}
        fields: Mapping[str, Any] = {}
        if self.prompts is None:
            text, asked = self.words.text(arrival, number), arrival.prompt_tokens
        else:
            prompt = self.prompts[number]
            text, messages, fields = prompt.text, prompt.messages, prompt.fields
            limit = prompt.most or limit
        body: dict[str, Any] = {"model": self.model, **limit, "stream": True}
        if self.endpoint == "chat":
            body["messages"] = messages or [{"role": "user", "content": text}]
        else:
            body["prompt"] = text
        if self.include_usage:
            body["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            body["ignore_eos"] = True
        if arrival.tenant:
            body["user"] = arrival.tenant
        if self.send_slo:
            targets = (arrival.ttft, arrival.tpot, arrival.deadline)
            names = ("ttft_ms", "tpot_ms", "deadline_ms")
            slo = {n: 1e3 * t for n, t in zip(names, targets, strict=True) if t is not None}
            if slo:
                body["slo"] = slo
        (most,) = limit.values()
        return msgspec.json.encode({**body, **fields, **self.extra}), asked, most
