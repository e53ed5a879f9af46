"""A Jinja sandbox from which templates cannot reach Python; ``render_template`` is its entry.

Chat templates come with checkpoints, and callers may send their own, so a template is treated as
hostile code. Jinja's immutable sandbox keeps it from attributes that lead to the interpreter; in
addition, methods of strings, lists and dicts, filters and globals are allow-lists here, and all
values of a template print without memory addresses.

Time and memory are not bounded here: ``template_process`` runs this in a process that the kernel
limits. Only templates that the package knows are rendered without it.

This module does not know what a chat is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import lru_cache, wraps
from types import BuiltinFunctionType, FunctionType, MethodType, MethodWrapperType
from typing import Any, Final, NoReturn

from jinja2 import Template, nodes, pass_context
from jinja2.environment import Environment
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from paceline.errors import InvalidRequestError

__all__ = [
    "MAX_PROMPT_CHARS",
    "MAX_TEMPLATE_CHARS",
    "NamedCallable",
    "RendersHere",
    "printable",
    "render_template",
]


class NamedCallable:
    """A function or bound method that prints as its name.

    Python prints functions, methods and generators with their addresses. A caller who sends a
    template could read them from the prompt or an error, and an address is half of an exploit of a
    bug elsewhere. Filtering the text would not help: a template can take text apart. So no value
    whose text holds an address ever reaches one.

    ``__wrapped__`` is the innermost function, as ``functools.wraps`` leaves it, so that code that
    checks calls sees the function called.
    """

    __slots__ = ("__name__", "__wrapped__", "_function")

    def __init__(self, function: Callable[..., Any], name: str | None = None) -> None:
        self._function = function
        self.__wrapped__ = getattr(function, "__wrapped__", function)
        self.__name__ = name or getattr(function, "__name__", "function")

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<function {self.__name__}>"


class _Lazy(Iterator[Any]):
    """An iterator that prints as ``<iterator>``."""

    __slots__ = ("_iterator",)

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator

    def __next__(self) -> Any:
        return next(self._iterator)

    def __repr__(self) -> str:
        return "<iterator>"


class _Block(BlockReference):
    def __repr__(self) -> str:
        return f"<Block {self.name!r}>"


def printable(value: Any) -> Any:
    """Return ``value``, or its wrapper. Of plain data only the type is checked."""
    if value is None or isinstance(value, (str, int, float, list, dict, tuple, NamedCallable)):
        return value
    if isinstance(value, (BuiltinFunctionType, FunctionType, MethodType, MethodWrapperType)):
        return NamedCallable(value)
    if isinstance(value, BlockReference):
        return _Block(value.name, value._context, value._stack, value._depth)
    # jinja's loop object is an iterator with a safe text of its own
    if isinstance(value, Iterator) and not isinstance(value, (_Lazy, LoopContext)):
        return _Lazy(value)
    return value


# the longest published template has about 20,000 characters
MAX_TEMPLATE_CHARS: Final = 200_000
MAX_PROMPT_CHARS: Final = 32 << 20


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FILTERS: Final = _words(
    "abs batch capitalize center count d default dictsort e escape first float forceescape format "
    "groupby indent int items join last length list lower map max min pprint reject rejectattr "
    "replace reverse round safe select selectattr slice sort string striptags sum title trim "
    "truncate unique upper urlencode wordcount wordwrap"
)
_METHODS: Final[tuple[tuple[type, frozenset[str]], ...]] = (
    (
        str,
        _words(
            "capitalize casefold center count endswith expandtabs find format index isalnum "
            "isalpha isascii isdecimal isdigit isidentifier islower isnumeric isprintable isspace "
            "istitle isupper join ljust lower lstrip partition removeprefix removesuffix replace "
            "rfind rindex rjust rpartition rsplit rstrip split splitlines startswith strip "
            "swapcase title upper zfill"
        ),
    ),
    (list, _words("count index copy")),
    (tuple, _words("count index")),
    (dict, _words("get items keys values copy")),
    (int, _words("bit_length")),
    (float, _words("is_integer")),
    (LoopContext, _words("cycle changed")),
)


class _RefusedError(Exception):
    """The template called ``raise_exception``."""


def _raise_exception(message: Any = "") -> NoReturn:
    raise _RefusedError(str(message)[:1000])


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=(separators[0], separators[1]) if separators else None,
        sort_keys=sort_keys,
    )


def _printing(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return printable(function(*args, **kwargs))

    return call


@pass_context
def _finalize(context: Context, value: Any) -> Any:
    """Return the value; taking the context keeps the compiler from computing constants."""
    return value


class _GenerationTag(Extension):
    """``{% generation %}...{% endgeneration %}`` marks an answer for training; here only its body
    is rendered."""

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
        return dict(*args, **kwargs)


class _Sandbox(ImmutableSandboxedEnvironment):
    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, loopcontrols],
            # compute nothing while a template is compiled: neither folded constants nor output
            optimized=False,
            finalize=_finalize,
        )
        self.filters = {
            name: _printing(function) for name, function in self.filters.items() if name in _FILTERS
        }
        self.filters["tojson"] = _tojson
        self.globals = {
            "range": NamedCallable(range, "range"),
            "dict": _Dict(),
            "namespace": Namespace,
            "raise_exception": NamedCallable(_raise_exception, "raise_exception"),
            "strftime_now": NamedCallable(_strftime_now, "strftime_now"),
        }

    def getattr(self, obj: Any, attribute: str) -> Any:
        return printable(super().getattr(obj, attribute))

    def getitem(self, obj: Any, argument: Any) -> Any:
        return printable(super().getitem(obj, argument))

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        # the sandbox wraps str.format; the wrapper holds the method itself
        method = getattr(function, "__wrapped__", function)
        owner = getattr(method, "__self__", None)
        if isinstance(owner, (str, list, tuple, dict, int, float, LoopContext)):
            name = getattr(method, "__name__", "")
            allowed = next((names for kind, names in _METHODS if isinstance(owner, kind)))
            if name not in allowed:
                raise SecurityError(f"method {name} of {type(owner).__name__} is not available")
        elif not isinstance(function, (Macro, LoopContext, BlockReference, Undefined)) and not any(
            function is known for known in self.globals.values()
        ):
            raise SecurityError(f"{type(function).__name__} may not be called")
        return super().call(context, function, *args, **kwargs)


_SANDBOX: Final = _Sandbox()


@lru_cache(maxsize=32)
def _compile(source: str) -> Template:
    if len(source) > MAX_TEMPLATE_CHARS:
        raise InvalidRequestError(
            f"the chat template has {len(source)} characters, at most {MAX_TEMPLATE_CHARS} are "
            "allowed",
            "chat_template",
        )
    try:
        return _SANDBOX.from_string(source)
    except TemplateSyntaxError as error:
        message = f"the chat template does not parse: line {error.lineno}: {error.message}"
    except MemoryError:
        raise
    except Exception as error:
        # nested too deeply, a number too long: any error of Jinja or Python's compiler about a
        # template is that template's fault
        message = f"the chat template does not compile: {type(error).__name__}: {error!s:.200}"
    raise InvalidRequestError(message, "chat_template")


def render_template(source: str, variables: dict[str, Any]) -> str:
    """Return the text that the template makes of the variables, which must be plain JSON values.

    Raises:
        InvalidRequestError: it does not compile, refuses, fails, or makes too long a text.
        MemoryError: no memory is left; only if the process's memory is bounded.
    """
    template = _compile(source)
    try:
        prompt = template.render(variables)
    except _RefusedError as error:
        message = f"the chat template refuses these messages: {error}"
    except MemoryError:
        raise
    except RecursionError:
        message = "the chat template was stopped: it recursed too deeply"
    except TemplateError as error:
        message = f"the chat template failed: {error.message!s:.500}"
    except Exception as error:
        # templates run other people's expressions on other people's messages: any error of these
        # (TypeError, KeyError, ZeroDivisionError, ...) fails this request alone
        message = f"the chat template failed: {type(error).__name__}: {error!s:.500}"
    else:
        if len(prompt) <= MAX_PROMPT_CHARS:
            return prompt
        message = (
            f"the chat template made {len(prompt)} characters, "
            f"at most {MAX_PROMPT_CHARS} are allowed"
        )
    raise InvalidRequestError(message, "messages")


class RendersHere:
    """A ``chat_template.Renderer`` in this process, for templates that are known to end."""

    def render(self, source: str, variables: dict[str, Any]) -> str:
        return render_template(source, variables)

    def close(self) -> None:
        """Do nothing: there is nothing to free."""
