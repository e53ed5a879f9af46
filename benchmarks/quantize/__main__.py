"""Four bits from 16: what they cost by rounding to the nearest, and by ``paceline quantize``.

Method. A twin of the default model (``twin``) is written in 16 bits and quantized by the command as
a user runs it, in a process of its own, whose seconds and peak memory are taken: in four bits, and
with ``--bits mixed`` at its default size. Every format, read as it is served (activations and KV
cache in int8), is compared with the twin in float32 on three texts that have nothing in common:

* ``gate``: the text of ``make bench NAME=accuracy``, the Python reference;
* ``third``: docstrings of NumPy, by other authors;
* ``calibration``: the text that the weights were rounded on, for how much it was learned by heart;

and on chat, by the gate of ``benchmarks/common/chat_gate.py``: all questions, and the half that is
held back. ``published`` there is the default model as it is published, in four bits that are kept,
and ``int8`` is the twin served in eight.

llama.cpp, built from the source that benchmarks/peers takes, reads the file of four bits: its
logits are compared with float32 of the same file, and its server is asked a question. ``llama.cpp``
among the formats is what its own tools make of the twin with an importance matrix of the
calibration text, served here like the others: Q4_1, in as many bytes, and Q4_K_M of the twin
widened by zeros to whole blocks of 256, which has the same outputs. The file's speed is compared
with the published one's, in turns.

``mixture``: a mixture of experts with the twin's outputs (``twin.mix``) is quantized in four bits,
and read on the gate's text and on chat, next to the mixture in float32.

``killed``: the command is killed once half of the layers are done, and run again; its share of a
whole run's time, and of its processors' time, which other load changes less. ``memory``: the
command's peak on one layer of random weights in the shape of a model of 1.7B. ``starts``: seconds
and ready lines of ``serve --dtype q4`` of the twin: alone, and with ``--packed-cache`` a first time
and once the four bits are made.

``rtn`` is ``--dtype q4`` of the 16-bit file, which rounds each group of weights between its minimum
and maximum while loading. No setting of the command was chosen by ``gate``, ``third`` or the
questions.

The last line is JSON. PARTS=a,b chooses of texts, killed, memory, peer, chat, mixture and starts;
QUICK=1: the gate's text alone; KINDS=q4 leaves mixed bits out. FOLDER=PATH keeps the files there,
and does not make those again that an earlier run left. TOKENS=16 ends answers on chat where
distributions are compared no further: minutes instead of a quarter of an hour, but loops are not
counted, so no format passes. PACELINE_ISA=avx2 takes another level of the native kernels, which is
printed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.common.chat_gate import FIRST, KEPT, ROUNDED, judged, read_chat, show
from benchmarks.common.parts import chosen
from benchmarks.common.questions import LOOP_TOKENS, QUESTIONS
from benchmarks.common.unmeasured import Unmeasured
from benchmarks.quantize.memory import memory_of_shape, run_alone
from benchmarks.quantize.peer import asked_of_server, llama_cpp, read_by_peer
from benchmarks.quantize.speed import speed_ratio
from benchmarks.quantize.starts import starts
from benchmarks.quantize.twin import mix, widen, write_twin
from paceline.backends.machine.cpu import choose_threads
from paceline.backends.native import OWN_BITS
from paceline.bench.machine import machine
from paceline.checkpoints.hub.resolve import find_local
from paceline.checkpoints.open import open_checkpoint
from paceline.engine.text.tokenizer import load_tokenizer
from paceline.quantize.check import (
    CHUNK,
    REFERENCE,
    WINDOW,
    WINDOWS,
    Figures,
    build,
    compare,
    forward_of,
    text_windows,
)  # fmt: skip
from paceline.quantize.text import CHAT, calibration_windows

MODEL: Final = "smollm2-135m"
QUICK: Final = bool(os.environ.get("QUICK"))
TOKENS: Final = int(os.environ.get("TOKENS") or LOOP_TOKENS)
ALL_PARTS: Final = ("texts", "killed", "memory", "peer", "chat", "mixture", "starts")
PARTS: Final = chosen(ALL_PARTS, ("texts",) if QUICK else None)
# options of the command by kind of file
ALL_KINDS: Final = {"q4": (), "mixed": ("--bits", "mixed")}
KINDS: Final = chosen(ALL_KINDS, variable="KINDS")
SHAPE: Final = (WINDOWS, WINDOW)


def third_text(encode: Callable[[str], Sequence[int]]) -> NDArray[np.int64]:
    """Return docstrings of NumPy's functions, [WINDOWS, WINDOW] tokens."""
    names = sorted(name for name in np.__all__ if callable(getattr(np, name)))
    text = "\n\n".join(getattr(np, name).__doc__ or "" for name in names)
    tokens = encode(text[: 8 * WINDOWS * WINDOW])
    if len(tokens) < WINDOWS * WINDOW:
        raise ValueError(f"NumPy's docstrings have {len(tokens)} tokens, not {WINDOWS * WINDOW}")
    return np.array(tokens[: WINDOWS * WINDOW], dtype=np.int64).reshape(SHAPE)


