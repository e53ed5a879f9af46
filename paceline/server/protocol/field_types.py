"""Kinds of fields: each is a check, whose error names the field and shows the value, and the schema
of values that pass.

Every function makes a ``Field``; ``note`` is documentation in addition to the type, for
docs/use/api.md and the schema; ``schema`` is for the latter where later checks allow less.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar, cast, overload

from paceline.errors import InvalidRequestError, UnknownModelError
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
from paceline.ranges import Range
from paceline.server.protocol import schemas
from paceline.server.protocol.body import (
    IGNORED,
    REFUSED,
    UNHEEDED,
    Body,
    Field,
    UnknownFieldsError,
    schema_of,
)
from paceline.server.protocol.rules import RequestRules
from paceline.server.protocol.schemas import Schema

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
# a number, or how to find it in the server's rules
Bound = int | Callable[[RequestRules], int]
SchemaMaker = Callable[[RequestRules], Schema]
Shape = Schema | SchemaMaker
# adapters that an error names: there may be thousands
_MOST_NAMED: Final = 20
# values that request nothing
NOTHING: Final[tuple[Any, ...]] = (False, [], {}, "")

T = TypeVar("T")


def _maker(schema: Shape) -> SchemaMaker:
    return schema if callable(schema) else lambda _: schema


def _bound(bound: Bound) -> Callable[[RequestRules], int]:
    return bound if callable(bound) else lambda _: bound


def described(
    check: Callable[[Any, str, RequestRules], T], schema: Shape, *, note: str = ""
) -> Field[T | None]:
    """A field with a check and a schema of its own."""
    return Field(check, _maker(schema), None, note)


def needed(
    field: Field[T | None], says: str = "is missing", *, note: str | None = None
) -> Field[T]:
    """Make a field required; a body without it is refused with its name and ``says``."""
    note = field.note if note is None else note
    return cast("Field[T]", replace(field, missing=says, note=note))


def anything(schema: Shape, *, note: str = "") -> Field[Any]:
    """Any value, unchanged; the code that uses it checks it."""
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
    """An integer, which SamplingParams checks against its range."""
    return integer(
        -INT32,
        INT32,
        note=note,
        schema=schemas.integer(int(allowed.least), int(min(allowed.most, INT32))),
    )


def number(allowed: Range, *, note: str = "") -> Field[float | None]:
    """A finite number, which SamplingParams checks against its range."""
    schema = schemas.number(allowed.least, allowed.most, above=allowed.above)
    return Field(lambda value, name, _: check_number(value, name), lambda _: schema, None, note)


def string(low: int = 0, high: int | None = None, *, note: str = "") -> Field[str | None]:
    """A string of ``low`` to ``high`` characters."""
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
    """One of ``values``; with a default, an empty string counts as absent."""
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
    """An object with any content.

    Args:
        names: the keys that are read; others are treated like unknown names.
    """
    made = described(lambda value, name, _: check_object(value, name), schema, note=note)
    return made if names is None else replace(made, unread=lambda value: unread(value, names))


def unread(values: Mapping[str, Any], names: Collection[str], where: str = "") -> list[str]:
    """Return the paths of values under other names, except values that request nothing."""
    return [
        f"{where}.{name}"
        for name, value in values.items()
        if name not in names and value is not None and value not in NOTHING
    ]


def unread_each(values: Any, names: Collection[str], where: str = "") -> Iterator[str]:
    """Yield the same paths for every object of a list; none for any other value."""
    for index, value in enumerate(values if type(values) is list else ()):
        if type(value) is dict:
            yield from unread(value, names, f"{where}[{index}]")


def array(schema: Shape, *, note: str = "") -> Field[list[Any] | None]:
    """A list with any content; ``schema`` is the list's."""
    return described(lambda value, name, _: check_array(value, name), schema, note=note)


def token_schema(rules: RequestRules) -> Schema:
    return schemas.integer(0, rules.vocab_size - 1)


def token_ids(low: int = 0, high: int | None = None, *, note: str = "") -> Field[list[int] | None]:
    """A list of ``low`` to ``high`` vocabulary ids; an empty one is refused elsewhere."""

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
    """An object with fields of its own; faults name them after the object if ``prefixed``."""

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
    """A field accepted for compatibility: it describes the caller, not the answer.

    Args:
        unless: values that change nothing on any server; others are treated like unknown names.
    """

    def check(value: Any, name: str, rules: RequestRules) -> Any:
        return value if unless is None or value in unless else unheeded(value, name, rules)

    return Field(check, lambda _: {}, None, note, IGNORED)


def unheeded(value: Any, name: str, rules: RequestRules) -> object:
    """Raise InvalidRequestError on servers where a field without effect is refused."""
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
    """A known field that is not served: a value that needs it is refused; a harmless one passes.

    Args:
        says: text after the name; ``{value}`` is the value.
        asks: whether a value needs the field, where a list of harmless values cannot express it.
    """

    def check(value: Any, name: str, _: RequestRules) -> None:
        if asks(value) if asks is not None else value not in harmless:
            raise InvalidRequestError(name + says.replace("{value}", show(value)), name)

    return Field(check, lambda _: {}, None, note, REFUSED)


def check_model(model: object, rules: RequestRules) -> str:
    """Return the name. Raises InvalidRequestError, or UnknownModelError if it is not served."""
    name = check_string(model, "model", 0, None)
    if not rules.serves(name):
        adapters = tuple(rules.adapters)
        more = len(adapters) - _MOST_NAMED
        raise UnknownModelError(
            f"The model {show(name)} does not exist here; served: "
            f"{', '.join((*rules.served_model_names, *adapters[:_MOST_NAMED]))}"
            + (f" and {more} more adapters" if more > 0 else ""),
            "model",
        )
    return name


def _models(rules: RequestRules) -> Schema:
    if rules.adapters or rules.listed_models != rules.served_model_names:
        return schemas.STRING
    return schemas.string(*rules.served_model_names)


# absent: the model that is served
MODEL: Final[Field[str | None]] = described(
    lambda value, _name, rules: check_model(value, rules), _models
)
