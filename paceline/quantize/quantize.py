"""Quantizing of a model: layers are rounded one after the other, and a killed run goes on.

Next to the new file, in FILE.parts, lie the layers that are done and both streams of the text
behind the last of them. They count for the same source, text and choices alone, and go once the
file is whole.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from zipfile import BadZipFile

import numpy as np
import torch

from paceline.backends.machine.cpu import choose_threads
from paceline.checkpoints.gguf.checkpoint import GGUFCheckpoint
from paceline.checkpoints.gguf.container import GGUFType
from paceline.checkpoints.hf.checkpoint import HFCheckpoint
from paceline.checkpoints.model.checkpoint import Checkpoint
from paceline.checkpoints.open import open_checkpoint
from paceline.errors import ConfigError
from paceline.quantize.folder import FolderSource
from paceline.quantize.layers import LayerRounding, RoundedTensor
from paceline.quantize.mixed import allocate, check_size, group_of, losses, share_of
from paceline.quantize.output import GGUFOutput, bytes_of, matrices_of, refuse_few_bits
from paceline.quantize.source import GGUFSource, Source
from paceline.quantize.version import VERSION

__all__ = ["Progress", "Quantized", "quantize"]

# what the parts of a run depend on, in their folder
_JOB: Final = "job.json"

# layers done, all layers, error of the stream behind the last one as a share
Progress = Callable[[int, int, float], None]
# layers done, all layers
Measured = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Quantized:
    """Outcome of a run."""

    seconds: float
    bytes_before: int
    bytes_after: int
    # matrices whose rows are no whole blocks, which keep their bits
    kept: tuple[str, ...]
    # layers that an earlier run had done
    resumed: int
    # numbers of matrices
    kinds: Mapping[GGUFType, int]
    # bytes of the layers' matrices over those in Q8_0
    size: float


def quantize(
    source: Path,
    target: Path,
    windows: torch.Tensor,
    *,
    kind: GGUFType = GGUFType.Q4_1,
    size: float | None = None,
    threads: int | None = None,
    progress: Progress = lambda done, layers, lost: None,
    measured: Measured = lambda done, layers: None,
) -> Quantized:
    """Write a GGUF file with the layers' matrices in few bits; see the package.

    Args:
        source: a GGUF file or a folder of safetensors, in 16 or 32 bits.
        windows: token ids of the calibration text, [pieces, length]; see ``calibration_windows``.
        kind: of the layers' matrices, Q4_1 or Q5_1.
        size: bytes of the layers' matrices over those in Q8_0 at most, with kinds by what each
            matrix costs; None: all have ``kind``.
        threads: of the processor; None: as many as there are.
        measured: is called while costs are measured, with the layers done and all.

    Raises:
        ConfigError: the source has fewer bits already, cannot be written as GGUF, or the disk is
            full.
        CheckpointError: the source cannot be read, or has values that are not finite.
    """
    began = time.monotonic()
    torch.set_num_threads(choose_threads(threads))
    if size is not None:
        check_size(size)
    checkpoint = open_checkpoint(source)
    names = matrices_of(checkpoint)
    if not names:
        raise ConfigError(f"{source}: no matrix has rows of whole blocks, of 32 weights each")
    model = _source_of(checkpoint)
    refuse_few_bits(checkpoint, names)
    parts = _Parts(target.with_name(f"{target.name}.parts"), _job(model, kind, size, windows))
    weights = {name: math.prod(checkpoint.tensor_shape(name)) for name in names}
    try:
        with parts.locked():
            if size is None:
                kinds = dict.fromkeys(names, kind)
            else:
                kinds = parts.kinds(
                    lambda: losses(checkpoint, windows, names, measured), weights, size
                )
            output = GGUFOutput(model, kinds)
            blocks = sum(bytes_of((weights[name],), of) for name, of in kinds.items())
            # both streams as they are, and as they are written behind the next layer
            streams = 4 * 4 * windows.numel() * checkpoint.config.hidden_size
            parts.check_room(target, output.size() + blocks + streams)
            resumed = _round_layers(checkpoint, windows, kinds, parts, progress)
            output.write(target, parts.tensor)
            parts.remove()
    except OSError as error:
        what = f"{error.filename or target} cannot be read or written"
        raise ConfigError(f"{what}: {error.strerror or error}") from None
    matrices = [name for name in checkpoint.tensor_names() if name.endswith("_proj.weight")]
    return Quantized(
        seconds=time.monotonic() - began,
        bytes_before=sum(path.stat().st_size for path in model.files()),
        bytes_after=target.stat().st_size,
        kept=tuple(name for name in matrices if name not in kinds),
        resumed=resumed,
        kinds=Counter(kinds.values()),
        size=share_of(kinds, weights),
    )


def _source_of(checkpoint: Checkpoint) -> Source:
    if isinstance(checkpoint, GGUFCheckpoint):
        return GGUFSource(checkpoint)
    if isinstance(checkpoint, HFCheckpoint):
        return FolderSource(checkpoint)
    raise TypeError(f"no source of {type(checkpoint).__name__}")


def _round_layers(
    checkpoint: Checkpoint,
    windows: torch.Tensor,
    kinds: Mapping[str, GGUFType],
    parts: _Parts,
    progress: Progress,
) -> int:
    """Round the layers that are not done, and return how many were."""
    rounding = LayerRounding(checkpoint, windows, kinds)
    layers, done = checkpoint.config.num_hidden_layers, parts.restore(rounding, kinds)
    for index in range(done, layers):
        found, lost = rounding.round_layer(index)
        parts.save(index, found, rounding)
        progress(index + 1, layers, lost)
    return done


def _job(
    source: Source, kind: GGUFType, size: float | None, windows: torch.Tensor
) -> dict[str, Any]:
    """Return what the parts of a run depend on."""
    files = [(path.resolve(), path.stat()) for path in source.files()]
    return {
        "version": VERSION,
        "source": [[str(path), about.st_size, about.st_mtime_ns] for path, about in files],
        "kind": kind.name,
        "size": size,
        "text": hashlib.sha256(windows.numpy().tobytes()).hexdigest(),
    }


class _Parts:
    """The folder of what is done."""

    def __init__(self, folder: Path, job: dict[str, Any]) -> None:
        self._folder, self._job = folder, job
        # the layer that was read last, and its tensors
        self._read: tuple[str, dict[str, RoundedTensor]] = ("", {})
        # what groups of matrices cost; none where all have one kind
        self._costs: dict[str, float] = {}

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder, and keep other processes from it meanwhile. Raises ConfigError where one
        has it, or where it is of no run."""
        self._is_same()
        self._folder.mkdir(parents=True, exist_ok=True)
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            # there are file systems without locks
            with suppress(OSError):
                try:
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise ConfigError(
                        f"{self._folder} is being written by another process: wait for it, or name "
                        "another output"
                    ) from None
            yield
        finally:
            os.close(folder)

    def check_room(self, target: Path, needed: int) -> None:
        """Raise ConfigError where the disk has no room for the parts and ``target``, hours before
        it would be full."""
        taken = sum(path.stat().st_size for path in self._folder.iterdir())
        free = shutil.disk_usage(self._folder).free + taken
        if needed > free:
            raise ConfigError(
                f"{target} and {self._folder.name} need {needed / 1e6:,.1f} MB of disk together, "
                f"and {free / 1e6:,.1f} MB are free"
            )

    def kinds(
        self, measure: Callable[[], dict[str, float]], weights: Mapping[str, int], size: float
    ) -> dict[str, GGUFType]:
        """Return the kind of each matrix by what groups cost, which an earlier run of the same job
        may have measured."""
        costs = self._measured() or measure()
        self._costs = costs
        if not self._is_same():
            self._begin()
        self._save_costs()
        groups: Counter[str] = Counter()
        for name, count in weights.items():
            groups[group_of(name)] += count
        chosen = allocate(costs, groups, size)
        return {name: chosen[group_of(name)] for name in weights}

    def _measured(self) -> dict[str, float]:
        try:
            if self._is_same():
                found: dict[str, float] = json.loads((self._folder / "costs.json").read_text())
                return found
        except (OSError, ValueError):
            # none, or one that was cut off as it was written
            pass
        return {}

    def _is_same(self) -> bool:
        """Whether the folder is of this job. Raises ConfigError where it is of none."""
        job = self._folder / _JOB
        if self._folder.exists() and not job.exists() and any(self._folder.iterdir()):
            raise ConfigError(
                f"{self._folder} is there and holds no parts of an earlier run: move it away, or "
                "name another output"
            )
        try:
            return bool(json.loads(job.read_text()) == self._job)
        except (OSError, ValueError):
            return False

    def _begin(self) -> None:
        """Begin the folder again, without what another job left."""
        self._empty()
        (self._folder / _JOB).write_text(json.dumps(self._job))
        self._save_costs()

    def _save_costs(self) -> None:
        if self._costs:
            (self._folder / "costs.json").write_text(json.dumps(self._costs))

    def restore(self, rounding: LayerRounding, kinds: Mapping[str, GGUFType]) -> int:
        """Give ``rounding`` the streams of an earlier run of the same job, and return how many
        layers are done; remove what is left of another job, or has other ``kinds``."""
        try:
            if self._is_same():
                with open(self._folder / "streams.npz", "rb") as file, np.load(file) as streams:
                    exact, rounded = streams["exact"], streams["rounded"]
                    done = int(streams["done"])
                for layer in range(done):
                    self._check_kinds(layer, kinds)
                if exact.shape == rounded.shape == tuple(rounding.exact.shape):
                    rounding.exact, rounding.rounded = map(torch.from_numpy, (exact, rounded))
                    return done
        except (OSError, ValueError, KeyError, BadZipFile):
            # none, or one that was cut off as it was written
            pass
        self._begin()
        return 0

    def _check_kinds(self, layer: int, kinds: Mapping[str, GGUFType]) -> None:
        """Raise ValueError where a layer that is done is not what is asked for now."""
        start = f"model.layers.{layer}."
        wanted = {name: kind for name, kind in kinds.items() if name.startswith(start)}
        if {name: tensor.kind for name, tensor in self._layer(str(layer)).items()} != wanted:
            raise ValueError(f"layer {layer} has other kinds")

    def save(self, index: int, found: dict[str, RoundedTensor], rounding: LayerRounding) -> None:
        """Keep a layer. Raises OSError."""
        arrays = {f"{name}:{tensor.kind.name}": tensor.blocks for name, tensor in found.items()}
        self._write(f"layer-{index}.npz", arrays)
        self._write(
            "streams.npz",
            {
                "exact": rounding.exact.numpy(),
                "rounded": rounding.rounded.numpy(),
                "done": np.array(index + 1),
            },
        )

    def tensor(self, name: str) -> RoundedTensor:
        return self._layer(name.split(".")[2])[name]

    def _layer(self, layer: str) -> dict[str, RoundedTensor]:
        if self._read[0] != layer:
            path = self._folder / f"layer-{layer}.npz"
            with open(path, "rb") as file, np.load(file) as arrays:
                named = {tuple(key.rsplit(":", 1)): arrays[key] for key in arrays.files}
            tensors = {name: RoundedTensor(GGUFType[kind], a) for (name, kind), a in named.items()}
            self._read = layer, tensors
        return self._read[1]

    def remove(self) -> None:
        self._empty()
        self._folder.rmdir()

    def _empty(self) -> None:
        self._read = "", {}
        # the last one says that the folder is ours, should this be the end of the process
        for path in sorted(self._folder.iterdir(), key=lambda path: path.name == _JOB):
            path.unlink()

    def _write(self, name: str, arrays: dict[str, Any]) -> None:
        partial = self._folder / f"{name}.partial"
        with partial.open("wb") as file:
            np.savez(file, **arrays)
            os.fsync(file.fileno())
        partial.replace(self._folder / name)
