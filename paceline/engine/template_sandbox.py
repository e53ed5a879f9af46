"""A Jinja sandbox in which a template can neither reach Python nor run away.

Chat templates come with checkpoints, and callers may send their own, so a template is treated as
hostile code. Jinja's immutable sandbox keeps it from attributes that lead to the interpreter. It
does not bound time and memory; this module does, by metering:

* each render has a ``Meter``: steps, characters made and CPU seconds, all limited;
* every loop pass, call, filter and test is a step;
* whatever makes text or lists (operators, ``~``, slices, methods, filters, output) pays for the
  size of its result, before making it where that size is known;
* whatever walks nested data (comparison, conversion to text) pays for the walk first, since a few
  lines of template can nest one list into itself 2**40 times;
* methods of strings, lists and dicts, filters and globals are allow-lists;
* what a template gets prints without memory addresses (``template_values``).

The compiler's own shortcuts around the environment (``~``, slices, comparisons, loops, literal
text) are rewritten, in the syntax tree, into metered filters. This module does not know what a
chat is.
"""

from __future__ import annotations

import re
import string
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from functools import wraps
from itertools import chain
from typing import Any, Final, cast

from jinja2 import Template, nodes, pass_context
from jinja2.environment import Environment
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from paceline.engine.template_values import NamedCallable, printable

__all__ = ["TemplateLimitError", "TemplateSandbox", "current_meter", "metered"]

MAX_STEPS: Final = 500_000
# characters made in one render, dropped ones included; a list entry counts as eight
MAX_SIZE: Final = 128 << 20
MAX_CPU_S: Final = 2.0
MAX_RANGE: Final = 100_000
# widths and precisions in formatting, and sizes of padding
MAX_WIDTH: Final = 10_000
MAX_INT_BITS: Final = 4096
# entries of the list a template can make by repetition
MAX_REPEATED: Final = 10_000
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


def _size(value: Any) -> int:
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


def _pay_for_format(text: str, arguments: Iterable[Any], meter: Meter, *, percent: bool) -> None:
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


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_STRING_METHODS: Final = _names(
    "capitalize casefold center count endswith expandtabs find format index isalnum isalpha "
    "isascii isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper "
    "join ljust lower lstrip partition removeprefix removesuffix replace rfind rindex rjust "
    "rpartition rsplit rstrip split splitlines startswith strip swapcase title upper zfill"
)
_METHODS: Final[tuple[tuple[type, frozenset[str]], ...]] = (
    (str, _STRING_METHODS),
    (list, _names("count index copy")),
    (tuple, _names("count index")),
    (dict, _names("get items keys values copy")),
    (int, _names("bit_length")),
    (float, _names("is_integer")),
    (LoopContext, _names("cycle changed")),
)
_PADDING: Final = _names("center ljust rjust zfill")
_STRIPPING: Final = _names("strip lstrip rstrip")


def _pay_for_method(
    owner: Any, name: str, args: list[Any], kwargs: dict[str, Any], meter: Meter
) -> None:
    """Check and pay for a call of a built-in method before it runs."""
    allowed = next((names for kind, names in _METHODS if isinstance(owner, kind)), frozenset())
    if name not in allowed:
        raise SecurityError(f"method {name} of {type(owner).__name__} is not available")
    meter.pay(_size(owner))
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
            args[0] = _as_list(args[0])
            _pay_for_join(owner, args[0], meter)
        elif name == "format":
            _pay_for_format(owner, chain(args, kwargs.values()), meter, percent=False)


