"""Flags of ``vllm serve``. One that Paceline has under the same name is not here, unless vLLM takes
other values."""

from __future__ import annotations

import argparse
import json
import re
from typing import Final

from paceline.cli.flags.elsewhere.rows import Row, Taken, already, boolean, refused, same
from paceline.cli.flags.plugins import OTHER_NAMES

__all__ = ["VLLM"]

_DTYPES: Final = {
    "half": "bfloat16", "float16": "bfloat16", "fp16": "bfloat16", "bf16": "bfloat16",
    "float": "float32", "fp32": "float32",
}  # fmt: skip
_KV_DTYPES: Final = {
    **_DTYPES, "fp8": "int8", "fp8_e4m3": "int8", "fp8_e5m2": "int8", "fp8_inc": "int8",
}  # fmt: skip
_TASKS: Final[dict[str, tuple[str, ...]]] = {
    "auto": (),
    "generate": ("--runner", "generate"),
    "embed": ("--runner", "pooling", "--convert", "embed"),
    "embedding": ("--runner", "pooling", "--convert", "embed"),
    "classify": ("--runner", "pooling", "--convert", "classify"),
    "score": ("--runner", "pooling"),
    "reward": ("--runner", "pooling"),
}
# formats of checkpoints, whose files say so
_OF_FILES: Final = (
    "awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "mxfp4", "gguf", "none",
)  # fmt: skip
_QUANTIZED: Final = {
    "fp8": ("--dtype", "int8"),
    "int8": ("--dtype", "int8"),
    "bitsandbytes": ("--dtype", "q4"),
    **dict.fromkeys(_OF_FILES, ()),
}
_ONE_DEVICE: Final = "an engine computes on one device; start one server for each device"
_NO_PICTURES: Final = "always the case: pictures, sound and video are not taken"


def _count(to: str) -> Row:
    """Return a row for a number that vLLM also takes as 32k (thousands) or 32K (1,024s)."""

    def take(name: str, value: str) -> Taken:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG])", value)
        if match is None:
            return Taken() if value in ("auto", "-1") else Taken((to, value))
        base = 1024 if match[2].isupper() else 1000
        number = int(float(match[1]) * base ** ("kmg".index(match[2].lower()) + 1))
        return Taken((to, str(number)), f"{number:,}")

    return Row((to,), "the same; `32k` is 32,000 and `32K` is 32,768", take)


def _quantization(name: str, value: str) -> Taken:
    args = _QUANTIZED.get(value.lower())
    if args is None:
        raise argparse.ArgumentTypeError(
            f"{value!r} is not a format here: leave it out for the format of the model's files, or "
            "give --dtype int8 or q4"
        )
    # --dtype is of the activations next to it
    note = f"served as {args[1]}" if args else "always the case: the model's files say it"
    return Taken(args, note, wins=True)


def _policy(name: str, value: str) -> Taken:
    return Taken((name, OTHER_NAMES.get(value, value)))


def _task(name: str, value: str) -> Taken:
    args = _TASKS.get(value.lower())
    if args is None:
        raise argparse.ArgumentTypeError(f"{value!r} is not one of {', '.join(_TASKS)}")
    return Taken(args)


def _origins(name: str, value: str) -> Taken:
    try:
        origins = json.loads(value)
    except ValueError:
        origins = value.split()
    if not isinstance(origins, list) or not all(isinstance(each, str) for each in origins):
        raise argparse.ArgumentTypeError(f"{value!r} is not a list of origins in JSON")
    return Taken(tuple(word for each in origins for word in ("--cors-origin", each)))


def _log_level(name: str, value: str) -> Taken:
    if value.lower() in ("warning", "error", "critical"):
        return Taken(("--no-enable-log-requests",), "no line for each request")
    return Taken(note="always the case: a line for each request")


def _bytes(name: str, value: str) -> Taken:
    return Taken(("--kv-cache-memory", value if value[-1:].isalpha() else f"{value}B"))


def _preemption(name: str, value: str) -> Taken:
    return Taken(("--preemption", value))


