"""The page of a server of several models: a row each, loaded, unloaded and pinned there."""

from __future__ import annotations

from typing import Any

import httpx

from tests.cli.servers import start_server
from tests.server.live_process import eventually
from tests.ui.conftest import OpenPage, expect


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


def steps(page: Any) -> int:
    count: int = page.evaluate("pacelineTimeline.history.count")
    return count


def test_the_timeline_is_that_of_the_model_that_is_chosen(open_page: OpenPage) -> None:
    models = ("--model", "a=null", "--model", "b=null,null-step-time=0.001", "--memory", "1GiB")

    def ask(address: str, model: str, tokens: int) -> None:
        body = {"model": model, "prompt": "x", "max_tokens": tokens, "ignore_eos": True}
        assert httpx.post(f"{address}/v1/completions", json=body, timeout=60).status_code == 200

    with start_server(*models) as server:
        page = open_page(f"{server.address}/ui/timeline")
        choice = page.get_by_label("Model of the steps")
        expect(choice).to_have_value("a")
        ask(server.address, "a", 5)
        eventually(lambda: steps(page) == 5)
        choice.select_option("b")
        page.get_by_text("the model 'b' was not in memory yet").wait_for()
        ask(server.address, "b", 9)
        eventually(lambda: steps(page) == 9)
        # and back, to what was there
        choice.select_option("a")
        eventually(lambda: steps(page) == 5)
        page.goto(f"{server.address}/ui/timeline?model=b")
        eventually(lambda: steps(page) == 9)
        expect(page.get_by_label("Model of the steps")).to_have_value("b")
        page.close()
