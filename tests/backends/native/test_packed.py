"""Copies of packed weights on disk."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from paceline.backends.native import NativeModel, NativeSettings, packed, unavailable_reason
from paceline.backends.native.packed import PackedCopies, fingerprint
from tests.backends.native.reference import random_weights, rope_tables, tiny_config

native = pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))
ABOUT = {"isa": "any"}


def _pieces(*values: bytes) -> list[memoryview]:
    return [memoryview(bytearray(value)) for value in values]


def _empty(pieces: list[memoryview]) -> list[memoryview]:
    return _pieces(*(bytes(len(piece)) for piece in pieces))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix == ".packed")


@pytest.fixture
def copies(tmp_path: Path) -> PackedCopies:
    return PackedCopies(tmp_path / "packed", 10_000, "a model")


def test_what_was_written_is_read(copies: PackedCopies) -> None:
    pieces = _pieces(b"some", b"weights", b"x" * 1000)
    assert not copies.read(ABOUT, _empty(pieces))
    copies.write(ABOUT, pieces)
    found = _empty(pieces)
    assert copies.read(ABOUT, found)
    assert found == pieces
    # of another level, another file or other sizes there is none
    assert not copies.read({"isa": "other"}, _empty(pieces))
    assert not PackedCopies(copies.folder, 10_000, "b").read(ABOUT, _empty(pieces))
    assert not copies.read(ABOUT, _pieces(b"some", b"weigh", b"x" * 1002))


@pytest.mark.parametrize("damage", ["cut", "longer", "end", "header", "zeros"])
def test_a_torn_copy_is_not_read(copies: PackedCopies, damage: str) -> None:
    pieces = _pieces(b"some", b"weights")
    copies.write(ABOUT, pieces)
    [path] = _files(copies.folder)
    data = bytearray(path.read_bytes())
    if damage == "cut":
        del data[-40:]
    elif damage == "longer":
        data += b"x"
    elif damage == "end":
        data[-1] ^= 1
    elif damage == "header":
        data[30] ^= 1
    else:
        # a size that was written before its data
        data[40:] = bytes(len(data) - 40)
    path.write_bytes(data)
    found = _empty(pieces)
    assert not copies.read(ABOUT, found)
    assert found == _empty(pieces)
    # and is replaced
    copies.write(ABOUT, pieces)
    assert copies.read(ABOUT, found)


def test_copies_take_no_more_than_they_may(
    copies: PackedCopies, caplog: pytest.LogCaptureFixture
) -> None:
    about = [{"isa": str(number)} for number in range(4)]
    for number, each in enumerate(about[:3]):
        copies.write(each, _pieces(b"x" * 3000))
        for path in _files(copies.folder):
            if path.stat().st_mtime > 1000:
                os.utime(path, (number, number))
    # so the second is the one that was used longest ago
    assert copies.read(about[0], _pieces(bytes(3000)))
    copies.write(about[3], _pieces(b"x" * 3000))
    there = [copies.read(each, _pieces(bytes(3000))) for each in about]
    assert there == [True, False, True, True]
    assert sum(path.stat().st_size for path in _files(copies.folder)) <= 10_000
    with caplog.at_level(logging.WARNING):
        copies.write(ABOUT, _pieces(b"x" * 20_000))
    assert "more than the 0 MiB of --packed-cache" in caplog.text
    assert len(_files(copies.folder)) == 3


def test_what_was_left_half_written_goes(copies: PackedCopies) -> None:
    copies.folder.mkdir()
    left = [copies.folder / f".{name}.packed.7.part" for name in ("old", "new")]
    for path in left:
        path.write_bytes(b"half")
    os.utime(left[0], (0, 0))
    copies.write(ABOUT, _pieces(b"x"))
    assert [path.exists() for path in left] == [False, True]


def test_what_others_write_is_counted(
    copies: PackedCopies, caplog: pytest.LogCaptureFixture
) -> None:
    copies.write({"isa": "0"}, _pieces(b"x" * 3000))
    part = copies.folder / ".other.packed.7.part"
    with part.open("wb") as others:
        fcntl.flock(others, fcntl.LOCK_EX)
        os.truncate(others.fileno(), 6000)
        # written to long ago, but somebody holds it
        os.utime(part, (0, 0))
        copies.write(ABOUT, _pieces(b"y" * 3500))
        assert part.exists()
        assert copies.read(ABOUT, _pieces(bytes(3500)))
        assert not copies.read({"isa": "0"}, _pieces(bytes(3000)))
        with caplog.at_level(logging.WARNING):
            copies.write({"isa": "2"}, _pieces(b"z" * 5000))
        assert "do not fit beside 0 MiB that other processes are writing" in caplog.text
        # and nothing was removed for it
        assert copies.read(ABOUT, _pieces(bytes(3500)))
    # whoever wrote it is gone
    copies.write({"isa": "2"}, _pieces(b"z" * 5000))
    assert not part.exists()
    assert copies.read({"isa": "2"}, _pieces(bytes(5000)))


def test_four_bits_that_are_not_done_count(copies: PackedCopies) -> None:
    folder = copies.folder / "other.q4.gguf.parts"
    unfinished = folder.with_suffix(".partial")
    target = copies.few_bits(1)
    own = target.with_name(f"{target.name}.parts")
    for parts in (folder, own):
        parts.mkdir(parents=True)
        (parts / "layer-0.npz").write_bytes(bytes(6000))
    unfinished.write_bytes(b"half")
    os.utime(folder, (0, 0))
    handle = os.open(folder, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    # its process runs, however long ago a layer was done
    assert "do not fit" in copies.make_room(5000, target) and folder.exists()
    assert copies.make_room(3000, target) == ""
    os.close(handle)
    # the process was killed, and nothing went on with it
    assert copies.make_room(3000, target) == "" and folder.exists()
    assert copies.make_room(5000, target) == ""
    assert not folder.exists() and not unfinished.exists() and own.exists()


def test_a_part_takes_its_whole_size_from_the_start(
    copies: PackedCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    put = packed._put

    def watched(file: int, piece: memoryview) -> None:
        [part] = copies.folder.glob(".*.part")
        sizes.append(part.stat().st_size)
        with part.open("rb") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        put(file, piece)

    monkeypatch.setattr(packed, "_put", watched)
    copies.write(ABOUT, _pieces(b"some", b"w" * 3000))
    [path] = _files(copies.folder)
    assert set(sizes) == {path.stat().st_size}


def test_a_disk_that_fails_costs_the_copy_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"")
    copies = PackedCopies(tmp_path / "file" / "below", 10_000, "a model")
    with caplog.at_level(logging.WARNING):
        copies.write(ABOUT, _pieces(b"x"))
        assert not copies.read(ABOUT, _pieces(b"x"))
    assert "not written: Not a directory" in caplog.text


def test_fingerprints_are_of_contents_and_times(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"a" * 100)
    first = fingerprint(path)
    assert fingerprint(path) == first
    times = path.stat().st_mtime_ns
    path.write_bytes(b"a" * 99 + b"b")
    os.utime(path, ns=(times, times))
    assert fingerprint(path) != first
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    before = fingerprint(folder)
    (folder / "model.safetensors").write_bytes(b"weights")
    assert fingerprint(folder) != before


@native
@pytest.mark.parametrize("dtype", ["q4", "int8", "float32"])
def test_a_model_starts_from_its_copy(
    tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(
        qk_norm=True, qkv_bias=True, o_bias=True, mlp_bias=True, tie_word_embeddings=False,
        vocab_size=2000, hidden_size=128,
    )  # fmt: skip
    weights = random_weights(config, 1)
    copies = PackedCopies(tmp_path, 1 << 30, "a model")
    taken = []

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        for name, tensor in weights.items():
            taken.append(name)
            yield name, tensor

    def logits() -> np.ndarray:
        model = NativeModel(
            config, tensors(), rope_tables(config, 64),
            NativeSettings(dtype=dtype, num_blocks=2, threads=2),
            copies=copies,
        )  # fmt: skip
        rows = np.arange(9)
        step = (rows, rows, np.array([0, 9]), np.array([[0]]), rows)
        out = model.forward(*step).copy()
        model.forward(*step[:4], rows[-1:], needs_logits=False)
        assert model.likeliest[0] == out[-1].argmax()
        model.close()
        return out

    first = logits()
    assert len(taken) == len(weights)
    np.testing.assert_array_equal(logits(), first)
    # nothing was read for the second
    assert len(taken) == len(weights)
    # another build of the library may pack otherwise
    monkeypatch.setattr("paceline.backends.native.model.digest", lambda: "of another build")
    np.testing.assert_array_equal(logits(), first)
    assert len(taken) == 2 * len(weights)