VLLM: Final = (
    same("--dtype", "--dtype", "`half` and `float16` are served as bfloat16", renamed=_DTYPES),
    same("--kv-cache-dtype", "--kv-dtype", "`--kv-dtype`; `fp8` is int8", renamed=_KV_DTYPES),
    Row(
        ("--quantization", "-q"),
        "`fp8` is `--dtype int8` and `bitsandbytes` q4, whatever `--dtype` says; formats of files "
        "have no effect, as the files say it",
        _quantization,
    ),
    Row(("--scheduling-policy",), "the same, and `fifo` for `fcfs`", _policy),
    _count("--max-model-len"),
    _count("--max-num-batched-tokens"),
    _count("--max-num-seqs"),
    same("--gpu-memory-util", "--gpu-memory-utilization"),
    same("--num-gpu-blocks-override", "--num-blocks"),
    Row(
        ("--kv-cache-memory-bytes",), "`--kv-cache-memory`, in bytes",
        _bytes,
    ),
    Row(("--preemption-mode",), "`--preemption`", _preemption),
    Row(("--task",), "`--runner` and `--convert`", _task),
    Row(("--allowed-origins",), "`--cors-origin` for each", _origins),
    already(
        "--allowed-methods --allowed-headers",
        "always the case: every header, and the methods that the API has", "1",
    ),
    refused("--allow-credentials", "pages send keys in headers, never cookies", "0"),
    Row(("--uvicorn-log-level",), "`--no-enable-log-requests` from `warning` on", _log_level),
    boolean(
        "--disable-log-requests --disable-uvicorn-access-log",
        Taken(("--no-enable-log-requests",)), Taken(("--enable-log-requests",)),
    ),
    *(
        boolean(name, Taken((name,)), Taken((name.replace("--", "--no-", 1),)), meaning="the same")
        for name in ("--enable-chunked-prefill", "--enable-prefix-caching")
    ),
    already("--disable-log-stats", "always the case: statistics are at /metrics, not in the log"),
    already("--max-log-len", "always the case: prompts are not logged", "1"),
    already(
        "--trust-remote-code", "accepted, and no code of a checkpoint is run: architectures are "
        "Paceline's own", "?",
    ),
    already(
        "--load-format", "always the case: the files say their format", "1",
        only=("auto", "safetensors", "gguf", "hf"),
        instead="give a folder with safetensors, or a .gguf file",
    ),
    already(
        "--config-format --tokenizer-mode", "always the case: the files say it", "1",
        only=("auto", "hf", "fast"), instead="leave it out",
    ),
    already(
        "--pipeline-parallel-size -pp --data-parallel-size -dp --decode-context-parallel-size",
        "1 is the only value here", "1", only=("1",), instead=_ONE_DEVICE,
    ),
    already("--api-server-count -asc",
            "always the case: one process answers HTTP", "1", only=("1",),
            instead="one process answers HTTP; several servers go behind paceline gateway"),
    already(
        "--distributed-executor-backend", "always the case: one process computes", "1",
        only=("mp", "uni"), instead=_ONE_DEVICE,
    ),
    already("--enable-expert-parallel", f"always the case: {_ONE_DEVICE.partition(';')[0]}", "?"),
    already("--disable-custom-all-reduce",
            "always the case: one device has nothing to reduce", "?"),
    already("--enforce-eager", "always the case: there are no CUDA graphs", "?"),
    already("--max-seq-len-to-capture --compilation-config -O",
            "no effect: there are no CUDA graphs", "1"),
    already("--num-scheduler-steps", "1 is the only value here", "1", only=("1",),
            instead="--pipeline-depth 2 plans a step while another runs"),
    already("--use-v2-block-manager", "always the case: there is one block manager", "?"),
    boolean("--async-scheduling", "always the case: --pipeline-depth 2",
            Taken(("--pipeline-depth", "1"))),
    already("--disable-sliding-window",
            "no effect: layers with a sliding window keep it, and --max-model-len bounds requests"),
    already(
        "--cpu-offload-gb", "no effect: the weights are in the memory of one device (--device)", "1"
    ),
    already("--calculate-kv-scales",
            "always the case: --kv-dtype int8 has a scale for each row", "?"),
    already("--limit-mm-per-prompt --mm-processor-cache-gb --mm-processor-kwargs "
            "--mm-encoder-tp-mode --allowed-local-media-path", _NO_PICTURES, "1"),
    already("--language-model-only", _NO_PICTURES, "?"),
    already("--enable-auto-tool-choice", "always the case: tool calls are always read", "?"),
    already("--enable-reasoning", "always the case: --reasoning-parser says how", "?"),
    already("--enable-prompt-tokens-details", "always the case: usage has them", "?"),
    already("--enable-server-load-tracking", "always the case: GET /load", "?"),
    already("--enable-request-id-headers", "always the case: x-request-id", "?"),
    already("--guided-decoding-backend --structured-outputs-config",
            "always the case: one compiler for schemas, grammars and expressions", "1"),
    already("--chat-template-content-format",
            "always the case: templates get the text of a message, "
            "whose parts are joined; `openai` is refused", "1", only=("auto", "string"),
            instead="templates get text; leave it out unless the template needs lists"),
    already("--response-role", "always the case", "1", only=("assistant",),
            instead="answers have the role assistant, as in OpenAI's API"),
    already("--root-path",
            "always the case: the page and its links work below any path that a proxy "
            "takes off", "1"),
    refused("--download-dir", "set PACELINE_CACHE and HF_HOME in the environment"),
    refused("--hf-token", "set HF_TOKEN in the environment"),
    refused("--middleware", "a proxy in front can do it: docs/use/recipes.md"),
    refused("--hf-overrides --rope-scaling", "write it into the model's config.json"),
    refused("--config", "give the flags on the command line"),
)  # fmt: skip
