"""``paceline quantize``: four bits a weight from a model in 16 bits."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Final

from paceline.checkpoints.gguf.shards import gguf_files
from paceline.cli.flags.arguments import Parser
from paceline.errors import ConfigError

__all__ = ["add_parser"]

_SIZE: Final = 0.70
_EPILOG = """\
examples:
  paceline quantize model-f16.gguf -o model-q4.gguf
  paceline quantize model-f16.gguf -o model-q4.gguf --calibration my-domain.txt --check
  paceline quantize folder-of-safetensors -o model-mixed.gguf --bits mixed --size 0.70

The weights of the layers get 4 bits and the two numbers of each group of 32 another 1, the
embedding and the head 8. With --bits mixed, matrices get 4, 5 or 8 bits, by what each of them
costs. The file has standard types alone (Q4_1, Q5_1, Q8_0). What is lost is kept small on a
calibration text that runs through the model: the package's own, of chat, prose and code, or one of
yours. A run that was killed goes on where it ended when it is started again with the same
arguments.
"""


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "quantize",
        help="make a model smaller and faster, in four bits a weight",
        description="Write a GGUF file in few bits a weight from a model in 16 or 32.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "model",
        type=Path,
        metavar="MODEL",
        help="a GGUF file or a folder of safetensors, in 16 or 32 bits",
    )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="the file to write, .gguf"
    )
    parser.add_argument(
        "--bits",
        choices=("4", "mixed"),
        default="4",
        help="4 in all matrices, or 4, 5 and 8 by what each matrix costs (default: %(default)s)",
    )
    parser.add_argument(
        "--size",
        type=float,
        metavar="SHARE",
        help="with --bits mixed: bytes of the layers' matrices at most, over the same in Q8_0; 4 "
        f"bits alone are 0.59 (default: {_SIZE:.2f})",
    )
    parser.add_argument(
        "--calibration",
        default="chat",
        metavar="FILE|chat",
        help="a text file, or the package's own text (default: %(default)s)",
    )
    parser.add_argument(
        "--threads", type=int, metavar="N", help="processor threads (default: as many as cores)"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare the result with the source, both on another text, and print the loss",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    source, target = args.model, args.output
    if target.suffix != ".gguf":
        raise ConfigError(f"--output {target} must end in .gguf")
    if not target.parent.is_dir():
        raise ConfigError(f"--output {target}: there is no folder {target.parent}")
    if target.is_dir():
        raise ConfigError(f"--output {target} is a folder")
    parts = gguf_files(source) if source.is_file() else ()
    if target.exists() and any(target.samefile(part) for part in parts):
        raise ConfigError(f"--output {target} is the model itself, or a part of it")
    if args.size is not None and args.bits != "mixed":
        raise ConfigError(f"--size {args.size:g} needs --bits mixed")
    if args.threads is not None and args.threads < 1:
        raise ConfigError(f"--threads {args.threads} must be at least 1")
    # on a machine that others use too, threads that wait by spinning take the time of the one that
    # they wait for: a layer took 13 s instead of 9
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        from paceline.quantize.mixed import check_size
        from paceline.quantize.quantize import quantize
        from paceline.quantize.text import calibration_windows
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ConfigError("quantize needs PyTorch: pip install 'paceline[torch]'") from None
    size = (_SIZE if args.size is None else args.size) if args.bits == "mixed" else None
    if size is not None:
        check_size(size)
    if args.check:
        from paceline.quantize.check import check, why_not

        # before hours of work rather than behind them
        if reason := why_not(source):
            raise ConfigError(f"--check: {reason}")
    from paceline.engine.text.tokenizer import load_tokenizer

    windows = calibration_windows(load_tokenizer(source), args.calibration)
    began, first = time.monotonic(), 0

    def progress(done: int, layers: int, lost: float) -> None:
        nonlocal first
        first = first or done - 1
        seconds = (time.monotonic() - began) / (done - first) * (layers - done)
        print(f"layer {done} of {layers}, error {lost:.3%}, {seconds:.0f} s left", flush=True)

    def measured(done: int, layers: int) -> None:
        nonlocal began
        print(f"measured what matrices of layer {done} of {layers} cost", flush=True)
        # which says nothing of how long the rounding takes
        began = time.monotonic()

    result = quantize(
        source,
        target,
        windows,
        size=size,
        threads=args.threads,
        progress=progress,
        measured=measured,
    )
    if result.resumed:
        print(f"the first {result.resumed} layers were done by an earlier run")
    if args.bits == "mixed":
        counts = ", ".join(f"{count} {kind.name}" for kind, count in sorted(result.kinds.items()))
        print(f"matrices: {counts}; {result.size:.2f} of their bytes in Q8_0")
    if result.kept:
        print(f"{len(result.kept)} matrices keep their bits, such as {result.kept[0]}: their rows "
              "have a length that is not a multiple of 32")  # fmt: skip
    print(
        f"{target}: {result.bytes_after / 1e6:.1f} MB of {result.bytes_before / 1e6:.1f} MB, "
        f"{result.seconds:.0f} s"
    )
    if args.check:
        loss = check(source, target, args.threads)
        print(
            f"next to float32 of the source: KL {loss.kl:.4f} nats a token, the likeliest token is "
            f"the same at {loss.top1:.1%}, perplexity {loss.perplexity_ratio - 1:+.1%}"
        )
    return 0
