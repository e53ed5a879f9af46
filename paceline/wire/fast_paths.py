"""Switch of the fast paths: code that does for the common case, with less work, what other code
does for every case.

::

    a read of one chunk          wire/response.py                   past the HTTP parser
    a read of one answer         wire/response.py                   past the HTTP parser
    a read of one event          wire/sse.py                        past the splitting of events
    a chunk like the one before  gateway/streams/chunk_template.py  past the JSON decoder
    a part of an answer          http/body_writer.py, shortcut.py   past ``send`` and the loop
    a line of metrics            http/exposition.py                 past the formatting of labels
    a route found before         gateway/routing/routes.py          past the search of all engines
    a model's only engine        gateway/routing/picker.py          past the filters and the choice

Each object asks once, when it is made or starts a stream. In operation they are on; tests turn them
off and must see the same bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

__all__ = ["are_on", "turned_off"]

_are_on = True


def are_on() -> bool:
    """Whether objects that are made now may use their fast paths."""
    return _are_on


@contextlib.contextmanager
def turned_off() -> Iterator[None]:
    """Turn the fast paths off, in the whole process, for tests."""
    global _are_on
    before, _are_on = _are_on, False
    try:
        yield
    finally:
        _are_on = before
