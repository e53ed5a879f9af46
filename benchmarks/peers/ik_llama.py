"""ik_llama.cpp, built from a folder with its source, driven through its own batched benchmark.

It is in no package registry, so IK_LLAMA names the folder; its commit is printed with the results.
Weights are repacked as they are loaded (``-rtr``), which its fast kernels are made for. A job's
seconds are those that the benchmark takes for prompts and steps of as many tokens, without loading;
like llama.cpp's it decodes tokens that no sampling chose. Its logits come from a program of our own
(``ik_logits.cpp``), built against its library. It shares no prefixes.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.processes import Command, Unavailable
from benchmarks.common.setup import Places, run_step
from benchmarks.peers.jobs import Done, Job, serve
from benchmarks.peers.levels import Level
from benchmarks.peers.llama_cpp import cpu_flags

__all__ = ["IkLlama"]

_TARGETS: Final = ("llama-batched-bench", "llama-quantize", "llama-server")
_EXTENSIONS: Final = ("avx512cd", "avx512dq", "avx512vl")
_PROGRAM: Final = Path(__file__).with_name("ik_logits.cpp")
_BATCH: Final = 2048
_SLOTS: Final = 16
_SLOT_TOKENS: Final = 2048


class IkLlama:
    """The ``Peer``. Variants are quantisations; the model's own file is the one in Q4_1."""

    name = "ik_llama.cpp"
    variants: tuple[str, ...] = ("Q4_1", "Q4_0")
    served = "Q4_1/float16"

    def __init__(self, places: Places, source: Path, level: Level | None = None) -> None:
        self._places, self._source, self._level = places, source, level
        self._folder = places.folder(self.name)
        self._build_folder = self._folder / (f"build-{level.name}" if level else "build")

    def setup(self) -> None:
        if not (self._source / "CMakeLists.txt").is_file():
            raise Unavailable(f"IK_LLAMA={self._source} is no folder with its source")
        for tool in ("cmake", "c++"):
            if shutil.which(tool) is None:
                raise Unavailable(f"building it takes {tool}, which is not installed")
        log = self._folder / "setup.log"
        flags = _flags(Path("/proc/cpuinfo").read_text(), self._level)
        # what has not changed is not built again
        run_step(
            ["cmake", "-S", self._source, "-B", self._build_folder, "-DCMAKE_BUILD_TYPE=Release",
             "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_CURL=OFF", *flags],
            log=log,
        )  # fmt: skip
        jobs = str(len(self._places.cpus))
        build: list[str | Path] = ["cmake", "--build", self._build_folder, "--parallel", jobs]
        run_step([*build, "--target", *_TARGETS], log=log)
        for variant in self.variants:
            if not (target := self._file(variant)).is_file():
                partial = target.with_suffix(".part")
                run_step(
                    [self._program("llama-quantize"), "--allow-requantize", "--pure",
                     self._places.model, partial, variant],
                    log=log,
                )  # fmt: skip
                partial.rename(target)

        self._build_logits(log)

    def _build_logits(self, log: Path) -> None:
        """Build the program that writes logits, against the library that is built by now."""
        found = {path.parent for path in self._build_folder.rglob("lib*.so")}
        libraries = [f"-L{folder}" for folder in found] + [f"-Wl,-rpath,{f}" for f in found]
        headers = [self._source / "include", self._source / "ggml" / "include"]
        run_step(
            ["c++", "-O1", "-std=c++17", *(f"-I{folder}" for folder in headers), _PROGRAM,
             "-o", self._program("paceline-logits"), *libraries, "-lllama", "-lggml"],
            log=log,
        )  # fmt: skip

    def variant_logits(self, variant: str, windows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the logits of a variant's file; see ``quality.GivesLogits``."""
        texts, found = self._folder / "windows.bin", self._folder / "logits.bin"
        windows.astype(np.int32).tofile(texts)
        numbers = (len(self._places.cpus), *windows.shape)
        run_step(
            [self._program("paceline-logits"), self._file(variant), *map(str, numbers), texts,
             found],
            log=self._folder / "setup.log",
        )  # fmt: skip
        logits = np.memmap(found, dtype=np.float32, mode="r")
        return logits.reshape(windows.size, -1)

    def _program(self, name: str) -> Path:
        return self._build_folder / "bin" / name

    def _file(self, variant: str) -> Path:
        # the published file, whose weights are not rounded again
        if f".{variant}." in self._places.model.name:
            return self._places.model
        return self._folder / f"{self._places.model.stem}.{variant}.gguf"

    def worker(self, variant: str, *, prefix_caching: bool) -> Command:
        program = self._program("llama-batched-bench")
        arguments = (program, self._file(variant), variant, len(self._places.cpus), self._source)
        return Command((sys.executable, "-m", __name__, *map(str, arguments)))

    def server(self, port: int) -> Command:
        threads = str(len(self._places.cpus))
        return Command(
            (str(self._program("llama-server")), "-m", str(self._file("Q4_1")), "-rtr",
             "--host", "127.0.0.1", "--port", str(port), "-t", threads, "-tb", threads,
             "-np", str(_SLOTS), "-c", str(_SLOTS * _SLOT_TOKENS)),
        )  # fmt: skip


def _flags(cpuinfo: str, level: Level | None) -> list[str]:
    """Return CMake options, see ``cpu_flags``, one of which has another name here. Its own for
    AVX-512 leaves out extensions that its source takes for granted then: without them it does not
    compile."""
    flags = [flag.replace("AVX_VNNI", "AVXVNNI") for flag in cpu_flags(cpuinfo, level)]
    if "-DGGML_AVX512=ON" in flags:
        more = " ".join(f"-m{name}" for name in _EXTENSIONS if f" {name}" in cpuinfo)
        flags += [f"-DCMAKE_{language}_FLAGS={more}" for language in ("C", "CXX")]
    return flags


class _Bench:
    """The worker's end: each job is a run of the benchmark."""

    def __init__(self, program: str, model: str, kind: str, threads: str, source: str) -> None:
        self._command = [program, "-m", model, "-rtr", "-t", threads, "-tb", threads]
        commit = subprocess.run(
            ["git", "-C", source, "rev-parse", "--short", "HEAD"],
            capture_output=True, check=False, text=True,
        )  # fmt: skip
        self.about = {
            "version": commit.stdout.strip() or "unknown",
            "weights": Path(model).name,
            "precision": f"{kind}/float16",
        }

    def run(self, job: Job) -> Done:
        if job.shared:
            raise RuntimeError("its benchmark has no prompts of which only the start is shared")
        count, length = len(job.prompts), len(job.prompts[0])
        # the prompt's last position gives the first token
        steps = job.max_tokens - 1
        context = count * (length + job.max_tokens)
        done = subprocess.run(
            [*self._command, "-c", str(max(512, -(-context // 256) * 256)), "-b", str(_BATCH),
             "-npp", str(length), "-ntg", str(steps), "-npl", str(count)],
            # it writes a log where it runs
            capture_output=True, check=True, cwd=Path(self._command[0]).parent, text=True,
        )  # fmt: skip
        return Done(seconds_of(done.stdout + done.stderr), count * job.max_tokens)


def seconds_of(output: str) -> float:
    """Return the seconds of the one row of the benchmark's table. Raises RuntimeError."""
    for line in output.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        # PP, TG, B, N_KV, T_PP, S_PP, T_TG, S_TG, T, S
        if len(cells) == 10 and cells[0].isdecimal():
            return float(cells[4]) + float(cells[6])
    raise RuntimeError(f"no row in the benchmark's table: {output[-500:]}")


def _load() -> tuple[_Bench, dict[str, Any]]:
    bench = _Bench(*sys.argv[1:])
    return bench, bench.about


if __name__ == "__main__":
    serve(_load)
