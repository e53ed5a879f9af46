"""``paceline top`` of a gateway and of several addresses: frames that can be computed by hand, and
real processes watched."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console, RenderableType

from paceline.cli.watch.top.gateway_frame import EngineRow, make_gateway_frame
from paceline.cli.watch.top.gateway_view import render_fleet, render_gateway
from paceline.cli.watch.top.watch import Seen, Source
from paceline.server.observability.snapshot.scrape import Scrape, parse_metrics
from tests.cli.conftest import Command
from tests.cli.servers import ServerProcess, start_server
from tests.cli.watch.test_top import AFTER, BEFORE

NAME = "paceline:gateway_"


def engine(**changes: Any) -> dict[str, Any]:
    pressure = {"waiting": 2.0, "running": 7.0, "kv": 0.5, "seconds_ago": 0.1}
    return {
        "url": "http://e", "kind": "paceline", "state": "ready", "trouble": None,
        "breaker": "closed", "draining": False, "share": 1.0, "slow": False, "models": ["m"],
        "requests": 3, "memory_pressure": False, "pressure": pressure,
    } | changes  # fmt: skip


def status(spent: str, **engines: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "version": "1", "in_flight": 5, "waiting": 1, "draining": False, "retry_budget": 12.5,
        "engines": engines,
        "spend": {"ann": {"spent": spent, "budget": "5.00/day", "currency": "EUR"}},
    }  # fmt: skip


def scrape(at: float, a: int, b: int, **more: float) -> Scrape:
    """``a`` and ``b`` requests were sent to two engines."""
    counts = {
        'attempts_total{engine="a"}': a,
        'attempts_total{engine="b"}': b,
        'requests_total{engine="a",result="ok"}': a,
        'requests_total{engine="b",result="broken"}': b,
        'attempt_failures_total{engine="b",kind="lost"}': b,
        'resumed_total{engine="a"}': b,
        'first_tokens_total{engine="a"}': a,
        'first_token_seconds_total{engine="a",kind="predicted"}': 0.1 * a,
        'first_token_seconds_total{engine="a",kind="actual"}': 0.4 * a,
        "requests_waiting": 1,
        'cascade_requests_total{answered_by="small",model="chat"}': a,
        'cascade_requests_total{answered_by="escalated",model="chat"}': b,
        'cascade_wasted_tokens_total{model="chat"}': 7 * b,
        'cascade_saved{model="chat"}': 0.25,
        'cascade_alarm{model="chat"}': 1,
    }  # fmt: skip
    return parse_metrics("".join(f"{NAME}{key} {n}\n" for key, n in counts.items()), at)


FRAME = make_gateway_frame(
    (scrape(10.0, 100, 10), status("1.00", a=engine(), b=engine())),
    (
        scrape(14.0, 130, 20),
        status(
            "1.25",
            a=engine(),
            b=engine(state="failing", trouble="failing (open)", breaker="open", pressure=None),
        ),
    ),
)


def test_a_frame_is_of_the_time_in_between() -> None:
    assert (FRAME.interval, FRAME.in_flight, FRAME.waiting) == (4.0, 5, 1)
    assert FRAME.results == {"ok": 30, "broken": 10} and FRAME.ended_per_s == 10.0
    assert FRAME.resumed == 10
    a, b = FRAME.engines
    assert (a.sent_per_s, a.sent_share, b.sent_share) == (7.5, 0.75, 0.25)
    assert a.predicted_first == pytest.approx(0.1) and a.actual_first == pytest.approx(0.4)
    # nothing was observed, and it says nothing of itself: that is not zero
    assert b.predicted_first is None and (b.running, b.waiting, b.kv) == (None, None, None)
    assert b.failures == {"lost": 10} and (a.running, a.waiting, a.kv) == (7, 2, 0.5)
    (ann,) = FRAME.keys
    assert (ann.name, ann.spent, ann.budget, ann.share) == ("ann", 1.25, "5.00/day", 0.25)
    assert ann.per_hour == 225.0


def test_what_begins_anew_counts_from_zero() -> None:
    now = (scrape(3.0, 4, 2), status("0.50", a=engine(), b=engine()))
    frame = make_gateway_frame((scrape(1.0, 100, 10), status("4.00", a=engine())), now)
    assert [row.sent_per_s for row in frame.engines] == [2.0, 1.0]
    assert frame.keys[0].per_hour == 900.0


def shown(what: RenderableType, width: int = 80) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(what)
    text = console.export_text()
    assert all(len(line) <= width for line in text.splitlines())
    return text


def test_what_people_see() -> None:
    text = shown(render_gateway(FRAME, "http://g/metrics"))
    for words in (
        "ready  1 of 2 engines", "at engines 4   waiting 1   ended/s 10.0   retries left 12",
        "ok 30   broken 10", "streams resumed 10",
        "small 30   escalated 10   large 0   handed off 25%",
        "wasted 70 tokens   saved 0.25   bound exceeded",
        "ready          3    7    2  50%    7.5 ████▌   75% 100 ms 400 ms",
        "failing        3    -    -    -    2.5 █▌      25%      -      -",
        "b  failing (open)   lost 10", "a  resumed 10",
        "1.25 EUR  5.00/day  █████                 25%   225.00",
    ):  # fmt: skip
        assert words in text, text
    assert "it is gone" in shown(render_gateway(FRAME, "u", "it is gone"))
    assert "draining" in shown(render_gateway(replace(FRAME, draining=True), "u"))
    assert "keys" not in shown(render_gateway(replace(FRAME, keys=()), "u"))


def test_the_pages_screen_is_one() -> None:
    """docs/operate/gateway.md shows the table of engines as it is."""
    a, b = FRAME.engines
    gone = replace(b, name="gpu2", sent_per_s=0.0, sent_share=0.0, requests=0, failures={})
    one = replace(
        a, name="gpu1", requests=7, running=9, kv=0.71, predicted_first=0.19, actual_first=0.21
    )
    other = replace(
        a, name="laptop", state="starting", requests=2, running=2, waiting=0, kv=0.12,
        sent_per_s=2.5, sent_share=0.25, predicted_first=0.48, actual_first=0.455,
    )  # fmt: skip
    text = shown(render_gateway(replace(FRAME, engines=(one, gone, other)), "u"))
    page = (Path(__file__).parents[3] / "docs" / "operate" / "gateway.md").read_text()
    (screen,) = re.findall(r"```\n( +TTFT .*?)```", page, re.DOTALL)
    table = [line.strip("│").strip() for line in text.splitlines()]
    for line in screen.splitlines():
        assert line.split() in [there.split() for there in table], line


def test_eighty_columns_are_enough() -> None:
    """Of a busy gateway nothing but names is cut, and the screen does not overflow."""
    a, b = FRAME.engines
    big = replace(
        a, name="an-engine-with-a-very-long-name", requests=9999, running=20_000, waiting=1234,
        kv=1.0, sent_per_s=99_999.0, sent_share=1.0, predicted_first=123.4, actual_first=0.0123,
    )  # fmt: skip
    rows: list[EngineRow] = [replace(big, name=f"{big.name}{number}") for number in range(30)]
    rows[25] = replace(b, name="unwell", state="unreachable", trouble="no connection")
    keys = tuple(replace(FRAME.keys[0], name=f"key{n}", spent=1e6, share=1.2) for n in range(9))
    text = shown(render_gateway(replace(FRAME, engines=tuple(rows), keys=keys), "http://g/metrics"))
    assert "(16 of 30)" in text and "unwell     unreachable" in text
    assert "9999  20k 1234 100%  99999 ██████ 100%  123 s  12 ms" in text
    assert "(the first 6, 3 more)" in text and "key6" not in text and "120%" in text
    assert len(text.splitlines()) <= 55
    states = (
        "slow", "starting", "memory_pressure", "at_capacity", "cooling_down", "half-open",
        "draining",
    )  # fmt: skip
    all_states = tuple(
        replace(a, name=s, state=s, trouble=f"because of {s}", share=0.4) for s in states
    )
    text = shown(render_gateway(replace(FRAME, engines=all_states), "u"))
    assert "starting  back again, gets 40% of its share" in text
    assert "it gets few requests" in text and "because of cooling_down" in text
    assert "because of at_capacity" not in text and "because of slow" not in text


def test_several_addresses_have_a_row_each() -> None:
    from paceline.server.observability.snapshot.frame import make_frame

    frame = make_frame(BEFORE, AFTER)
    seen = [
        Seen("gw:1", "http://gw:1/metrics", FRAME),
        Seen("gpu-one:8000", "http://gpu-one:8000/metrics", frame),
        Seen("gpu-two:8000", "http://gpu-two:8000/metrics", replace(frame, ready=False, running=3)),
        Seen("gone:8000", "http://gone:8000/metrics", None, "does not answer"),
        Seen("was:8000", "http://was:8000/metrics", frame, "went away"),
    ]
    assert [each.kind for each in seen] == ["gateway", "server", "server", "unknown", "server"]
    text = shown(render_fleet(seen))
    assert text.startswith("gateway  http://gw:1/metrics")
    (row,) = [line for line in text.splitlines() if "gpu-one" in line]
    assert row.split()[1:] == ["gpu-one:8000", "m", "20", "0", "0%", "0", "-", "30.0%", "│"]
    for words in ("gone:8000  does not answer", "was:8000  went away", "gpu-two:8000  not ready"):
        assert words in text, text
    (totals,) = [line for line in text.splitlines() if " all " in line]
    assert totals.split()[2:] == ["43", "0", "0", "│"]


def test_addresses() -> None:
    assert Source("gw:8080").address == "gw:8080"
    for address, url in (
        ("gw:8080", "http://gw:8080/status"),
        ("http://gw/paceline/metrics", "http://gw/paceline/status"),
    ):
        assert Source(address)._status_url == url


@pytest.fixture(scope="module")
def servers() -> Iterator[list[ServerProcess]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(start_server("--backend", "null", "--null-step-time", "0.002"))
            for _ in range(2)
        ]


@pytest.fixture(scope="module")
def gateway(
    servers: list[ServerProcess], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Before both, and a third one that is not there."""
    folder = tmp_path_factory.mktemp("gateway")
    urls = [*(server.address for server in servers), "http://127.0.0.1:1"]
    engines = "".join(
        f'[[engines]]\nname = "{name}"\nurl = "{url}"\n'
        for name, url in zip(("one", "two", "gone"), urls, strict=True)
    )
    prices = "[[prices]]\ninput = 1000\noutput = 1000\n"
    config = folder / "gateway.toml"
    config.write_text(f'spend_storage = ""\n{engines}{prices}')
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "paceline.cli.main", "gateway", str(config), "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[3].removesuffix("/v1")
        finally:
            process.terminate()
            process.wait(20)
            assert process.stdout is not None
            process.stdout.close()


