"""Parts of a benchmark, as the environment chooses them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable


def chosen(
    known: Iterable[str], default: Iterable[str] | None = None, *, variable: str = "PARTS"
) -> tuple[str, ...]:
    """Return the names that a variable lists, separated by commas; without it ``default``, or all
    that are known. Ends the program with code 2 where one is not known."""
    known = tuple(known)
    names = tuple(filter(None, os.environ.get(variable, "").split(",")))
    if unknown := [name for name in names if name not in known]:
        print(f"{variable} may have {', '.join(known)}, got {unknown[0]!r}", file=sys.stderr)
        raise SystemExit(2)
    return names or (known if default is None else tuple(default))
