"""Models of other sizes compared with llama.cpp: tokens a second, seconds to ready, memory.

Method. No weights of these sizes are at hand, so a GGUF file of random ones is written in 16 bits
for each shape, with norms of 1, from which llama.cpp's own tool makes the kinds that people
download (Q4_0, Q4_K_M, Q8_0). Both engines get the same files: ours computes 4-bit files in q4 and,
as a kind of its own, in native, Q8_0 in int8, with the KV cache in int8 (``FORMATS``); llama.cpp
in the kinds themselves, its KV cache in 16 bits and with its fused attention, its defaults, with as
many threads as ours, and the first kind with up to 2,048 tokens at once as well as 512. A row is
COUNTxPROMPTxOUTPUT (``benchmarks.peers``), random ids, engines in turns, the median of the
rounds; an engine shows its best kind of each row, ``kinds`` in the JSON all of them.

``ready_s`` is from the start of the process to the first token of a prompt of 128, with the file in
the page cache. ``rss_ratio`` is the peak resident memory until then over the file's bytes;
``beside_mb`` is that memory less the file's bytes: 128 tokens of the KV cache, their activations,
and the program itself, whose 60 MB or so weigh the more the smaller the file is. ``share`` of a row
of one sequence is the least time to read the part of the file that each token needs, at the
bandwidth measured in the same run, before the rows or after, over the time taken.

Random weights have no quality to lose. So the kinds are made of a model that has, by the same tool
and from 16 bits (``benchmarks.quantize.twin``, widened to whole blocks of 256), and KL and top-1 of
either engine's logits on them, next to float32 of the 16 bits, are printed by format.

SIZES=0.6b,1.7b,moe, KINDS=Q4_0,... (names of ``FORMATS``) and ROWS=x,y choose, ROUNDS=n sets the
number of rounds, QUICK=1 takes the smallest shape once, MEMORY=1 leaves the rows out. LEVEL=avx2
limits both engines to one level of instructions (``benchmarks.peers.levels``). Unknown names are
refused before anything is set up. ``moe`` is a mixture of 32 experts, of which a token goes to 4:
1.5 B weights, of which it reads 0.5. Files stay in the peers' folder (PACELINE_PEERS): 2.6 GB for
0.6b, 7.4 for 1.7b, 6.5 for moe. Each shape is a part of its own that fits 45 minutes. The last line
is JSON.

    python -m benchmarks.peers.sizes
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.common.processes import Command, Unavailable
from benchmarks.common.setup import Peer, Places, run_step
from benchmarks.peers.levels import Level, chosen_level, impose
from benchmarks.peers.llama_cpp import LlamaCpp
from benchmarks.peers.offline import Team, by_variant, run_rows, summary
from benchmarks.peers.ours import Paceline
from benchmarks.peers.process import Worker
from benchmarks.peers.quality import TEXTS, TOKENS
from benchmarks.peers.report import OURS, offline_table
from benchmarks.peers.rows import make_job, parse_row
from benchmarks.quantize.twin import widen, write_twin
from paceline.backends.native import variants
from paceline.backends.native.single_kernels import read_bandwidth
from paceline.bench.machine import machine
from paceline.checkpoints.hub.resolve import default_cache_dir, find_local
from paceline.engine.text.tokenizer import load_tokenizer
from paceline.quantize.check import (
    CHUNK,
    WINDOW,
    build,
    compare,
    forward_of,
    layer_by_layer,
    text_windows,
)  # fmt: skip

__all__ = ["SHAPES", "Shape", "Wanted", "begin_file", "end_file", "main", "write_model"]

# whose quality stands for formats
MODEL: Final = "smollm2-135m"
ROWS: Final = ("1x128x128", "8x128x128", "32x128x128", "4x1024x1")
# our formats for each kind of file that llama.cpp's tool makes: weights/KV cache
FORMATS: Final = {
    "Q4_0": "q4/int8", "Q4_K_M": "q4/int8", "Q8_0": "int8/int8",
    "Q4_0 native": "native/int8", "Q4_K_M native": "native/int8",
}  # fmt: skip
# random values from which all matrices are cut, as making new ones takes minutes
_POOL: Final = 1 << 23
_READ_MIB: Final = 256
# most tokens at once in llama.cpp's second setting
_AT_ONCE: Final = 2048


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of a model like Qwen3 with tied embeddings, dense or a mixture of experts."""

    layers: int
    hidden: int
    # inner size of an MLP, or of each expert
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    # number of experts, and of those that a token goes to; 0: one MLP for all tokens
    experts: int = 0
    experts_per_token: int = 0

    def matrices(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all matrices (experts, rows and columns) by GGUF's names."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        stacked, ending = ((self.experts,), "_exps") if self.experts else ((), "")
        of_layer: dict[str, tuple[int, ...]] = {
            "attn_q": (queries, self.hidden), "attn_k": (keys, self.hidden),
            "attn_v": (keys, self.hidden), "attn_output": (self.hidden, queries),
            f"ffn_gate{ending}": (*stacked, self.inner, self.hidden),
            f"ffn_up{ending}": (*stacked, self.inner, self.hidden),
            f"ffn_down{ending}": (*stacked, self.hidden, self.inner),
        }  # fmt: skip
        if self.experts:
            of_layer["ffn_gate_inp"] = (self.experts, self.hidden)
        layers = {
            f"blk.{layer}.{name}": size
            for layer in range(self.layers)
            for name, size in of_layer.items()
        }
        return {"token_embd": (self.vocab, self.hidden), **layers}

    @property
    def weights(self) -> int:
        return sum(math.prod(size) for size in self.matrices().values())

    @property
    def share_read(self) -> float:
        """Share of the weights that one token needs."""
        idle = self.experts - self.experts_per_token
        return 1 - self.layers * idle * 3 * self.inner * self.hidden / self.weights


# Qwen3-0.6B's and Qwen3-1.7B's, by their config.json; and a mixture of the first one's width
SHAPES: Final = {
    "0.6b": Shape(28, 1024, 3072, 16, 8, 128, 151_936),
    "1.7b": Shape(28, 2048, 6144, 16, 8, 128, 151_936),
    "moe": Shape(24, 1024, 512, 16, 8, 128, 151_936, 32, 4),
}


def begin_file(path: Path, shape: Shape, context: int) -> gguf.GGUFWriter:
    """Begin a GGUF file of a shape like Qwen3, without a vocabulary or matrices yet."""
    writer = gguf.GGUFWriter(path, "qwen3moe" if shape.experts else "qwen3")
    writer.add_context_length(context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    return writer


def end_file(writer: gguf.GGUFWriter, shape: Shape) -> None:
    """Add the norms to a file that has all the rest, and write it."""
    norms = {"output_norm": shape.hidden}
    for layer in range(shape.layers):
        prefix = f"blk.{layer}"
        norms |= {f"{prefix}.attn_norm": shape.hidden, f"{prefix}.ffn_norm": shape.hidden}
        norms |= {f"{prefix}.attn_{x}_norm": shape.head_dim for x in "qk"}
    for name, width in norms.items():
        writer.add_tensor(f"{name}.weight", np.ones(width, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_model(path: Path, shape: Shape) -> None:
    """Write a GGUF file of random weights in float16, completely or not at all."""
    partial = path.with_suffix(".part")
    writer = begin_file(partial, shape, 4096)
    writer.add_vocab_size(shape.vocab)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.experts_per_token)
        writer.add_expert_feed_forward_length(shape.inner)
    writer.add_tokenizer_model("no_vocab")
    random = np.random.default_rng(0)
    pool = random.standard_normal(_POOL, dtype=np.float32)
    for name, size in shape.matrices().items():
        values = np.resize(np.roll(pool, int(random.integers(_POOL))), size)
        values *= size[-1] ** -0.5
        # routers are in float32, as converters write them
        kept = np.float32 if name.endswith("_inp") else np.float16
        writer.add_tensor(f"{name}.weight", values.astype(kept))
    end_file(writer, shape)
    partial.rename(path)


class _Kinds:
    """Files of one shape for the wanted ones of our formats (``FORMATS``)."""

    def __init__(self, places: Places, wanted: Sequence[str]) -> None:
        self._model = places.model
        self.wanted = tuple(wanted)
        self.names = tuple(dict.fromkeys(name.split()[0] for name in wanted))

    def __getitem__(self, kind: str) -> Path:
        return self._model.with_suffix(f".{kind}.gguf")

    def make(self, quantiser: Path) -> None:
        """Make the files that are not there yet."""
        for kind in self.names:
            target = self[kind]
            if target.is_file():
                continue
            partial = target.with_suffix(".part")
            run_step([quantiser, self._model, partial, kind], log=target.with_suffix(".log"))
            partial.rename(target)


class _Ours(Paceline):
    """Our engine; variants are kinds of files, each in its formats of ``FORMATS``."""

    def __init__(self, places: Places, kinds: _Kinds) -> None:
        super().__init__(places, OURS, kinds.wanted)
        self._kinds = kinds

    def worker(self, variant: str, *, prefix_caching: bool) -> Command:
        return self.command(self._kinds[variant.split()[0]], FORMATS[variant])


class _Theirs(LlamaCpp):
    def __init__(self, places: Places, kinds: _Kinds, level: Level | None) -> None:
        super().__init__(places, level)
        # prompts may take less time in larger pieces than its default
        self.variants = (*kinds.names, f"{kinds.names[0]}@{_AT_ONCE}")
        self._kinds = kinds

    def setup(self) -> None:
        self.build()
        self._kinds.make(self.quantiser)

    def worker(self, variant: str, *, prefix_caching: bool) -> Command:
        kind, _, tokens = variant.partition("@")
        return self.command(self._kinds[kind], kind, tokens)


def memory(peers: Sequence[Peer], kinds: _Kinds) -> dict[str, dict[str, Any]]:
    """Return, by engine and kind, seconds to the first token and memory until then."""
    found = {}
    for peer in peers:
        for kind in peer.variants:
            if "@" in kind:
                # the same file, with more memory for activations, which is optional
                continue
            # brings the file into the page cache, for both alike
            file = kinds[kind.split()[0]]
            size = len(file.read_bytes())
            began = time.perf_counter()
            log = file.with_suffix(f".{peer.name}.log")
            with Worker(peer.worker(kind, prefix_caching=False), log) as worker:
                worker.run(make_job(parse_row("1x128x1"), 1000, seed=-1))
                ready, peak = time.perf_counter() - began, worker.peak_rss_mb()
            found[f"{peer.name} {kind}"] = {
                "ready_s": round(ready, 2),
                "rss_mb": round(peak),
                "file_mb": round(size / 2**20),
                "rss_ratio": round(peak * 2**20 / size, 3),
                "beside_mb": round(peak - size / 2**20),
            }
    return found


@dataclass(frozen=True, slots=True)
class Wanted:
    """Choices of the environment."""

    sizes: tuple[str, ...]
    rows: tuple[str, ...]
    kinds: tuple[str, ...]
    rounds: int
    level: Level | None

    @classmethod
    def of(cls, environment: Mapping[str, str], here: Sequence[str]) -> Wanted:
        """Read the environment. Raises ValueError for unknown names.

        Args:
            here: levels of our kernels that run on this machine.
        """

        def listed(variable: str, default: Sequence[str]) -> tuple[str, ...]:
            words = (environment.get(variable) or "").split(",")
            return tuple(word.strip() for word in words if word.strip()) or tuple(default)

        quick = bool(environment.get("QUICK"))
        rows = () if environment.get("MEMORY") else listed("ROWS", ROWS)
        for row in rows:
            parse_row(row)
        sizes = listed("SIZES", ("0.6b",) if quick else tuple(SHAPES))
        kinds = listed("KINDS", tuple(FORMATS))
        for variable, names, known in (
            ("SIZES", sizes, tuple(SHAPES)), ("KINDS", kinds, tuple(FORMATS)),
        ):  # fmt: skip
            if unknown := sorted(set(names) - set(known)):
                raise ValueError(f"{variable}: {', '.join(unknown)} not among {', '.join(known)}")
        rounds = environment.get("ROUNDS") or ("1" if quick else "3")
        if not rounds.isdecimal() or not 1 <= int(rounds) <= 99:
            raise ValueError(f"ROUNDS={rounds} is not a number from 1 to 99")
        level = chosen_level(environment.get("LEVEL"), here)
        return cls(sizes, rows, kinds, int(rounds), level)


def measure(name: str, wanted: Wanted, root: Path) -> dict[str, Any]:
    """Measure one shape; print and return its figures."""
    rows = wanted.rows
    shape = SHAPES[name]
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    folder = root / "sizes"
    folder.mkdir(parents=True, exist_ok=True)
    places = Places(root, folder / f"{name}.gguf", cpus)
    if not places.model.is_file():
        print(f"writing {places.model.name}: {shape.weights / 1e9:.2f} B weights", file=sys.stderr)
        write_model(places.model, shape)
    kinds = _Kinds(places, wanted.kinds)
    ours, theirs = _Ours(places, kinds), _Theirs(places, kinds, wanted.level)
    peers: list[Peer] = [ours, theirs]
    # llama.cpp comes first, as its tool makes the files that both read
    theirs.setup()
    ours.setup()
    resident = memory(peers, kinds)
    print(f"\n{name:24}{'ready s':>10}{'memory MiB':>12}{'file MiB':>10}{'ratio':>7}{'beside':>8}")
    for label, values in resident.items():
        print(f"{label:24}" + f"{values['ready_s']:>10.2f}{values['rss_mb']:>12}"
              f"{values['file_mb']:>10}{values['rss_ratio']:>7.2f}"
              f"{values['beside_mb']:>8}")  # fmt: skip
    # the kind that most people download, if it is wanted
    usual = "Q4_K_M" if "Q4_K_M" in kinds.wanted else kinds.wanted[0]
    best_kind = resident[f"{ours.name} {usual}"]
    figures = {key: best_kind[key] for key in ("ready_s", "rss_ratio")} | {"memory": resident}
    if not rows:
        return figures
    bandwidth = read_bandwidth(_READ_MIB << 20, len(cpus))
    team = Team(places.folder("logs"), shape.vocab)
    try:
        measured = run_rows(
            [parse_row(row) for row in rows], peers, team, rounds=wanted.rounds,
            report=lambda line: print(f"  {line}", file=sys.stderr),
        )  # fmt: skip
    finally:
        team.close()
    # other load before the rows would make the shares of rows too high
    bandwidth = max(bandwidth, read_bandwidth(_READ_MIB << 20, len(cpus)))
    offline = {entry.row.name: summary(entry) for entry in measured}
    precisions = {label: str(said["precision"]) for label, said in team.about.items()}
    print(f"\n{offline_table(offline, [ours.name, theirs.name], precisions)}")
    results: dict[str, Any] = {}
    for entry in measured:
        results[entry.row.name] = {
            peer: values.get("total_tps", values)
            for peer, values in offline[entry.row.name].items()
        }
        results[entry.row.name]["kinds"] = by_variant(entry)
        if entry.row.count == 1 and "seconds" in offline[entry.row.name].get(ours.name, {}):
            best = offline[entry.row.name][ours.name]
            size = kinds[best["variant"].split()[0]].stat().st_size * shape.share_read
            read = entry.row.output * size / bandwidth
            results[entry.row.name]["share"] = round(read / best["seconds"], 3)
    return results | figures | {"read_gb_s": round(bandwidth / 1e9, 1)}


def quality(wanted: Wanted, root: Path) -> dict[str, dict[str, float]]:
    """Return KL and top-1 of a model's kinds next to its 16 bits, by engine and format; none where
    that model is not here."""
    published = find_local(MODEL)
    if published is None:
        print(f"no quality: {MODEL} is not here yet, 'make model' fetches it", file=sys.stderr)
        return {}
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    places = Places(root, root / "sizes" / "quality.gguf", cpus)
    kinds = _Kinds(places, wanted.kinds)
    theirs = _Theirs(places, kinds, wanted.level)
    if not places.model.is_file():
        twin, wide = places.model.with_suffix(".twin"), places.model.with_suffix(".part")
        write_twin(published, twin)
        widen(twin, wide)
        twin.unlink()
        wide.rename(places.model)
    theirs.setup()
    windows = text_windows(load_tokenizer(places.model).encode, WINDOW)[:TEXTS, :TOKENS]
    windows = np.ascontiguousarray(windows)
    found: dict[str, dict[str, float]] = {}
    torch.set_num_threads(len(cpus))
    with layer_by_layer(places.model, windows) as exact:
        for name in kinds.wanted:
            ours = build(kinds[name.split()[0]], FORMATS[name], len(cpus), windows.shape)
            try:
                figures = compare(windows, exact, {"": forward_of(ours, windows.shape)}, CHUNK)[""]
            finally:
                ours.close()
            found[f"{OURS} {name}"] = {"kl": round(figures.kl, 5), "top1": round(figures.top1, 4)}
        for kind in kinds.names:
            given = theirs.logits(kinds[kind], windows).reshape(*windows.shape, -1)
            forward = partial(_rows_of, given)
            figures = compare(windows, exact, {"": forward}, CHUNK)[""]
            label = f"{theirs.name} {kind}"
            found[label] = {"kl": round(figures.kl, 5), "top1": round(figures.top1, 4)}
    print(f"\n{'of a model in 16 bits':28}{'KL':>8}{'top-1':>8}")
    for label, row in found.items():
        print(f"{label:28}{row['kl']:>8.4f}{row['top1']:>8.1%}")
    return found


def _rows_of(
    given: NDArray[np.float32], tokens: NDArray[np.int64], first: int
) -> NDArray[np.float32]:
    """Return logits of some tokens of all windows, as a ``check.Forward`` does."""
    part = given[:, first : first + tokens.shape[1]]
    return np.array(part).reshape(-1, part.shape[-1])


def main() -> int:
    try:
        wanted = Wanted.of(os.environ, variants())
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if wanted.level is not None:
        impose(wanted.level, os.environ)
    root = Path(os.environ.get("PACELINE_PEERS") or default_cache_dir() / "peers")
    about = machine(tuple(sorted(os.sched_getaffinity(0))))
    print(f"{about['cpu']}, {about['cores']} cores, level {about['level']}, load {about['load']}")
    try:
        results = {name: measure(name, wanted, root) for name in wanted.sizes}
        of_formats = quality(wanted, root)
    except Unavailable as error:
        print(f"llama.cpp, whose tool makes the files, cannot be set up: {error}", file=sys.stderr)
        return 1
    print()
    print(
        json.dumps(
            {
                "bench": "sizes",
                "level": about["level"],
                "machine": about,
                "results": results,
                "quality": of_formats,
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
