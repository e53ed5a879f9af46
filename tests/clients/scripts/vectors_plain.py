"""What the server says to plain HTTP. Standard library only."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from conversation import KEY, MODEL, URL

TEXTS = ["the quick brown fox", "what is the capital of france", "paris"]


def ask(path: str, **body: Any) -> Any:
    request = urllib.request.Request(
        f"{URL}{path}",
        json.dumps({"model": MODEL, **body}).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def vectors() -> list[list[float]]:
    return [item["embedding"] for item in ask("/v1/embeddings", input=TEXTS)["data"]]


def check(found: list[list[float]]) -> None:
    expected = vectors()
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert len(one) == len(other)
        assert max(abs(a - b) for a, b in zip(one, other, strict=True)) < 1e-6
