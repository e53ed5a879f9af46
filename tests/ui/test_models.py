"""The page of a server of several models: a row each, loaded, unloaded and pinned there."""

from __future__ import annotations

from tests.cli.servers import start_server
from tests.ui.conftest import OpenPage


def test_models_are_shown_loaded_and_pinned(open_page: OpenPage) -> None:
    models = ("--model", "a=null", "--model", "b=null", "--models-max", "1")
    with start_server(*models, "--memory", "1GiB") as server:
        page = open_page(f"{server.address}/ui/server")
        page.get_by_role("heading", name="Models").wait_for()
        row = page.get_by_role("row", name="b known")
        row.wait_for()
        page.get_by_role("row", name="a ready").wait_for()
        # the memory for models, less that of the process which waits for the next load
        page.get_by_text("of 960 MiB").wait_for()
        page.get_by_role("button", name="Load b").click()
        page.get_by_role("row", name="b ready").wait_for()
        page.get_by_role("row", name="a unloaded").wait_for()
        page.get_by_role("button", name="Pin b").click()
        page.get_by_role("button", name="Unpin b").wait_for()
        # a pinned model makes room for no other, but may be unloaded by hand
        page.get_by_role("button", name="Unload b").click()
        page.get_by_role("row", name="b unloaded").wait_for()
        page.get_by_role("button", name="Load a").click()
        page.get_by_role("row", name="a ready").wait_for()
        page.close()
