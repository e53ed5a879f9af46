"""``paceline top``: frames that can be computed by hand, and a real server watched."""

from __future__ import annotations

import http.client
import io
import json
import math
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from paceline.cli.watch.top.view import render
from paceline.cli.watch.top.watch import Source
from paceline.errors import ConfigError
from paceline.server.observability.snapshot.frame import Frame, TenantRow, make_frame
from paceline.server.observability.snapshot.scrape import Quantiles, Scrape, parse_metrics, quantile
from tests.cli.conftest import Command
from tests.cli.servers import ServerProcess, start_server

HEAD = "# TYPE vllm:num_requests_running gauge\n"


def scrape(at: float, *lines: str, running: int = 0) -> Scrape:
    text = f'{HEAD}vllm:num_requests_running{{engine="0",model_name="m"}} {running}\n'
    return parse_metrics(text + "\n".join(lines) + "\n", at)


def counts(steps: int, prefill: int, decode: int, good: int, ended: int) -> list[str]:
    return [
        f"paceline:steps_total {steps}",
        f'paceline:step_tokens_total{{kind="prefill"}} {prefill}',
        f'paceline:step_tokens_total{{kind="decode"}} {decode}',
        f'paceline:step_seconds_total{{kind="actual"}} {steps * 0.02}',
        f'paceline:step_seconds_total{{kind="predicted"}} {steps * 0.03}',
        f'paceline:goodput_requests_total{{slo_class="a"}} {good}',
        f'paceline:slo_requests_total{{slo_class="a"}} {ended}',
        f'paceline:slo_violations_total{{slo_class="a",kind="ttft"}} {ended - good}',
        f'paceline:queue_blocked_seconds_total{{reason="memory"}} {steps * 0.01}',
        f'paceline:request_waited_seconds_total{{reason="memory"}} {steps * 0.005}',
        'paceline:request_waited_seconds_total{reason="slots"} 7',
        f'paceline:ttft_prediction_error_seconds_bucket{{le="0.2"}} {good}',
        f'paceline:ttft_prediction_error_seconds_bucket{{le="+Inf"}} {good}',
        'paceline:queue_blocked{reason="memory"} 1',
        'paceline:queue_blocked{reason="slots"} 0',
        'paceline:kv_blocks{owner="a"} 30',
        'paceline:kv_blocks{owner="free"} 70',
        'paceline:requests{slo_class="a",state="waiting"} 4',
        "paceline:ready 1",
    ]


BEFORE = scrape(10.0, *counts(100, 5000, 800, 90, 100))
AFTER = scrape(12.0, *counts(150, 6000, 1800, 93, 110), running=20)


def test_a_frame_is_of_the_time_in_between() -> None:
    frame = make_frame(BEFORE, AFTER)
    assert (frame.model, frame.interval, frame.running, frame.ready) == ("m", 2.0, 20, True)
    assert frame.steps_per_s == 25
    assert (frame.prefill_tokens_per_step, frame.decode_tokens_per_step) == (20, 20)
    assert frame.step_seconds == pytest.approx(0.02)
    assert frame.predicted_step_seconds == pytest.approx(0.03)
    # 50 steps of 20 ms in two seconds, each predicted to take 30
    assert frame.step_error == pytest.approx(0.5) and frame.step_share == pytest.approx(0.5)
    assert frame.goodput_per_s == 1.5 and frame.attainment == pytest.approx(0.3)
    assert frame.waited_seconds == {"memory": pytest.approx(0.25)}
    assert (frame.ttft_error.p50, frame.ttft_error.count) == (0.2, 3)
    assert frame.blocked_by == "memory"
    assert frame.blocked_share == {"memory": pytest.approx(0.25)}
    (row,) = frame.classes
    assert (row.name, row.waiting, row.ended, row.kv_blocks) == ("a", 4, 10, 30)
    assert row.attainment == pytest.approx(0.3)
    assert row.attainment_since_start == pytest.approx(93 / 110)
    assert row.violations == {"ttft": 7}
    assert frame.kv_blocks == {"a": 30, "free": 70}
    # nothing was observed, and that is not zero
    assert frame.ttft.p50 is None and frame.prefix_cache_hit_rate is None
    assert frame.cost_per_million_tokens is None


def test_guesses_by_who_made_them() -> None:
    def counted(at: float, ngram: tuple[int, int], prediction: tuple[int, int]) -> Scrape:
        lines = [
            f'paceline:spec_decode_{kind}_tokens_total{{source="{source}"}} {counts[place]}'
            for source, counts in (("ngram", ngram), ("prediction", prediction))
            for place, kind in enumerate(("draft", "accepted"))
        ]
        return scrape(at, *lines)

    frame = make_frame(counted(1.0, (10, 5), (8, 8)), counted(3.0, (50, 35), (8, 8)))
    # nothing is told of a source that did not guess meanwhile
    assert frame.drafts_per_s == {"ngram": 20.0}
    assert frame.drafts_accepted == {"ngram": 0.75}
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(render(frame, "http://x"))
    assert "ngram 20/s, accepted 75%" in console.export_text()


