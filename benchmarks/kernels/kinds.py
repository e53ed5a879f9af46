"""The accuracy gate on GGUF's mixed and K kinds: the default model, quantised, against itself.

Method. Rows of K kinds are blocks of 256 values, and the default model's have 576 values, for which
llama.cpp's tool would choose other kinds. So the model is made wider first, without changing its
results: 192 columns of zeros, three heads of zeros whose values are zero, and weights of norms
times the root of 576 / 768, since a norm's mean counts the zeros. From that file in 16 bits
llama.cpp's own tool makes the kinds (``llama-quantize``, as ``make bench NAME=sizes`` does).
They are judged as ``accuracy`` judges formats, on the same text and by the same gate:
results of its own values in float32 against results of the kernels on its blocks, so that the
engine is judged, not the quantisation.

KINDS=Q4_0,Q4_K_M,... and LEVELS=avx2,... choose. Exits with 1 when a kind fails. The last line is
JSON.

    python -m benchmarks.kernels.kinds
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.common.processes import Unavailable
from benchmarks.common.setup import Places, run_step
from benchmarks.kernels.accuracy import MODEL, WINDOW, judge, show, text_windows
from benchmarks.peers.llama_cpp import LlamaCpp
from paceline.backends.machine.cpu import choose_threads
from paceline.backends.native import choose_kinds, unavailable_reason, variants
from paceline.bench.machine import machine
from paceline.checkpoints.hub.resolve import default_cache_dir, find_local
from paceline.checkpoints.open import open_checkpoint

__all__ = ["main", "widen"]

# formats to compute in, by kind: weights/KV cache
FORMATS: Final = {
    "Q4_0": ("q4/int8", "native/int8"),
    "Q4_K_M": ("q4/int8", "native/int8"),
    "Q5_K_M": ("int8/int8", "native/int8"),
    "Q6_K": ("int8/int8", "native/int8"),
}
_BLOCK: Final = 256


def widen(source: Path, target: Path) -> None:
    """Write a GGUF Llama in float16 with the same results, whose rows are whole blocks of 256.
    Raises ValueError if that takes no whole number of KV heads."""
    reader = gguf.GGUFReader(source)
    number = {
        key: int(reader.fields[f"llama.{key}"].contents())
        for key in ("embedding_length", "attention.head_count", "attention.head_count_kv")
    }
    hidden, heads, kv_heads = number.values()
    head_dim, group = hidden // heads, heads // kv_heads
    wide = -(-hidden // _BLOCK) * _BLOCK
    more = wide // head_dim
    if more * head_dim != wide or more % group:
        raise ValueError(f"{more} heads of {head_dim} in groups of {group} are not {wide} columns")
    changed = {
        "llama.embedding_length": wide,
        "llama.attention.head_count": more,
        "llama.attention.head_count_kv": more // group,
    }
    rows: dict[str, int] = {"attn_q": wide, "attn_k": wide // group, "attn_v": wide // group}
    rows |= {"attn_output": wide, "ffn_down": wide}
    partial = target.with_suffix(".part")
    writer = gguf.GGUFWriter(partial, "llama")
    for key, field in reader.fields.items():
        # the writer makes these itself
        if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        below = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, changed.get(key, field.contents()), kind, sub_type=below)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        name = str(tensor.name).removesuffix(".weight").split(".")[-1]
        if values.ndim == 1:
            # the added zeros lower the mean of squares
            widened = np.zeros(wide, dtype=np.float32)
            widened[:hidden] = values * math.sqrt(hidden / wide)
            writer.add_tensor(tensor.name, widened)
            continue
        columns = wide if values.shape[1] == hidden else values.shape[1]
        count = rows[name] if name in rows else len(values)
        out: NDArray[np.float16] = np.zeros((count, int(columns)), dtype=np.float16)
        out[: values.shape[0], : values.shape[1]] = values
        writer.add_tensor(tensor.name, out)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(target)


def main() -> int:
    from paceline.engine.text.tokenizer import load_tokenizer

    kinds = [kind for kind in (os.environ.get("KINDS") or "").split(",") if kind] or list(FORMATS)
    levels = [name for name in (os.environ.get("LEVELS") or "").split(",") if name]
    levels = levels or list(variants()[:1])
    unknown = sorted(set(kinds) - set(FORMATS)) + sorted(set(levels) - set(variants()))
    if unknown:
        print(
            f"{', '.join(unknown)} not among {', '.join((*FORMATS, *variants()))}", file=sys.stderr
        )
        return 2
    model, reason = find_local(MODEL), unavailable_reason()
    if model is None or reason is not None:
        print(reason or f"{MODEL} is not here yet: run 'make model' first", file=sys.stderr)
        return 1
    root = Path(os.environ.get("PACELINE_PEERS") or default_cache_dir() / "peers")
    folder = root / "kinds"
    folder.mkdir(parents=True, exist_ok=True)
    wide = folder / f"{MODEL}-wide.gguf"
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    tool = LlamaCpp(Places(root, wide, cpus))
    try:
        tool.build()
        if not wide.is_file():
            widen(model, wide)
        for kind in kinds:
            target = wide.with_suffix(f".{kind}.gguf")
            if not target.is_file():
                partial = target.with_suffix(".part")
                run_step([tool.quantiser, wide, partial, kind], log=target.with_suffix(".log"))
                partial.rename(target)
    except Unavailable as error:
        print(f"llama.cpp, whose tool makes the files, cannot be set up: {error}", file=sys.stderr)
        return 1
    about, threads = machine(), choose_threads(None)
    torch.set_num_threads(threads)
    windows = text_windows(load_tokenizer(model).encode, WINDOW)
    results: dict[str, dict[str, Any]] = {}
    for level in levels:
        for kind in kinds:
            path = wide.with_suffix(f".{kind}.gguf")
            checkpoint = open_checkpoint(path)
            for dtype in sorted({name.split("/")[0] for name in FORMATS[kind]}):
                print(f"\n{kind} with {dtype}: {choose_kinds(checkpoint, dtype).note}")
            found = judge(path, windows, FORMATS[kind], level, threads)
            show(f"{level} {kind}", found, "")
            results.setdefault(level, {})[kind] = found
    print()
    print(json.dumps({"bench": "kinds", "machine": about, "results": results}))
    passed = all(
        judged["passes"]
        for of_level in results.values()
        for of_kind in of_level.values()
        for judged in of_kind.values()
    )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
