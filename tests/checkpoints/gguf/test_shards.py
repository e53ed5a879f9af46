"""Models split over files by ``gguf``'s own writer."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from paceline.checkpoints.gguf.shards import gguf_files, read_gguf_parts
from paceline.checkpoints.open import open_checkpoint
from paceline.cli.main import main
from paceline.errors import CheckpointError
from tests.checkpoints.builders import write_gguf


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "whole.gguf")


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    write_gguf(tmp_path / "split.gguf", tensors_per_part=8)
    found = sorted(tmp_path.glob("split-*.gguf"))
    assert len(found) == 3
    return found


def test_any_part_is_all_of_the_model(whole: Path, parts: list[Path]) -> None:
    expected = open_checkpoint(whole)
    for part in parts:
        assert gguf_files(part) == tuple(parts)
        found = open_checkpoint(part)
        assert found.config == expected.config
        assert set(found.tensor_names()) == set(expected.tensor_names())
        for name in expected.tensor_names():
            np.testing.assert_array_equal(found.tensor(name), expected.tensor(name))
        found.release()
        name = "model.layers.1.mlp.down_proj.weight"
        np.testing.assert_array_equal(found.raw_tensor(name)[0], expected.raw_tensor(name)[0])


def test_a_plan_of_memory_counts_all_parts(
    whole: Path, parts: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    weights = []
    for path in (whole, parts[0], parts[2]):
        flags = ["--memory", "1GB", "--max-len", "64", "--mean-len", "32", "--json"]
        assert main(["plan", "memory", "--model", str(path), *flags]) == 0
        weights.append(json.loads(capsys.readouterr().out)["weight_bytes"])
    assert weights[0] == weights[1] == weights[2] > 0


def test_parts_that_do_not_fit(parts: list[Path], tmp_path: Path) -> None:
    def refused(message: str, path: Path = parts[0]) -> None:
        with pytest.raises(CheckpointError, match=message):
            read_gguf_parts(path)

    other = tmp_path / "other" / "split.gguf"
    other.parent.mkdir()
    write_gguf(other, tensors_per_part=8, change={"llama.block_count": 2})
    renamed = tmp_path / "renamed.gguf"
    shutil.copyfile(parts[1], renamed)
    refused(r"renamed.gguf is one of 3 parts .*by names like model-00001-of-00003.gguf", renamed)
    # the second twice: it says which one it is
    kept = parts[2].read_bytes()
    shutil.copyfile(parts[1], parts[2])
    refused(r"split-00003-of-00003.gguf should be part 3 of 3, and says split.no=1, split.count=3")
    parts[2].write_bytes(kept)
    read_gguf_parts(parts[0])
    parts[2].unlink()
    refused(
        r"00001-of-00003.gguf is one of 3 parts of a model, and split-00003-of-00003.gguf is not"
    )
    refused(r"00002-of-00003.gguf is one of 3 parts of a model, and split-00003", parts[1])


def test_a_tensor_that_is_in_two_parts_or_none(parts: list[Path]) -> None:
    (first,) = re.findall(rb"blk\.[0-9]\.[a-z_]+\.weight", parts[0].read_bytes())[-1:]
    for part in parts[1:]:
        data = part.read_bytes()
        for name in re.findall(rb"blk\.[0-9]\.[a-z_]+\.weight", data):
            if len(name) == len(first) and name != first:
                part.write_bytes(data.replace(name, first))
                with pytest.raises(CheckpointError, match="is in another part too"):
                    read_gguf_parts(parts[0])
                part.write_bytes(data)
                return
    raise AssertionError("no two names of one length")
