"""The browser of tests/ui, for the built site."""

from __future__ import annotations

from tests.ui.conftest import browser, open_page

__all__ = ["browser", "open_page"]
