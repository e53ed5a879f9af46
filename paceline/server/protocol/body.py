"""A request body, described once: a class whose attributes are its fields.

::

    class DetokenizeBody(Body):
        model = MODEL
        tokens = token_ids(required=True, note="of this model's vocabulary")

    body = DetokenizeBody.read(values, rules)    checked; body.tokens is a list[int]
    schema_of(DetokenizeBody, rules)             its JSON schema, with the bounds of this server
    fields_of(DetokenizeBody)                    the rows of its table in docs/use/api.md

A function of ``field_types`` makes each field; subclasses inherit their bases' fields. JSON null
counts as absent. Of several faults the first in class order is reported, own fields first.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Generic, Self, TypeVar, overload

from paceline.errors import InvalidRequestError
from paceline.http.fields import show
from paceline.server.protocol.rules import RequestRules
from paceline.server.protocol.schemas import ANYTHING, Schema, bounded, closed, nullable, record

__all__ = [
    "IGNORED",
    "REFUSED",
    "SERVED",
    "UNHEEDED",
    "Body",
    "Field",
    "OtherName",
    "UnknownFieldsError",
    "fields_of",
    "other_names_of",
    "schema_of",
]

_log = logging.getLogger("paceline.server")

SERVED: Final = "served"
IGNORED: Final = "ignored"
REFUSED: Final = "refused"
# check result of a value without effect; the caller gets its name in a header
UNHEEDED: Final = object()
_NO_EFFECT: Final = bounded(ANYTHING, "accepted, without effect")
_LINK: Final = re.compile(r"\[([^]]*)\]\([^)]*\)")
_MAX_UNKNOWN: Final = 16

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Field(Generic[T]):
    """One field: its check, and its documentation."""

    # given a value that is not null, the field's name and the rules, returns the body's value;
    # raises InvalidRequestError
    check: Callable[[Any, str, RequestRules], T]
    # schema of values that pass
    schema: Callable[[RequestRules], Schema]
    # the body's value if the field is absent
    default: T
    # documentation in docs/use/api.md and the schema, in Markdown
    note: str = ""
    status: str = SERVED
    # the fault of a body without the field; "": it is optional
    missing: str = ""
    # given a raw value that passed, returns the paths inside that are not read, such as ``.name``
    unread: Callable[[Any], Iterable[str]] | None = None

    @overload
    def __get__(self, body: None, owner: type) -> Field[T]: ...
    @overload
    def __get__(self, body: Body, owner: type) -> T: ...
    def __get__(self, body: Body | None, owner: type) -> Field[T] | T:
        # never reached for values: a parsed body has them in its __dict__, looked up first
        return self

    def described(self, rules: RequestRules) -> Schema:
        """Return the field's schema as a property of the body's schema."""
        if self.status == IGNORED:
            return _NO_EFFECT
        schema = self.schema(rules)
        schema = schema if self.missing else nullable(schema)
        return bounded(schema, _LINK.sub(r"\1", self.note)) if self.note else schema


@dataclass(frozen=True, slots=True)
class OtherName:
    """Another server's name for a field of the body."""

    ours: str
    # the value is stored under this key of an object
    key: str | None = None
    # a value that counts as absent, and its meaning there
    nothing: Any = None
    note: str = ""


class UnknownFieldsError(InvalidRequestError):
    """Unknown names, at a server that refuses them; shown with their whole path."""


