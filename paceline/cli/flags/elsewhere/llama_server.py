"""Flags of llama.cpp's ``llama-server``, as ``paceline serve -m FILE`` takes them."""

from __future__ import annotations

import argparse
import json
from typing import Final

from paceline.cli.flags.elsewhere.rows import (
    FALSE,
    Row,
    Taken,
    already,
    boolean,
    refused,
    same,
    sampling,
)

__all__ = ["KV_TYPES", "LLAMA_SERVER"]

KV_TYPES: Final = {
    "f32": "float32", "f16": "bfloat16", "bf16": "bfloat16", "q8_0": "int8",
}  # fmt: skip
_AS_DISTRIBUTE: Final = "off"
_NUMA: Final = {"distribute": _AS_DISTRIBUTE, "numactl": _AS_DISTRIBUTE, "isolate": "auto"}
_STATIC: Final = Taken(("--scheduling-policy", "static"))
_ONE_PLACE: Final = "no effect: the whole model and its KV cache are on one device (--device)"


def _layers(name: str, value: str) -> Taken:
    if value == "0":
        return Taken(("--device", "cpu"))
    if value not in ("auto", "all", "-1") and not value.isdecimal():
        raise argparse.ArgumentTypeError(f"{value!r} is not a number of layers, auto or all")
    return Taken(note="always the case: the whole model is on one device, a GPU if there is one")


def _kv_type(name: str, value: str) -> Taken:
    kind = KV_TYPES.get(value.lower())
    if kind is None:
        raise argparse.ArgumentTypeError(
            f"{value!r} is not a format of the KV cache here: q8_0 (--kv-dtype int8) is the "
            "smallest"
        )
    return Taken(("--kv-dtype", kind), f"keys and values in {kind}")


def _draft(name: str, value: str) -> Taken:
    return Taken(("--speculative-config", json.dumps({"model": value})))


def _names(name: str, value: str) -> Taken:
    # with =, as MODEL may follow
    return Taken(tuple(f"--served-model-name={each}" for each in value.split(",")))


def _shift(name: str, value: str) -> Taken:
    if name.startswith("--no-") or value.lower() in FALSE:
        return Taken(note="always the case: a context that is full ends the answer")
    raise argparse.ArgumentTypeError("a context that is full ends the answer: give a larger -c")


def _thinking(name: str, value: str) -> Taken:
    if value == "none":
        return Taken(("--reasoning-parser", "none"))
    return Taken(note="always the case: as the chat template marks it")


def _threads(name: str, value: str) -> Taken:
    return Taken() if value == "-1" else Taken(("--threads", value))