def test_a_restarted_server_counts_from_zero() -> None:
    frame = make_frame(AFTER, scrape(13.0, *counts(10, 100, 5, 1, 2)))
    assert frame.steps_per_s == 10
    assert frame.classes[0].ended == 2


def test_quantiles_are_promqls() -> None:
    found = {1.0: 10.0, 2.0: 30.0, 4.0: 40.0, math.inf: 40.0}
    assert quantile(0.5, found) == 1.5
    assert quantile(0.99, found) == pytest.approx(2 + 2 * 9.6 / 10)
    assert quantile(0.99, {1.0: 1.0, math.inf: 10.0}) == 1.0
    assert quantile(0.5, {1.0: 0.0, math.inf: 0.0}) is None


def of_tenant(name: str, ended: int, tokens: int, good: int, unfinished: int) -> list[str]:
    values = {
        "unfinished_requests": unfinished,
        "requests_total": ended,
        "goodput_requests_total": good,
        "refused_requests_total": ended // 10,
        "prompt_tokens_total": tokens // 4,
        "generation_tokens_total": tokens - tokens // 4,
        "time_to_first_token_seconds_sum": ended * 0.2,
        "time_to_first_token_seconds_count": ended,
    }
    return [f'paceline:tenant_{kind}{{tenant="{name}"}} {value}' for kind, value in values.items()]


def test_tenants_by_what_they_took() -> None:
    before = scrape(1.0, *of_tenant("ada", 10, 1000, 10, 2))
    after = scrape(
        3.0,
        *of_tenant("ada", 20, 1400, 15, 1),
        *of_tenant("bob", 4, 1200, 4, 0),
        *(line for number in range(6) for line in of_tenant(f"idle{number}", 0, 0, 0, 0)),
    )
    frame = make_frame(before, after)
    bob, ada, idle, *_ = frame.tenants
    assert (bob.name, bob.ended, bob.tokens_per_s, bob.share) == ("bob", 4, 600, 0.75)
    assert (ada.name, ada.unfinished, ada.ended, ada.refused) == ("ada", 1, 10, 1)
    assert ada.attainment == 0.5 and ada.mean_ttft == pytest.approx(0.2)
    assert (idle.name, idle.mean_ttft, idle.attainment) == ("idle0", None, None)
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(render(frame, "http://x/metrics"))
    console.file.close()
    text = console.export_text()
    assert "the first 5, 3 more" in text and "10 (1 refused)" in text
    assert "75%" in text and "200 ms" in text and "idle3" not in text
    assert make_frame(BEFORE, AFTER).tenants == () and "tenant" not in text_of()


def of_model(name: str, state: str, tokens: int, computed: float, mib: int) -> list[str]:
    own = f'model_name="{name}"'
    return [
        f'paceline:model_state{{{own},state="{state}"}} 1',
        f'paceline:model_state{{{own},state="other"}} 0',
        f"paceline:model_leases{{{own}}} 3",
        f"paceline:model_waiting{{{own}}} 0",
        f"paceline:model_load_seconds{{{own}}} 0.5",
        f'paceline:ledger_bytes{{{own},kind="weights"}} {mib * 2**20}',
        f"vllm:generation_tokens_total{{{own}}} {tokens}",
        f"paceline:turn_seconds_total{{{own}}} {computed}",
    ]


def test_several_models_have_a_row_each() -> None:
    before = scrape(1.0, *of_model("cold", "unloaded", 0, 0, 0), *of_model("a", "ready", 5, 1, 7))
    after = scrape(3.0, *of_model("cold", "unloaded", 0, 0, 0), *of_model("a", "ready", 85, 2, 7))
    frame = make_frame(before, after)
    cold, warm = frame.models
    assert (cold.name, cold.state, cold.num_bytes) == ("cold", "unloaded", 0)
    assert (warm.state, warm.output_tokens_per_s, warm.computed) == ("ready", 40.0, 0.5)
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(render(frame, "http://x/metrics"))
    console.file.close()
    text = console.export_text()
    # those in memory come first
    assert text.index("unloaded") > text.index("ready") and "50%" in text and "500 ms" in text
    assert make_frame(BEFORE, AFTER).models == () and "unloaded" not in text_of()


