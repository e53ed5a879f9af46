"""docs/use/client.md names what there is."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import get_args

from paceline.client import Event

PAGE = (Path(__file__).parents[2] / "docs" / "use" / "client.md").read_text()


def test_events_and_their_fields() -> None:
    table = "".join(re.findall(r"^\| (`[A-Z].*?) \|", PAGE, re.MULTILINE))
    told = {name: parts.split(", ") for name, parts in re.findall(r"`(\w+)\((.*?)\)`", table)}
    assert told == {kind.__name__: [f.name for f in fields(kind)] for kind in get_args(Event)}
