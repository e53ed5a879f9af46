"""Paceline itself: the engine in the worker's process, without HTTP, and ``paceline serve``.

Its settings are its own defaults but for precision, the number of threads and the KV cache's size,
like the other engines', and draft tokens are off: prompts of random ids have answers that repeat
themselves, so drafts would gain more than with real texts, and no other engine uses them.
``benchmarks.speculation`` measures their gain. The library's worker has no second process, and
does not turn tokens into text.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.common.processes import Command, Unavailable
from benchmarks.common.setup import Places
from benchmarks.peers.jobs import Done, Job, serve

if TYPE_CHECKING:
    from paceline.engine.core import EngineCore

__all__ = ["Paceline"]

_BLOCK: Final = 16
# tokens of all requests of the largest row at once, and of the longest request
_POOL_TOKENS: Final = 80_000
_MAX_LENGTH: Final = 2304
_NO_DRAFTS: Final = {"method": "off"}


class Paceline:
    """The ``Peer``.

    Args:
        formats: the variants: "weights/KV cache", as for ``--dtype`` and ``--kv-dtype``;
            "auto/auto" is the default of ``paceline serve``.
        prefix_caching: on, as by default, in all rows; or off in all.
        served: the formats of the server.
    """

    def __init__(
        self,
        places: Places,
        name: str,
        formats: tuple[str, ...],
        *,
        prefix_caching: bool = True,
        served: str = "auto/auto",
    ) -> None:
        self.name = name
        self.served = served
        self._prefix_caching = prefix_caching
        self.variants = formats
        self._places = places

    def setup(self) -> None:
        from paceline.backends.native import unavailable_reason

        reason = unavailable_reason()
        if reason is not None:
            raise Unavailable(f"--compute native: {reason}")

    def worker(self, variant: str, *, prefix_caching: bool) -> Command:
        return self.command(self._places.model, variant)

    def command(self, model: Path, formats: str) -> Command:
        """Return the command of a worker with ``model``."""
        arguments = (str(model), formats, str(int(self._prefix_caching)))
        return Command((sys.executable, "-m", __name__, *arguments, str(len(self._places.cpus))))

    def server(self, port: int) -> Command:
        told: tuple[str, ...] = ()
        if self.served != "auto/auto":
            weights, kv = self.served.split("/")
            told = ("--dtype", weights, "--kv-dtype", kv)
        return Command(
            (sys.executable, "-m", "paceline.cli.main", "serve", str(self._places.model),
             "--host", "127.0.0.1", "--port", str(port),
             "--threads", str(len(self._places.cpus)),
             "--speculative-config", json.dumps(_NO_DRAFTS), *told),
        )  # fmt: skip


class _Engine:
    """The worker's end: the core, stepped by this thread."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._count = 0

    def run(self, job: Job) -> Done:
        from paceline.core.request import Request, RequestSpec
        from paceline.core.sampling_params import SamplingParams

        sampling = SamplingParams(max_tokens=job.max_tokens, temperature=0.0)
        started = time.perf_counter()
        for prompt in job.prompts:
            self._core.add_request(
                Request(
                    RequestSpec(
                        request_id=str(self._count),
                        prompt_token_ids=prompt,
                        sampling=sampling,
                        arrival_time=time.monotonic(),
                    )
                )
            )
            self._count += 1
        tokens = 0
        while self._core.has_work:
            for update in self._core.step():
                if update.error is not None:
                    raise RuntimeError(f"request {update.request_id}: {update.error}")
                tokens += len(update.new_token_ids)
        return Done(time.perf_counter() - started, tokens)


def _load() -> tuple[_Engine, dict[str, Any]]:
    from paceline import __version__
    from paceline.cli.flags.settings import EngineSettings
    from paceline.cli.wiring import build_core

    model, formats, prefix_caching, threads = sys.argv[1:]
    dtype, kv_dtype = formats.split("/")
    core, info = build_core(
        EngineSettings.of(
            model_name="model",
            model_path=model,
            compute="native",
            dtype=dtype,
            kv_dtype=kv_dtype,
            block_size=_BLOCK,
            num_blocks=_POOL_TOKENS // _BLOCK,
            max_model_len=_MAX_LENGTH,
            enable_prefix_caching=bool(int(prefix_caching)),
            threads=int(threads),
            speculative_config=_NO_DRAFTS,
        )
    )
    about = {"version": __version__, "precision": f"{info.dtype}/{info.kv_dtype}"}
    return _Engine(core), about | {"why": info.choice}


if __name__ == "__main__":
    serve(_load)
