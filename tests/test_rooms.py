"""Rooms import only rooms below them, and `make rooms` draws them so."""

import importlib.util
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
_SPEC = importlib.util.spec_from_file_location("rooms", ROOT / "scripts" / "rooms.py")
assert _SPEC is not None and _SPEC.loader is not None
rooms = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(rooms)


def test_no_room_is_in_a_circle() -> None:
    graph = grimp.build_graph(rooms.PACKAGE, cache_dir=None)
    page = rooms.page_of(graph)
    for container in (rooms.PACKAGE, *(f"{rooms.PACKAGE}.{name}" for name in rooms.INSIDE)):
        arrows = rooms.arrows_of(graph, container)
        assert rooms.floors_of(arrows)[1] == [], container
        assert f"`{container.replace('.', '/')}/`: {len(arrows)} rooms" in page


def test_floors_and_circles() -> None:
    arrows = {"a": {"b": 1, "c": 2}, "b": {"c": 1}, "c": {}, "x": {"y": 1}, "y": {"x": 1, "c": 1}}
    assert rooms.floors_of(arrows) == ([["c"], ["b"], ["a"]], ["x", "y"])
