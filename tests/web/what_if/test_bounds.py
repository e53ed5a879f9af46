"""A job stays within its bounds, whatever its process does."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest

from paceline.web.what_if import service as module
from tests.web.what_if.helpers import (
    CARD,
    MANY,
    PATH,
    SLEEPS,
    Ask,
    begun,
    configured,
    is_gone,
    pid_of,
    script,
    until,
)


async def test_one_at_a_time_and_cancelled(ask: Ask) -> None:
    asker = ask(configured(SLEEPS))
    pid = await begun(asker)
    assert (await asker.start(workload="trace", **CARD)).status_code == 409
    assert (await asker.send()).status_code == 409
    job = (await asker.http.delete(PATH)).json()
    assert job["status"] == "cancelled" and is_gone(pid)
    # and there is room for the next one
    assert (await asker.start(workload="trace", **CARD)).status_code == 200
    assert (await asker.http.delete(PATH)).json()["number"] == job["number"] + 1
    # nothing runs: nothing changes
    assert (await asker.http.delete(PATH)).json()["status"] == "cancelled"


async def test_a_drain_ends_it_and_its_files(ask: Ask) -> None:
    asker = ask(configured(SLEEPS))
    pid = await begun(asker)
    folder = asker.root
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and (folder / "1" / "trace").is_file()
    asker.service.draining = True
    await asker.service.end_side_work()
    assert is_gone(pid) and not folder.exists()
    assert (await asker.start(workload="trace", **CARD)).status_code == 503
    assert (await asker.send()).status_code == 503


async def test_it_takes_too_long(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK", 0.05)
    asker = ask(configured(SLEEPS, seconds=0.5))
    pid = await begun(asker)
    job = await asker.ended()
    assert job["status"] == "failed" and "more than 0.5 s" in job["error"] and is_gone(pid)


async def test_nobody_asks_for_it(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FORGOTTEN", 0.3)
    monkeypatch.setattr(module, "_LOOK", 0.05)
    asker = ask(configured(SLEEPS))
    pid = await begun(asker)
    await until(lambda: is_gone(pid))
    job = await asker.ended()
    assert job["status"] == "cancelled" and "no page asked" in job["error"]


async def test_what_it_may_take(ask: Ask) -> None:
    """Of processor and of memory; what was done before stays."""
    asker = ask(configured(cpu_seconds=3))
    await asker.send(MANY)
    await asker.start(workload="trace", **CARD)
    job = await asker.ended()
    assert job["status"] == "failed" and "more than 3 s of processor" in job["error"], job
    assert job["requests"] == 20_000 and job["left_out"] == 500
    starved = ask(configured(script("bytearray(2**60)"), memory=90 * 2**20))
    await starved.send()
    await starved.start(workload="trace", **CARD)
    assert (await starved.ended())["error"] == "it needs more than 90 MiB"


@pytest.mark.thorough
async def test_it_yields_to_everything_else(ask: Ask) -> None:
    asker = ask()
    await asker.send(MANY)
    await asker.start(workload="trace", **CARD)
    pid = await pid_of(asker)
    await until(lambda: os.getpriority(os.PRIO_PROCESS, pid) == 19)
    assert os.sched_getscheduler(pid) == os.SCHED_IDLE
    limits = Path(f"/proc/{pid}/limits").read_text()
    for name, most in (("address space", 2**30), ("core file size", 0), ("file size", 2**26)):
        assert re.search(rf"Max {name} +{most} ", limits), limits
    # in a session of its own: Ctrl-C on a terminal is not for it
    assert os.getsid(pid) != os.getsid(0)


async def test_no_secret_is_handed_on(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_API_KEY", "a-secret-of-this-server")
    monkeypatch.setenv("HF_TOKEN", "another-secret")
    tells = script("print(json.dumps({'error': ' '.join(os.environ.values())}), flush=True)")
    asker = ask(configured(tells))
    await asker.send()
    await asker.start(workload="trace", **CARD)
    assert "secret" not in (await asker.ended())["error"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sys.exit(3)", "code 3"),
        ("print('nonsense', flush=True); time.sleep(60)", "no answer"),
        ("print('{}' * 2, flush=True); time.sleep(60)", "no answer"),
    ],
)
async def test_a_child_that_misbehaves(
    ask: Ask, text: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # how long it may linger
    monkeypatch.setattr(module, "_LOOK", 0.2)
    asker = ask(configured(script(text)))
    await asker.send()
    await asker.start(workload="trace", **CARD)
    job = await asker.ended()
    assert job["status"] == "failed" and said in job["error"]
    assert (await asker.http.get("/health")).status_code == 200


async def test_a_child_that_is_none(ask: Ask) -> None:
    asker = ask(configured(("/nonexistent/program",)))
    await asker.send()
    await asker.start(workload="trace", **CARD)
    assert "could not be started" in (await asker.ended())["error"]
