"""Kinds of fields: each is a check, in words that name the field and show the value, and the schema
of what passes it.

Every function makes a ``Field``; ``note`` is what docs/api.md and the schema tell beside the type,
``schema`` what the latter tells where other checks come later and allow less.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar, cast, overload

from paceline.core.errors import InvalidRequestError, UnknownModelError
from paceline.core.ranges import Range
from paceline.http.fields import (
    check_array,
    check_boolean,
    check_integer,
    check_number,
    check_object,
    check_string,
    check_token_ids,
    show,
)
from paceline.server.bodies import schemas
from paceline.server.bodies.body import (
    IGNORED,
    REFUSED,
    UNHEEDED,
    Body,
    Field,
    UnknownFieldsError,
    schema_of,
)
from paceline.server.bodies.rules import RequestRules
from paceline.server.bodies.schemas import Schema

__all__ = [
    "INT32",
    "INT64",
    "MODEL",
    "NOTHING",
    "Bound",
    "anything",
    "array",
    "boolean",
    "check_model",
    "choice",
    "described",
    "ignored",
    "integer",
    "mapping",
    "needed",
    "nested",
    "number",
    "refused",
    "string",
    "token_ids",
    "token_schema",
    "unheeded",
    "unread",
    "unread_each",
    "whole",
]

INT32: Final = 2**31 - 1
INT64: Final = 2**63
# a number, or where the server's rules have it
Bound = int | Callable[[RequestRules], int]
SchemaMaker = Callable[[RequestRules], Schema]
Shape = Schema | SchemaMaker
# values that ask for nothing
NOTHING: Final[tuple[Any, ...]] = (False, [], {}, "")

T = TypeVar("T")


def _maker(schema: Shape) -> SchemaMaker:
    return schema if callable(schema) else lambda _: schema


def _bound(bound: Bound) -> Callable[[RequestRules], int]:
    return bound if callable(bound) else lambda _: bound


def described(
    check: Callable[[Any, str, RequestRules], T], schema: Shape, *, note: str = ""
) -> Field[T | None]:
    """Of a kind of its own."""
    return Field(check, _maker(schema), None, note)


def needed(
    field: Field[T | None], says: str = "is missing", *, note: str | None = None
) -> Field[T]:
    """The same, without which a body is refused: its name ``says``."""
    note = field.note if note is None else note
    return cast("Field[T]", replace(field, missing=says, note=note))


def anything(schema: Shape, *, note: str = "") -> Field[Any]:
    """As it came; whoever acts on it looks at it."""
    return Field(lambda value, _name, _rules: value, _maker(schema), None, note)


@overload
def boolean(default: bool = False, *, note: str = "") -> Field[bool]: ...
@overload
def boolean(default: None, *, note: str = "") -> Field[bool | None]: ...
def boolean(default: bool | None = False, *, note: str = "") -> Field[Any]:
    return Field(
        lambda value, name, _: check_boolean(value, name), lambda _: schemas.BOOLEAN, default, note
    )


@overload
def integer(
    low: int, high: Bound, default: int, *, note: str = "", schema: Shape | None = None
) -> Field[int]: ...
@overload
def integer(
    low: int, high: Bound, *, note: str = "", schema: Shape | None = None
) -> Field[int | None]: ...
def integer(
    low: int, high: Bound, default: Any = None, *, note: str = "", schema: Shape | None = None
) -> Field[Any]:
    most = _bound(high)
    return Field(
        lambda value, name, rules: check_integer(value, name, low, most(rules)),
        _maker(schema) if schema is not None else lambda rules: schemas.integer(low, most(rules)),
        default,
        note,
    )


def whole(allowed: Range, *, note: str = "") -> Field[int | None]:
    """An integer that SamplingParams holds to its range."""
    return integer(
        -INT32,
        INT32,
        note=note,
        schema=schemas.integer(int(allowed.least), int(min(allowed.most, INT32))),
    )


def number(allowed: Range, *, note: str = "") -> Field[float | None]:
    """A finite number that SamplingParams holds to its range."""
    schema = schemas.number(allowed.least, allowed.most, above=allowed.above)
    return Field(lambda value, name, _: check_number(value, name), lambda _: schema, None, note)


def string(low: int = 0, high: int | None = None, *, note: str = "") -> Field[str | None]:
    """Of ``low`` to ``high`` characters."""
    return Field(
        lambda value, name, _: check_string(value, name, low, high),
        lambda _: schemas.string(low=low, high=high),
        None,
        note,
    )


@overload
def choice(*values: str, default: str, note: str = "") -> Field[str]: ...
@overload
def choice(*values: str, note: str = "") -> Field[str | None]: ...
def choice(*values: str, default: str | None = None, note: str = "") -> Field[Any]:
    """One of ``values``; where there is a default an empty string is as good as absent."""
    wanted = " or ".join(values) if len(values) == 2 else f"one of {', '.join(values)}"

    def check(value: Any, name: str, _: RequestRules) -> str | None:
        check_string(value, name, 0, None)
        if value == "" and default is not None:
            return default
        if value not in values:
            raise InvalidRequestError(f"{name} must be {wanted}, got {show(value)}", name)
        return cast(str, value)

    return Field(check, lambda _: schemas.string(*values), default, note)


def mapping(
    schema: Shape = schemas.OBJECT, *, note: str = "", names: Collection[str] | None = None
) -> Field[dict[str, Any] | None]:
    """An object, whatever is in it.

    Args:
        names: what is read of it; others are treated as unknown names are.
    """
    made = described(lambda value, name, _: check_object(value, name), schema, note=note)
    return made if names is None else replace(made, unread=lambda value: unread(value, names))


def unread(values: Mapping[str, Any], names: Collection[str], where: str = "") -> list[str]:
    """Paths of what is there under other names; values that ask for nothing are no matter."""
    return [
        f"{where}.{name}"
        for name, value in values.items()
        if name not in names and value is not None and value not in NOTHING
    ]


def unread_each(values: Any, names: Collection[str], where: str = "") -> Iterator[str]:
    """The same of every object in a list; anything else has none."""
    for index, value in enumerate(values if type(values) is list else ()):
        if type(value) is dict:
            yield from unread(value, names, f"{where}[{index}]")


def array(schema: Shape, *, note: str = "") -> Field[list[Any] | None]:
    """A list, whatever is in it; ``schema`` is the list's."""
    return described(lambda value, name, _: check_array(value, name), schema, note=note)


