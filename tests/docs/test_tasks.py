"""What a newcomer comes for is three clicks from README at most, by links that name it."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import ROOT

MOST = 3


@pytest.mark.parametrize(
    ("clicks", "there"),
    [
        pytest.param(["GGUF files"], r"^paceline serve \S+\.gguf", id="serve a GGUF from disk"),
        pytest.param(["clients"], r"^from openai import OpenAI", id="ask from Python"),
        pytest.param(["who waited and why"], r'"explain": true', id="why it was slow"),
        pytest.param(["recipes", "nginx"], r"^ *proxy_pass http", id="behind nginx"),
        pytest.param(["keys, limits"], r"--max-concurrent-per-key N", id="limit a key"),
        pytest.param(["flags"], r"`--max-model-len`", id="the flag for context length"),
        pytest.param(["choose a model"], r"^paceline pull --list", id="a better model"),
    ],
)
def test_a_task_is_found_by_links_that_name_it(clicks: list[str], there: str) -> None:
    assert len(clicks) <= MOST
    page, text = ROOT / "README.md", (ROOT / "README.md").read_text(encoding="utf-8")
    for words in clicks:
        links = re.findall(rf"\[{re.escape(words)}\]\(([^)\s]+)\)", text)
        assert links, f"{page.name} has no link {words!r}"
        name, _, anchor = links[0].partition("#")
        if name:
            page = (page.parent / name).resolve()
            text = page.read_text(encoding="utf-8")
        assert anchor or name, links
    assert re.search(there, text, flags=re.MULTILINE), f"{page.name} does not say {there}"
