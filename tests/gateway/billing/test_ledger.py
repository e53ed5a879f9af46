"""What was spent, in memory and in its file."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import re
import sqlite3
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.gateway.billing import ledger as ledger_module
from paceline.gateway.billing.ledger import Ledger
from paceline.gateway.settings.prices import Price, Used
from paceline.gateway.streams.usage import used_by
from tests.gateway.helpers import until

PAGE = Path(__file__).parents[3] / "docs" / "operate" / "gateway.md"

TODAY = datetime.datetime.now(datetime.UTC).date().isoformat()


async def test_what_was_spent_outlives_the_gateway(tmp_path: Path) -> None:
    path = tmp_path / "spend.sqlite"
    for _ in range(2):
        ledger = Ledger(path)
        ledger.start()
        for number in range(3):
            ledger.add("ann", TODAY, "e", "m", Used(10, 4, number), 7)
        ledger.add("ann", "2999-04-01", "e", "m", Used(1, 0, 1), 5)
        await ledger.close()
    again = Ledger(path)
    assert again.spent("ann", "") == 52
    assert again.spent("ann", "2999-04-01") == 10 and again.spent("bob", "") == 0
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    with contextlib.closing(sqlite3.connect(path)) as database:
        (row,) = database.execute("SELECT * FROM spend WHERE day = ?", (TODAY,))
    assert row == ("ann", TODAY, "e", "m", 6, 60, 24, 6, 42)


async def test_two_gateways_may_share_the_file(tmp_path: Path) -> None:
    ledgers = [Ledger(tmp_path / "spend.sqlite") for _ in range(2)]
    for ledger in ledgers:
        ledger.start()
        ledger.add("ann", "2026-03-31", "e", "m", Used(1, 0, 1), 5)
    for ledger in ledgers:
        await ledger.close()
    assert Ledger(tmp_path / "spend.sqlite").spent("ann", "") == 10


def test_a_file_that_is_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"this is no database" * 100)
    with pytest.raises(ConfigError, match="spend_storage"):
        Ledger(path)
    with pytest.raises(ConfigError, match="spend_storage"):
        Ledger(tmp_path / "no" / "folder")


async def test_absurd_counts_lose_no_spend(tmp_path: Path) -> None:
    told = b'{"usage": {"prompt_tokens": -5, "completion_tokens": 99999999999999}}'
    assert used_by("/v1/chat/completions", told) == Used(0, 0, 10**9)
    ledger = Ledger(tmp_path / "spend.sqlite")
    ledger.add("bob", "2026-03-31", "e", "m", Used(1, 0, 1), 2**80)
    ledger.add("ann", "2026-03-31", "e", "m", Used(1, 0, 1), 7)
    ledger.start()
    await ledger.close()
    again = Ledger(tmp_path / "spend.sqlite")
    assert (again.spent("ann", ""), again.spent("bob", "")) == (7, 10**18)


async def test_sums_of_absurd_amounts_are_read(tmp_path: Path) -> None:
    """What is told in all, in the way that the documentation has, too."""
    path = tmp_path / "spend.sqlite"
    for _ in range(3):
        # three times into one row, and into two others
        ledger = Ledger(path)
        for model in ("m", "n", "o"):
            ledger.add("ann", "2026-03-31", "e", model, Used(10**9, 0, 10**9), 2**62 + 7)
        ledger.start()
        await ledger.close()
    assert Ledger(path).spent("ann", "") == 3 * 10**18
    with contextlib.closing(sqlite3.connect(path)) as database:
        # a sum of whole numbers holds several of them
        ((total,),) = database.execute("SELECT SUM(amount) FROM spend")
        assert total == 3 * 10**18
        for number in range(20):
            row = ("ann", f"2026-01-{number + 1:02}", "e", "m", 1, 1, 0, 1, 10**18)
            database.execute("INSERT INTO spend VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        found = re.search(r'^sqlite3 \S+ "(SELECT .*)"$', PAGE.read_text(), re.MULTILINE)
        assert found is not None
        told = {(key, model): amount for key, model, amount in database.execute(found[1])}
        assert told == {("ann", "m"): 21e6, ("ann", "n"): 1e6, ("ann", "o"): 1e6}


def test_no_request_costs_more_than_any_budget_has() -> None:
    dear = Price(10**12, 10**12, 10**12)
    assert dear.of(Used(10**9, 0, 10**9)) == 10**18
    assert dear.of(Used(1, 0, 1)) == 2 * 10**12


async def test_a_row_that_cannot_be_written_keeps_no_other_one_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "spend.sqlite"
    ledger = Ledger(path)
    ledger.add("ann", TODAY, "e", "m", Used(1, 0, 1), 5)
    # no text of a database
    ledger.add("ann", TODAY, "e", "m\udcff", Used(1, 0, 1), 6)
    ledger.add("bob", TODAY, "e", "m", Used(1, 0, 1), 7)
    ledger.start()
    await ledger.close()
    again = Ledger(path)
    assert (again.spent("ann", ""), again.spent("bob", "")) == (5, 7)
    # it is told, with what it has, and counts until the process ends
    assert caplog.text.count("spend_row_refused") == 1 and "amount=6" in caplog.text
    assert ledger.spent("ann", "") == 11 and not ledger._unwritten


async def test_a_file_that_is_locked_gets_every_row_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "_BUSY_SECONDS", 0.02)
    path = tmp_path / "spend.sqlite"
    ledger = Ledger(path)
    ledger.add("ann", TODAY, "e", "m", Used(1, 0, 1), 5)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        await ledger._flush()
        ledger.add("ann", TODAY, "e", "m", Used(1, 0, 1), 6)
        other.execute("COMMIT")
    ledger.start()
    await ledger.close()
    await ledger.close()
    assert Ledger(path).spent("ann", "") == 11


async def test_what_is_being_written_at_the_end_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However that write ends."""
    monkeypatch.setattr(ledger_module, "_EVERY_SECONDS", 0.01)
    path = tmp_path / "spend.sqlite"
    ledger = Ledger(path)
    ledger.add("ann", TODAY, "e", "m", Used(1, 0, 1), 5)
    tries: list[Any] = []
    closing = threading.Event()

    def write(rows: Any) -> Any:
        tries.append(rows)
        if len(tries) == 1:
            closing.wait(5.0)
            raise sqlite3.OperationalError("database is locked")
        return really(rows)

    really = ledger._write
    monkeypatch.setattr(ledger, "_write", write)
    ledger.start()
    await until(lambda: len(tries) == 1)
    closed = asyncio.ensure_future(ledger.close())
    asyncio.get_running_loop().call_later(0.02, closing.set)
    await closed
    assert len(tries) == 2 and Ledger(path).spent("ann", "") == 5
