"""llama.cpp, built from the source in ``llama-cpp-python``, driven through its binding.

The build has the vector instructions this processor lists, or those of a level that limits all
engines (in a folder of its own), but not AMX: it uses that if the processor lists it, and crashes
where the system has not enabled it. The weights are quantised again by its own tool, since its fast
kernels are made for those formats. The prompts of a row go in together and decoding takes one token
of every sequence per step. The tokens decoded are random, as in llama.cpp's own batched benchmark:
no sampling in Python counts against it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import random
import shutil
import sys
import tarfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.processes import Command, Unavailable
from benchmarks.common.setup import Places, make_venv, run_step
from benchmarks.peers.jobs import Done, Job, serve
from benchmarks.peers.levels import Level

__all__ = ["LlamaCpp", "cpu_flags"]

_VERSION: Final = "0.3.36"
# packages that the binding imports
_PACKAGES: Final = ("numpy", "typing-extensions", "diskcache", "jinja2")
_TARGETS: Final = ("llama", "llama-quantize", "llama-imatrix", "llama-server")
# CMake option by the name in /proc/cpuinfo
_CPU_OPTIONS: Final = {
    "avx": "GGML_AVX",
    "avx2": "GGML_AVX2",
    "fma": "GGML_FMA",
    "f16c": "GGML_F16C",
    "bmi2": "GGML_BMI2",
    "avx512f": "GGML_AVX512",
    "avx512vbmi": "GGML_AVX512_VBMI",
    "avx512_vnni": "GGML_AVX512_VNNI",
    "avx512_bf16": "GGML_AVX512_BF16",
    "avx_vnni": "GGML_AVX_VNNI",
}
_BATCH: Final = 2048
# llama.cpp's default
_UBATCH: Final = "512"
# tokens, as llama-batched-bench
_WARM_UP: Final = 16
# slots of the server, and tokens of each, enough for the longest request of the online load
_SLOTS: Final = 16
_SLOT_TOKENS: Final = 2048


def cpu_flags(cpuinfo: str, level: Level | None = None) -> list[str]:
    """Return CMake options for a processor, from the text of /proc/cpuinfo, no better than
    ``level``; AMX is always off."""
    words: set[str] = set()
    for line in cpuinfo.splitlines():
        if line.startswith("flags"):
            words = set(line.split(":", 1)[1].split())
            break
    if level is not None:
        words &= level.flags
    options = [
        f"-D{option}={'ON' if flag in words else 'OFF'}" for flag, option in _CPU_OPTIONS.items()
    ]
    amx = [f"-DGGML_AMX_{kind}=OFF" for kind in ("TILE", "INT8", "BF16")]
    return ["-DGGML_NATIVE=OFF", *options, *amx]


class LlamaCpp:
    """The ``Peer``. Variants are quantisations, with "@" and the most tokens that it computes at
    once if that is not its default (``n_ubatch``, 512)."""

    name = "llama.cpp"
    variants: tuple[str, ...] = ("Q4_0", "Q4_0@2048", "Q8_0")
    served = "Q4_0/float16"

    def __init__(self, places: Places, level: Level | None = None) -> None:
        self._places = places
        self._level = level
        self._folder = places.folder(self.name)
        self._source = self._folder / f"llama_cpp_python-{_VERSION}"
        self._build_folder = self._folder / (f"build-{level.name}" if level else "build")
        self._binaries = self._build_folder / "bin"

    def setup(self) -> None:
        self.build()
        for kind in dict.fromkeys(variant.partition("@")[0] for variant in self.variants):
            self._quantise(kind)

    def build(self) -> None:
        """Build binding and programs, once. Raises Unavailable."""
        make_venv(self._folder, _PACKAGES)
        self._fetch()
        self._build()

    @property
    def quantiser(self) -> Path:
        """Path of the program that makes files of other kinds, once it is built."""
        return self._binaries / "llama-quantize"

    def _fetch(self) -> None:
        if (self._source / "vendor").is_dir():
            return
        archive = self._folder / f"llama_cpp_python-{_VERSION}.tar.gz"
        if not archive.is_file():
            python = self._folder / "venv" / "bin" / "python"
            run_step(
                [python, "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-python",
                 "-d", self._folder, f"llama-cpp-python=={_VERSION}"],
                log=self._folder / "setup.log",
            )  # fmt: skip
        with tarfile.open(archive) as files:
            files.extractall(self._folder, filter="data")

    def _build(self) -> None:
        """Configure and build; an interrupted build is continued."""
        stamp = self._build_folder / ".built"
        flags = cpu_flags(Path("/proc/cpuinfo").read_text(), self._level)
        # an earlier build may lack a target
        wanted = "\n".join([*flags, *_TARGETS])
        if stamp.is_file() and stamp.read_text() == wanted:
            return
        log = self._folder / "setup.log"
        for tool in ("cmake", "c++"):
            if shutil.which(tool) is None:
                raise Unavailable(f"building it takes {tool}, which is not installed")
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        run_step(
            ["cmake", "-S", self._source / "vendor" / "llama.cpp", "-B", self._build_folder,
             *generator, "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", *flags,
             "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_UI=OFF",
             "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF"],
            log=log,
        )  # fmt: skip
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(len(self._places.cpus)))
        run_step(
            ["cmake", "--build", self._build_folder, "--parallel", jobs, "--target", *_TARGETS],
            log=log,
        )
        stamp.write_text(wanted)

    def _quantised(self, variant: str) -> Path:
        return self._folder / f"{self._places.model.stem}.{variant}.gguf"

    def _quantise(self, variant: str) -> None:
        target = self._quantised(variant)
        if target.is_file():
            return
        partial = target.with_suffix(".part")
        run_step(
            [self.quantiser, "--allow-requantize", "--pure",
             self._places.model, partial, variant],
            log=self._folder / "setup.log",
        )  # fmt: skip
        partial.rename(target)

    def worker(self, variant: str, *, prefix_caching: bool) -> Command:
        kind, _, tokens = variant.partition("@")
        return self.command(self._quantised(kind), kind, tokens)

    def command(self, model: Path, kind: str, tokens: str = "") -> Command:
        """Return the command of a worker with ``model``."""
        python = self._folder / "venv" / "bin" / "python"
        arguments = (str(model), kind, tokens or _UBATCH, str(len(self._places.cpus)))
        return Command(
            (str(python), "-m", __name__, str(self._source), *arguments),
            (("LLAMA_CPP_LIB_PATH", str(self._binaries)),),
        )

    def logits(self, model: Path, windows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the logits of every token of some texts, [texts * length, vocab], given token ids
        [texts, length]; the array is backed by a file of this peer's folder. Raises Unavailable."""
        texts, found = self._folder / "windows.npy", self._folder / "logits.npy"
        np.save(texts, windows)
        arguments = (self._source, model, len(self._places.cpus), texts, found)
        python = self._folder / "venv" / "bin" / "python"
        run_step(
            [python, "-m", "benchmarks.peers.llama_cpp_logits", *map(str, arguments)],
            log=self._folder / "setup.log",
            env={"LLAMA_CPP_LIB_PATH": str(self._binaries)},
        )
        logits: NDArray[np.float32] = np.load(found, mmap_mode="r")
        return logits

    def variant_logits(self, variant: str, windows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the logits of a variant's file; see ``quality.GivesLogits``."""
        return self.logits(self._quantised(variant.partition("@")[0]), windows)

    def round_with_importance(self, model: Path, kind: str, text: str, target: Path) -> None:
        """Write ``model`` in a kind by llama.cpp's own tools: the layers' matrices in the kind, or
        as a mixture's recipe has it (``Q4_K_M``), by an importance matrix of ``text``, whose
        special tokens are read as such, and the embedding and head in Q8_0. Raises Unavailable."""
        log, matrix = self._folder / "setup.log", self._folder / "importance.gguf"
        words = self._folder / "importance.txt"
        words.write_text(text, encoding="utf-8")
        threads = str(len(self._places.cpus))
        run_step(
            [self._binaries / "llama-imatrix", "-m", model, "-f", words, "-o", matrix,
             "-t", threads, "-c", "512", "--no-ppl", "--parse-special"],
            log=log,
        )  # fmt: skip
        run_step(
            [self.quantiser, *([] if kind.endswith("_M") else ["--pure"]),
             "--imatrix", matrix, "--token-embedding-type", "q8_0",
             "--output-tensor-type", "q8_0", model, target, kind, threads],
            log=log,
        )  # fmt: skip

    def server(self, port: int) -> Command:
        return self.server_of(self._quantised("Q4_0"), port)

    def server_of(self, model: Path, port: int) -> Command:
        """Return the command of its server with ``model``."""
        threads = str(len(self._places.cpus))
        return Command(
            (str(self._binaries / "llama-server"), "-m", str(model),
             "--host", "127.0.0.1", "--port", str(port), "-t", threads, "-tb", threads,
             "-np", str(_SLOTS), "-c", str(_SLOTS * _SLOT_TOKENS), "--no-webui"),
        )  # fmt: skip


class _Model:
    """The worker's end. A context is made for every job and warmed up, which is not timed."""

    def __init__(self, model: str, kind: str, tokens: str, threads: str) -> None:
        self._api: Any = importlib.import_module("llama_cpp.llama_cpp")
        self._numpy: Any = importlib.import_module("numpy")
        self._threads = int(threads)
        self._tokens = int(tokens)
        self._api.llama_backend_init()
        parameters = self._api.llama_model_default_params()
        self._model = self._api.llama_model_load_from_file(model.encode(), parameters)
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {model}")
        vocabulary = self._api.llama_model_get_vocab(self._model)
        self._vocab_size = self._api.llama_vocab_n_tokens(vocabulary)
        self._random = random.Random(2)
        self._batch = self._api.llama_batch_init(_BATCH, 0, 1)
        self.about = {
            "version": f"{_VERSION} (llama-cpp-python)",
            "weights": Path(model).name,
            # its KV cache is in 16 bits by default
            "precision": f"{kind}/float16",
            "n_ubatch": int(tokens),
            "system": self._api.llama_print_system_info().decode(),
        }

    def _context(self, sequences: int, length: int) -> Any:
        parameters = self._api.llama_context_default_params()
        parameters.n_ctx = sequences * (-(-length // 256) * 256)
        parameters.n_seq_max = sequences
        parameters.n_batch = _BATCH
        parameters.n_ubatch = self._tokens
        parameters.n_threads = parameters.n_threads_batch = self._threads
        context = self._api.llama_init_from_model(self._model, parameters)
        if not context:
            raise RuntimeError(f"no context of {sequences} x {length} tokens")
        return context

    def _decode(self, context: Any, rows: list[tuple[int, int, int, bool]]) -> None:
        """Decode rows of (token, position, sequence, whether its logits are wanted)."""
        for first in range(0, len(rows), _BATCH):
            part = rows[first : first + _BATCH]
            batch = self._batch
            batch.n_tokens = len(part)
            for i, (token, position, sequence, logits) in enumerate(part):
                batch.token[i] = token
                batch.pos[i] = position
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = sequence
                batch.logits[i] = logits
            status = self._api.llama_decode(context, batch)
            if status:
                raise RuntimeError(f"llama_decode answered {status}")

    def run(self, job: Job) -> Done:
        length = len(job.prompts[0]) + job.max_tokens
        context = self._context(len(job.prompts), length)
        try:
            # warms the context up, as llama.cpp's own benchmark does
            self._decode(context, [(token, token, 0, True) for token in range(_WARM_UP)])
            self._api.llama_memory_clear(self._api.llama_get_memory(context), True)
            self._api.llama_synchronize(context)
            return self._timed(context, job)
        finally:
            self._api.llama_free(context)

    def _timed(self, context: Any, job: Job) -> Done:
        started = time.perf_counter()
        if job.shared:
            shared = job.prompts[0][: job.shared]
            self._decode(context, [(t, i, 0, False) for i, t in enumerate(shared)])
            memory = self._api.llama_get_memory(context)
            for sequence in range(1, len(job.prompts)):
                self._api.llama_memory_seq_cp(memory, 0, sequence, -1, -1)
        rows = [
            (token, place, sequence, place == len(prompt) - 1)
            for sequence, prompt in enumerate(job.prompts)
            for place, token in enumerate(prompt)
            if place >= job.shared
        ]
        self._decode(context, rows)
        # the prompt's last position has given the first token
        place = len(job.prompts[0])
        for step in range(job.max_tokens - 1):
            tokens = [self._random.randrange(self._vocab_size) for _ in job.prompts]
            self._decode(context, [(t, place + step, s, True) for s, t in enumerate(tokens)])
        self._api.llama_synchronize(context)
        return Done(time.perf_counter() - started, job.max_tokens * len(job.prompts))


def _load() -> tuple[_Model, dict[str, Any]]:
    source, *rest = sys.argv[1:]
    sys.path.insert(0, source)
    # turns its log off, which is long and of no use here
    callback_type = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
    with contextlib.suppress(ImportError):
        api: Any = importlib.import_module("llama_cpp.llama_cpp")
        _load.quiet = callback_type(lambda level, text, data: None)  # type: ignore[attr-defined]
        api.llama_log_set(_load.quiet, None)  # type: ignore[attr-defined]
    model = _Model(*rest)
    return model, model.about


if __name__ == "__main__":
    serve(_load)
