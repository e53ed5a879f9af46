"""``serve --dtype q4`` of a model in 16 bits, next to a cache of packed weights."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest

from paceline.backends.native.packed import PackedCopies, fingerprint
from paceline.cli.flags.settings import EngineSettings
from paceline.cli.serve import few_bits as module
from paceline.cli.serve.few_bits import FewBits, Making, few_bits
from paceline.cli.wiring import _keeper_maker, build_backend
from paceline.quantize.version import VERSION
from tests.backends.torch.models import save_model
from tests.checkpoints.builders import llama_tensors, write_gguf


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    tensors = {
        name: values.astype(np.float16) if values.ndim == 2 else values
        for name, values in llama_tensors().items()
    }
    return write_gguf(tmp_path / "model.gguf", tensors=tensors)


def served(model: Path, **values: object) -> EngineSettings:
    usual = {"model_name": "m", "dtype": "q4", "packed_cache_bytes": 1 << 30}
    return EngineSettings.of(**usual | {"model_path": str(model)} | values)


def kept(model: Path) -> Path:
    folder = Path(str(model.parent / "cache")) / "packed"
    return PackedCopies(folder, 1 << 30, fingerprint(model)).few_bits(VERSION)


def test_int8_is_served_while_they_are_made_and_then_they_are(model: Path) -> None:
    first = few_bits(served(model, threads=1))
    assert (first.settings.load.dtype, first.settings.load.packed_cache_bytes) == ("int8", None)
    assert first.settings.weights_path is None
    assert first.said.startswith("int8 for now: paceline quantize makes four bits of model.gguf")
    target = kept(model)
    assert first.making.command[3:] == (
        "quantize", str(model), "-o", str(target), "--threads", "1",
    )  # fmt: skip
    helped = Making((*first.making.command[:4], "--help"))
    helped.start()
    assert helped.wait(60) == 0
    target.write_bytes(b"four bits")
    second = few_bits(served(model))
    assert second.settings == replace(served(model), weights_path=str(target))
    assert str(target) in second.said and second.making.command == ()


def test_what_an_older_version_made_is_made_again(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = kept(model)
    older.parent.mkdir(parents=True)
    older.write_bytes(b"four bits")
    monkeypatch.setattr(module, "VERSION", VERSION + 1)
    plan = few_bits(served(model))
    assert plan.settings.weights_path is None and plan.said.startswith("int8 for now")
    assert str(older) not in plan.making.command


@pytest.mark.parametrize(
    "values",
    [{"dtype": "int8"}, {"packed_cache_bytes": None}, {"compute": "torch"}, {"device": "cuda"}],
)
def test_nothing_changes_where_it_was_not_asked_for(model: Path, values: dict[str, object]) -> None:
    settings = served(model, **values)
    assert few_bits(settings).settings == settings
    assert few_bits(settings).said == ""


def test_a_file_in_few_bits_keeps_its_own(tmp_path: Path) -> None:
    settings = served(write_gguf(tmp_path / "q8.gguf", quantise=gguf.GGMLQuantizationType.Q8_0))
    assert few_bits(settings).settings == settings


def test_what_cannot_be_made_is_rounded_as_before(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(settings: EngineSettings) -> str:
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="paceline.cli"):
            plan = few_bits(settings)
        assert plan.settings == settings and not plan.said
        return caplog.messages[0]

    assert "has no room for four bits: " in refused(served(model, packed_cache_bytes=1000))
    save_model(model.parent / "windows", "gemma2", num_hidden_layers=2)
    message = refused(served(model.parent / "windows"))
    assert "cannot be written as GGUF" in message
    monkeypatch.setattr("paceline.backends.machine.cpu.has_torch", lambda: False)
    assert "four bits are made with PyTorch" in refused(served(model))


def test_lines_are_logged_and_the_process_ends_with_the_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="paceline.cli"):
        made = Making([sys.executable, "-c", "print('layer 1 of 2'); exit('the disk is full')"])
        made.start()
        assert made.wait(60) == 1
    assert sorted(caplog.messages) == ["quantize: layer 1 of 2", "quantize: the disk is full"]
    made.stop()
    endless = Making([sys.executable, "-c", "import time; time.sleep(3600)"])
    endless.start()
    endless.stop()
    assert endless.wait(60) < 0
    nothing = FewBits(EngineSettings.of()).making
    nothing.start()
    nothing.stop()


def test_a_process_ends_with_a_server_that_was_killed() -> None:
    code = (
        "import os, pathlib, time\n"
        "from paceline.cli.serve.few_bits import end_with_server\n"
        "end_with_server()\n"
        "score = pathlib.Path('/proc/self/oom_score_adj').read_text().strip()\n"
        "print(os.nice(0), score, flush=True)\n"
        "time.sleep(3600)\n"
    )
    argv, pipe = [sys.executable, "-c", code], subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline().split() == ["19", "1000"]
        assert process.poll() is None
        # what the system does when the server is gone
        process.stdin.close()
        assert process.wait(60) == 1


def test_a_command_that_fails_does_not_end_the_server(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="paceline.cli"):
        absent = Making(["/no/such/program"])
        absent.start()
        absent.stop()
        killed = Making([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
        killed.start()
        killed.wait(60)
    assert "quantize: it cannot be started" in caplog.messages[0]
    assert caplog.messages[1:] == ["quantize: ended by signal 9; the next start goes on with it"]


def test_weights_are_read_from_their_own_file(tmp_path: Path) -> None:
    for name, layers in (("model", 2), ("weights", 3)):
        save_model(tmp_path / name, "llama", num_hidden_layers=layers)
    settings = EngineSettings.of(
        model_name="m", model_path=str(tmp_path / "model"), compute="torch", num_blocks=8
    )
    sizes = []
    for path in (None, str(tmp_path / "weights")):
        chosen = replace(settings, weights_path=path, kv_store=str(tmp_path / "kv"))
        backend = build_backend(replace(settings, weights_path=path))
        maker = _keeper_maker(chosen, backend)
        assert isinstance(maker, partial)
        # blocks that are kept belong to the weights that computed them
        assert {file.parent.name for file in maker.keywords["files"]} == {
            "model" if path is None else "weights"
        }
        sizes.append(backend.info.block_bytes)
        backend.close()
    assert sizes[0] * 3 == sizes[1] * 2
