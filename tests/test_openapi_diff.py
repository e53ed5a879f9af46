"""``scripts/openapi_diff.py``: what counts as a difference between two descriptions."""

import importlib.util
from pathlib import Path

_SPEC = importlib.util.spec_from_file_location(
    "openapi_diff", Path(__file__).parents[1] / "scripts" / "openapi_diff.py"
)
assert _SPEC is not None and _SPEC.loader is not None
script = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(script)


def test_order_alone_is_no_difference() -> None:
    before = {"a": {"required": ["x", "y"], "type": "object"}, "b": [1, {"c": 2}]}
    after = {"b": [1, {"c": 2}], "a": {"type": "object", "required": ["y", "x"]}}
    assert list(script.differences(before, after)) == []


def test_each_difference_is_named_with_its_place() -> None:
    before = {"a": {"required": ["x"], "minimum": 1}, "b": [1, {"c": 2}], "gone": {}}
    after = {"a": {"required": ["x", "z"], "minimum": 2}, "b": [1, {"c": 3}], "new": None}
    assert list(script.differences(before, after)) == [
        "/a/minimum: 1 -> 2",
        '/a/required: ["x"] -> ["x", "z"]',
        "/b/1/c: 2 -> 3",
        '/gone: {} -> "(absent)"',
        '/new: "(absent)" -> null',
    ]


def test_saying_null_twice_is_no_difference_and_descriptions_can_be_left_out() -> None:
    once = {"type": ["integer", "null"], "description": "a", "maximum": 5}
    twice = {"anyOf": [{"type": ["integer", "null"], "maximum": 5}, {"type": "null"}]}
    assert script.meaning(twice) == {"type": ["integer", "null"], "maximum": 5}
    assert script.meaning(once) == once
    assert script.meaning(once, descriptions=False) == script.meaning(twice)
    # a property of that name is no description
    named = {"properties": {"description": {"type": "string"}}}
    assert script.meaning(named, descriptions=False) == named
    other = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
    assert script.meaning(other) == other


def test_a_checkout_is_the_same_as_itself() -> None:
    root = Path(__file__).parents[1]
    document = script.document_of(root)
    assert "/v1/chat/completions" in document["paths"]
    assert list(script.differences(document, document)) == []
