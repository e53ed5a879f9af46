"""A Jinja sandbox in which a template can neither reach Python nor run away.

Chat templates come with checkpoints, and callers may send their own, so a template is treated as
hostile code. Jinja's immutable sandbox keeps it from attributes that lead to the interpreter. It
does not bound time and memory; this module does, by metering (``template_meter``):

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

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Final, cast

from jinja2 import nodes, pass_context
from jinja2.environment import Environment
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from paceline.engine.template_meter import (
    MAX_INT_BITS,
    TemplateLimitError,
    as_list,
    current_meter,
    pay_for_filter,
    pay_for_format,
    pay_for_method,
    size_of,
    word_set,
)
from paceline.engine.template_values import NamedCallable, printable

__all__ = ["TemplateSandbox"]

MAX_RANGE: Final = 100_000
# entries of the list a template can make by repetition
MAX_REPEATED: Final = 10_000

# filters whose result is no larger than some multiple of what goes in
_PLAIN_FILTERS: Final = word_set(
    "abs capitalize count d default e escape first float forceescape int items last length list "
    "lower map reject rejectattr reverse safe select selectattr striptags title truncate "
    "upper urlencode wordcount"
)
# filters that compare or convert what is inside their input
_DEEP_FILTERS: Final = word_set("dictsort groupby max min pprint sort string unique")
# filters whose result can be larger; see pay_for_filter
_GROWING_FILTERS: Final = word_set(
    "batch center format indent join replace round slice sum trim wordwrap"
)
_DEEP_TESTS: Final = word_set("== != < <= > >= eq equalto ne in lt lessthan le gt greaterthan ge")


def _metered_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    # some filters get the environment or context before the value
    skip = 1 if getattr(function, "jinja_pass_arg", None) is not None else 0

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        meter = current_meter()
        meter.step()
        value = args[skip]
        if name in _DEEP_FILTERS or name in _GROWING_FILTERS:
            value = as_list(value)
            if name in _DEEP_FILTERS:
                meter.pay_deep(value)
            else:
                pay_for_filter(name, value, [*args[skip + 1 :], *kwargs.values()], meter)
        meter.pay(size_of(value))
        result = function(*args[:skip], value, *args[skip + 1 :], **kwargs)
        meter.pay(size_of(result))
        return printable(result)

    return call


def _metered_test(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    skip = 1 if getattr(function, "jinja_pass_arg", None) is not None else 0

    @wraps(function)
    def call(*args: Any) -> Any:
        meter = current_meter()
        meter.step()
        if name in _DEEP_TESTS:
            meter.pay_deep(args[skip:])
        return function(*args)

    return call


# what the rewritten syntax tree calls; the names cannot be written in a template


def _step(size: int) -> str:
    meter = current_meter()
    meter.step()
    meter.pay(size)
    return ""


def _concat(parts: list[Any]) -> str:
    meter = current_meter()
    for part in parts:
        meter.pay_deep(part)
    return "".join(map(str, parts))


def _slice(value: Any, start: Any, stop: Any, step: Any) -> Any:
    result = value[slice(start, stop, step)]
    current_meter().pay(size_of(result))
    return result


def _operand(value: Any) -> Any:
    if isinstance(value, (list, tuple, dict)):
        current_meter().pay_deep(value)
    elif isinstance(value, str):
        current_meter().pay(len(value))
    return value


@pass_context
def _finalize(context: Context, value: Any) -> Any:
    """Called with everything a template outputs. Taking the context keeps the compiler from
    calling it while there is no meter."""
    current_meter().pay_deep(value)
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
        current_meter().pay(len(result))
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
        meter = current_meter()
        meter.step()
        if operator == "%" and isinstance(left, str):
            arguments = right if isinstance(right, tuple) else (right,)
            pay_for_format(left, arguments, meter, percent=True)
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
            meter.pay(size_of(left) + size_of(right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        meter = current_meter()
        meter.step()
        # the sandbox wraps str.format; the method itself is below the wrapper
        method = getattr(function, "__wrapped__", function)
        owner = getattr(method, "__self__", None)
        values = list(args)
        if isinstance(owner, (str, list, tuple, dict, int, float, LoopContext)):
            pay_for_method(owner, getattr(method, "__name__", ""), values, kwargs, meter)
        elif not isinstance(function, (Macro, LoopContext, BlockReference, Undefined)) and not any(
            function is known for known in self.globals.values()
        ):
            raise SecurityError(f"{type(function).__name__} may not be called")
        result = super().call(context, function, *values, **kwargs)
        meter.pay(size_of(result))
        return result


def _check_bits(operator: str, left: int, right: int) -> None:
    bits = 0
    if operator == "**":
        bits = left.bit_length() * max(right, 0) if abs(left) > 1 else 0
    elif operator == "*":
        bits = left.bit_length() + right.bit_length()
    if bits > MAX_INT_BITS:
        raise TemplateLimitError(f"it computed a number of {bits:.3g} bits")
