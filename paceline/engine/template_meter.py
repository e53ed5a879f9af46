"""What one render of a template may use, and what each construct of the language costs.

``template_sandbox`` asks before it lets anything run; see there for what is metered and why. This
module does not know Jinja's environment.
"""

from __future__ import annotations

import re
import string
import time
from collections.abc import Iterable
from contextvars import ContextVar
from itertools import chain
from typing import Any, Final

from jinja2 import Template
from jinja2.exceptions import SecurityError
from jinja2.runtime import LoopContext

__all__ = [
    "MAX_INT_BITS",
    "Meter",
    "TemplateLimitError",
    "as_list",
    "current_meter",
    "metered",
    "pay_for_filter",
    "pay_for_format",
    "pay_for_method",
    "size_of",
    "word_set",
]

MAX_STEPS: Final = 500_000
# characters made in one render, dropped ones included; a list entry counts as eight
MAX_SIZE: Final = 128 << 20
MAX_CPU_S: Final = 2.0
# widths and precisions in formatting, and sizes of padding
MAX_WIDTH: Final = 10_000
MAX_INT_BITS: Final = 4096
# what walking past one value costs, so that MAX_SIZE bounds the time of walks too
_WALK_COST: Final = 64


class TemplateLimitError(Exception):
    """A template used more time or memory than any chat needs."""


class Meter:
    """What one render has used; raises TemplateLimitError when it is too much."""

    def __init__(self) -> None:
        self.steps = 0
        self.size = 0
        # CPU time of this thread: a busy machine does not fail an innocent template
        self.deadline = time.thread_time() + MAX_CPU_S

    def step(self) -> None:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise TemplateLimitError(f"it took more than {MAX_STEPS} steps")
        if not self.steps & 63 and time.thread_time() > self.deadline:
            raise TemplateLimitError(f"it took more than {MAX_CPU_S:g} s")

    def pay(self, size: int) -> None:
        self.size += size
        if self.size > MAX_SIZE:
            raise TemplateLimitError(f"it made or walked more than {MAX_SIZE} characters of data")

    def pay_deep(self, value: Any) -> None:
        """Pay for everything inside ``value``, shared parts as often as they occur."""
        pending = [value]
        while pending:
            item = pending.pop()
            if isinstance(item, str):
                self.pay(len(item) + _WALK_COST)
            elif isinstance(item, (list, tuple)):
                self.pay(len(item) + _WALK_COST)
                pending.extend(item)
            elif isinstance(item, dict):
                self.pay(len(item) + _WALK_COST)
                pending.extend(chain(item.keys(), item.values()))
            else:
                self.pay(_WALK_COST)


_METER: ContextVar[Meter] = ContextVar("paceline_template_meter")


def metered(template: Template, variables: dict[str, Any]) -> str:
    """Render with a fresh meter. Raises whatever the template raises, and TemplateLimitError."""
    token = _METER.set(Meter())
    try:
        return template.render(variables)
    finally:
        _METER.reset(token)


def current_meter() -> Meter:
    """The meter of the render this thread is in, for extra filters and globals."""
    return _METER.get()


def size_of(value: Any) -> int:
    """Memory of ``value`` by itself, in characters; an entry of a list takes as much as eight."""
    if isinstance(value, str):
        return len(value)
    return 8 * len(value) if isinstance(value, (list, tuple, dict)) else 1


def _check_width(value: Any) -> int:
    """``value`` if it is a width that can be allowed, 0 if it is no width."""
    if not isinstance(value, int):
        return 0
    if abs(value) > MAX_WIDTH:
        raise TemplateLimitError(f"it asked for a width of {value:.3g}, at most {MAX_WIDTH}")
    return abs(value)


_PERCENT_FIELD: Final = re.compile(r"%(?:\([^()]*\))?[-+ #0]*(\*|[0-9]+)?(?:\.(\*|[0-9]+))?")
# Python pairs up parentheses inside a key, the pattern above does not
_NESTED_KEY: Final = re.compile(r"%\([^()]*\(")


def _format_widths(text: str, percent: bool) -> list[str]:
    """The width and precision of every field of a format string."""
    if percent:
        if _NESTED_KEY.search(text):
            raise TemplateLimitError("it used a format with parentheses in a key")
        return [group for match in _PERCENT_FIELD.finditer(text) for group in match.groups("")]
    specs = [spec or "" for _, _, spec, _ in string.Formatter().parse(text)]
    return [part for spec in specs for part in (re.findall(r"\d+|\{", spec) or [""])]


