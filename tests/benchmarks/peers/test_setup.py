from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from benchmarks.common.processes import Unavailable
from benchmarks.common.setup import Places, make_venv, run_step
from benchmarks.kernels.model import Ceilings
from benchmarks.peers import llama_cpp
from benchmarks.peers.ceilings import floor_s
from benchmarks.peers.hf_folder import write_hf_folder
from benchmarks.peers.levels import LEVELS
from benchmarks.peers.llama_cpp import LlamaCpp, cpu_flags
from benchmarks.peers.openvino_genai import OpenVino
from benchmarks.peers.ours import Paceline
from benchmarks.peers.rows import parse_row
from benchmarks.peers.transformers_generate import Transformers
from benchmarks.peers.vllm_cpu import VllmCpu, needed
from paceline.backends.native import unavailable_reason
from paceline.backends.native.single_kernels import variants_for


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path / "peers", tmp_path / "model.Q4_1.gguf", (0, 3))


def test_a_failing_step_is_unavailable_with_its_last_words(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("of a step before\n")
    with pytest.raises(Unavailable, match=r"ended with 3: .*no such wheel") as caught:
        run_step([sys.executable, "-c", "print('no such wheel'); raise SystemExit(3)"], log=log)
    assert "before" not in str(caught.value)
    with pytest.raises(Unavailable, match="no-such-tool"):
        run_step(["no-such-tool"], log=log)


def test_an_environment_is_made_once(tmp_path: Path) -> None:
    """The stamp holds what was installed; anything else is installed again."""
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    python = tmp_path / "venv" / "bin" / "python"
    calls = tmp_path / "calls"
    python.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')
    python.chmod(0o755)
    for _ in range(2):
        assert make_venv(tmp_path, ["a>=1", "b"]) == python
    assert calls.read_text().splitlines() == ["-m pip install a>=1 b"]
    make_venv(tmp_path, ["a>=2", "b"], options=["--pre"])
    assert calls.read_text().splitlines()[1:] == ["-m pip install --pre a>=2 b"]


def test_the_build_has_the_processor_s_instructions_and_never_amx() -> None:
    flags = cpu_flags("processor: 0\nflags\t\t: avx avx2 fma avx512f avx512_bf16 amx_tile\n")
    assert {"-DGGML_AVX512=ON", "-DGGML_AVX512_BF16=ON", "-DGGML_AVX512_VNNI=OFF"} <= set(flags)
    assert {"-DGGML_AMX_TILE=OFF", "-DGGML_AMX_INT8=OFF", "-DGGML_NATIVE=OFF"} <= set(flags)
    assert "-DGGML_AVX2=OFF" in cpu_flags("")


def test_a_build_of_fewer_programs_is_not_taken(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[list[str]] = []
    monkeypatch.setattr(llama_cpp, "make_venv", lambda *of: Path())
    monkeypatch.setattr(llama_cpp, "run_step", lambda argv, log: steps.append(list(map(str, argv))))
    monkeypatch.setattr(shutil, "which", lambda tool: tool)
    peer = LlamaCpp(places)
    for folder in (peer._source / "vendor", peer._build_folder):
        folder.mkdir(parents=True)
    # as an earlier version left it, which did not build llama-imatrix
    flags = cpu_flags(Path("/proc/cpuinfo").read_text(), None)
    (peer._build_folder / ".built").write_text("\n".join(flags))
    peer.build()
    assert "llama-imatrix" in steps[-1]
    peer.build()
    assert len(steps) == 2


def test_a_build_for_a_level_has_no_more_and_a_folder_of_its_own(places: Places) -> None:
    listed = "flags\t\t: avx avx2 fma f16c bmi2 avx512f avx512_vnni avx512_bf16 avx_vnni\n"
    on = {
        name: {flag for flag in cpu_flags(listed, level) if flag.endswith("=ON")}
        for name, level in LEVELS.items()
    }
    names = ("AVX", "AVX2", "FMA", "F16C", "BMI2")
    assert on["avx2"] == {f"-DGGML_{name}=ON" for name in names}
    assert on["avxvnni"] == on["avx2"] | {"-DGGML_AVX_VNNI=ON"}
    assert on["avx512bw"] == on["avx2"] | {"-DGGML_AVX512=ON"}
    assert on["avx512"] == on["avx512bw"] | {"-DGGML_AVX512_VNNI=ON"}
    assert on["avx512bf16"] == on["avx512"] | {"-DGGML_AVX512_BF16=ON"}
    # what the processor lacks is not built for
    assert "-DGGML_AVX_VNNI=OFF" in cpu_flags("flags : avx avx2", LEVELS["avxvnni"])
    builds = {
        dict(LlamaCpp(places, level).worker("Q4_0", prefix_caching=False).env)["LLAMA_CPP_LIB_PATH"]
        for level in (None, *LEVELS.values())
    }
    assert len(builds) == 1 + len(LEVELS)


@pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))
def test_other_engines_can_be_held_to_every_level_that_is_compiled() -> None:
    compiled = variants_for(*[0xFFFFFFFF] * 4, 0xFFFFFFFF).split(",")
    assert set(LEVELS) == set(compiled[:-1]) or compiled == ["portable"]


