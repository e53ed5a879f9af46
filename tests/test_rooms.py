"""The drawing in docs/architecture.md is of these imports."""

import importlib.util
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
_SPEC = importlib.util.spec_from_file_location("rooms", ROOT / "scripts" / "rooms.py")
assert _SPEC is not None and _SPEC.loader is not None
rooms = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(rooms)


def test_the_page_shows_the_rooms_as_they_are() -> None:
    graph = grimp.build_graph(rooms.PACKAGE, cache_dir=None)
    drawn = (ROOT / rooms.PAGE).read_text().partition(rooms.BEGIN)[2].partition(rooms.END)[0]
    assert drawn.strip() == rooms.page_of(graph).strip(), "make rooms renews it"


def test_floors_and_circles() -> None:
    arrows = {"a": {"b": 1, "c": 2}, "b": {"c": 1}, "c": {}, "x": {"y": 1}, "y": {"x": 1, "c": 1}}
    assert rooms.floors_of(arrows) == ([["c"], ["b"], ["a"]], ["x", "y"])
