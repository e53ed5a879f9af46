"""One flag of another server as a row, and the arguments that a command line becomes.

A row is read before argparse is, so that the parser, its help and everything behind it know only
the flags of Paceline. This module does not know which rows there are.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

__all__ = [
    "FALSE",
    "Note",
    "Row",
    "Rows",
    "Taken",
    "already",
    "boolean",
    "refused",
    "same",
    "sampling",
]

_TRUE: Final = ("true", "1", "on", "yes", "auto")
FALSE: Final = ("false", "0", "off", "no")


@dataclass(frozen=True, slots=True)
class Taken:
    """Meaning of one flag here."""

    # arguments of the command here
    args: tuple[str, ...] = ()
    # for the start log; empty: only the name differs, or nothing does
    note: str = ""
    # whether ``args`` win over other flags, wherever they stand
    wins: bool = False
    # fields of --override-generation-config, which several flags fill
    sampling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Note:
    """A line of the start log: a flag as it was given, and what it is here."""

    given: str
    here: str


@dataclass(frozen=True, slots=True)
class Row:
    """A flag of another server."""

    # spellings, the usual one first
    names: tuple[str, ...]
    # what it is here, for the table in the documents
    meaning: str
    # called with the name as given and the value; raises ArgumentTypeError for one that is refused
    take: Callable[[str, str], Taken]
    # "1": a value follows; "?": one of on, off and the like may follow; "0": none; "*": any number
    values: Literal["0", "1", "?"] = "1"
    # whether its names ask for two things which are one here, and so may not differ
    agree: bool = False


def same(
    names: str, to: str, meaning: str = "", *, renamed: Mapping[str, str | None] | None = None
) -> Row:
    """Return a row for a flag that has another name here. ``renamed``: values with another name
    here, which the log says; None: the default."""

    def take(name: str, value: str) -> Taken:
        other = (renamed or {}).get(value.lower(), value)
        if other is None:
            return Taken()
        note = f"served as {other}" if other != value else ""
        return Taken((to, other), note)

    return Row(tuple(names.split()), meaning or f"`{to}`", take)


def already(
    names: str, here: str, values: Literal["0", "1", "?"] = "0", *,
    only: Collection[str] = (), instead: str = "",
) -> Row:  # fmt: skip
    """Return a row for what is always the case here. ``only``: the values that ask for it;
    ``instead`` says what to do with others."""

    def take(name: str, value: str) -> Taken:
        if only and value.lower() not in only:
            raise argparse.ArgumentTypeError(f"{value!r} is not served here: {instead}")
        return Taken(note=here)

    return Row(tuple(names.split()), here, take, values)


def boolean(
    names: str, on: Taken | str, off: Taken | str | None = None, *, meaning: str = ""
) -> Row:
    """Return a row for a switch; ``on`` and ``off`` are what it becomes, or the note of what is
    always the case. Without ``off``, what turns it off is refused."""

    def take(name: str, value: str) -> Taken:
        if value.lower() not in ("", *_TRUE, *FALSE):
            raise argparse.ArgumentTypeError(f"{value!r} is not true or false")
        wanted = value.lower() not in FALSE
        wanted ^= name.startswith("--no-")
        chosen = on if wanted else off
        if chosen is None:
            raise argparse.ArgumentTypeError(f"cannot be turned off here: {on}")
        return Taken(note=chosen) if isinstance(chosen, str) else chosen

    said = meaning or (on if isinstance(on, str) else f"`{' '.join(on.args)}`")
    every = tuple(names.split())
    return Row((*every, *(f"--no-{n[2:]}" for n in every if n.startswith("--"))), said, take, "?")


def refused(
    names: str, instead: str, values: Literal["0", "1", "?"] = "1", *,
    unless: Collection[str] = (),
) -> Row:  # fmt: skip
    """Return a row for what does not exist here; ``instead`` says what to do."""

    def take(name: str, value: str) -> Taken:
        if value in unless:
            return Taken(note="always the case")
        raise argparse.ArgumentTypeError(instead)

    return Row(tuple(names.split()), f"refused: {instead}", take, values)


def sampling(names: str, key: str, parse: Callable[[str], float], *, unset: str = "") -> Row:
    """Return a row for a default of requests; ``unset`` is the value that leaves it alone."""

    def take(name: str, value: str) -> Taken:
        if value == unset:
            return Taken()
        try:
            return Taken(sampling={key: parse(value)})
        except ValueError:
            raise argparse.ArgumentTypeError(f"{value!r} is not a number") from None

    return Row(tuple(names.split()), f"`--override-generation-config '{{\"{key}\": ...}}'`", take)


class Rows:
    """All rows that one command takes.

    Args:
        rows: later ones go first where two have a name in common.
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        self._by_name = {name: row for row in rows for name in row.names}

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._by_name)

    def rewrite(
        self, args: Sequence[str], known: Collection[str]
    ) -> tuple[list[str], tuple[Note, ...]]:
        """Return the arguments with every flag of a row replaced, and what to log. Flags of
        ``known`` may be written with underscores. Raises ArgumentTypeError that names the flag."""
        left = list(reversed(args))
        made: list[str] = []
        # behind what wins, and arguments that are no flags
        last: list[str] = []
        rest: list[str] = []
        agreed: dict[Row, tuple[str, Taken]] = {}
        notes: list[Note] = []
        fields: dict[str, Any] = {}
        while left:
            word = left.pop()
            if word == "--":
                rest = [word, *reversed(left)]
                break
            name, equals, value = word.partition("=")
            if name.startswith("--"):
                name = name.replace("_", "-")
            row = self._by_name.get(name) if name.startswith("-") else None
            if row is None:
                made.append(f"{name}{equals}{value}" if name in known else word)
                continue
            if not equals:
                value = _value(row, left)
            try:
                taken = row.take(name, value)
            except argparse.ArgumentTypeError as error:
                # without its value, which may be a secret
                raise argparse.ArgumentTypeError(f"{name}: {error}") from None
            (last if taken.wins else made).extend(taken.args)
            before, same_args = agreed.setdefault(row, (name, taken))
            if row.agree and same_args.args != taken.args:
                raise argparse.ArgumentTypeError(
                    f"{before} and {name} differ, and are one setting here: {row.meaning}"
                )
            fields |= taken.sampling
            if taken.note:
                notes.append(Note(f"{name} {value}".strip(), taken.note))
        if fields:
            # first: the flag itself wins
            made = ["--override-generation-config", json.dumps(fields), *made]
        return [*made, *last, *rest], tuple(notes)


def _value(row: Row, left: list[str]) -> str:
    """Take the row's value from the words that follow, the next of which is the last of
    ``left``."""
    if row.values == "1":
        if not left:
            raise argparse.ArgumentTypeError(f"{row.names[0]} needs a value")
        return left.pop()
    if row.values == "?":
        return left.pop() if left and left[-1].lower() in (*_TRUE, *FALSE) else ""
    return ""