def quantized(source: Path, target: Path, *options: str) -> dict[str, float]:
    """Run the command, and return its seconds and those of its processors, its peak memory in MB,
    and the file's size; those of an earlier run where the file is there."""
    noted = target.with_suffix(".json")
    if target.exists() and noted.exists():
        found: dict[str, float] = json.loads(noted.read_text())
        return found
    began = time.monotonic()
    command = (sys.executable, "-m", "paceline.cli.main", "quantize", str(source))
    used = run_alone((*command, "-o", str(target), *options))
    run = {
        "seconds": round(time.monotonic() - began, 1),
        # which other load on the machine changes less
        "cpu_seconds": round(used.cpu_seconds, 1),
        "peak_mb": used.peak_mb,
        "file_mb": round(target.stat().st_size / 1e6, 1),
    }
    noted.write_text(json.dumps(run))
    return run


def killed_at_half(source: Path, target: Path, layers: int) -> dict[str, float]:
    """Kill the command once half of the layers are done, run it again, and return the seconds of
    both, and those of the second's processors. Raises RuntimeError where the first ends by
    itself."""
    command = [
        sys.executable,
        "-m",
        "paceline.cli.main",
        "quantize",
        str(source),
        "-o",
        str(target),
    ]
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        for line in first.stdout:
            if line.startswith(f"layer {layers // 2} of {layers},"):
                first.kill()
                break
        else:
            raise RuntimeError(f"{target} was written before half of {layers} layers were seen")
    middle = time.monotonic()
    used = run_alone(command, quiet=True)
    return {
        "until_killed_s": round(middle - began, 1),
        "second_run_s": round(time.monotonic() - middle, 1),
        "second_run_cpu_s": round(used.cpu_seconds, 1),
    }


def distances(
    source: Path, formats: dict[str, tuple[Path, str]], texts: dict[str, NDArray[np.int64]]
) -> dict[str, dict[str, Any]]:
    """Return figures by format and text."""
    threads = choose_threads(None)
    torch.set_num_threads(threads)
    found: dict[str, dict[str, Any]] = {name: {} for name in formats}
    for text, windows in texts.items():
        models = {name: build(path, kind, threads, SHAPE) for name, (path, kind) in formats.items()}
        reference = build(source, REFERENCE, threads, SHAPE)
        try:
            others = {name: forward_of(model, SHAPE) for name, model in models.items()}
            results = compare(windows, forward_of(reference, SHAPE), others, CHUNK)
        finally:
            for model in (reference, *models.values()):
                model.close()
        for name, figures in results.items():
            found[name][text] = as_json(figures)
    return found


def bits_of_layers(path: Path) -> float:
    """Return the bits a weight of the layers' matrices, zeros that a model was widened by too."""
    tensors = [t for t in gguf.GGUFReader(path).tensors if t.name.startswith("blk.")]
    matrices = [tensor for tensor in tensors if len(tensor.shape) > 1]
    return 8 * sum(int(t.n_bytes) for t in matrices) / sum(int(t.n_elements) for t in matrices)


