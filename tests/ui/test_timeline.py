"""The timeline in Chromium: live, stopped, gone through, found, told; what troubles look like."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.security.keys import ADMIN, USER
from tests.server.live_process import LiveServer, eventually, live_server
from tests.ui.conftest import OpenPage, drawn, expect
from tests.ui.references import recording
from tests.ui.test_accessibility import AXE, violations

BACKEND = {"step_time": 0.01, "num_blocks": 256}
CORE = {"timeline": True, "max_num_seqs": 4, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("timeline") / "log"
    with live_server(log, backend=BACKEND, core=CORE) as server:
        yield server


def generate(server: LiveServer, number: int, tokens: int, **more: Any) -> list[dict[str, Any]]:
    """So many requests at once; their answers."""
    answers: list[dict[str, Any]] = []

    def one(index: int) -> None:
        body = {"model": "null", "prompt": "x" * (20 + 40 * index), "max_tokens": tokens}
        body |= {"explain": True} | more
        answers.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json())

    threads = [threading.Thread(target=one, args=(index,)) for index in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def asked(page: Any, what: str) -> Any:
    return page.evaluate(f"(() => {{ const t = pacelineTimeline; return {what}; }})()")


def steps(page: Any) -> int:
    return int(asked(page, "t.history.count"))


def picture(page: Any) -> set[int]:
    """The colours of the chart."""
    colours = page.evaluate(
        "(() => { const c = pacelineTimeline.painter().canvas; const copy = c.cloneNode();"
        " const to = copy.getContext('2d', { willReadFrequently: true }); to.drawImage(c, 0, 0);"
        " const d = to.getImageData(0, 0, c.width, c.height).data; const s = new Set();"
        " for (let i = 0; i < d.length; i += 4) s.add((d[i] << 16) | (d[i + 1] << 8) | d[i + 2]);"
        " return [...s]; })()"
    )
    return set(colours)


def test_live_then_step_by_step(told: LiveServer, open_page: OpenPage) -> None:
    page = open_page(f"{told.url}/ui/timeline")
    page.get_by_text("No step in the last 60 s").wait_for()
    before = steps(page)
    generate(told, 7, 20)
    eventually(lambda: steps(page) >= before + 20)
    page.locator(".step-words").get_by_text("blocks free").wait_for()
    # what is drawn is what the engine says of itself
    assert asked(page, "t.model.doubts") == 0
    eventually(lambda: asked(page, "t.stories.size") == 7)
    assert asked(page, "[...t.stories.values()].map((s) => s.ended.output)") == [20] * 7
    page.keyboard.press("Space")
    page.get_by_role("button", name="Live").wait_for()
    words = page.locator(".step-words")
    # the newest that is drawn, which movement may have left behind the newest there is
    here = asked(page, "t.history.step[t.view.end - 1]")
    expect(words).to_contain_text(f"Step {here} ")
    page.keyboard.press("ArrowLeft")
    expect(words).to_contain_text(f"Step {here - 1} ")
    page.keyboard.press("Shift+ArrowLeft")
    expect(words).to_contain_text(f"Step {here - 11} ")
    zoom = asked(page, "t.view.zoom")
    page.keyboard.press("w")
    assert asked(page, "t.view.zoom") > zoom
    end = asked(page, "t.view.end")
    page.keyboard.press("a")
    eventually(lambda: asked(page, "t.view.end") <= end)
    page.keyboard.press("Home")
    eventually(lambda: asked(page, "t.pending()") == 0)
    # a page that is stopped draws nothing, though it hears of the engine each second
    frames, heard = asked(page, "[t.painter().frames, t.heardAt()]")
    eventually(lambda: asked(page, "t.heardAt()") > heard)
    drawn(page)
    assert asked(page, "t.painter().frames") == frames
    page.keyboard.press("End")
    page.get_by_role("button", name="Pause").wait_for()


def test_the_story_is_what_explain_says(told: LiveServer, open_page: OpenPage) -> None:
    page = open_page(f"{told.url}/ui/timeline")
    answers = generate(told, 8, 15, slo={"ttft_ms": 5000})
    # the one that waited longest: five at most run at once
    answer = max(answers, key=lambda each: each["usage"]["timeline"][0]["queued_ms"])
    explained = answer["usage"]["timeline"][0]
    assert explained["queued_ms"] > 20
    find = page.get_by_label("Find a request by its id")
    # it has heard of the request's end, so that it can be found
    of_answer = f"[...t.stories.values()].some((s) => s.told?.id.includes('{answer['id']}'))"
    eventually(lambda: bool(asked(page, of_answer)))
    page.keyboard.press("/")
    expect(find).to_be_focused()
    find.fill(answer["id"])
    find.press("Enter")
    story = page.locator(".story-panel .story")
    story.get_by_text("tokens a second").wait_for()
    text = story.inner_text()

    def ms(number: str, unit: str) -> float:
        return float(number) * (1000 if unit == "s" else 1)

    total = re.findall(r"Waited ([\d.]+) (ms|s): (.*?)\. Prompt", text)[0]
    assert ms(total[0], total[1]) == pytest.approx(explained["queued_ms"], rel=0.01, abs=1)
    waited = {"slots": "for a place", "step": "for the step under way", "budget": "for tokens"}
    for reason, value in explained["waited_ms"].items():
        if value > 1:
            found = re.findall(rf"([\d.]+) (ms|s) {waited[reason]}", total[2])
            assert ms(*found[0]) == pytest.approx(value, rel=0.01, abs=1), reason
    assert f"Prompt of {answer['usage']['prompt_tokens']} tokens in {explained['chunks']} c" in text
    first = ms(*re.findall(r"First token after ([\d.]+) (ms|s)", text)[0])
    # one is the engine's time and one its caller's process's, which hears of it later
    assert explained["queued_ms"] * 0.99 - 1 <= first <= explained["ttft_ms"] * 1.01 + 1
    assert "target 5 s: met" in text
    # chosen, it is outlined, and by the keyboard its story gets the focus
    page.keyboard.press("Enter")
    eventually(lambda: page.evaluate("document.activeElement.id") == "story")


def test_the_tables_say_the_same_and_the_filter_holds(
    told: LiveServer, open_page: OpenPage
) -> None:
    generate(told, 3, 5, slo={"class": "batch"})
    page = open_page(f"{told.url}/ui/timeline")
    generate(told, 2, 5, slo={"class": "interactive"})
    page.get_by_role("button", name="Table of requests").click()
    rows = page.locator(".tables tbody tr")
    eventually(lambda: rows.count() >= 5)
    page.get_by_placeholder("Class, tenant, id").fill("batch")
    classes = page.locator(".tables tbody tr td:nth-child(3)")
    eventually(lambda: set(classes.all_inner_texts()) == {"batch"})
    page.get_by_placeholder("Class, tenant, id").fill("")
    page.get_by_role("button", name="Prompt").click()
    page.get_by_role("button", name="Prompt").click()
    expect(page.locator('th[aria-sort="ascending"]')).to_have_count(1)
    page.locator(".tables tbody button").first.click()
    page.locator(".story-panel .story").wait_for()
    page.get_by_role("button", name="Table of steps").click()
    page.get_by_text("The 50 steps up to the right edge").wait_for()


def test_the_cells_are_what_the_model_says(told: LiveServer, open_page: OpenPage) -> None:
    """Not the picture, whose edges differ from browser to browser: what it is made of."""
    page = open_page(f"{told.url}/ui/timeline")
    generate(told, 6, 12)
    seen = (
        "(() => { const seen = new Set(); for (let c = t.history.first; c < t.history.count; c++)"
        " for (let r = 0; r < 320; r++) seen.add(t.history.cell[(c % 4096) * 320 + r]);"
        " return [...seen]; })()"
    )
    # it waited, computed its prompt, wrote; 255 is nobody
    eventually(lambda: {0, 2, 3, 255} <= set(asked(page, seen)))
    # the colours of waiting, prompts and writing in the light theme
    eventually(lambda: {0x868E96, 0xC77700, 0x0072B2} <= picture(page))


def test_lanes_are_coloured_by_the_time_left_and_stand_by_class(
    told: LiveServer, open_page: OpenPage
) -> None:
    page = open_page(f"{told.url}/ui/timeline?colour=slack", color_scheme="light")
    late = threading.Thread(
        target=generate, args=(told, 2, 60), kwargs={"slo": {"class": "interactive", "tpot_ms": 1}}
    )
    late.start()
    answers = generate(told, 2, 40, slo={"class": "batch", "ttft_ms": 60_000, "tpot_ms": 60_000})
    ids = [answer["id"] for answer in answers]
    ended = "[...t.stories.values()].map((s) => s.told?.id ?? '')"
    eventually(lambda: all(any(i in s for s in asked(page, ended)) for i in ids))
    # and what it has heard of is drawn: movement ends within a step of the newest
    heard = steps(page)
    eventually(lambda: asked(page, "t.view.end") > heard - 1)
    page.get_by_role("button", name="Pause").click()
    late.join()
    # late, and a second and more is left
    eventually(lambda: {0xD9480F, 0x1F4E79} <= picture(page))
    page.get_by_text("a second and more is left").wait_for()
    page.get_by_label("Lanes").select_option("class")
    eventually(lambda: asked(page, "t.painter().arrangement !== null"))
    for _ in range(60):
        groups = [g["name"] for g in asked(page, "t.painter().arrangement.groups")]
        if len(groups) == 2:
            break
        page.keyboard.press("ArrowLeft")
        drawn(page)
    assert groups == ["batch", "interactive"]
    # the row that is clicked is the one that is seen there
    first = asked(page, "t.painter().arrangement.order[0]")
    # in the step that is looked at, by which they stand so: later ones may have other requests
    step = re.findall(r"Step (\d+)", page.locator(".step-words").inner_text())[0]
    column = asked(page, f"t.history.step.lastIndexOf({step})")
    x = asked(page, f"t.painter().x(t.painter().place(t.view), t.view, {column}) + 2")
    assert asked(page, f"t.painter().columnAt(t.view, {x})") == column
    y = asked(page, "t.painter().y.lanes + t.painter().rowHeight / 2")
    page.locator(".chart canvas").click(position={"x": x, "y": y})
    number = asked(page, f"t.history.who[({column} % 4096) * 320 + 64 + {first}]")
    assert asked(page, f"t.model.requests.get({number}) ?? t.find({number})")["told"]["slo"] == (
        "batch"
    )
    page.get_by_role("row", name="class batch").wait_for()
    page.get_by_label("Colour").select_option("class")
    eventually(lambda: 0xD9480F not in picture(page))
    # the same in words
    page.get_by_role("button", name="Table of requests").click()
    page.get_by_role("columnheader", name="Time left").wait_for()


def test_who_is_refused_at_the_door_is_told(tmp_path: Path, open_page: OpenPage) -> None:
    core = {"timeline": True, "max_num_seqs": 1, "max_num_waiting": 1}
    with live_server(tmp_path / "log", backend=BACKEND, core=core) as server:
        page = open_page(f"{server.url}/ui/timeline")
        page.get_by_text("No step in the last 60 s").wait_for()
        # the first is still there when the last one comes
        answers = generate(server, 5, 100)
        refused = sum("error" in answer for answer in answers)
        assert refused >= 2
        page.locator(".door").get_by_text(f"{refused} refused at the door").wait_for()
        page.locator(".door").get_by_text("queue-full").wait_for()
        page.close()


def test_who_may_not_see_it_is_told_so(tmp_path: Path, open_page: OpenPage) -> None:
    keys = [
        {"name": "alice", "scope": "user", "key": USER},
        {"name": "root", "scope": "admin", "key": ADMIN},
    ]
    with live_server(tmp_path / "log", backend=BACKEND, core=CORE, keys=keys) as server:
        page = open_page(f"{server.url}/ui/timeline")
        dialog = page.get_by_role("dialog", name="API key")
        dialog.wait_for()
        dialog.get_by_label("Key").fill(USER)
        dialog.get_by_role("button", name="Use this key").click()
        page.locator(".notice").get_by_text("requires a key of scope admin").wait_for()
        page.get_by_role("button", name="API key: set").click()
        dialog.get_by_label("Key").fill(ADMIN)
        dialog.get_by_role("button", name="Use this key").click()
        page.get_by_text("No step in the last 60 s").wait_for()
        assert ADMIN not in page.url
        page.close()


def test_a_server_without_a_timeline_says_so(tmp_path: Path, open_page: OpenPage) -> None:
    config = {"timeline_history": 0}
    with live_server(tmp_path / "log", backend=BACKEND, config=config) as server:
        page = open_page(f"{server.url}/ui/timeline")
        page.locator(".notice").get_by_text("--no-timeline").wait_for()
        # it asks on while the server ends
        page.close()


def test_an_engine_that_is_lost_leaves_a_mark(tmp_path: Path, open_page: OpenPage) -> None:
    with live_server(tmp_path / "log", backend=BACKEND, core=CORE, supervise={}) as server:
        page = open_page(f"{server.url}/ui/timeline")
        stream = threading.Thread(target=generate, args=(server, 2, 150))
        stream.start()
        eventually(lambda: steps(page) > 10)
        assert server.engine_pid is not None
        os.kill(server.engine_pid, signal.SIGKILL)
        lost = page.locator(".notice.bad").get_by_text("The engine failed")
        lost.wait_for()
        stream.join()
        expect(lost).to_have_count(0)
        notes = "[...t.history.notes.values()]"
        expected = ["the engine failed", "another engine began"]
        eventually(lambda: asked(page, notes) == expected)
        # it goes on with the next one
        before = steps(page)
        generate(server, 2, 5)
        eventually(lambda: steps(page) > before)
        assert asked(page, "t.model.doubts") == 0
        page.close()


def test_another_server_at_the_same_address_is_shown_from_its_beginning(
    told: LiveServer, open_page: OpenPage
) -> None:
    """It counts engines and steps as the one before it did, and none of them is a repetition."""
    page = open_page(f"{told.url}/ui/server")
    numbers = iter((1, 1, 2))

    def answer(route: Any) -> None:
        # whoever asks again after these waits for an answer
        if number := next(numbers, 0):
            route.fulfill(body=recording(number), content_type="application/octet-stream")

    page.route("**/ui/api/timeline*", answer)
    page.get_by_role("link", name="Timeline").click()
    eventually(lambda: asked(page, "[...t.history.notes.values()]") == ["another server began"])
    columns = "[...Array(t.history.count).keys()]"

    def is_shown_twice() -> bool:
        shown = asked(page, f"{columns}.map((c) => t.history.kind[c] ? -1 : t.history.step[c])")
        before, after = shown[: shown.index(-1)], shown[shown.index(-1) + 1 :]
        return before == after and len(before) > 20

    # a long recording is read in several turns
    eventually(is_shown_twice)


def test_on_a_phone_it_is_steps_and_tables(told: LiveServer, open_page: OpenPage) -> None:
    generate(told, 3, 10)
    page = open_page(f"{told.url}/ui/timeline", viewport={"width": 360, "height": 740})
    page.locator("canvas").wait_for()
    eventually(lambda: steps(page) > 5)
    page.get_by_role("button", name="Table of requests").click()
    page.locator(".tables tbody tr").nth(2).wait_for()
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert wide <= 360, "nothing to scroll sideways but tables"


def test_reduced_motion_moves_once_a_second(told: LiveServer, open_page: OpenPage) -> None:
    page = open_page(f"{told.url}/ui/timeline", reduced_motion="reduce")
    page.locator("canvas").wait_for()
    eventually(lambda: asked(page, "t.painter().frames") > 0 and asked(page, "t.pending()") == 0)
    before, known, began = asked(page, "t.painter().frames"), steps(page), time.monotonic()
    generate(told, 2, 120)
    eventually(lambda: steps(page) > known + 100)
    # more than a hundred steps, and as many chances to draw
    frames = asked(page, "t.painter().frames") - before
    assert frames <= 3 + (time.monotonic() - began)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing(told: LiveServer, open_page: OpenPage, theme: str) -> None:
    if not AXE.is_file():
        pytest.skip("there is no axe-core (make test-ui installs it)")
    page = open_page(f"{told.url}/ui/timeline", color_scheme=theme)
    page.locator("canvas").wait_for()
    generate(told, 3, 10)
    page.get_by_role("button", name="Table of requests").click()
    page.locator(".tables tbody button").first.click()
    page.locator(".story-panel .story").wait_for()
    assert violations(page) == []
    page.get_by_role("button", name="Table of steps").click()
    page.get_by_role("button", name="Pause").click()
    page.get_by_text("The 50 steps").wait_for()
    assert violations(page) == []


def test_a_trace_is_saved_and_says_what_was_left_out(
    told: LiveServer, open_page: OpenPage, tmp_path: Path
) -> None:
    page = open_page(f"{told.url}/ui/timeline")
    generate(told, 3, 8)
    eventually(lambda: asked(page, "t.stories.size") >= 3)
    with page.expect_download() as download:
        page.get_by_role("button", name="Save as a trace").click()
    page.get_by_text("uploads nothing").wait_for()
    path = tmp_path / "t.json.gz"
    download.value.save_as(path)
    assert download.value.suggested_filename == "paceline-timeline.json.gz"
    trace = json.loads(gzip.decompress(path.read_bytes()))
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in slices} == {1, 2} and trace["otherData"]["left_out"] == 0


def test_a_gap_and_a_shutdown_are_shown(tmp_path: Path, open_page: OpenPage) -> None:
    config = {"drain_timeout": 20}
    with live_server(tmp_path / "log", backend=BACKEND, core=CORE, config=config) as server:
        page = open_page(f"{server.url}/ui/timeline")
        page.get_by_text("No step in the last 60 s").wait_for()
        generate(server, 1, 5)
        eventually(lambda: steps(page) > 3)
        # what the stream says where it could not keep up, as the server writes it
        page.evaluate(
            "(told) => { const t = pacelineTimeline; const end = t.history.count;"
            " t.take({ frame: 'gap', told }); return end; }",
            {"from": 5, "to": 47, "why": "slow viewer"},
        )
        assert "42 steps missing: slow viewer" in asked(page, "[...t.history.notes.values()]")
        page.get_by_role("button", name="Table of steps").click()
        page.locator("td.bad").get_by_text("42 steps missing").wait_for()
        body = {"model": "null", "prompt": "x", "max_tokens": 3000, "stream": True}
        url = f"{server.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=60) as stream:
            # kept, as a reader that is dropped closes the stream
            lines = stream.iter_lines()
            next(lines)
            server.signal()
            page.get_by_text("The server is shutting down: what runs may end").wait_for()
            # it asks on while the server ends
            page.close()
        assert server.wait() == 0


def test_a_server_that_is_gone_is_told_and_asked_again(tmp_path: Path, open_page: OpenPage) -> None:
    with live_server(tmp_path / "log", backend=BACKEND, core=CORE) as server:
        page = open_page(f"{server.url}/ui/timeline")
        page.get_by_text("No step in the last 60 s").wait_for()
        # it stands still: nothing comes, and what is shown is old
        server.process.send_signal(signal.SIGSTOP)
        page.locator(".notice").get_by_text("Stale: the last news came").wait_for()
        server.process.send_signal(signal.SIGCONT)
        expect(page.get_by_text("Stale")).to_have_count(0)
        page.close()
