"""Memory of a server by kind, compared with the forecast of ``paceline plan memory``.

Method. Each model is served with a KV cache of 4,096 tokens, without swap space, and gets 32
requests of 128 tokens, twice, and one of 3,000, so that every block of the cache was used and steps
became as large as they do by themselves. Then ``smaps`` of both processes is added up: proportional
sizes, so that a library's page that both share counts once. ``planned`` is the forecast of
``served_memory``: weights, the same keys and values, and the rest of the processes; its error must
stay within 5 %, else the exit code is 1.

Models: the default one; Qwen3-0.6B's shape in random blocks of Q4_0 and Q6_K, with a vocabulary as
large as its own; and an embedding model of that width, a folder in bfloat16. MODELS=a,b
chooses (default, 0.6b, embedding). Files of the second and third take 800 MB in a temporary folder.

KINDS=PATH prints instead the kinds of memory of one file's or folder's worker, started as by
``benchmarks.peers.sizes``, after its first token, in each of FORMATS (weights/KV cache, default
q4/int8,native/int8), and the time to that token. The last line is JSON.

    python -m benchmarks.memory
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice, product
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from benchmarks.common.processes import Process, Unavailable
from benchmarks.common.setup import Places
from benchmarks.common.unmeasured import Unmeasured
from benchmarks.peers.ours import Paceline
from benchmarks.peers.process import Worker
from benchmarks.peers.rows import make_job, parse_row
from benchmarks.peers.sizes import SHAPES, Shape, begin_file, end_file
from benchmarks.startup import MODEL, starting
from paceline.backends.loading.memory_estimate import served_memory
from paceline.bench.machine import machine
from paceline.checkpoints.hub.resolve import resolve_model

__all__ = ["kinds_of", "main", "vocabulary", "write_embedding_model", "write_quantised_model"]

TOKENS: Final = 4096
BLOCK: Final = 16
REQUESTS: Final = 32
# tokens of a request in all, and of its output
LENGTH: Final = TOKENS // REQUESTS
OUTPUT: Final = 8
LONG: Final = 3000
TOLERANCE: Final = 0.05
_MIB: Final = 2**20
_EMBEDDING: Final = Shape(8, 1024, 3072, 16, 8, 128, 151_936)
_HEADER: Final = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+ *(.*)")


def kinds_of(smaps: Iterable[str]) -> Counter[str]:
    """Return proportional bytes by kind of a process's mappings: huge pages (weights, keys and
    values, buffers of steps), the heap, stacks, other anonymous memory, and each file by its
    name."""
    found: Counter[str] = Counter()
    name = ""
    mapping: Counter[str] = Counter()

    def close() -> None:
        huge = mapping["AnonHugePages"]
        if not name:
            found["huge pages"] += huge
            found["anonymous"] += max(0, mapping["Pss"] - huge)
        elif name.startswith("["):
            found[name] += mapping["Pss"]
        else:
            found[Path(name).name] += mapping["Pss"]

    for line in smaps:
        if match := _HEADER.fullmatch(line):
            close()
            name, mapping = match[1], Counter()
        else:
            key, _, value = line.partition(":")
            if value.strip().endswith("kB"):
                mapping[key] = int(value.split()[0]) * 1024
    close()
    return +found


def _processes(of: Process) -> dict[str, Counter[str]]:
    """Return kinds of memory of a process and its descendants, by each one's role."""
    found: dict[str, Counter[str]] = {}
    for pid in of.members():
        try:
            smaps = Path(f"/proc/{pid}/smaps").read_text().splitlines()
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if not smaps:
            continue
        name = "engine" if b"engine_process" in command or b"peers.ours" in command else "api"
        found[name if name not in found else f"{name} {pid}"] = kinds_of(smaps)
    return found


def _show(processes: Mapping[str, Counter[str]], rows: int = 14) -> None:
    for name, kinds in processes.items():
        print(f"  {name:8}{sum(kinds.values()) / _MIB:>8.1f} MiB")
        for kind, size in kinds.most_common(rows):
            print(f"    {kind:48}{size / _MIB:>8.1f}")