def as_json(figures: Figures) -> dict[str, float]:
    return {
        "kl": round(figures.kl, 5),
        "ppl": round(figures.perplexity_ratio, 4),
        "top1": round(figures.top1, 4),
    }


def chat(
    twin: Path, formats: dict[str, tuple[Path, str]], published: Path
) -> dict[str, dict[str, Any]]:
    """Return the chat gate's figures by format, and print them."""
    threads = choose_threads(None)
    found: dict[str, dict[str, Any]] = {}
    eight = {"int8": (twin, "int8/int8")}
    for source, others in (
        (twin, formats | eight),
        (published, {"published": (published, "q4/int8")}),
    ):
        read = read_chat(source, others, QUESTIONS, threads, tokens=TOKENS)
        judgements = {
            name: judged(answers, ROUNDED if name in formats else KEPT, TOKENS)
            for name, answers in read.items()
        }
        show(judgements)
        found |= judgements
    return found


def main() -> int:
    published = find_local(MODEL)
    if published is None:
        print(f"{MODEL} is not here yet: run 'make model' first", file=sys.stderr)
        return 1
    if not FIRST <= TOKENS <= LOOP_TOKENS:
        print(f"TOKENS={TOKENS} must be from {FIRST} to {LOOP_TOKENS}", file=sys.stderr)
        return 2
    if "q4" not in KINDS:
        print(f"KINDS={','.join(KINDS)} must be q4 or {','.join(ALL_KINDS)}", file=sys.stderr)
        return 2
    unmeasured, about = Unmeasured(), machine()
    print(f"{about['cpu']}, {about['cores']} cores, level {about['level']}", flush=True)
    with ExitStack() as stack:
        name = os.environ.get("FOLDER") or stack.enter_context(tempfile.TemporaryDirectory())
        results = measured(published, Path(name), unmeasured)
    report = {"bench": "quantize", "machine": about, "results": results}
    print(json.dumps(report | {"unmeasured": unmeasured.reasons}))
    return unmeasured.exit_code


