"""Wrappers that make a template's values print without memory addresses.

Python prints functions, methods and generators with their addresses. A caller who sends a template
could read them from the prompt or an error, and an address is half of an exploit of a bug
elsewhere. Filtering the text would not help: a template can take text apart. So no value whose text
holds an address ever reaches one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodType,
    MethodWrapperType,
)
from typing import Any

from jinja2.runtime import BlockReference, LoopContext

__all__ = ["NamedCallable", "printable"]


class NamedCallable:
    """A function or bound method that prints as its name.

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