def vocabulary(count: int) -> tuple[list[str], list[tuple[str, str]]]:
    """Make ``count`` tokens of byte-level BPE, and their merges: of one, two, four and eight bytes,
    about as long as tokens that were learned from text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens, merges, pieces = list(alphabet), [], alphabet[:64]
    for most in (4096, 32_768, count):
        made = []
        for left, right in islice(product(pieces, pieces), min(most, count - len(tokens))):
            merges.append((left, right))
            made.append(left + right)
        tokens += made
        # a sample of all, as tokens next to each other begin alike
        pieces = made[:: max(1, len(made) // 512)]
    return tokens, merges


def _random_blocks(kind: gguf.GGMLQuantizationType, rows: int, columns: int, seed: int) -> Any:
    """Make blocks of Q4_0 or Q6_K with scales of a sensible size."""
    values, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (rows, columns // values, size), dtype=np.uint8)
    place = 208 if kind == gguf.GGMLQuantizationType.Q6_K else 0
    scale = columns**-0.5 * (2.0**-11 if place else 2.0**-2)
    blocks[..., place : place + 2] = np.array([scale], "<f2").view(np.uint8)
    return blocks.reshape(rows, -1)


def write_quantised_model(path: Path, shape: Shape) -> None:
    """Write a file of random blocks in Q4_0, with the embedding table in Q6_K, and a vocabulary."""
    writer = begin_file(path, shape, 40_960)
    tokens, merges = vocabulary(shape.vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(shape.vocab - 1)
    for seed, (name, (rows, columns)) in enumerate(shape.matrices().items()):
        kind = gguf.GGMLQuantizationType["Q6_K" if name == "token_embd" else "Q4_0"]
        writer.add_tensor(
            f"{name}.weight", _random_blocks(kind, rows, columns, seed), raw_dtype=kind
        )
    end_file(writer, shape)


def write_embedding_model(folder: Path, shape: Shape) -> None:
    """Write a folder like Qwen3-Embedding's: bfloat16, pooling of the last token."""
    folder.mkdir(parents=True, exist_ok=True)
    hidden, random = shape.hidden, np.random.default_rng(0)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    pool = random.integers(0x3C00, 0x3D00, 1 << 22, dtype=np.uint16)
    pool ^= random.integers(0, 2, 1 << 22, dtype=np.uint16) << 15

    tensors: dict[str, Any] = {}

    def add(name: str, rows: int, columns: int = 0) -> None:
        size = rows * (columns or 1)
        values = np.full(rows, 0x3F80, np.uint16) if not columns else np.resize(pool, size)
        tensors[name] = values.reshape((rows, columns) if columns else (rows,))

    add("embed_tokens.weight", shape.vocab, hidden)
    add("norm.weight", hidden)
    for layer in range(shape.layers):
        prefix = f"layers.{layer}"
        for name, rows, columns in (
            ("self_attn.q_proj", queries, hidden), ("self_attn.k_proj", keys, hidden),
            ("self_attn.v_proj", keys, hidden), ("self_attn.o_proj", hidden, queries),
            ("mlp.gate_proj", shape.inner, hidden), ("mlp.up_proj", shape.inner, hidden),
            ("mlp.down_proj", hidden, shape.inner),
        ):  # fmt: skip
            add(f"{prefix}.{name}.weight", rows, columns)
        add(f"{prefix}.input_layernorm.weight", hidden)
        add(f"{prefix}.post_attention_layernorm.weight", hidden)
        add(f"{prefix}.self_attn.q_norm.weight", shape.head_dim)
        add(f"{prefix}.self_attn.k_norm.weight", shape.head_dim)
    _write_bfloat16(folder / "model.safetensors", tensors)
    config = {
        "architectures": ["Qwen3Model"], "model_type": "qwen3", "hidden_size": hidden,
        "intermediate_size": shape.inner, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim, "vocab_size": shape.vocab, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 8192, "rope_theta": 1e6, "tie_word_embeddings": True,
        "hidden_act": "silu", "torch_dtype": "bfloat16", "eos_token_id": shape.vocab - 1,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    parts = ("Transformer", "Pooling", "Normalize")
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{part}" if i else "",
         "type": f"sentence_transformers.models.{part}"}
        for i, part in enumerate(parts)
    ]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    pooling = {"word_embedding_dimension": hidden, "pooling_mode_lasttoken": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    tokens, merges = vocabulary(shape.vocab)
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.add_special_tokens([AddedToken(tokens[-1], special=True, normalized=False)])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def _write_bfloat16(path: Path, tensors: Mapping[str, Any]) -> None:
    """Write a safetensors file of numbers given by their bits."""
    header, end = {}, 0
    for name, bits in tensors.items():
        begin, end = end, end + bits.nbytes
        header[name] = {"dtype": "BF16", "shape": bits.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for bits in tensors.values():
            file.write(bits.tobytes())


def _embed(port: int, count: int, length: int, seed: int) -> None:
    ids = np.random.default_rng(seed).integers(20, 250, (count, length)).tolist()
    body = json.dumps({"model": "bench", "input": ids}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/embeddings", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        if len(json.load(answer)["data"]) != count:
            raise Unavailable("embeddings are missing")


def measure(model: Path, log: Path, *, pooled: bool) -> dict[str, Any]:
    """Measure the memory of a server of ``model``, and compare it with the forecast."""
    planned = served_memory(model)
    flags = (
        str(model), "--num-blocks", str(TOKENS // BLOCK), "--preemption", "recompute",
        "--block-size", str(BLOCK),
    )  # fmt: skip
    with starting(log, *flags, generates=not pooled) as server:
        for seed, (count, length) in enumerate([(REQUESTS, LENGTH)] * 2 + [(1, LONG)], 1):
            if pooled:
                _embed(server.port, count, length, seed)
            else:
                server.generate(count, length - OUTPUT, OUTPUT, seed)
        processes = _processes(server.process)
    _show(processes)
    measured = sum(sum(kinds.values()) for kinds in processes.values())
    parts = {
        "weights": planned.weight_bytes,
        "kv": int(planned.kv_bytes_per_token * TOKENS),
        "rest": planned.process_bytes,
    }
    total = sum(parts.values())
    return {
        "formats": f"{planned.compute} {planned.dtype}/{planned.kv_dtype}",
        "measured_mb": round(measured / _MIB, 1),
        "planned_mb": round(total / _MIB, 1),
        "parts_mb": {name: round(size / _MIB, 1) for name, size in parts.items()},
        "error": round(total / measured - 1, 4),
        "processes_mb": {
            name: {kind: round(size / _MIB, 1) for kind, size in kinds.most_common(20)}
            for name, kinds in processes.items()
        },
    }


def worker_kinds(model: Path, formats: str, folder: Path) -> dict[str, Any]:
    """Return kinds of memory of a worker after its first token."""
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    ours = Paceline(Places(folder, model, cpus), "ours", (formats,))
    files = [model] if model.is_file() else sorted(model.glob("*.safetensors"))
    # brings the files into the page cache
    size = sum(len(file.read_bytes()) for file in files)
    began = time.perf_counter()
    with Worker(ours.command(model, formats), folder / "worker.log") as worker:
        worker.run(make_job(parse_row("1x128x1"), 1000, seed=-1))
        ready = time.perf_counter() - began
        processes, peak = _processes(worker), worker.peak_rss_mb()
        seconds = worker.cpu_seconds()
    _show(processes, 24)
    ratio = round(peak * _MIB / size, 3)
    print(f"  {formats}: peak {peak:.0f} MiB, file {size / _MIB:.0f} MiB, ratio {ratio}, "
          f"first token after {ready:.2f} s, {seconds:.2f} s of processor time")  # fmt: skip
    return {
        "peak_mb": round(peak, 1), "file_mb": round(size / _MIB, 1), "rss_ratio": ratio,
        "ready_s": round(ready, 2), "cpu_s": round(seconds, 2),
    }  # fmt: skip


def main() -> int:
    about = machine(tuple(sorted(os.sched_getaffinity(0))))
    results: dict[str, Any] = {}
    unmeasured = Unmeasured()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if given := os.environ.get("KINDS"):
            for formats in (os.environ.get("FORMATS") or "q4/int8,native/int8").split(","):
                results[formats] = worker_kinds(Path(given), formats, folder)
        else:
            names = (os.environ.get("MODELS") or "default,0.6b,embedding").split(",")
            for model in names:
                path = folder / "m.gguf"
                if model == "default":
                    path = resolve_model(MODEL).path
                elif model == "0.6b":
                    write_quantised_model(path, SHAPES["0.6b"])
                elif model == "embedding":
                    path = folder / "embedding"
                    write_embedding_model(path, _EMBEDDING)
                else:
                    print(f"MODELS: {model} not among default, 0.6b, embedding", file=sys.stderr)
                    return 2
                print(f"\n{model}")
                with unmeasured.part(model):
                    found = measure(path, folder / "server.log", pooled=model == "embedding")
                    results[model] = found
                    print(f"  measured {found['measured_mb']} MiB, planned {found['planned_mb']} "
                          f"({found['parts_mb']}): {100 * found['error']:+.1f} %")  # fmt: skip
    told = {"bench": "memory", "machine": about, "results": results}
    print(json.dumps(told | {"unmeasured": unmeasured.reasons}))
    errors = [abs(found["error"]) for found in results.values() if "error" in found]
    return unmeasured.exit_code or int(any(error > TOLERANCE for error in errors))


if __name__ == "__main__":
    sys.exit(main())