class Body:
    """A parsed body, with an attribute for each field. Only ``read`` makes one.

    Class arguments:
        passes: a body, and names of fields of its that are accepted here unchecked: ``passed()``
            returns them for the code that reads that body.
        refuses_unknown: message about unknown names, with ``{names}``. "": ``ignored_fields`` lists
            them, like names inside the fields, or a server with ``--strict-fields`` refuses them.
        partial: another body reads the rest of these values, and knows which names are unknown.
    """

    # names without effect, known and unknown, shortened, at most 16; inside an object with its
    # path, such as ``stream_options.name``
    ignored_fields: tuple[str, ...]

    _fields: ClassVar[Mapping[str, Field[Any]]] = {}
    _defaults: ClassVar[Mapping[str, Any]] = {}
    _order: ClassVar[Mapping[str, int]] = {}
    _missing: ClassVar[Mapping[str, str]] = {}
    _others: ClassVar[Mapping[str, OtherName]] = {}
    _passes: ClassVar[tuple[str, ...]] = ()
    _refuses_unknown: ClassVar[str] = ""
    _partial: ClassVar[bool] = False

    def __init_subclass__(
        cls,
        *,
        passes: tuple[type[Body], tuple[str, ...]] | None = None,
        refuses_unknown: str | None = None,
        partial: bool = False,
    ) -> None:
        fields: dict[str, Field[Any]] = {}
        others: dict[str, OtherName] = {}
        for name, value in vars(cls).items():
            if isinstance(value, Field):
                fields[name] = value
            elif isinstance(value, OtherName):
                others[name] = value
        if passes is not None:
            body, cls._passes = passes
            fields |= {name: _passed(body._fields[name]) for name in cls._passes}
        for base in cls.__bases__:
            if issubclass(base, Body):
                fields = fields | {n: f for n, f in base._fields.items() if n not in fields}
                others = dict(base._others) | others
        cls._fields = fields
        cls._others = others
        cls._defaults = {name: field.default for name, field in fields.items()}
        cls._order = {name: place for place, name in enumerate(fields)}
        cls._missing = {name: field.missing for name, field in fields.items() if field.missing}
        if refuses_unknown is not None:
            cls._refuses_unknown = refuses_unknown
        cls._partial = partial

    @classmethod
    def read(cls, values: Mapping[str, Any], rules: RequestRules, within: str = "") -> Self:
        """Parse a body. Raises InvalidRequestError that names the field and shows the value, or
        UnknownModelError.

        Args:
            within: prefix for names of unknown fields; ``stream_options.``, for instance.
        """
        if not cls._others.keys().isdisjoint(values):
            values = _translated(values, cls._others)
        fields = cls._fields
        body = cls.__new__(cls)
        found = body.__dict__
        found.update(cls._defaults)
        known: Collection[str] = values
        unknown: list[str] = []
        unheeded: list[str] = []
        if not fields.keys() >= values.keys():
            unknown = [name for name in values if name not in fields]
            known = fields.keys() & values.keys()
        for name in sorted(known, key=cls._order.__getitem__):
            given = values[name]
            if given is not None:
                field = fields[name]
                found[name] = value = field.check(given, name, rules)
                if value is UNHEEDED:
                    unheeded.append(name)
                elif isinstance(value, Body):
                    unheeded += value.ignored_fields
                elif field.unread is not None:
                    inside = [f"{within}{name}{path}" for path in field.unread(given)]
                    if inside:
                        unheeded += cls._noted(inside, rules)
        for name, says in cls._missing.items():
            if found[name] is None:
                raise InvalidRequestError(f"{name} {says}", name)
        noted: tuple[str, ...] = ()
        if unknown:
            noted = cls._noted([within + name for name in unknown], rules, cls._refuses_unknown)
        found["ignored_fields"] = (*unheeded, *noted)[:_MAX_UNKNOWN] if unheeded else noted
        return body

    def passed(self) -> dict[str, Any]:
        """Return the given fields of another body, unchanged."""
        found = vars(self)
        return {name: found[name] for name in self._passes if found[name] is not None}

    @classmethod
    def _noted(cls, names: list[str], rules: RequestRules, refused: str = "") -> tuple[str, ...]:
        """Return unknown names, shortened. Raises InvalidRequestError where they are refused."""
        shown = tuple(show(name) for name in names[:_MAX_UNKNOWN])
        # logged, because a misspelt field ends up here
        _log.debug("unknown_fields names=%s", ",".join(shown))
        if refused:
            says = refused.replace("{names}", ", ".join(shown))
            raise InvalidRequestError(says, shown[0].strip("'"))
        if rules.strict_fields and not cls._partial:
            listed = ", ".join(f"{name}{cls._meant(name)}" for name in shown)
            raise UnknownFieldsError(
                f"unknown fields: {listed}; this server was started with --strict-fields",
                shown[0].strip("'"),
            )
        return shown

    @classmethod
    def _meant(cls, name: str) -> str:
        outside, dot, inside = name.strip("'").rpartition(".")
        close = difflib.get_close_matches(inside, cls._fields, 1)
        return f" (did you mean {outside + dot + close[0]!r}?)" if close else ""


def schema_of(body: type[Body], rules: RequestRules) -> Schema:
    """Return the schema of the body; fields that are refused are left out."""
    served = {name: f for name, f in body._fields.items() if f.status != REFUSED}
    required = {name: f.described(rules) for name, f in served.items() if f.missing}
    optional = {name: f.described(rules) for name, f in served.items() if not f.missing}
    schema = record(required, optional)
    return closed(schema) if body._refuses_unknown else schema


def fields_of(body: type[Body]) -> Mapping[str, Field[Any]]:
    """Return the fields by name, in the order in which their faults are reported."""
    return body._fields


def other_names_of(body: type[Body]) -> Mapping[str, OtherName]:
    """Return the names that other servers have for these fields."""
    return body._others


def _passed(field: Field[Any]) -> Field[Any]:
    return replace(field, check=lambda value, _name, _rules: value, default=None, missing="")


def _translated(values: Mapping[str, Any], others: Mapping[str, OtherName]) -> dict[str, Any]:
    """Return the values under our names. Raises InvalidRequestError for a field given under two."""
    made = {name: value for name, value in values.items() if name not in others}
    for name, other in others.items():
        value = values.get(name)
        if value in (None, "") or (other.nothing is not None and value == other.nothing):
            continue
        if made.get(other.ours) is not None:
            raise InvalidRequestError(
                f"{name}={show(value)} and {other.ours}={show(made[other.ours])} mean the same "
                "here: give one of them",
                name,
            )
        made[other.ours] = value if other.key is None else {other.key: value}
    return made
