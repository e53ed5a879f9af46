"""docs/operate/troubleshooting.md quotes messages that the code says."""

from __future__ import annotations

import ast
import re

from tests.docs.pages import DOCS, ROOT

PAGE = (DOCS / "operate/troubleshooting.md").read_text()
# a quotation with dots is of a message; others are flags, fields and commands
QUOTED = re.findall(r"^\|(?: \d+ \|)? `([^`|]*\.\.\.[^`|]*)`", PAGE, re.MULTILINE)


def said() -> set[str]:
    """Every text in the code; of one with gaps, each part."""
    return {
        node.value
        for path in (ROOT / "paceline").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def test_messages_are_said() -> None:
    assert len(QUOTED) > 25
    # what a log line puts its values for
    texts = {re.sub(r"%[.\d]*[a-z]", "\0", text) for text in said()}
    everything = "\1".join(texts)
    unsaid = {
        message: [
            part
            for part in (each.strip() for each in message.split("..."))
            if len(part) > 3 and part not in everything
        ]
        for message in QUOTED
    }
    assert not {message: parts for message, parts in unsaid.items() if parts}
