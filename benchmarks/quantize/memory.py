"""Peak memory of ``paceline quantize`` on a model of 1.7B parameters, of which one layer is enough:
layers are read, rounded and forgotten one at a time.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import gguf
import numpy as np

from benchmarks.quantize.twin import begin_file, end_file

__all__ = ["Used", "memory_of_shape", "run_alone", "write_layer"]

# as SmolLM2-1.7B has them
WIDTH: Final = 2048
INNER: Final = 8192
HEADS: Final = 32
_LOADED: Final = (
    "import torch, paceline.cli.main, paceline.cli.models.quantize, paceline.quantize.quantize,"
    "paceline.quantize.text, paceline.engine.text.tokenizer"
)
_STARTER: Final = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[2:]).returncode
used = resource.getrusage(resource.RUSAGE_CHILDREN)
open(sys.argv[1], "w").write(f"{used.ru_utime + used.ru_stime} {used.ru_maxrss}")
sys.exit(code)
"""


class Used(NamedTuple):
    """Processor time and memory of a command."""

    cpu_seconds: float
    peak_mb: int


def run_alone(command: Sequence[str], *, quiet: bool = False) -> Used:
    """Run a command, and return what it alone used. Raises CalledProcessError.

    A small process starts it: of a child the system counts its parent's memory too, until the child
    is another program.
    """
    with tempfile.NamedTemporaryFile("r") as noted:
        subprocess.run(
            (sys.executable, "-c", _STARTER, noted.name, *command),
            check=True, stdout=subprocess.DEVNULL if quiet else None,
        )  # fmt: skip
        seconds, kilobytes = noted.read().split()
    return Used(float(seconds), int(kilobytes) >> 10)


def write_layer(
    source: Path, target: Path, width: int = WIDTH, inner: int = INNER, heads: int = HEADS
) -> None:
    """Write a model of one layer of random weights, with the tokenizer of ``source``, a GGUF file
    of the llama architecture."""
    reader, random = gguf.GGUFReader(source), np.random.default_rng(5)
    changed = {
        "llama.block_count": 1, "llama.embedding_length": width, "llama.feed_forward_length": inner,
        "llama.attention.head_count": heads, "llama.attention.head_count_kv": heads,
    }  # fmt: skip
    of_heads = ("rope.dimension_count", "attention.key_length", "attention.value_length")
    changed |= {f"llama.{key}": width // heads for key in of_heads}
    writer = begin_file(reader, target, changed)
    vocabulary = next(int(t.shape[1]) for t in reader.tensors if t.name == "token_embd.weight")
    shapes = {"token_embd": (vocabulary, width)}
    shapes |= {f"blk.0.attn_{part}": (width, width) for part in ("q", "k", "v", "output")}
    shapes |= {f"blk.0.ffn_{part}": (inner, width) for part in ("gate", "up")}
    for name, shape in (shapes | {"blk.0.ffn_down": (width, inner)}).items():
        values = random.standard_normal(shape, dtype=np.float32) / np.sqrt(width)
        writer.add_tensor(f"{name}.weight", values.astype(np.float16))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(width, dtype=np.float32))
    end_file(writer)


def memory_of_shape(source: Path, folder: Path) -> dict[str, int]:
    """Return MB: the command's peak, and what it has after its imports."""
    model, target = folder / "one-layer.gguf", folder / "one-layer-q4.gguf"
    write_layer(source, model)
    command = (sys.executable, "-m", "paceline.cli.main", "quantize", str(model), "-o", str(target))
    peak, imports = run_alone(command, quiet=True), run_alone((sys.executable, "-c", _LOADED))
    model.unlink()
    return {"peak_mb": peak.peak_mb, "imports_mb": imports.peak_mb}
