"""transformers' ``generate()``, in bfloat16: all requests of a row as one padded batch.

The prompts of a row are equally long, so there is no padding in fact.
"""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.common.processes import Command, Unavailable
from benchmarks.common.setup import Places, make_venv, torch_options
from benchmarks.peers.jobs import Done, Job, serve

__all__ = ["Transformers"]

_PACKAGES: Final = ("torch==2.13.0", "transformers>=5.17", "numpy", "safetensors")


class Transformers:
    """The ``Peer``."""

    name = "transformers"
    variants: tuple[str, ...] = ("bfloat16",)
    served = ""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._folder = places.folder(self.name)

    def setup(self) -> None:
        from benchmarks.peers.hf_folder import write_hf_folder

        write_hf_folder(self._places.model, self._places.hf_folder)
        make_venv(self._folder, _PACKAGES, options=torch_options())

    def worker(self, variant: str, *, prefix_caching: bool) -> Command:
        # generate() has no cache across requests
        python = self._folder / "venv" / "bin" / "python"
        arguments = (str(self._places.hf_folder), variant, str(len(self._places.cpus)))
        return Command((str(python), "-m", __name__, *arguments), (("HF_HUB_OFFLINE", "1"),))

    def server(self, port: int) -> Command:
        raise Unavailable("measured as a library, through generate()")


class _Model:
    """The worker's end."""

    def __init__(self, folder: str, dtype: str, threads: str) -> None:
        self._torch: Any = importlib.import_module("torch")
        transformers: Any = importlib.import_module("transformers")
        self._torch.set_num_threads(int(threads))
        transformers.utils.logging.set_verbosity_error()
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(self._torch, dtype)
        ).eval()
        self.about = {
            "version": transformers.__version__,
            "weights": Path(folder).name,
            "precision": f"{dtype}/{dtype}",
        }

    def run(self, job: Job) -> Done:
        prompts = self._torch.tensor(job.prompts)
        started = time.perf_counter()
        answer = self._model.generate(
            prompts,
            attention_mask=self._torch.ones_like(prompts),
            do_sample=False,
            min_new_tokens=job.max_tokens,
            max_new_tokens=job.max_tokens,
            pad_token_id=0,
        )
        seconds = time.perf_counter() - started
        return Done(seconds, int(answer[:, prompts.shape[1] :].numel()))


def _load() -> tuple[_Model, dict[str, Any]]:
    model = _Model(*sys.argv[1:])
    return model, model.about


if __name__ == "__main__":
    serve(_load)