def measured(published: Path, folder: Path, unmeasured: Unmeasured) -> dict[str, Any]:
    """Return the results; files are made in ``folder``, or read where an earlier run left them."""
    threads, twin = choose_threads(None), folder / "twin-f16.gguf"
    if not twin.exists():
        write_twin(published, twin)
    tokenizer = load_tokenizer(twin)
    own = calibration_windows(tokenizer, CHAT).numpy()
    texts = {"gate": text_windows(tokenizer.encode, WINDOW)}
    if not QUICK:
        texts["third"] = third_text(tokenizer.encode)
        # pieces of all its kinds
        count = WINDOWS * WINDOW // own.shape[1]
        texts["calibration"] = own[:: len(own) // count][:count].reshape(SHAPE)
    formats = {"rtn": (twin, "q4/int8")}
    results: dict[str, Any] = {}
    for name in KINDS:
        target = folder / f"twin-{name}.gguf"
        run = quantized(twin, target, *ALL_KINDS[name])
        results |= run if name == "q4" else {f"{name}_run": run}
        formats[name] = (target, f"{OWN_BITS}/int8")
        print(
            f"{name}: {run['seconds']} s, {run['cpu_seconds']} s of processors, at most "
            f"{run['peak_mb']} MB of memory, {run['file_mb']} MB of file, "
            f"{bits_of_layers(target):.2f} bits a weight of the layers",
            flush=True,
        )
    if "killed" in PARTS:
        target, whole = folder / "twin-killed.gguf", formats["q4"][0]
        layers = open_checkpoint(twin).config.num_hidden_layers
        results["killed"] = killed_at_half(twin, target, layers)
        killed = results["killed"]
        killed["equal_bytes"] = target.read_bytes() == whole.read_bytes()
        for key, of_whole in (("second_run_s", "seconds"), ("second_run_cpu_s", "cpu_seconds")):
            killed[f"{key}_share"] = round(killed[key] / results[of_whole], 3)
        print(f"killed at half, in seconds: {results['killed']}", flush=True)
    if "memory" in PARTS:
        results["memory_of_1.7b"] = of = memory_of_shape(published, folder)
        print(f"1.7B: {of['peak_mb']} MB at most, {of['imports_mb']} MB after imports", flush=True)
    if "peer" in PARTS:
        with unmeasured.part("llama.cpp"):
            peer = llama_cpp(twin)
            for key, path in (("peer_kl", formats["q4"][0]), ("peer_kl_published", published)):
                results[key] = round(read_by_peer(peer, path, texts["gate"], threads).kl, 5)
            log, question = folder / "llama-server.log", QUESTIONS[0]
            results["peer_server"] = asked_of_server(peer, formats["q4"][0], question, log)
            print(f"llama.cpp's server, asked {question!r}: {results['peer_server']!r}", flush=True)
            # with the marks of turns
            text = tokenizer.decode(own.flatten().tolist(), skip_special_tokens=False)
            wide = folder / "twin-wide-f16.gguf"
            if not wide.exists():
                widen(twin, wide)
            results["peer_files"] = {}
            for kind, source in (("Q4_1", twin), ("Q4_K_M", wide)):
                target = folder / f"twin-peer-{kind}.gguf"
                began = time.monotonic()
                peer.round_with_importance(source, kind, text, target)
                results["peer_files"][kind] = {
                    "seconds": round(time.monotonic() - began, 1),
                    "bits": round(bits_of_layers(target), 2),
                }
                formats[f"llama.cpp {kind}"] = (target, f"{OWN_BITS}/int8")
        ratio = speed_ratio(formats["q4"][0], published, "q4/int8", texts["gate"], threads)
        results["speed_ratio_to_q4_1"] = [round(value, 4) for value in ratio]
        show_peer(results)
    if "texts" in PARTS:
        results["twin"] = distances(twin, formats, texts)
        show_texts(results["twin"])
    if "chat" in PARTS:
        results["chat_gate"] = chat(twin, formats, published)
    if "starts" in PARTS:
        with unmeasured.part("starts"):
            results["starts"] = starts(twin, folder)
            for name, start in results["starts"].items():
                print(f"{name} start: {start['seconds']} s: {start['ready']}", flush=True)
    if "mixture" in PARTS:
        results["mixture"] = of_mixture(twin, folder, texts["gate"])
    return results


def of_mixture(twin: Path, folder: Path, gate: NDArray[np.int64]) -> dict[str, Any]:
    """Return what four bits of a mixture cost on the gate's text and on chat."""
    mixture, target = folder / "mixture-f16.gguf", folder / "mixture-q4.gguf"
    if not mixture.exists():
        mix(twin, mixture)
    found: dict[str, Any] = {"run": quantized(mixture, target)}
    formats = {"mixture q4": (target, f"{OWN_BITS}/int8")}
    found["texts"] = distances(mixture, formats, {"gate": gate})["mixture q4"]
    show_texts({"mixture q4": found["texts"]})
    read = read_chat(mixture, formats, QUESTIONS, choose_threads(None), tokens=TOKENS)
    judgements = {name: judged(answers, ROUNDED, TOKENS) for name, answers in read.items()}
    show(judgements)
    return found | {"chat_gate": judgements}


def show_texts(twins: dict[str, dict[str, Any]]) -> None:
    print(f"\n{'':18}{'text':14}{'KL':>9}{'perplexity':>12}{'top-1':>9}")
    for name, by_text in twins.items():
        for text, row in by_text.items():
            print(f"{name:18}{text:14}{row['kl']:>9.4f}{row['ppl'] - 1:>+12.1%}{row['top1']:>9.1%}")


def show_peer(results: dict[str, Any]) -> None:
    middle, low, high = results["speed_ratio_to_q4_1"]
    print(f"speed over the published Q4_1 file: {middle:.3f} ({low:.3f} to {high:.3f})")
    if "peer_kl" in results:
        print(
            f"llama.cpp next to float32 of the same file: KL {results['peer_kl']:.4f}, of the "
            f"published one {results['peer_kl_published']:.4f}"
        )
    for kind, of in results.get("peer_files", {}).items():
        print(f"its own tools' {kind}: {of['bits']} bits a weight of the layers, {of['seconds']} s")


if __name__ == "__main__":
    sys.exit(main())
