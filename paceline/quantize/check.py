"""The accuracy gate: how far a model in few bits is from float32, on real text.

The text is the Python reference that ``pydoc`` carries: WINDOWS topics, WINDOW tokens of each. All
formats read the same tokens, and at every position their distributions over the next token are
compared with those of float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.backends.machine.cpu import choose_threads
from paceline.backends.native import (
    OWN_BITS,
    NativeModel,
    NativeSettings,
    checkpoint_tensors,
    choose_kinds,
    unavailable_reason,
    unsupported_reason,
)
from paceline.backends.runner.rope import rotary_tables
from paceline.checkpoints.open import open_checkpoint
from paceline.engine.text.tokenizer import load_tokenizer
from paceline.quantize.streams import Streams, dense

__all__ = [
    "BLOCK", "CHUNK", "MAX_KL", "MAX_PERPLEXITY_RATIO", "MIN_TOP1", "REFERENCE", "WINDOW",
    "WINDOWS", "Comparison", "Expected", "Figures", "Forward", "build", "check", "chunks",
    "compare", "forward_of", "layer_by_layer", "log_probabilities", "text_windows", "why_not",
]  # fmt: skip

WINDOWS: Final = 8
WINDOW: Final = 640
# tokens of each window that are read at once to imitate prompts
CHUNK: Final = 32
BLOCK: Final = 16
# long prose first; which exist depends on the Python version
TOPICS: Final = (
    "execmodel", "objects", "import", "naming", "types", "compound", "customization",
    "attribute-access", "assignment", "comparisons", "try", "calls", "strings", "function",
)  # fmt: skip

MAX_KL: Final = 0.01
MIN_TOP1: Final = 0.95
MAX_PERPLEXITY_RATIO: Final = 1.01

REFERENCE: Final = "float32/float32"

# token ids [windows, n] of a step and the position of the first of them -> logits
# [windows * n, vocab], which the next step may overwrite
Forward = Callable[[NDArray[np.int64], int], NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Figures:
    """Distance of a format from float32."""

    top1: float
    kl: float
    perplexity: float
    perplexity_ratio: float

    @property
    def passes(self) -> bool:
        """Whether the format passes the gate."""
        return (
            self.kl <= MAX_KL
            and self.top1 >= MIN_TOP1
            and self.perplexity_ratio <= MAX_PERPLEXITY_RATIO
        )


class Expected:
    """Results of float32 for some positions, in the forms that every comparison needs."""

    def __init__(self, logs: torch.Tensor, targets: torch.Tensor) -> None:
        """Take log-probabilities [n, vocab], and the text's tokens [n]."""
        self.logs = logs
        self.targets = targets[:, None]
        self.probabilities = logs.exp()
        self.likeliest = logs.argmax(1)
        self.gain = float(logs.gather(1, self.targets).double().sum())


class Comparison:
    """Sums over positions, of one format against float32."""

    def __init__(self) -> None:
        self._count = 0
        self._agree = 0
        self._kl = 0.0
        self._loss = 0.0
        self._reference_loss = 0.0

    def add(self, expected: Expected, other: torch.Tensor) -> None:
        """Add positions, by the log-probabilities [n, vocab] of both."""
        self._count += len(expected.targets)
        self._agree += int((expected.likeliest == other.argmax(1)).sum())
        differences = expected.logs - other
        self._kl += float(differences.mul_(expected.probabilities).sum(1).double().sum())
        self._loss -= float(other.gather(1, expected.targets).double().sum())
        self._reference_loss -= expected.gain

    def figures(self) -> Figures:
        """Return the figures. Raises ValueError before anything was added."""
        if not self._count:
            raise ValueError("nothing was compared")
        return Figures(
            top1=self._agree / self._count,
            kl=self._kl / self._count,
            perplexity=math.exp(self._loss / self._count),
            perplexity_ratio=math.exp((self._loss - self._reference_loss) / self._count),
        )


def text_windows(encode: Callable[[str], Sequence[int]], window: int) -> NDArray[np.int64]:
    """Return the first ``window`` tokens of WINDOWS topics, [WINDOWS, window]. Raises ValueError
    when this Python's topics are too short."""
    from pydoc_data.topics import topics

    windows: list[Sequence[int]] = []
    for name in TOPICS:
        # a token has at least one character
        ids = encode(topics.get(name, ""))
        if len(ids) >= window and len(windows) < WINDOWS:
            windows.append(ids[:window])
    if len(windows) < WINDOWS:
        raise ValueError(f"only {len(windows)} of {WINDOWS} topics have {window} tokens")
    return np.array(windows, dtype=np.int64)