def test_a_gateway_at_work(gateway: str, command: Command) -> None:
    body = {"prompt": "go", "max_tokens": 4, "stream": True}
    before = httpx.get(f"{gateway}/metrics").text
    for _ in range(6):
        assert httpx.post(f"{gateway}/v1/completions", json=body).status_code == 200
    status_now = httpx.get(f"{gateway}/status").json()
    after = httpx.get(f"{gateway}/metrics").text
    frame = make_gateway_frame(
        (parse_metrics(before, 0.0), status_now), (parse_metrics(after, 2.0), status_now)
    )
    one, two, gone = frame.engines
    assert one.sent_per_s + two.sent_per_s == 3.0 and frame.results == {"ok": 6}
    assert gone.state == "unreachable" and gone.sent_per_s == 0.0 and "refused" in gone.trouble
    (busy, *_) = [row for row in (one, two) if row.actual_first is not None]
    assert busy.predicted_first is not None and busy.state == "ready" and busy.kv is not None
    done = command("top", gateway, "--json", "--once", "--interval", "0.1")
    told = json.loads(done.stdout)
    assert [row["name"] for row in told["engines"]] == ["one", "two", "gone"]
    assert told["keys"][0]["name"] == "anybody" and told["keys"][0]["spent"] > 0
    text = command("top", gateway, "--once", "--interval", "0.1").stdout
    assert "2 of 3 engines" in text and "gone  no connection" in text


def test_several_at_once(
    servers: list[ServerProcess], gateway: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = [server.address for server in servers]
    done = command("top", *addresses, gateway, "127.0.0.1:1", "--json", "--once", "--interval", 0.1)
    told = json.loads(done.stdout)["addresses"]
    assert [each["kind"] for each in told.values()] == ["server", "server", "gateway", "unknown"]
    assert (
        told["127.0.0.1:1"]["frame"] is None and "does not answer" in told["127.0.0.1:1"]["problem"]
    )
    assert told[addresses[0].removeprefix("http://")]["frame"]["ready"] is True
    shown_text = command("top", *addresses, "--once", "--interval", 0.1).stdout
    assert "servers" in shown_text and shown_text.count("null") == 2
    absent = command("top", "127.0.0.1:1", "127.0.0.1:2", "--once")
    assert absent.returncode == 2 and "127.0.0.1:2/metrics does not answer" in absent.stderr
