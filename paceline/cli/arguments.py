"""A parser whose errors are one line, and the numbers and sizes that flags take."""

from __future__ import annotations

import argparse
import difflib
import math
import re
import sys
from collections.abc import Callable, Iterable
from typing import NoReturn

__all__ = ["Parser", "bounded_float", "bounded_int", "byte_count"]

_UNITS = {
    "": 1,
    "B": 1,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line and name the nearest flag."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        # a prefix that is unique today is ambiguous tomorrow, and scripts outlive both
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        if unknown:
            message += _nearest(unknown[1], self._option_string_actions)
        choice = re.match(r"argument .*: invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if choice:
            message += _nearest(choice[1], re.findall(r"[\w-]+", choice[2]))
        print(f"{self.prog}: {message} - see {self.prog} --help", file=sys.stderr)
        sys.exit(2)


def _nearest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def bounded_int(low: int, high: int | None = None) -> Callable[[str], int]:
    """A parser of whole numbers in ``[low, high]``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < low or (high is not None and value > high):
            wanted = f"at least {low}" if high is None else f"between {low} and {high}"
            raise argparse.ArgumentTypeError(f"must be {wanted}, got {value}")
        return value

    return parse


def bounded_float(low: float, high: float = math.inf) -> Callable[[str], float]:
    """A parser of finite numbers in ``[low, high]``."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not (math.isfinite(value) and low <= value <= high):
            wanted = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
            raise argparse.ArgumentTypeError(f"must be {wanted}, got {text}")
        return value

    return parse


def byte_count(text: str) -> int:
    """``2GiB``, ``512 MB`` or plain bytes."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size; examples: 2GiB, 512MiB, 1500MB, 1073741824"
        )
    count = int(float(match[1]) * unit)
    if count < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1 byte, got {text}")
    return count