def test_below_the_lowest_bound_nothing_is_known() -> None:
    """All waited less than 0.3 s: that is said, and not 150 ms."""

    def queue(at: float, count: int) -> Scrape:
        name = "vllm:request_queue_time_seconds_bucket"
        bounds = ("0.3", "0.5", "+Inf")
        return scrape(at, *(f'{name}{{le="{bound}"}} {count}' for bound in bounds))

    frame = make_frame(queue(1.0, 5), queue(2.0, 25))
    assert frame.queue == Quantiles(0.3, 0.3, 20, 0.3)
    assert "queued <300 ms / <300 ms" in text_of(frame)
    assert quantile(0.5, {0.3: 4.0, 0.5: 10.0, math.inf: 10.0}) == pytest.approx(0.3 + 0.2 / 6)


def test_shares_of_time_are_never_more_than_all_of_it() -> None:
    """The engine counted 0.3 s by the end of its step, 0.2 s after the reading before."""

    def held(at: float, memory: float, slots: float) -> Scrape:
        name = "paceline:queue_blocked_seconds_total"
        return scrape(
            at, f'{name}{{reason="memory"}} {memory}', f'{name}{{reason="slots"}} {slots}'
        )

    frame = make_frame(held(1.0, 5.0, 1.0), held(1.2, 5.2, 1.1))
    assert frame.blocked_share == {"memory": pytest.approx(2 / 3), "slots": pytest.approx(1 / 3)}
    assert make_frame(held(1.0, 5.0, 1.0), held(1.2, 5.1, 1.0)).blocked_share == {
        "memory": pytest.approx(0.5)
    }


def text_of(frame: Frame | None = None, *, width: int = 140, **changes: Any) -> str:
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(render(frame or make_frame(BEFORE, AFTER), "http://x/metrics", **changes))
    console.file.close()
    return console.export_text()


def test_what_people_see() -> None:
    text = text_of()
    for words in (
        "blocked by memory (not enough KV blocks)",
        "of the time  memory 25%",
        "step 20.0 ms",
        "predicted 30.0 ms",
        "prefill tokens 20.0",
        "30.0%",
        "84.5%",
        "ttft 7",
        "free 70",
        "ready",
    ):
        assert words in text, text
    assert "NOT READY" not in text
    assert "it is gone" in text_of(problem="it is gone")


def test_eighty_columns_are_enough() -> None:
    """Of a busy server no word is cut or broken, and every line fits."""
    frame = make_frame(BEFORE, AFTER)
    (row,) = frame.classes
    classes = tuple(
        replace(row, name=name, running=1200, waiting=20_000, ended=1000, kv_blocks=100_000)
        for name in ("interactive", "standard", "batch")
    )
    times = Quantiles(0.412, 12.34, 9, 0.001)
    tenant = TenantRow("somebody-with-a-long-name", 123, 4567, 12, 123_456.0, 0.5, 0.412, 0.993)
    frame = replace(
        frame,
        classes=classes,
        tenants=(tenant, replace(tenant, name="another")),
        running=3600,
        waiting=60_000,
        output_tokens_per_s=123_456.0,
        prompt_tokens_per_s=1_234_567.0,
        ttft=times,
        inter_token=Quantiles(0.01, 0.0987, 9, 0.01),
        queue=times,
        blocked_share=dict.fromkeys(("memory", "slots", "budget", "policy", "pace"), 0.2),
        refused={"queue-full": 12, "predicted-ttft": 345},
        cost_per_million_tokens=0.1234,
        pressure_level=4,
        kv_host_total=10_000,
        wasted_tokens_per_s={"recompute": 123.0, "discarded": 45.0},
        kv_blocks={
            "interactive": 12_000,
            "standard": 3000,
            "batch": 8,
            "prefix_cache": 5,
            "free": 1,
        },
    )
    # as many owners, of which most have next to nothing, do not break its bar
    many = {f"c{number}": 1 for number in range(15)} | {"free": 100_000}
    shown = text_of(replace(frame, kv_blocks=many), width=80)
    assert sum("█" in line for line in shown.splitlines()) == 1
    text = text_of(frame, width=80)
    assert "…" not in text.replace("somebody-with-…", "")
    lines = text.splitlines()
    assert all(len(line) <= 80 for line in lines) and len(lines) <= 32
    for words in (
        "waiting 60000", "prompt 1234567", "0.1234 per million tokens",
        "TTFT 412 ms / 12.34 s   ITL <10.0 ms / 98.7 ms", "queued 412 ms / 12.34 s",
        "memory 20%   slots 20%   budget 20%   policy 20%   pace 20%",
        "another", "4567 (12 refused)", "99.3%",
        "queue-full 12   predicted-ttft 345", "interactive", "running", "since start", "ttft 7",
        "preemptions/s 0.0   host blocks 0/10000   pressure valve refusing",
    ):  # fmt: skip
        assert words in text, text
    # there are never blocks of both kinds
    windows = replace(frame, kv_host_total=0, kv_windows_used=3, kv_windows_total=1280)
    assert "preemptions/s 0.0   window blocks 3/1280   pressure valve" in text_of(windows, width=80)


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("gpu1:8000", "http://gpu1:8000/metrics"),
        ("https://h/", "https://h/metrics"),
        ("http://h:1/deep/metrics", "http://h:1/deep/metrics"),
    ],
)
def test_addresses(address: str, url: str) -> None:
    assert Source(address).url == url


