"""Compilation of grammars to token masks, by llguidance (docs/adr/0005-constrained-generation.md).

::

    prepare(grammar) --thread--> prototype, kept in a bounded cache
    matcher(grammar) ----------> a copy of the prototype per sequence

Compiling is bounded by the library's own fuel counters and not by a clock, so a hostile grammar is
refused after the same work on every machine. Recursion is bounded here: by the size and nesting of
sources, and by threads whose stacks hold the deepest chain of rules that fits into a source.

This module does not know requests, schedules or logits.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final

from paceline.core.grammar import Grammar
from paceline.engine.protocol import Tokenizer
from paceline.engine.types import TOO_AMBIGUOUS
from paceline.errors import InvalidRequestError, RequestFailedError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    # declared only in the stubs
    from llguidance._lib import JsonCompileOptions

__all__ = ["GrammarCompiler"]

# the library's messages about too many items
_TOO_MANY_ITEMS: Final = re.compile(r"row has \d+ items; max is \d+|[Tt]oo many items")

# compilations at once: a slow grammar does not hold up the next one
_THREADS: Final = 2
# stack of such a thread, in bytes of address space: a chain of 3,000 rules overflows the usual 8
# MiB, and sources that core.grammar lets through hold 15,000
_STACK: Final = 256 << 20
# compiled grammars kept; the largest take a few MB each
_MAX_COMPILED: Final = 128
# deepest nesting of brackets in a regex or grammar
_MAX_NESTING: Final = 64
# most characters of the library's message in an error
_MAX_MESSAGE: Final = 400
# repetition counts: {a,b}
_REPEAT: Final = re.compile(r"\{\s*(\d*)\s*(?:,\s*(\d*)\s*)?\}")
_MAX_REPEAT: Final = 10_000
# seconds that the end of the process waits for a compilation; less than a client's patience
_LAST_SECONDS: Final = 4.0
# no part of a schema may be ignored silently
_OVERRIDES: Final[JsonCompileOptions] = {"lenient": False, "coerce_one_of": False}


class GrammarCompiler:
    """A ``core.grammar.MatcherSource``.

    Args:
        load_tokenizer: called once, on a compiling thread, for the first grammar.
        timeout: seconds that a caller should wait for a compilation.
    """

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], *, timeout: float = 10.0) -> None:
        self.timeout = timeout
        self._load_tokenizer = load_tokenizer
        self._jobs: queue.SimpleQueue[tuple[Future[None], Grammar] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        # the library's id for the end of output, and all other ids that mean the same
        self._ends: tuple[int, ...] = ()
        self._compiled: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()

    def prepare(self, grammar: Grammar) -> Future[None]:
        future: Future[None] = Future()
        if self._cached(grammar) is not None:
            future.set_result(None)
            return future
        self._start()
        self._jobs.put((future, grammar))
        return future

    def matcher(self, grammar: Grammar) -> Matcher:
        prototype = self._cached(grammar)
        while prototype is None:
            # it was evicted from the cache while its request waited
            self.prepare(grammar).result(self.timeout)
            prototype = self._cached(grammar)
        return Matcher(prototype.deep_copy(), self._ends, self._ll_tokenizer().vocab_size)

    def close(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)

    def _start(self) -> None:
        """Start the threads, once; most engines never need them."""
        with self._lock:
            if self._threads:
                return
            # the setting is process-wide and applies to threads started under it
            before = threading.stack_size(_STACK)
            try:
                for number in range(_THREADS):
                    thread = threading.Thread(
                        target=self._work, name=f"grammar-{number}", daemon=True
                    )
                    thread.start()
                    self._threads.append(thread)
            finally:
                threading.stack_size(before)
            # clean up also if ``close`` is never called
            weakref.finalize(self, _finish, self._jobs, self._threads)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, grammar = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                if self._cached(grammar) is None:
                    self._compile(grammar)
            except BaseException as error:
                # includes panics of the library; the caller gets the error
                future.set_exception(error)
            else:
                future.set_result(None)

    @property
    def num_compiled(self) -> int:
        """Grammars in the cache."""
        return len(self._compiled)

    def _cached(self, grammar: Grammar) -> LLMatcher | None:
        key = (grammar.kind, grammar.source)
        with self._lock:
            prototype = self._compiled.get(key)
            if prototype is not None:
                self._compiled.move_to_end(key)
            return prototype

    def _compile(self, grammar: Grammar) -> None:
        # imported with the first grammar, as most engines see none
        from llguidance import LLMatcher

        source = _source(grammar)
        prototype = LLMatcher(self._ll_tokenizer(), source, log_level=0, limits=_limits())
        if prototype.is_error():
            raise InvalidRequestError(
                f"{grammar.field}: the {_NAMES[grammar.kind]} cannot be compiled: "
                f"{_first_lines(prototype.get_error())}",
                grammar.field,
            )
        first = prototype.deep_copy()
        if not any(first.compute_bitmask()) or first.is_error():
            # for example a schema that requires itself recursively
            raise InvalidRequestError(
                f"{grammar.field}: nothing can be generated from the {_NAMES[grammar.kind]}: "
                f"{_first_lines(first.get_error()) or 'no output matches it'}",
                grammar.field,
            )
        with self._lock:
            self._compiled[grammar.kind, grammar.source] = prototype
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)

    def _ll_tokenizer(self) -> LLTokenizer:
        with self._loading:
            if self._tokenizer is None:
                from llguidance import LLTokenizer
                from llguidance import TokenizerWrapper as _Wrapper

                vocabulary = _Vocabulary(self._load_tokenizer())
                self._ends = vocabulary.ends
                self._tokenizer = LLTokenizer(
                    _Wrapper(vocabulary), eos_token=vocabulary.eos_token_id
                )
            return self._tokenizer


def _finish(
    jobs: queue.SimpleQueue[tuple[Future[None], Grammar] | None], threads: list[threading.Thread]
) -> None:
    """Join the threads at the end of the process: a thread that returns from the library after the
    interpreter has ended would crash the process."""
    with contextlib.suppress(queue.Empty):
        while True:
            jobs.get_nowait()
    for _ in threads:
        jobs.put(None)
    for thread in threads:
        # the last reference to the compiler may be on one of its own threads
        if thread is not threading.current_thread():
            thread.join(_LAST_SECONDS)


_NAMES: Final = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "grammar"}


class Matcher:
    """The matcher of one output, a ``core.grammar.TokenMatcher``."""

    def __init__(self, matcher: LLMatcher, ends: tuple[int, ...], vocab_size: int) -> None:
        self._matcher = matcher
        self._ends = ends
        self._vocab_size = vocab_size
        self._eos = ends[0]
        self._others = ends[1:]

    def consume(self, token_ids: Sequence[int]) -> None:
        tokens = [self._eos if i in self._others else i for i in token_ids]
        if tokens[-1] == self._eos:
            # if only the end may come, the library takes no token, not even the end
            if not self._matcher.consume_tokens(tokens[:-1]):
                self._fail()
            tokens = [] if self._matcher.is_stopped() else tokens[-1:]
        if not self._matcher.consume_tokens(tokens):
            self._fail()

    def allowed(self) -> bytes:
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            self._fail()
        if self._others and mask[self._eos >> 3] >> (self._eos & 7) & 1:
            bits = bytearray(mask)
            for token_id in self._others:
                bits[token_id >> 3] |= 1 << (token_id & 7)
            return bytes(bits)
        return mask

    def look_ahead(self, drafts: Sequence[int]) -> list[bytes]:
        masks = [self.allowed()]
        if drafts:
            # an error cannot be rolled back, so a copy looks ahead
            ahead = Matcher(self._matcher.deep_copy(), self._ends, self._vocab_size)
            for token_id in drafts:
                if not ahead.takes(token_id):
                    break
                try:
                    ahead.consume((token_id,))
                    masks.append(ahead.allowed())
                except RequestFailedError:
                    # the error will come when the token is sampled
                    break
        return masks

    def takes(self, token_id: int) -> bool:
        """Whether this token may come next and does not end the output. After False, the matcher
        must not be used."""
        return (
            0 <= token_id < self._vocab_size
            and token_id not in self._ends
            and self._matcher.validate_tokens([token_id]) == 1
        )

    def forced(self, most: int) -> Sequence[int]:
        found = self._matcher.compute_ff_tokens()[:most]
        return list(itertools.takewhile(lambda token_id: token_id not in self._ends, found))

    def _fail(self) -> None:
        message = _first_lines(self._matcher.get_error())
        if _TOO_MANY_ITEMS.search(message):
            raise RequestFailedError(
                f"{TOO_AMBIGUOUS}: give it fewer alternatives or optional parts ({message})"
            )
        raise RequestFailedError(f"the output left its grammar: {message}")


class _Vocabulary:
    """A tokenizer in the form for llguidance."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._encode = tokenizer.encode
        special = tokenizer.special_token_ids
        self.tokens = [
            # this byte, which is not UTF-8, marks special tokens for the library
            b"\xff" + tokenizer.token_bytes(i) if i in special else tokenizer.token_bytes(i)
            for i in range(tokenizer.vocab_size)
        ]
        self.special_token_ids = sorted(special)
        # the library knows one end of output
        self.ends = tuple(sorted(tokenizer.eos_token_ids)) or (0,)
        self.eos_token_id = self.ends[0]
        self.bos_token_id = None

    def __call__(self, text: bytes | str) -> list[int]:
        plain = text if isinstance(text, str) else text.decode("utf-8", "replace")
        return self._encode(plain, add_special_tokens=False)


