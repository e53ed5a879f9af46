"""ik_llama.cpp's batched benchmark as a worker, by a program that prints its table."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common.processes import Unavailable
from benchmarks.common.setup import Places
from benchmarks.peers.ik_llama import IkLlama, _Bench, _flags, seconds_of
from benchmarks.peers.jobs import Job
from benchmarks.peers.levels import LEVELS
from benchmarks.peers.quality import GivesLogits

TABLE = """\
|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |
|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|
|     5 |      7 |    2 |     24 |    0.250 |    40.00 |    1.500 |     9.33 |    1.750 |    13.71 |
"""


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path, tmp_path / "small.Q4_1.gguf", (0, 1))


def test_a_job_is_a_run_of_as_many_tokens(tmp_path: Path) -> None:
    program = tmp_path / "bench"
    program.write_text(
        f"#!{sys.executable}\nimport sys\n"
        f"open('seen', 'w').write(' '.join(sys.argv[1:]))\nprint({TABLE!r})\n"
    )
    program.chmod(0o755)
    bench = _Bench(str(program), "m.gguf", "Q4_1", "2", str(tmp_path))
    done = bench.run(Job([[1] * 5, [2] * 5], 8))
    assert (done.seconds, done.output_tokens) == (1.75, 16)
    assert (tmp_path / "seen").read_text() == (
        "-m m.gguf -rtr -t 2 -tb 2 -c 512 -b 2048 -npp 5 -ntg 7 -npl 2"
    )
    assert bench.about["precision"] == "Q4_1/float16"
    with pytest.raises(RuntimeError, match="no prompts of which only the start is shared"):
        bench.run(Job([[1] * 5], 8, shared=3))
    with pytest.raises(RuntimeError, match="no row in the benchmark's table: it failed"):
        seconds_of("it failed")


def test_the_published_file_is_read_as_it_is(places: Places) -> None:
    peer = IkLlama(places, Path("source"), LEVELS["avx2"])
    by_variant = {v: peer.worker(v, prefix_caching=True).argv for v in peer.variants}
    assert str(places.model) in by_variant["Q4_1"]
    assert str(places.folder(peer.name) / "small.Q4_1.Q4_0.gguf") in by_variant["Q4_0"]
    assert "build-avx2" in by_variant["Q4_0"][3] and "-rtr" in peer.server(80).argv
    with pytest.raises(Unavailable, match="IK_LLAMA=source is no folder with its source"):
        peer.setup()


def test_logits_are_those_that_its_program_writes(places: Places) -> None:
    peer = IkLlama(places, Path("source"))
    program = places.folder(peer.name) / "build" / "bin" / "paceline-logits"
    program.parent.mkdir(parents=True)
    # of a vocabulary of two: each token, and the number of threads
    program.write_text(
        f"#!{sys.executable}\nimport sys\nfrom array import array\n"
        "model, threads, windows, length, tokens, out = sys.argv[1:]\n"
        "found = array('i')\n"
        "found.fromfile(open(tokens, 'rb'), int(windows) * int(length))\n"
        "array('f', [x for t in found for x in (t, int(threads))]).tofile(open(out, 'wb'))\n"
    )
    program.chmod(0o755)
    logits = peer.variant_logits("Q4_1", np.arange(6).reshape(2, 3))
    assert isinstance(peer, GivesLogits)
    assert logits.tolist() == [[float(token), 2.0] for token in range(6)]


def test_all_of_avx512_that_its_source_needs_is_asked_for() -> None:
    cpuinfo = "flags\t: avx2 avx512f avx512dq avx512bw avx512vl\n"
    assert "-DCMAKE_CXX_FLAGS=-mavx512dq -mavx512vl" in _flags(cpuinfo, None)
    assert "-DGGML_AVXVNNI=ON" in _flags("flags\t: avx2 avx_vnni\n", None)
    assert not any("CMAKE" in flag for flag in _flags(cpuinfo, LEVELS["avx2"]))
