"""docs/lab-log/ stays readable, and its figures come from commands that exist."""

from __future__ import annotations

import re

from tests.docs.pages import DOCS, headings, links

FOLDER = DOCS / "lab-log"
PATHS = sorted(FOLDER.glob("[a-z]*.md"))
PAGES = [path.read_text() for path in PATHS]
ENTRIES = [x for page in PAGES for x in re.split(r"^## ", page, flags=re.MULTILINE)[1:]]
MOST_LINES = 15


def test_entries_are_short() -> None:
    assert len(ENTRIES) > 40
    lengths = {
        entry.splitlines()[0]: sum(1 for line in entry.splitlines()[1:] if line.strip())
        for entry in ENTRIES
    }
    assert not {title: count for title, count in lengths.items() if count > MOST_LINES}


def test_titles_are_different() -> None:
    """Other pages and comments name entries by them."""
    titles = [entry.splitlines()[0] for entry in ENTRIES]
    assert len(set(titles)) == len(titles)


def test_no_figure_is_of_a_script_that_is_not_here() -> None:
    assert not re.findall(r"script\s+(?:that\s+was\s+not\s+kept|around)", "".join(PAGES))


def test_the_index_has_a_verdict_for_each_entry() -> None:
    there = [f"{path.name}#{heading}" for path in PATHS for heading in headings(path)[1:]]
    assert sorted(x for x in links(FOLDER / "README.md") if "#" in x) == sorted(there)