def test_every_level_limits_ours_and_onednn() -> None:
    for name, level in LEVELS.items():
        set_to = level.environment()
        assert set_to["PACELINE_ISA"] == name
        assert {"ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"} <= set(set_to)


def test_what_only_pictures_and_sound_need_is_left_out() -> None:
    listed = ("torch==2.13.0+cpu", "torchaudio", "torchvision", "torchcodec>=0.14")
    listed += ("torch-other", "", "xgrammar==0.2.8")
    assert needed("\n".join(listed)) == ["torch-other", "xgrammar==0.2.8"]


def test_commands_say_precision_threads_and_prefix_caching(places: Places) -> None:
    vino = OpenVino(places)
    assert vino.worker("256", prefix_caching=False) != vino.worker("256", prefix_caching=True)
    assert vino.worker("256", prefix_caching=True) != vino.worker("2048", prefix_caching=True)
    for peer in (vino, LlamaCpp(places), Transformers(places)):
        assert peer.worker(peer.variants[0], prefix_caching=False).argv[-1] == "2", "threads"
    for peer in (LlamaCpp(places), VllmCpu(places), Transformers(places)):
        same = [peer.worker(peer.variants[0], prefix_caching=on) for on in (False, True)]
        assert same[0] == same[1]
    assert ("VLLM_CPU_OMP_THREADS_BIND", "0,3") in VllmCpu(places).server(5).env
    ours = Paceline(places, "paceline", ("int8/int8", "q4/bfloat16"))
    without = Paceline(places, "without", ("int8/bfloat16",), prefix_caching=False)
    assert ours.worker("int8", prefix_caching=False) == ours.worker("int8", prefix_caching=True)
    assert ours.worker("int8", prefix_caching=True) != without.worker("int8", prefix_caching=True)
    argv = ours.server(77).argv
    assert "--dtype" not in argv, "it is served as it comes"
    assert argv[argv.index("--port") + 1] == "77"
    for peer in (vino, Transformers(places)):
        with pytest.raises(Unavailable):
            peer.server(5)


def test_the_floor_of_a_row_by_hand() -> None:
    # reading limits everything: 1 byte a second, products free
    slow_read = Ceilings({256: 1.0}, {"int8": 1e30, "bfloat16": 1e30, "q4": 1e30})
    one = floor_s(slow_read, parse_row("1x128x1"), "bfloat16/bfloat16")
    per_token = 2 * 30 * 3 * 64 * 2
    weights = 2 * 134_479_872
    assert one == pytest.approx(weights + 64 * per_token, rel=1e-3)
    two = floor_s(slow_read, parse_row("1x128x2"), "bfloat16/bfloat16")
    assert two - one == pytest.approx(weights + 129 * per_token, rel=1e-3)
    # products limit everything: the shared prefix is computed once
    slow_products = Ceilings({256: 1e30}, {"bfloat16": 1.0, "int8": 1.0, "q4": 1.0})
    shared = floor_s(slow_products, parse_row("prefix-4x1000+24x1"), "bfloat16/bfloat16")
    alone = floor_s(slow_products, parse_row("4x1024x1"), "bfloat16/bfloat16")
    assert alone / shared == pytest.approx(4096 / 1096, rel=0.01)


@pytest.mark.thorough
def test_the_hugging_face_folder_holds_the_same_model(smollm2_path: Path, tmp_path: Path) -> None:
    import numpy as np

    from paceline.checkpoints.open import open_checkpoint
    from paceline.engine.text.tokenizer import load_tokenizer

    folder = tmp_path / "models" / "hf"
    write_hf_folder(smollm2_path, folder)
    ours, theirs = open_checkpoint(smollm2_path), open_checkpoint(folder)
    assert theirs.config.rope == ours.config.rope
    assert set(theirs.tensor_names()) == set(ours.tensor_names())
    name = "model.layers.7.mlp.down_proj.weight"
    np.testing.assert_allclose(theirs.tensor(name), ours.tensor(name), rtol=2**-8)
    text = "Numbers like 1234, and  spaces: naïve?"
    assert load_tokenizer(folder).encode(text) == load_tokenizer(smollm2_path).encode(text)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    before = (folder / "model.safetensors").stat().st_mtime_ns
    write_hf_folder(smollm2_path, folder)
    assert (folder / "model.safetensors").stat().st_mtime_ns == before, "written once"
