"""Blocks on disk: what was whole is found again, and an error of the disk costs hits alone."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from paceline.engine.blocks.disk import DiskStore
from paceline.engine.blocks.opening import file_digests, fingerprint
from paceline.errors import ConfigError

SIZE = 24
PRINT = fingerprint(["digest"], {"level": "avx2"})
MANY = 1 << 20


def name(number: int) -> bytes:
    return sha256(b"%d" % number).digest()


def content(number: int) -> bytes:
    return (b"%d" % number).ljust(SIZE, b".")


def opened(folder: Path, print_: bytes = PRINT, most: int = MANY) -> closing[DiskStore]:
    return closing(DiskStore(folder, print_, SIZE, most))


def write(store: DiskStore, *numbers: int) -> None:
    store.write([name(n) for n in numbers], b"".join(map(content, numbers)))


def read(store: DiskStore, *numbers: int) -> list[bytes]:
    data = b"".join(store.read([name(n) for n in numbers], lambda: 1.0))
    return [data[i : i + SIZE] for i in range(0, len(data), SIZE)]


def files(folder: Path, suffix: str) -> list[Path]:
    return sorted(folder.glob(f"*/*.{suffix}"))


def test_what_was_written_is_found_after_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        write(store, 1, 2)
        write(store, 2, 3)
        assert store.counts.written_bytes == 3 * SIZE, "one that is there is not written again"
        store.check_integrity()
    with opened(tmp_path) as store:
        assert store.find([name(n) for n in (1, 2, 3, 4)]) == 3
        assert read(store, 1, 2, 3, 4) == [content(n) for n in (1, 2, 3)]
        assert read(store, 4, 1) == [], "a run begins with its first block"
        assert store.counts.read_bytes == 3 * SIZE
        store.check_integrity()
    modes = {path.stat().st_mode & 0o777 for path in tmp_path.glob("*/*")}
    assert modes == {0o600}, "others can guess prompts from KV"


def test_another_model_format_or_level_finds_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        write(store, 1)
    for digests, level in ((["other"], "avx2"), (["digest"], "avx512")):
        with opened(tmp_path, fingerprint(digests, {"level": level})) as store:
            assert store.find([name(1)]) == 0 and read(store, 1) == []
    with opened(tmp_path) as store:
        # a folder that was copied to the name of another fingerprint
        other = fingerprint(["digest"], {"level": "none"})
        shutil.copytree(tmp_path / PRINT.hex()[:32], tmp_path / other.hex()[:32])
        with opened(tmp_path, other) as copied:
            assert copied.find([name(1)]) == 0


@pytest.mark.parametrize("suffix", ["seg", "idx"])
def test_cut_at_every_byte_what_is_whole_is_read(tmp_path: Path, suffix: str) -> None:
    with opened(tmp_path / "a") as store:
        write(store, 1, 2, 3)
    (path,) = files(tmp_path / "a", suffix)
    head, each = {"seg": (64, SIZE), "idx": (0, 44)}[suffix]
    for length in range(path.stat().st_size):
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        os.truncate(tmp_path / "b" / path.relative_to(tmp_path / "a"), length)
        whole = max(0, length - head) // each
        with opened(tmp_path / "b") as store:
            assert read(store, 1, 2, 3) == [content(n) for n in (1, 2, 3)[:whole]], length
            write(store, 1, 2, 3)
            assert len(read(store, 1, 2, 3)) == 3
            store.check_integrity()
        shutil.rmtree(tmp_path / "b")


@pytest.mark.parametrize("suffix", ["seg", "idx"])
def test_a_changed_byte_is_a_block_that_is_computed(tmp_path: Path, suffix: str) -> None:
    with opened(tmp_path) as store:
        write(store, 1)
    (path,) = files(tmp_path, suffix)
    good = path.read_bytes()
    for place in range(len(good)):
        if suffix == "seg" and 48 <= place < 64:
            # padding of the head
            continue
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        copied = tmp_path.parent / f"{tmp_path.name}-{place}"
        shutil.copytree(tmp_path, copied)
        with opened(copied) as store:
            assert read(store, 1) == [], place
            store.check_integrity()


def test_the_least_recently_read_segment_goes_first(tmp_path: Path) -> None:
    most = 8 * (64 + 2 * SIZE + 3 * 44)
    with opened(tmp_path, most=most) as store:
        for number in range(200):
            write(store, number)
            assert read(store, 0) == [content(0)], "it is read all the time"
            store.check_integrity()
        assert store.find([name(199)]) == 1 and store.find([name(50)]) == 0
        assert sum(path.stat().st_size for path in tmp_path.glob("*/*")) <= most


def test_folders_of_other_models_go_before_ones_own(tmp_path: Path) -> None:
    most = 8 * (64 + 2 * SIZE + 3 * 44)
    others = [fingerprint([str(n)], {}) for n in range(2)]
    for other in others:
        with opened(tmp_path, other, most) as store:
            write(store, 0, 1)
    with opened(tmp_path, others[0], most) as held, opened(tmp_path, PRINT, most) as store:
        write(store, *range(90))
        assert store.find([name(89)]) == 1 and store.find([name(0)]) == 0
        assert held.find([name(1)]) == 1, "one that a process uses stays"
    assert not (tmp_path / others[1].hex()[:32]).exists()


def test_a_folder_is_one_processs(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        write(store, 1)
        with opened(tmp_path) as second:
            assert "another process uses" in second.counts.failure
            write(second, 2)
            assert second.find([name(1)]) == 0 and read(second, 1) == []
    with opened(tmp_path) as store:
        assert not store.counts.failure and store.find([name(1)]) == 1


def test_what_is_not_to_be_trusted_is_not_found_again(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        write(store, 1, 2)
        store.drop([name(2), name(5)])
        assert store.find([name(2)]) == 0
        store.check_integrity()
    with opened(tmp_path) as store:
        assert store.find([name(2)]) == 0


@contextmanager
def full_disk(most: int) -> Iterator[None]:
    """Let no file of this process grow beyond ``most`` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_ends_writing_alone(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        with full_disk(64 + 2 * SIZE + SIZE // 2):
            write(store, 1, 2, 3, 4)
        assert "File too large" in store.counts.failure
        assert store.counts.errors == {"disk": 1}
        assert read(store, 1, 2, 3) == [content(1), content(2)]
        write(store, 5)
        assert store.find([name(5)]) == 0, "it is off until the next start"
        store.check_integrity()
    with opened(tmp_path) as store:
        assert read(store, 1, 2, 3) == [content(1), content(2)]
        write(store, 5)
        assert store.find([name(5)]) == 1


def test_a_disk_that_was_full_from_the_start(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        with full_disk(10):
            write(store, 1)
        assert store.counts.failure and store.find([name(1)]) == 0
        store.check_integrity()


def test_what_is_whole_stays_where_no_further_segment_can_be_made(tmp_path: Path) -> None:
    most = 8 * (64 + 2 * SIZE + 3 * 44)
    with opened(tmp_path, most=most) as store:
        write(store, 1, 2)
        # another process's, which cannot be deleted
        other = fingerprint(["other"], {})
        with opened(tmp_path, other, most) as held:
            (tmp_path / other.hex()[:32] / "00000.seg").write_bytes(bytes(most))
            write(store, *range(3, 30))
            assert not held.counts.failure
        assert "folders of other models have" in store.counts.failure
        assert read(store, 1, 2) == [content(1), content(2)]
    with opened(tmp_path) as store, full_disk(10):
        write(store, 9)
        assert store.counts.failure and read(store, 1, 2) == [content(1), content(2)]
        store.check_integrity()


def test_what_no_store_made_is_left_alone(tmp_path: Path) -> None:
    most = 8 * (64 + 2 * SIZE + 3 * 44)
    for folder in ("mail", "0" * 32, "1" * 32):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "lock").touch()
        (tmp_path / folder / "letter").write_bytes(bytes(10))
    (tmp_path / ("1" * 32) / "letter").unlink()
    (tmp_path / ("2" * 32)).symlink_to(tmp_path / "mail")
    (tmp_path / "mail" / "1.seg").write_bytes(bytes(most))
    with opened(tmp_path, most=most) as store:
        write(store, *range(200))
        assert not store.counts.failure
        store.check_integrity()
    kept = {
        str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*") if "." not in str(path)
    }
    assert {"mail/lock", "mail/letter", f"{'0' * 32}/letter"} <= kept
    assert (tmp_path / "mail" / "1.seg").exists() and not (tmp_path / ("1" * 32)).exists()


def test_a_block_that_broke_is_read_as_it_was_written_again(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        write(store, 1, 2)
    (path,) = files(tmp_path, "seg")
    path.write_bytes(path.read_bytes()[:64] + bytes(SIZE) + content(2))
    for times in range(2):
        with opened(tmp_path) as store:
            assert read(store, 1) == [content(1)] * times
            write(store, 1)
            store.check_integrity()


def test_segments_hold_no_descriptors(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for number in range(40):
        with opened(tmp_path) as store:
            write(store, number)
    with opened(tmp_path) as store:
        assert read(store, *range(40)) == [content(n) for n in range(40)]
        # the lock
        assert len(os.listdir("/proc/self/fd")) == before + 1


def test_a_process_that_is_killed_while_it_writes_loses_one_block_at_most(tmp_path: Path) -> None:
    script = f"""
import sys
from pathlib import Path
from tests.engine.blocks.test_disk import PRINT, SIZE, DiskStore, write
store = DiskStore(Path({str(tmp_path)!r}), PRINT, SIZE, {MANY})
number = 0
while True:
    write(store, number)
    print(number, flush=True)
    number += 1
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for _ in range(30):
            last = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
    with opened(tmp_path) as store:
        assert read(store, *range(last + 1)) == [content(n) for n in range(last + 1)]
        store.check_integrity()


@pytest.mark.parametrize("made", ["file", "closed"])
def test_a_folder_that_cannot_be_used_is_refused_at_start(tmp_path: Path, made: str) -> None:
    folder = tmp_path / "a"
    if made == "file":
        folder.write_text("x")
    else:
        folder = Path("/proc/nowhere")
    with pytest.raises(ConfigError, match=f"--kv-store {folder}"):
        DiskStore(folder, PRINT, SIZE, MANY)
    with pytest.raises(ConfigError, match=r"too small: at least 704 bytes"):
        DiskStore(tmp_path, PRINT, SIZE, 100)


def test_digests_are_of_contents_and_are_kept(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.write_bytes(b"weights")
    (first,) = file_digests([model], tmp_path)
    assert first == sha256(b"weights").hexdigest()
    kept = (tmp_path / "digests.json").read_text()
    assert first in kept
    (tmp_path / "digests.json").write_text(kept.replace(first, "kept"))
    assert file_digests([model], tmp_path) == ["kept"], "it is not read again"
    os.utime(model, ns=(1, 1))
    assert file_digests([model], tmp_path) == [first], "until it changes"
    (tmp_path / "digests.json").write_text("[1")
    assert file_digests([model], tmp_path) == [first] == file_digests([model], None)


class Machine(RuleBasedStateMachine):
    """A store against a set of what it must not make up."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path("/tmp") / f"kv-store-test-{os.getpid()}"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.written: set[int] = set()
        self.open()

    def open(self) -> None:
        self.store = DiskStore(self.folder, PRINT, SIZE, 8 * (64 + 3 * (SIZE + 44) + 44))

    @rule(numbers=st.lists(st.integers(0, 60), min_size=1, max_size=6, unique=True))
    def write(self, numbers: list[int]) -> None:
        write(self.store, *numbers)
        self.written.update(numbers)
        assert self.store.find([name(numbers[-1])]) == 1

    @rule(numbers=st.lists(st.integers(0, 60), min_size=1, max_size=6))
    def read(self, numbers: list[int]) -> None:
        found = self.store.find([name(n) for n in numbers])
        assert read(self.store, *numbers) == [content(n) for n in numbers[:found]]
        assert self.written.issuperset(numbers[:found])

    @rule(number=st.integers(0, 60))
    def drop(self, number: int) -> None:
        self.store.drop([name(number)])
        self.written.discard(number)
        assert self.store.find([name(number)]) == 0

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.open()

    @precondition(lambda self: bool(files(self.folder, "seg")))
    @rule(data=st.data())
    def tear(self, data: st.DataObject) -> None:
        """Cut a file while no process has it."""
        self.store.close()
        path = data.draw(st.sampled_from(files(self.folder, "seg") + files(self.folder, "idx")))
        os.truncate(path, data.draw(st.integers(0, path.stat().st_size)))
        self.open()

    def teardown(self) -> None:
        self.store.check_integrity()
        self.store.close()
        shutil.rmtree(self.folder)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
