"""The docs site's demo: a recording played by the page's own timeline, from files alone."""

from __future__ import annotations

import functools
import gzip
import shutil
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paceline.timeline.codec import Decoder
from paceline.timeline.events import VERSION, Announce, FrameType, Kind, Plan, Told
from paceline.timeline.model import Model
from tests.server.live_process import eventually
from tests.ui.conftest import OpenPage
from tests.ui.demo import FILE, MAX_BYTES, SECONDS, made

ROOT = Path(__file__).parents[2]


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Of the demo as it is on the site, without what builds the site."""
    folder = tmp_path / "demo"
    shutil.copytree(ROOT / "docs" / "demo", folder)
    subprocess.run([ROOT / "scripts" / "docs-demo", folder], check=True)
    handler = functools.partial(Quiet, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/demo"
        server.shutdown()
        thread.join()


def test_it_plays_live_and_goes_back(address: str, open_page: OpenPage) -> None:
    page = open_page(f"{address}/index.html")
    page.get_by_text("Forty seconds of a server").wait_for()
    asked = "pacelineTimeline.history.count"
    page.locator(".step-words").get_by_text("blocks free").wait_for()
    before = page.evaluate(asked)
    eventually(lambda: page.evaluate(asked) > before)
    # as it came: forty or so a second, not all at once
    assert page.evaluate(asked) < before + 400
    running = "[...pacelineTimeline.model.requests.values()].find((one) => one.told)?.told.id"
    name = page.wait_for_function(running).json_value()
    page.keyboard.press("Space")
    page.get_by_role("button", name="Live").wait_for()
    page.keyboard.press("ArrowLeft")
    page.get_by_label("Find a request by its id").fill(name)
    page.get_by_label("Find a request by its id").press("Enter")
    page.locator(".story-panel .story").wait_for()
    assert page.evaluate("pacelineTimeline.model.doubts") == 0
    assert page.get_by_text("Stale").count() == 0


def test_the_recording_is_small_whole_and_has_something_to_see() -> None:
    packed = FILE.read_bytes()
    assert len(packed) <= MAX_BYTES
    ended: list[Any] = []
    model, decoder = Model(on_ended=ended.append), Decoder()
    frames = list(decoder.feed(gzip.decompress(packed)))
    for frame in frames:
        model.take(frame)
    assert (decoder.num_broken, decoder.num_unknown, model.num_doubts) == (0, 0, 0)
    # the page that plays it reads this version
    assert model.hello["version"] == VERSION
    plans = [frame for frame in frames if isinstance(frame, Plan)]
    assert SECONDS - 12 < plans[-1].planned - plans[0].planned < SECONDS + 12
    kinds = Counter(event.kind for plan in plans for event in plan.events)
    assert kinds[Kind.PREEMPT] >= 3 and any(plan.waiting for plan in plans)
    classes = Counter(frame.slo_class for frame in frames if isinstance(frame, Announce))
    assert classes["interactive"] > 50 and classes["batch"] > 5
    gauges = [f for f in frames if isinstance(f, Told) and f.type is FrameType.GAUGES]
    assert len(gauges) > 30 and not model.requests and len(ended) == classes.total()


def inputs(data: bytes) -> dict[str, Any]:
    """What of a recording is its maker's, and not the scheduler's, which may come to decide
    otherwise without another recording."""
    frames = list(Decoder().feed(data))
    told = [frame for frame in frames if isinstance(frame, Told)]
    announced = (
        msgspec.structs.replace(frame, added=0.0, predicted_ttft=None)
        for frame in frames
        if isinstance(frame, Announce)
    )
    return {
        "kinds": {type(frame).__name__ for frame in frames} | {frame.type.name for frame in told},
        "hello": [frame.told for frame in told if frame.type is FrameType.HELLO],
        "start": [frame.told for frame in told if frame.type is FrameType.START],
        "gauges": {name for f in told if f.type is FrameType.GAUGES for name in f.told},
        # as text, in which nothing differs from itself
        "requests": [repr(frame) for frame in sorted(announced, key=lambda frame: frame.number)],
    }


def test_the_recording_is_what_its_maker_makes() -> None:
    found, expected = inputs(gzip.decompress(FILE.read_bytes())), inputs(made())
    assert len(expected["requests"]) > 55 and expected["hello"] and expected["gauges"]
    for name, value in expected.items():
        assert found[name] == value, f"{name}: python -m tests.ui.demo makes the recording anew"