@pytest.mark.parametrize("address", ["ftp://h", "http://", "h:99999", "a..b"])
def test_bad_addresses_are_named(address: str) -> None:
    with pytest.raises(ConfigError, match="is not an address"):
        Source(address)


def test_other_peoples_metrics_are_refused() -> None:
    with pytest.raises(ConfigError, match="not those of a Paceline server"):
        parse_metrics("up 1\n", 0.0)
    with pytest.raises(ConfigError, match="not in Prometheus' text format"):
        parse_metrics("<html>\n", 0.0)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    flags = ("--backend", "null", "--null-step-time", "0.005", "--max-num-seqs", "2")
    with start_server(*flags, "--price-per-hour", "3") as made:
        yield made


@pytest.fixture
def busy(server: ServerProcess) -> Iterator[ServerProcess]:
    """With two requests running and one waiting, until the test ends."""
    body = {"prompt": "go", "max_tokens": 4000, "ignore_eos": True, "slo": "interactive"}
    callers = []
    for _ in range(3):
        caller = http.client.HTTPConnection(server.address.removeprefix("http://"), timeout=30)
        headers = {"Content-Type": "application/json"}
        caller.request("POST", "/v1/completions", json.dumps(body), headers)
        callers.append(caller)
    deadline = time.monotonic() + 20
    while "vllm:num_requests_waiting" not in "".join(
        line for line in server.request("/metrics")[1].splitlines() if line.endswith(" 1.0")
    ):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    yield server
    # a request whose client hangs up is aborted
    for caller in callers:
        caller.close()


def test_a_busy_server(
    busy: ServerProcess, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = command("top", busy.address, "--json", "--once", "--interval", "0.5")
    frame = json.loads(done.stdout)
    assert (frame["running"], frame["waiting"], frame["blocked_by"]) == (2, 1, "slots")
    assert frame["blocked_share"]["slots"] > 0
    assert frame["decode_tokens_per_step"] == pytest.approx(2, abs=0.3)
    assert frame["output_tokens_per_s"] > 20
    assert frame["inter_token"]["p50"] >= 0.004
    (row,) = frame["classes"]
    assert (row["name"], row["running"], row["waiting"]) == ("interactive", 2, 1)
    assert row["kv_blocks"] == frame["kv_blocks"]["interactive"] > 0
    assert frame["cost_per_million_tokens"] > 0
    monkeypatch.setenv("COLUMNS", "140")
    shown = command("top", busy.address, "--once", "--interval", "0.2")
    assert "blocked by slots (all slots are taken" in shown.stdout
    assert "\x1b" not in shown.stdout


def test_it_goes_on_until_it_is_interrupted(server: ServerProcess) -> None:
    """On a terminal: draws again and again, and leaves it as it was."""
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "paceline.cli.main", "top", server.address]
    process = subprocess.Popen(
        [*command, "--interval", "0.1"],
        stdin=slave,
        stdout=slave,
        stderr=subprocess.PIPE,
        env=os.environ | {"TERM": "xterm"},
    )
    os.close(slave)
    shown = b""
    while shown.count(b"classes") < 3:
        shown += os.read(master, 65536)
    process.send_signal(signal.SIGINT)
    with pytest.raises(OSError):
        while True:
            shown += os.read(master, 65536)
    os.close(master)
    assert process.wait(20) == 130
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    # back from the alternate screen
    assert b"\x1b[?1049l" in shown


def test_no_server_there(command: Command) -> None:
    done = command("top", "127.0.0.1:1", "--once")
    assert done.returncode == 2
    assert "is a server running there?" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_key_is_wanted_and_sent(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    with start_server("--backend", "null", env={"PACELINE_API_KEY": "long-enough-key"}) as server:
        refused = command("top", server.address, "--once", "--json")
        assert refused.returncode == 2 and "PACELINE_API_KEY" in refused.stderr
        monkeypatch.setenv("PACELINE_API_KEY", "long-enough-key")
        done = command("top", server.address, "--once", "--json", "--interval", "0.1")
        assert json.loads(done.stdout)["ready"] is True
