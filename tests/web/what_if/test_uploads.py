"""Traces that are sent: what is refused, and the process that reads them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from paceline.cli.flags.settings import TRACE_PROCESS
from paceline.web.what_if import trace as module
from tests.web.what_if.helpers import PATH, TRACE, Ask, configured, script


async def test_what_cannot_be_simulated_is_refused_when_it_is_sent(ask: Ask) -> None:
    asker = ask(configured(check=TRACE_PROCESS))
    sent = await asker.send()
    assert sent.json() == {"trace_bytes": len(TRACE), "requests": 120}
    for text, said in (
        ("a,b\n1,2\n", "the trace:1: not a known trace"),
        (
            TRACE + "2023-11-16 19:00:00.0,10000001,1\n",
            "10000001 tokens; prompts and answers of up",
        ),
    ):
        refused = await asker.send(text)
        error = refused.json()["error"]
        assert refused.status_code == 400 and error["param"] == "trace"
        assert said in error["message"] and "paceline-what-if" not in error["message"]
    # the one before it is still there
    assert (await asker.tell())["trace_bytes"] == len(TRACE)
    line = '{"timestamp": %d, "input_length": 9, "output_length": 1}\n'
    told = (await asker.send("".join(line % (40 * n) for n in range(6)))).json()
    assert told["requests"] == 6 and "25 a second, if stamps are milliseconds" in told["doubt"]
    assert [path.name for path in (asker.root / "1").iterdir()] == ["trace"]


@pytest.mark.parametrize(
    ("check", "said"),
    [
        ("bytearray(2**60)", "the trace takes more than 1024 MiB to read"),
        (
            "import resource, signal; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
            "os.kill(os.getpid(), signal.SIGXCPU)",
            "the trace takes more than 20 s of processor time to read",
        ),
    ],
)
async def test_a_trace_that_takes_too_much_is_refused(ask: Ask, check: str, said: str) -> None:
    refused = await ask(configured(check=script(check))).send()
    error = refused.json()["error"]
    assert (refused.status_code, error["param"], error["message"]) == (400, "trace", said)


@pytest.mark.parametrize(
    ("check", "code"),
    [
        ("sys.exit('a defect of ours')", 1),
        ("print('a defect of ours', file=sys.stderr); os.kill(os.getpid(), 9)", -9),
        ("print('a defect of ours', file=sys.stderr); print('nonsense')", 0),
        ("print('a defect of ours', file=sys.stderr); print('[1]')", 0),
    ],
)
async def test_a_reader_that_fails_is_a_fault_of_ours(
    ask: Ask, check: str, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Not of the trace: its sender cannot mend it, and whoever reads the log can."""
    asker = ask(configured(check=script(check)))
    failed = await asker.send()
    error = failed.json()["error"]
    assert failed.status_code == 500 and error["type"] == "InternalServerError"
    assert f"(code {code}): a fault of this server" in error["message"]
    assert "defect" not in error["message"] and (await asker.tell())["trace_bytes"] is None
    (logged,) = [r for r in caplog.records if r.getMessage().startswith("what_if_check_failed")]
    assert logged.levelname == "ERROR" and f"code={code} " in logged.getMessage()
    assert "a defect of ours" in logged.getMessage()


async def test_a_reader_knows_that_its_server_lives(ask: Ask) -> None:
    """Its standard input is open until it has answered: it ends with whoever closes it."""
    waits = script(
        "import select; sys.stdin.readline(); ended = select.select([0], [], [], 0.3)[0]\n"
        "print(json.dumps({'requests': len(ended)}), flush=True)"
    )
    sent = await ask(configured(check=waits)).send()
    assert sent.json()["requests"] == 0


async def test_one_trace_is_read_at_a_time(ask: Ask, tmp_path: Path) -> None:
    log = tmp_path / "log"
    tells = script(
        f"log = open({str(log)!r}, 'a')\n"
        "print('begins', file=log, flush=True); time.sleep(0.2)\n"
        "print('ends', file=log, flush=True); print(json.dumps({'requests': 1}))"
    )
    asker = ask(configured(check=tells))
    sessions = [{"X-Paceline-Session": name} for name in ("one", "two", "three")]
    sent = await asyncio.gather(*(asker.send(**session) for session in sessions))
    assert [answer.status_code for answer in sent] == [200, 200, 200]
    assert log.read_text().split() == ["begins", "ends"] * 3


async def test_a_caller_sends_one_trace_at_a_time(ask: Ask) -> None:
    """Each is as large as a trace may be, and waits on the disk until it was read."""
    asker = ask(configured(check=script("time.sleep(0.2); print(json.dumps({'requests': 1}))")))
    sent = await asyncio.gather(*(asker.send() for _ in range(5)))
    assert sorted(answer.status_code for answer in sent) == [200, 409, 409, 409, 409]
    refused = next(answer for answer in sent if answer.status_code == 409)
    assert "another trace of yours" in refused.json()["error"]["message"]
    # and the next one once it was
    assert (await asker.send()).status_code == 200
    await asker.send("")
    assert (await asker.send()).status_code == 200


async def test_uploads_are_bounded(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    http = ask().http
    assert (await http.put(f"{PATH}/trace", content=b"")).status_code == 400
    declared = {"Content-Length": str(33 * 2**20)}
    assert (await http.put(f"{PATH}/trace", content=b"x", headers=declared)).status_code == 413
    monkeypatch.setattr(module, "MOST_TRACE", 1000)

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(11):
            yield b"x" * 100

    assert (await http.put(f"{PATH}/trace", content=pieces())).status_code == 413
    # nothing of it is left
    assert (await http.get(PATH)).json()["trace_bytes"] is None
