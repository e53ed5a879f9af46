"""docs/use/batches.md: its program runs as written, and what it says of limits is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.cli.flags.server_options import batch_config
from paceline.cli.main import build_parser
from paceline.server.batches.answering import URLS
from tests.cli.servers import start_server

DOC = (Path(__file__).parents[3] / "docs" / "use" / "batches.md").read_text()


def test_the_program_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", DOC, flags=re.MULTILINE | re.DOTALL)
    with start_server("--backend", "null", "--batch-dir", str(tmp_path)) as server:
        assert "http://127.0.0.1:8000" in code
        exec(code.replace("http://127.0.0.1:8000", server.address), {})
    printed = capsys.readouterr().out
    assert printed.startswith("completed BatchRequestCounts(completed=2, failed=0, total=2")
    assert "question-0" in printed and "question-1" in printed


def test_endpoints_and_limits() -> None:
    assert all(f"`{url}`" in DOC for url in URLS)
    config = batch_config(build_parser().parse_args(["serve"]), 8000)
    assert config is not None
    for flag, size in (
        ("max-file-size", f"{config.max_file_bytes // 2**20} MiB"),
        ("batch-storage", f"{config.max_bytes // 2**30} GiB"),
        ("max-batch-requests", f"{config.max_requests:,}"),
    ):
        assert f"`--{flag}`, {size}" in DOC
