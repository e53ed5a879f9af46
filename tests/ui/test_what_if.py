"""The what-if page in Chromium: asked, simulated, compared, gone through step by step."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.server.live_process import LiveServer, eventually, live_server
from tests.ui.conftest import OpenPage, drawn, expect
from tests.ui.test_accessibility import violations

TRACE = "arrived_at_s,prompt_tokens,output_tokens\n" + "".join(
    f"{i * 0.02:.2f},{300 + 61 * (i % 13)},{20 + i % 30}\n" for i in range(100)
)
BACKEND = {"step_time": 0.005, "num_blocks": 256}
CORE = {"timeline": True, "max_num_seqs": 4, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server that has served: short requests and long ones at once."""
    log = tmp_path_factory.mktemp("what-if") / "log"
    with live_server(log, backend=BACKEND, core=CORE, what_if=True) as server:

        def one(index: int) -> None:
            body = {"model": "null", "prompt": "x" * (20 + 40 * (index % 5)), "max_tokens": 12}
            body |= {"slo": {"class": "interactive", "ttft_ms": 60}}
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)

        threads = [threading.Thread(target=one, args=(index,)) for index in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        yield server


def asked(page: Any, what: str) -> Any:
    return page.evaluate(f"(() => {{ const w = pacelineWhatIf; return {what}; }})()")


def choose(page: Any, *policies: str, loads: str = "1") -> None:
    page.get_by_role("button", name=re.compile("^Simulate")).wait_for()
    for box in page.get_by_role("group", name="Policies").get_by_role("checkbox").all():
        box.uncheck()
    for policy in policies:
        page.get_by_role("checkbox", name=policy, exact=False).first.check()
    page.get_by_label("Loads, several").fill(loads)


def simulate(page: Any, press: Callable[[], None] | None = None) -> None:
    """Until it is done; by the button, unless told how else."""
    before = asked(page, "w.told.value.job.number ?? 0")
    (press or page.get_by_role("button", name=re.compile("^Simulate")).click)()
    job = "w.told.value.job"
    eventually(lambda: asked(page, f"{job}.number > {before} && {job}.status === 'done'"), 60)
    page.get_by_text(re.compile("^Done in")).wait_for()


def results(page: Any, number: int) -> list[list[str]]:
    """The cells of so many rows that compare runs."""
    rows = page.get_by_role("region", name="Results").locator("tbody tr")
    expect(rows).to_have_count(number)
    return [row.split("\t") for row in rows.all_inner_texts()]


def test_policies_compared_on_the_last_minutes(told: LiveServer, open_page: OpenPage) -> None:
    page = open_page(f"{told.url}/ui/what-if")
    page.get_by_text("It remembers 12 requests").wait_for()
    choose(page, "fcfs", "sjf", loads="1, 8")
    page.get_by_role("button", name="Simulate 4 runs").wait_for()
    simulate(page)
    rows = results(page, 4)
    assert [(row[0], row[2]) for row in rows] == [
        ("fcfs", "1×"), ("fcfs", "8×"), ("sjf", "1×"), ("sjf", "8×"),
    ]  # fmt: skip
    for row in rows:
        # 64 tokens in a step, times with a unit, shares, nothing refused
        assert row[1] == "64" and re.fullmatch(r"[\d.]+ m?s", row[4])
        assert re.fullmatch(r"[\d.]+ %", row[8]) and row[10] == "0"
    # the first two rows are shown, step by step, and both move together
    eventually(lambda: asked(page, "w.pair.value?.a.history.count > 20"))
    page.get_by_role("radio", name=re.compile("^Second timeline: sjf, 64 tokens, load 1")).check()
    eventually(lambda: asked(page, "w.pair.value && w.pair.value.b.history.count > 20"))
    page.get_by_role("heading", name="Step by step").click()
    page.keyboard.press("Home")
    column = "w.pair.value.a.history.at(w.cursor.value)"
    first = asked(page, column)
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    assert asked(page, column) == first + 5
    page.keyboard.press("ArrowLeft")
    assert asked(page, column) == first + 4
    now = asked(page, "w.cursor.value")
    assert now == asked(page, f"w.pair.value.a.history.planned[{first + 4}]") > 0
    words = page.locator(".what-if-chart .step-words")
    for place in (0, 1):
        expect(words.nth(place)).to_have_text(re.compile(r"^Step \d+ · \d+ of 64 tokens"))
    # a click in one is a place in both
    box = page.locator(".what-if-chart canvas").nth(1).bounding_box()
    page.mouse.click(box["x"] + 0.8 * box["width"], box["y"] + 40)
    eventually(lambda: asked(page, "w.cursor.value") > now)
    page.get_by_role("button", name="Steps as a table").click()
    steps = page.get_by_role("region", name="Steps of both")
    expect(steps.get_by_role("row").nth(3)).to_be_attached()


def test_a_trace_is_sent_and_simulated(told: LiveServer, open_page: OpenPage) -> None:
    page = open_page(f"{told.url}/ui/what-if")
    choose(page, "fcfs")
    page.get_by_role("radio", name="A trace").check()
    page.get_by_label("File:").set_input_files(
        {"name": "mine.csv", "mimeType": "text/csv", "buffer": TRACE.encode()}
    )
    page.get_by_role("radio", name="Of a hardware and a model").check()
    page.locator("select[name=hardware]").select_option("H100-SXM")
    page.locator("select[name=model]").select_option("meta-llama/Llama-3.1-8B")
    page.get_by_label("First token, ms").last.fill("20")
    page.get_by_label("Tokens in a step, several").fill("512, 2048")
    simulate(page)
    page.get_by_text("Simulate 2 runs").wait_for()
    rows = results(page, 2)
    assert [row[1] for row in rows] == ["512", "2048"]
    # what differs is found
    page.get_by_role("button", name="First difference").click()
    there = "Math.abs(w.cursor.value - w.pair.value.difference) < 1e-9"
    assert asked(page, "w.pair.value.difference") is not None
    eventually(lambda: bool(asked(page, there)))


def test_answers_about_another_job_are_not_shown(told: LiveServer, open_page: OpenPage) -> None:
    """They were asked for before it began, and come late."""
    page = open_page(f"{told.url}/ui/what-if")
    choose(page, "fcfs", "sjf", "deadline")
    simulate(page)
    eventually(lambda: asked(page, "w.pair.value !== null"))
    frames: list[Any] = []
    page.route("**/what-if/timeline?run=2*", lambda route: frames.append(route))
    second = page.get_by_role("radio", name=re.compile("^Second timeline"))
    second.nth(2).check()
    eventually(lambda: page.wait_for_timeout(20) or bool(frames))
    # that run of the first job, and how that job is; then another job
    states: list[Any] = []
    url = "**/ui/api/what-if"
    page.route(
        url,
        lambda route: (
            route.continue_() if states or route.request.method != "GET" else states.append(route)
        ),
    )
    page.get_by_role("link", name="Server").click()
    page.get_by_role("link", name="What if").click()
    eventually(lambda: page.wait_for_timeout(20) or bool(states))
    of_first = asked(page, "w.told.value")
    simulate(page)
    page.unroute("**/what-if/timeline?run=2*")
    eventually(lambda: asked(page, "w.pair.value?.b.history.count > 20"))
    page.evaluate("void (pacelineWhatIf.first = pacelineWhatIf.pair.value.a)")
    states[0].fulfill(body=json.dumps(of_first), content_type="application/json")
    with page.expect_response("**/what-if/timeline?run=2*"):
        frames[0].continue_()
    drawn(page)
    assert asked(page, "w.told.value.job.number") == of_first["job"]["number"] + 1
    assert asked(page, "w.pair.value.a === w.first")


def test_what_is_wrong_stands_beside_its_field(told: LiveServer, open_page: OpenPage) -> None:
    page = open_page(f"{told.url}/ui/what-if")
    choose(page, "fcfs", loads="1, fast")
    page.get_by_role("button", name=re.compile("^Simulate")).click()
    page.locator("#bad-loads").get_by_text("'fast'").wait_for()
    expect(page.get_by_label("Loads, several")).to_have_attribute("aria-invalid", "true")
    # not as many tokens in a step as requests may run: known to the simulator alone
    choose(page, "fcfs")
    page.get_by_label("Tokens in a step, several").fill("2")
    page.get_by_role("button", name=re.compile("^Simulate")).click()
    page.get_by_text(re.compile("It failed: max_num_batched_tokens=2")).wait_for(timeout=30_000)


def test_it_is_cancelled(told: LiveServer, open_page: OpenPage) -> None:
    page = open_page(f"{told.url}/ui/what-if")
    page.get_by_role("radio", name="A trace").check()
    rows = "".join(f"{i / 50:.2f},900,900\n" for i in range(20_000))
    page.get_by_label("File:").set_input_files(
        {
            "name": "long.csv",
            "mimeType": "text/csv",
            "buffer": f"arrived_at_s,prompt_tokens,output_tokens\n{rows}".encode(),
        }
    )
    page.get_by_role("radio", name="Of a hardware and a model").check()
    choose(page, "fcfs")
    page.get_by_role("button", name="Simulate", exact=True).click()
    page.get_by_text("Simulating 20000 requests").wait_for(timeout=30_000)
    page.get_by_role("button", name="Cancel").click()
    page.get_by_text("Cancelled.").wait_for()
    page.get_by_role("button", name="Simulate", exact=True).wait_for()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing(told: LiveServer, open_page: OpenPage, theme: str) -> None:
    page = open_page(f"{told.url}/ui/what-if", color_scheme=theme)
    choose(page, "fcfs", "deadline", loads="1, x")
    assert violations(page) == []
    page.get_by_role("button", name=re.compile("^Simulate")).click()
    page.locator("#bad-loads").wait_for()
    assert violations(page) == []
    page.get_by_label("Loads, several").fill("1")
    simulate(page)
    page.get_by_role("heading", name="Step by step").wait_for()
    page.get_by_role("button", name="Steps as a table").click()
    assert violations(page) == []


@pytest.mark.parametrize("width", [360, 640])
def test_a_narrow_page_does_not_scroll_sideways(
    told: LiveServer, open_page: OpenPage, width: int
) -> None:
    page = open_page(f"{told.url}/ui/what-if", viewport={"width": width, "height": 700})
    choose(page, "fcfs", "sjf")
    simulate(page)
    page.get_by_role("heading", name="Step by step").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_by_keyboard_alone(told: LiveServer, open_page: OpenPage) -> None:
    page = open_page(f"{told.url}/ui/what-if")
    choose(page, "fcfs", "sjf")
    page.get_by_label("Loads, several").focus()
    simulate(page, lambda: page.keyboard.press("Enter"))
    eventually(lambda: asked(page, "w.pair.value && w.painters.a && w.painters.a.frames > 0"))
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("Home")
    zoom = asked(page, "w.view.zoom")
    page.keyboard.press("w")
    assert asked(page, "w.view.zoom") > zoom
    page.keyboard.press("s")
    page.keyboard.press("End")
    assert asked(page, "w.cursor.value") > 0
    page.keyboard.press("t")
    page.get_by_role("region", name="Steps of both").wait_for()