def pay_for_format(text: str, arguments: Iterable[Any], meter: Meter, *, percent: bool) -> None:
    widths = _format_widths(text, percent)
    meter.pay(len(text))
    for width in widths:
        if width and (not width.isdecimal() or len(width) > 9):
            raise TemplateLimitError("it used a format whose width is computed or too large")
        meter.pay(_check_width(int(width or 0)))
    # every field may name the same argument
    before = meter.size
    meter.pay_deep(list(arguments))
    meter.pay(len(widths) * (meter.size - before))


def word_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


_STRING_METHODS: Final = word_set(
    "capitalize casefold center count endswith expandtabs find format index isalnum isalpha "
    "isascii isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper "
    "join ljust lower lstrip partition removeprefix removesuffix replace rfind rindex rjust "
    "rpartition rsplit rstrip split splitlines startswith strip swapcase title upper zfill"
)
_METHODS: Final[tuple[tuple[type, frozenset[str]], ...]] = (
    (str, _STRING_METHODS),
    (list, word_set("count index copy")),
    (tuple, word_set("count index")),
    (dict, word_set("get items keys values copy")),
    (int, word_set("bit_length")),
    (float, word_set("is_integer")),
    (LoopContext, word_set("cycle changed")),
)
_PADDING: Final = word_set("center ljust rjust zfill")
_STRIPPING: Final = word_set("strip lstrip rstrip")


def pay_for_method(
    owner: Any, name: str, args: list[Any], kwargs: dict[str, Any], meter: Meter
) -> None:
    """Check and pay for a call of a built-in method before it runs."""
    allowed = next((names for kind, names in _METHODS if isinstance(owner, kind)), frozenset())
    if name not in allowed:
        raise SecurityError(f"method {name} of {type(owner).__name__} is not available")
    meter.pay(size_of(owner))
    if isinstance(owner, (list, tuple, LoopContext)):
        # they compare what is inside
        meter.pay_deep([owner if isinstance(owner, (list, tuple)) else 0, args])
    elif isinstance(owner, str):
        if name in _PADDING:
            meter.pay(sum(_check_width(value) for value in chain(args, kwargs.values())))
        elif name == "expandtabs":
            widths = [_check_width(value) for value in chain(args, kwargs.values())]
            meter.pay(owner.count("\t") * max(widths, default=8))
        elif name == "replace" and len(args) >= 2 and all(isinstance(a, str) for a in args[:2]):
            meter.pay(owner.count(args[0]) * len(args[1]))
        elif name in _STRIPPING and args:
            meter.pay(_cost_of_strip(owner, args[0]))
        elif name == "join" and args:
            args[0] = as_list(args[0])
            _pay_for_join(owner, args[0], meter)
        elif name == "format":
            pay_for_format(owner, chain(args, kwargs.values()), meter, percent=False)


def _cost_of_strip(text: Any, characters: Any) -> int:
    # every stripped character is looked for among the characters, some 64 of them at a time
    return size_of(text) * (size_of(characters) // 64)


def as_list(value: Any) -> Any:
    """``value``, with iterators and views made into lists, whose size is known."""
    if isinstance(value, (str, list, tuple, dict)) or not isinstance(value, Iterable):
        return value
    return list(value)


def _pay_for_join(separator: Any, items: Any, meter: Meter) -> None:
    count = len(items) if isinstance(items, (str, list, tuple, dict)) else 1
    meter.pay(count * size_of(separator))
    meter.pay_deep(items)


def pay_for_filter(name: str, value: Any, args: list[Any], meter: Meter) -> None:
    """Check and pay for a growing filter before it runs."""
    if name == "format":
        pay_for_format(str(value), args, meter, percent=True)
    elif name == "join":
        _pay_for_join(args[0] if args else "", value, meter)
    elif name == "replace" and len(args) >= 2:
        meter.pay(str(value).count(str(args[0])) * len(str(args[1])))
    elif name == "trim" and args:
        meter.pay(_cost_of_strip(value, args[0]))
    elif name == "round" and any(isinstance(arg, int) and abs(arg) > 300 for arg in args):
        raise TemplateLimitError("it rounded to more than 300 digits")
    elif name == "sum" and any(isinstance(arg, (list, tuple)) for arg in args):
        # adding lists takes quadratic time
        raise SecurityError("sum adds numbers only")
    elif name in ("batch", "slice", "center", "indent", "wordwrap"):
        width = sum(size_of(arg) if isinstance(arg, str) else _check_width(arg) for arg in args)
        width = max(width, 80)
        pieces = value.count("\n") + 1 if isinstance(value, str) and name == "indent" else 1
        # wordwrap may put its separator after every character
        if name == "wordwrap" and len(args) > 1:
            pieces = size_of(value)
        meter.pay(pieces * width)
