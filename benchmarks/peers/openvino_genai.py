"""OpenVINO GenAI's ContinuousBatchingPipeline, which reads the GGUF file itself.

Its settings are its own defaults but for the number of threads, a KV cache large enough for every
row, and the tokens per step: 2048 as for the other engines, which is good for prompts, or its
default of 256. It has no HTTP server of its own.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common.processes import Command, Unavailable
from benchmarks.common.setup import Places, make_venv
from benchmarks.peers.jobs import Done, Job, serve

__all__ = ["OpenVino"]

_PACKAGE = "openvino-genai>=2026.4"
_CACHE_GB = 3
# set by ``levels.impose``
_LIMIT = "ONEDNN_MAX_CPU_ISA"
# reported properties of its CPU device, at their defaults
_PROPERTIES = (
    "INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION", "DYNAMIC_QUANTIZATION_GROUP_SIZE",
    "EXECUTION_MODE_HINT", "ENABLE_CPU_PINNING", "ENABLE_HYPER_THREADING",
)  # fmt: skip


class OpenVino:
    """The ``Peer``. A variant is the most tokens per step; a quick run has the first, which is the
    better one for prompts (docs/lab-log/) and the same for few rows."""

    name = "openvino-genai"
    variants: tuple[str, ...] = ("2048", "256")
    served = ""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._folder = places.folder(self.name)

    def setup(self) -> None:
        make_venv(self._folder, [_PACKAGE])

    def worker(self, variant: str, *, prefix_caching: bool) -> Command:
        python = self._folder / "venv" / "bin" / "python"
        arguments = (variant, str(int(prefix_caching)), str(len(self._places.cpus)))
        return Command((str(python), "-m", __name__, str(self._places.model), *arguments))

    def server(self, port: int) -> Command:
        raise Unavailable("a library: it has no HTTP server of its own")


class _Pipeline:
    """The worker's end."""

    def __init__(self, model: str, max_tokens: str, prefix_caching: str, threads: str) -> None:
        genai: Any = importlib.import_module("openvino_genai")
        self._openvino: Any = importlib.import_module("openvino")
        self._numpy: Any = importlib.import_module("numpy")
        config = genai.SchedulerConfig()
        config.cache_size = _CACHE_GB
        config.max_num_batched_tokens = int(max_tokens)
        config.enable_prefix_caching = bool(int(prefix_caching))
        self._genai = genai
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": int(threads)}
        # It decides by the processor whether to multiply in bfloat16 and to quantise activations,
        # finds no such kernel below oneDNN's limit and fails. A processor of these levels has
        # float32, and one without VNNI no quantised activations.
        limit = os.environ.get(_LIMIT, "")
        if limit.startswith("AVX2"):
            properties["INFERENCE_PRECISION_HINT"] = "f32"
        if limit == "AVX2":
            properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 0
        self._pipeline = genai.ContinuousBatchingPipeline(Path(model), config, "CPU", properties)
        known = self._openvino.Core()
        told = {name: str(known.get_property("CPU", name)) for name in _PROPERTIES}
        told |= {name: str(value) for name, value in properties.items() if name in told}
        multiplied, kept = (told[name] for name in _PROPERTIES[:2])
        self.about = {
            "version": importlib.import_module("importlib.metadata").version("openvino-genai"),
            "weights": Path(model).name,
            # weights are in the file's format, and multiplied in another if they are decompressed
            "precision": f"file in {multiplied}/{kept}",
            "properties": told,
        }
        self._count = 0

    def run(self, job: Job) -> Done:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = job.max_tokens
        config.ignore_eos = True
        config.do_sample = False
        prompts = [
            self._openvino.Tensor(self._numpy.array([prompt], dtype="int64"))
            for prompt in job.prompts
        ]
        started = time.perf_counter()
        handles = []
        for prompt in prompts:
            handles.append(self._pipeline.add_request(self._count, prompt, config))
            self._count += 1
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        seconds = time.perf_counter() - started
        tokens = sum(len(out.generated_ids) for handle in handles for out in handle.read_all())
        return Done(seconds, tokens)


def _load() -> tuple[_Pipeline, dict[str, Any]]:
    pipeline = _Pipeline(*sys.argv[1:])
    return pipeline, pipeline.about


if __name__ == "__main__":
    serve(_load)