def token_schema(rules: RequestRules) -> Schema:
    return schemas.integer(0, rules.vocab_size - 1)


def token_ids(low: int = 0, high: int | None = None, *, note: str = "") -> Field[list[int] | None]:
    """A list of ``low`` to ``high`` ids of the vocabulary; an empty one is refused elsewhere."""

    def check(value: Any, name: str, rules: RequestRules) -> list[int]:
        ids = check_token_ids(check_array(value, name), name, rules.vocab_size)
        if high is not None and len(ids) > high:
            raise InvalidRequestError(f"{name} may hold {high} ids, got {len(ids)}", name)
        return ids

    def schema(rules: RequestRules) -> Schema:
        return schemas.array(token_schema(rules), low, high)

    return Field(check, schema, None, note)


_B = TypeVar("_B", bound=Body)


def nested(
    body: type[_B], schema: Shape | None = None, *, note: str = "", prefixed: bool = True
) -> Field[_B | None]:
    """An object with fields of its own; faults name them behind the object's name, if ``prefixed``,
    and else alone."""

    def check(value: Any, name: str, rules: RequestRules) -> _B:
        values = check_object(value, name)
        try:
            return body.read(values, rules, f"{name}.")
        except UnknownFieldsError:
            raise
        except InvalidRequestError as error:
            if not prefixed:
                raise
            raise InvalidRequestError(f"{name}.{error}", name) from None

    made = _maker(schema) if schema is not None else lambda rules: schema_of(body, rules)
    return Field(check, made, None, note)


def ignored(*, unless: tuple[Any, ...] | None = None, note: str = "") -> Field[Any]:
    """Accepted for compatibility: it describes the caller, not the answer.

    Args:
        unless: the values that change nothing anywhere; others are treated as unknown names are.
    """

    def check(value: Any, name: str, rules: RequestRules) -> Any:
        return value if unless is None or value in unless else unheeded(value, name, rules)

    return Field(check, lambda _: {}, None, note, IGNORED)


def unheeded(value: Any, name: str, rules: RequestRules) -> object:
    """Raises InvalidRequestError where a field must not be without effect."""
    if rules.strict_fields:
        raise InvalidRequestError(
            f"{name}={show(value)} has no effect here; this server was started with "
            "--strict-fields",
            name,
        )
    return UNHEEDED


def refused(
    says: str,
    harmless: tuple[Any, ...] = NOTHING,
    *,
    asks: Callable[[Any], bool] | None = None,
    note: str = "",
) -> Field[None]:
    """Known, but not served: asking for it is a fault that says so, a harmless value passes.

    Args:
        says: what follows the name; ``{value}`` is the value.
        asks: whether a value asks for it, where a list of those that do not cannot say it.
    """

    def check(value: Any, name: str, _: RequestRules) -> None:
        if asks(value) if asks is not None else value not in harmless:
            raise InvalidRequestError(name + says.replace("{value}", show(value)), name)

    return Field(check, lambda _: {}, None, note, REFUSED)


def check_model(model: object, rules: RequestRules) -> str:
    """Raises InvalidRequestError, or UnknownModelError for a name that is not served."""
    name = check_string(model, "model", 0, None)
    if not rules.serves(name):
        raise UnknownModelError(
            f"The model {show(name)} does not exist here; served: "
            f"{', '.join(rules.served_model_names)}",
            "model",
        )
    return name


def _models(rules: RequestRules) -> Schema:
    if rules.listed_models != rules.served_model_names:
        return schemas.STRING
    return schemas.string(*rules.served_model_names)


# absent: the one that is served
MODEL: Final[Field[str | None]] = described(
    lambda value, _name, rules: check_model(value, rules), _models
)