def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    # messages must not quote other callers' grammars
    return LLParserLimits(verbose_errors=False)


def _source(grammar: Grammar) -> str:
    """Return the library's form; raises InvalidRequestError for input unfit for its parsers."""
    from llguidance import LLMatcher

    if grammar.kind == "json_schema":
        # the schema text is passed unchanged: the order of properties is the order of the output
        try:
            return LLMatcher.grammar_from_json_schema(grammar.source, overrides=_OVERRIDES)
        except ValueError as error:
            raise InvalidRequestError(
                f"{grammar.field} is not a JSON schema: {error!s:.200}", grammar.field
            ) from None
    _check_nesting(grammar)
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.source)
    return json.dumps({"grammars": [{"lark_grammar": grammar.source}]})


def _check_nesting(grammar: Grammar) -> None:
    """Bound the recursion of a recursive parser: brackets, and counted repetition."""
    depth = deepest = 0
    for char in grammar.source:
        if char in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in ")]}":
            depth = max(0, depth - 1)
    if deepest > _MAX_NESTING:
        raise InvalidRequestError(
            f"{grammar.field}: brackets are nested {deepest} deep, at most {_MAX_NESTING} are "
            "allowed",
            grammar.field,
        )
    for found in _REPEAT.finditer(grammar.source):
        count = max(int(digits[:9]) for digits in ("0", found[1] or "0", found[2] or "0"))
        if count > _MAX_REPEAT:
            raise InvalidRequestError(
                f"{grammar.field}: {found[0][:40]} repeats more than {_MAX_REPEAT} times",
                grammar.field,
            )


def _first_lines(message: str) -> str:
    return " ".join(message.removesuffix("<non-verbose/>").split())[:_MAX_MESSAGE]