def _cost_of_strip(text: Any, characters: Any) -> int:
    # every stripped character is looked for among the characters, some 64 of them at a time
    return _size(text) * (_size(characters) // 64)


def _as_list(value: Any) -> Any:
    """``value``, with iterators and views made into lists, whose size is known."""
    if isinstance(value, (str, list, tuple, dict)) or not isinstance(value, Iterable):
        return value
    return list(value)


def _pay_for_join(separator: Any, items: Any, meter: Meter) -> None:
    count = len(items) if isinstance(items, (str, list, tuple, dict)) else 1
    meter.pay(count * _size(separator))
    meter.pay_deep(items)


# filters whose result is no larger than some multiple of what goes in
_PLAIN_FILTERS: Final = _names(
    "abs capitalize count d default e escape first float forceescape int items last length list "
    "lower map reject rejectattr reverse safe select selectattr striptags title truncate "
    "upper urlencode wordcount"
)
# filters that compare or convert what is inside their input
_DEEP_FILTERS: Final = _names("dictsort groupby max min pprint sort string unique")
# filters whose result can be larger; see _pay_for_filter
_GROWING_FILTERS: Final = _names(
    "batch center format indent join replace round slice sum trim wordwrap"
)
_DEEP_TESTS: Final = _names("== != < <= > >= eq equalto ne in lt lessthan le gt greaterthan ge")


def _pay_for_filter(name: str, value: Any, args: list[Any], meter: Meter) -> None:
    """Check and pay for a growing filter before it runs."""
    if name == "format":
        _pay_for_format(str(value), args, meter, percent=True)
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
        width = sum(_size(arg) if isinstance(arg, str) else _check_width(arg) for arg in args)
        width = max(width, 80)
        pieces = value.count("\n") + 1 if isinstance(value, str) and name == "indent" else 1
        # wordwrap may put its separator after every character
        meter.pay(_size(value) * width if name == "wordwrap" and len(args) > 1 else pieces * width)


def _metered_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    # some filters get the environment or context before the value
    skip = 1 if getattr(function, "jinja_pass_arg", None) is not None else 0

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        meter = _METER.get()
        meter.step()
        value = args[skip]
        if name in _DEEP_FILTERS or name in _GROWING_FILTERS:
            value = _as_list(value)
            if name in _DEEP_FILTERS:
                meter.pay_deep(value)
            else:
                _pay_for_filter(name, value, [*args[skip + 1 :], *kwargs.values()], meter)
        meter.pay(_size(value))
        result = function(*args[:skip], value, *args[skip + 1 :], **kwargs)
        meter.pay(_size(result))
        return printable(result)

    return call


def _metered_test(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    skip = 1 if getattr(function, "jinja_pass_arg", None) is not None else 0

    @wraps(function)
    def call(*args: Any) -> Any:
        meter = _METER.get()
        meter.step()
        if name in _DEEP_TESTS:
            meter.pay_deep(args[skip:])
        return function(*args)

    return call


# what the rewritten syntax tree calls; the names cannot be written in a template


def _step(size: int) -> str:
    meter = _METER.get()
    meter.step()
    meter.pay(size)
    return ""


def _concat(parts: list[Any]) -> str:
    meter = _METER.get()
    for part in parts:
        meter.pay_deep(part)
    return "".join(map(str, parts))


def _slice(value: Any, start: Any, stop: Any, step: Any) -> Any:
    result = value[slice(start, stop, step)]
    _METER.get().pay(_size(result))
    return result


def _operand(value: Any) -> Any:
    if isinstance(value, (list, tuple, dict)):
        _METER.get().pay_deep(value)
    elif isinstance(value, str):
        _METER.get().pay(len(value))
    return value


@pass_context
def _finalize(context: Context, value: Any) -> Any:
    """Called with everything a template outputs. Taking the context keeps the compiler from
    calling it while there is no meter."""
    _METER.get().pay_deep(value)
    return value


_HIDDEN: Final[dict[str, Callable[..., Any]]] = {
    "meter concat": _concat,
    "meter slice": _slice,
    "meter operand": _operand,
    "meter step": _step,
}


def _hidden(name: str, value: nodes.Expr, args: list[nodes.Expr]) -> nodes.Filter:
    return nodes.Filter(value, f"meter {name}", args, [], None, None)


def _rewrite(node: nodes.Node) -> nodes.Node:
    """Route what the compiler would do without asking the environment through meters."""
    for field, value in node.iter_fields():
        if isinstance(value, nodes.Node):
            setattr(node, field, _rewrite(value))
        elif isinstance(value, list):
            setattr(node, field, [_rewrite(v) if isinstance(v, nodes.Node) else v for v in value])
    if isinstance(node, nodes.Concat):
        return _hidden("concat", nodes.List(node.nodes), []).set_lineno(node.lineno)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        parts = (node.arg.start, node.arg.stop, node.arg.step)
        bounds = [nodes.Const(None) if part is None else part for part in parts]
        return _hidden("slice", node.node, bounds).set_lineno(node.lineno)
    if isinstance(node, nodes.Tuple) and node.ctx == "load":
        # a tuple can be a key, and hashing walks into it
        return _hidden("operand", node, []).set_lineno(node.lineno)
    if isinstance(node, nodes.Compare):
        node.expr = _hidden("operand", node.expr, [])
        for operand in node.ops:
            operand.expr = _hidden("operand", operand.expr, [])
    elif isinstance(node, (nodes.For, nodes.Macro, nodes.CallBlock)):
        node.body = [_pay_statement(0), *node.body]
    elif isinstance(node, nodes.Output):
        literal = sum(len(n.data) for n in node.nodes if isinstance(n, nodes.TemplateData))
        if literal:
            node.nodes = [_hidden("step", nodes.Const(literal), []), *node.nodes]
    return node


def _pay_statement(size: int) -> nodes.Stmt:
    return nodes.ExprStmt(_hidden("step", nodes.Const(size), []))


class _GenerationTag(Extension):
    """``{% generation %}...{% endgeneration %}`` marks an answer for training; here it is only its
    body."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Dict:
    """The global ``dict``, without the type's own attributes."""

    def __repr__(self) -> str:
        return "<function dict>"

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        result = dict(*args, **kwargs)
        _METER.get().pay(len(result))
        return result


def _range(*args: int) -> range:
    result = range(*args)
    if len(result) > MAX_RANGE:
        raise TemplateLimitError(f"it used a range of {len(result)}, at most {MAX_RANGE}")
    return result


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The environment; ``extra_filters`` and ``extra_globals`` must meter themselves."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "**", "%"))

    def __init__(
        self,
        extra_filters: Mapping[str, Callable[..., Any]],
        extra_globals: Mapping[str, Callable[..., Any]],
    ) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, loopcontrols],
            finalize=_finalize,
            # folding constants would run filters at compile time, with no meter
            optimized=False,
        )
        allowed = _PLAIN_FILTERS | _DEEP_FILTERS | _GROWING_FILTERS
        self.filters = {
            name: _metered_filter(name, function)
            for name, function in self.filters.items()
            if name in allowed
        }
        self.filters.update(_HIDDEN)
        self.filters.update(extra_filters)
        tests = cast("dict[str, Callable[..., Any]]", self.tests)
        self.tests = {name: _metered_test(name, test) for name, test in tests.items()}
        self.globals = {
            "range": NamedCallable(_range, "range"),
            "dict": _Dict(),
            "namespace": Namespace,
        }
        for name, function in extra_globals.items():
            self.globals[name] = NamedCallable(function, name)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        rewritten = _rewrite(tree)
        assert isinstance(rewritten, nodes.Template)
        rewritten.set_environment(self)
        return rewritten

    def getattr(self, obj: Any, attribute: str) -> Any:
        return printable(super().getattr(obj, attribute))

    def getitem(self, obj: Any, argument: Any) -> Any:
        return printable(super().getitem(obj, argument))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = _METER.get()
        meter.step()
        if operator == "%" and isinstance(left, str):
            arguments = right if isinstance(right, tuple) else (right,)
            _pay_for_format(left, arguments, meter, percent=True)
        elif isinstance(left, int) and isinstance(right, int):
            _check_bits(operator, left, right)
        elif operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, (str, list, tuple)) and isinstance(times, int):
                    size = len(sequence) * max(times, 0)
                    if size > MAX_REPEATED and not isinstance(sequence, str):
                        raise TemplateLimitError(f"it repeated a list to {size:.3g} entries")
                    meter.pay(size)
        elif operator == "+":
            meter.pay(_size(left) + _size(right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        meter = _METER.get()
        meter.step()
        # the sandbox wraps str.format; the method itself is below the wrapper
        method = getattr(function, "__wrapped__", function)
        owner = getattr(method, "__self__", None)
        values = list(args)
        if isinstance(owner, (str, list, tuple, dict, int, float, LoopContext)):
            _pay_for_method(owner, getattr(method, "__name__", ""), values, kwargs, meter)
        elif not isinstance(function, (Macro, LoopContext, BlockReference, Undefined)) and not any(
            function is known for known in self.globals.values()
        ):
            raise SecurityError(f"{type(function).__name__} may not be called")
        result = super().call(context, function, *values, **kwargs)
        meter.pay(_size(result))
        return result


def _check_bits(operator: str, left: int, right: int) -> None:
    bits = 0
    if operator == "**":
        bits = left.bit_length() * max(right, 0) if abs(left) > 1 else 0
    elif operator == "*":
        bits = left.bit_length() + right.bit_length()
    if bits > MAX_INT_BITS:
        raise TemplateLimitError(f"it computed a number of {bits:.3g} bits")