def build(
    path: Path, name: str, threads: int, shape: tuple[int, int], isa: str | None = None
) -> NativeModel:
    """Load the model in a format, for ``shape``: windows, and tokens of each. ``isa``: the level of
    instructions; None: the best here."""
    windows, length = shape
    checkpoint = open_checkpoint(path)
    dtype, kv_dtype = name.split("/")
    return NativeModel(
        checkpoint.config,
        checkpoint_tensors(checkpoint),
        rotary_tables(checkpoint.config, length),
        NativeSettings(
            dtype="q4" if dtype == OWN_BITS else dtype,
            kv_dtype=kv_dtype,
            num_blocks=windows * -(-length // BLOCK),
            block_size=BLOCK,
            threads=threads,
            isa=isa,
            kinds=choose_kinds(checkpoint, dtype).numbers,
        ),
    )


def forward_of(model: NativeModel, shape: tuple[int, int]) -> Forward:
    """Return a function that reads the next tokens of all windows; see ``Forward``."""
    windows, length = shape
    tables = np.arange(windows * -(-length // BLOCK)).reshape(windows, -1)

    def forward(tokens: NDArray[np.int64], first: int) -> NDArray[np.float32]:
        width = tokens.shape[1]
        positions = np.tile(np.arange(first, first + width), windows)
        starts = np.arange(windows + 1) * width
        return model.forward(tokens.ravel(), positions, starts, tables, np.arange(tokens.size))

    return forward


def chunks(windows: NDArray[np.int64], size: int) -> Iterator[tuple[NDArray[np.int64], int]]:
    """Yield pieces [windows, size] of the text and their first positions."""
    for first in range(0, windows.shape[1], size):
        yield windows[:, first : first + size], first


def log_probabilities(forward: Forward, tokens: NDArray[np.int64], first: int) -> torch.Tensor:
    """Return log-probabilities [rows, vocab] in float32."""
    return torch.from_numpy(forward(tokens, first)).log_softmax(1)


def compare(
    windows: NDArray[np.int64], reference: Forward, others: dict[str, Forward], size: int
) -> dict[str, Figures]:
    """Read the text ``size`` tokens of every window at a time with all formats."""
    sums = {name: Comparison() for name in others}
    length = windows.shape[1]
    for tokens, first in chunks(windows, size):
        following = windows[:, first + 1 : first + 1 + tokens.shape[1]]
        # the token after a window's last one is not known
        known = np.tile(np.arange(first, first + tokens.shape[1]) < length - 1, len(windows))
        if not known.any():
            break
        targets = torch.from_numpy(np.ascontiguousarray(following.ravel()))
        # a slice makes no copy; in all but the last step every position is known
        chosen = slice(None) if known.all() else torch.from_numpy(known)
        expected = Expected(log_probabilities(reference, tokens, first)[chosen], targets)
        for name, forward in others.items():
            sums[name].add(expected, log_probabilities(forward, tokens, first)[chosen])
    return {name: comparison.figures() for name, comparison in sums.items()}


def why_not(source: Path) -> str | None:
    """Return why ``check`` cannot compare a model; None: it can."""
    if reason := unavailable_reason() or unsupported_reason(open_checkpoint(source).config, BLOCK):
        return reason
    try:
        text_windows(load_tokenizer(source).encode, WINDOW)
    except ValueError as error:
        return str(error)
    return None


@contextmanager
def layer_by_layer(source: Path, windows: NDArray[np.int64]) -> Iterator[Forward]:
    """Yield what gives the logits of a text in float32: its layers have run over all windows, one
    at a time, so that a model is compared that does not fit into memory."""
    checkpoint = open_checkpoint(source)
    streams = Streams(checkpoint, windows.shape[1])
    with torch.inference_mode():
        x = streams.embed(torch.from_numpy(windows))
        for index in range(checkpoint.config.num_hidden_layers):
            with streams.layer(index, dense) as layer:
                streams.run(index, layer, x)
        by_window = x.view(*windows.shape, -1)
        with streams.head() as head:

            def forward(tokens: NDArray[np.int64], first: int) -> NDArray[np.float32]:
                part = by_window[:, first : first + tokens.shape[1]]
                logits: NDArray[np.float32] = head(part.flatten(0, 1)).numpy()
                return logits

            yield forward


def check(source: Path, target: Path, threads: int | None = None) -> Figures:
    """Compare a model in few bits, as it is served by default, with its source in float32.
    ``why_not`` tells which cannot be compared."""
    threads = choose_threads(threads)
    torch.set_num_threads(threads)
    windows = text_windows(load_tokenizer(source).encode, WINDOW)
    shape = (WINDOWS, WINDOW)
    with layer_by_layer(source, windows) as exact:
        served = build(target, f"{OWN_BITS}/int8", threads, shape)
        try:
            return compare(windows, exact, {"": forward_of(served, shape)}, CHUNK)[""]
        finally:
            served.close()