LLAMA_SERVER: Final = (
    same("-m", "--model"),
    same("-hf -hfr --hf-repo", "--model"),
    same(
        "-c --ctx-size", "--max-model-len", "`--max-model-len`, for each request: it is not shared "
        "out among `-np`; 0 is the model's", renamed={"0": None},
    ),
    same("-np --parallel --n-parallel", "--max-num-seqs", renamed={"-1": None}),
    Row(
        ("-ngl", "--gpu-layers", "--n-gpu-layers"), "0 is `--device cpu`; other numbers "
        "have no effect: the whole model is on one device", _layers,
    ),
    Row(("-t", "--threads"), "`--threads`", _threads),
    already("-tb --threads-batch", "always the case: --threads computes prompts and tokens", "1"),
    already("--threads-http", "always the case: HTTP needs no threads", "1"),
    same("-b --batch-size", "--max-num-batched-tokens"),
    already("-ub --ubatch-size", "always the case: the kernels choose", "1"),
    already("-fa --flash-attn",
            "always the case: one kind of attention, which keeps no scores", "?"),
    Row(
        ("-ctk", "--cache-type-k", "-ctv", "--cache-type-v"), "`--kv-dtype`; one for both",
        _kv_type, agree=True,
    ),
    boolean("--jinja", "always the case: the chat template is always rendered"),
    same("--chat-template-file", "--chat-template"),
    same("--chat-template-kwargs", "--default-chat-template-kwargs"),
    Row(("-a", "--alias"), "`--served-model-name`; a comma parts several", _names),
    boolean(
        "--mmap",
        "no effect: weights are packed as they are read",
        "no effect: weights are packed as they are read",
    ),
    already("--mlock", "no effect: pages are not locked; turn swap off, or bound it by a cgroup"),
    same("--numa", "--numa", "`distribute` and `numactl` are `off`, `isolate` is `auto`",
         renamed=_NUMA),
    boolean("--cont-batching", "the default", _STATIC,
            meaning="the default; `--no-cont-batching` is `--scheduling-policy static`"),
    already("-cb", "the default"),
    Row(("-nocb",), "`--scheduling-policy static`", lambda *_: _STATIC, "0"),
    already("--metrics --slots --props", "always the case", "?"),
    boolean("--webui", "always the case: /ui", Taken(("--no-ui",))),
    Row(("--embedding", "--embeddings"), "`--runner pooling --convert embed`",
        lambda *_: Taken(("--runner", "pooling", "--convert", "embed")), "0"),
    Row(("--rerank", "--reranking"), "`--runner pooling`",
        lambda *_: Taken(("--runner", "pooling")), "0"),
    refused("--pooling", "the model's files say how it pools"),
    sampling("--temp --temperature", "temperature", float),
    sampling("--top-k", "top_k", int),
    sampling("--top-p", "top_p", float),
    sampling("--min-p", "min_p", float),
    sampling("--repeat-penalty", "repetition_penalty", float),
    sampling("-n --predict --n-predict", "max_new_tokens", int, unset="-1"),
    same("-s --seed", "--seed", renamed={"-1": None}),
    refused("--mirostat", "set --temp and --min-p", unless=("0",)),
    refused("--mirostat-ent --mirostat-lr --typical --dynatemp-range --xtc-probability "
            "--dry-multiplier", "samplers are temperature, top_k, top_p, min_p and penalties"),
    refused("--presence-penalty --frequency-penalty", "requests name it", unless=("0", "0.0")),
    already("--keep", "always the case: nothing of a prompt is dropped; one that is too long "
            "is refused", "1"),
    Row(("--context-shift", "--no-context-shift"), "refused: a context that is full ends the "
        "answer", _shift, "?"),
    already("-ot --override-tensor -sm --split-mode -mg --main-gpu -ts --tensor-split -ncmoe "
            "--n-cpu-moe", _ONE_PLACE, "1"),
    already("-cmoe --cpu-moe -nkvo --no-kv-offload", _ONE_PLACE),
    already("--cache-reuse", "always the case: prefixes are cached by blocks", "1"),
    already("--defrag-thold -dt", "always the case: blocks need no defragmentation", "1"),
    boolean("--warmup", "always the case", "no effect: a start measures one step"),
    Row(("-v", "--verbose", "--log-verbose"), "`--log-level debug`",
        lambda *_: Taken(("--log-level", "debug")), "0"),
    Row(("--log-disable",), "`--log-level error`", lambda *_: Taken(("--log-level", "error")), "0"),
    already("--log-colors --log-timestamps --log-prefix",
            "always the case: plain lines with their time", "?"),
    refused("--log-file", "send standard error to the file: 2> FILE"),
    Row(("-md", "--model-draft"), "`--speculative-config '{\"model\": FILE}'`", _draft),
    Row(("--reasoning-format",), "`none` is `--reasoning-parser none`", _thinking),
    same("--ssl-key-file", "--ssl-keyfile"),
    same("--ssl-cert-file", "--ssl-certfile"),
    refused("--mmproj --mmproj-url", "pictures are not taken: leave it out to serve the text"),
    refused("--lora --lora-scaled", "--enable-lora --lora-modules NAME=FILE serves it as the model "
            "NAME; POST /lora-adapters applies it to llama-server's endpoints", "?"),
    already("--lora-init-without-apply", "always the case: POST /lora-adapters applies adapters"),
    refused("--models-preset", "--model NAME=MODEL,FLAG=VALUE gives a model flags of its own"),
    refused("--slot-save-path", "prefixes are kept in memory: --prefix-cache-memory"),
    refused("--api-prefix", "let a proxy take the prefix off: docs/use/recipes.md"),
    refused("-hff --hf-file", "name the file behind the repository: -hf org/name/file.gguf"),
)  # fmt: skip
