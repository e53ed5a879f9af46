"""Step times from operator profiles: tables of kernel times measured on one GPU.

A folder holds, for a prefix such as ``GPU-Model-bf16-tp1``, the files::

    PREFIX-attention.csv     prefill_chunk, kv_prefill, n_decode, kv_decode, time_us   (one layer)
    PREFIX-dense.csv         layer, tokens, time_us
    PREFIX-per_sequence.csv  layer, sequences, time_us
    PREFIX-skew_fit.csv      alpha by bucket, for decoding rows of unequal length      (optional)
    PREFIX-moe.csv           tokens, activated_experts, time_us       (mixture of experts,
    ``experts``)
    *-meta.yaml              "model:", at the left margin, names the model

written by LLMServingSim's profiler (casys-kaist/LLMServingSim). A step is the sum of its operators,
once per layer or once per step, plus the all-reduces of tensor parallelism and, when no captured
graph covers the step, a constant for the host's work.

The attention table has decoding rows of one length only. Rows of different lengths are first
replaced by rows of two lengths with the same mean, spread and skewness, as in the skew table's
measurements; their attention lies between that of the mean and that of the longer rows::

    t = t(mean) + alpha * (t(longer) - t(mean))

Times of a tensor-parallel profile (``...-tp2``) are of one GPU without communication, which is
computed from the link; without a link such a profile is refused.

This module does not know what scheduled the step.
"""

from __future__ import annotations

import csv
import math
import operator
import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.core.outputs import SchedulerOutput
from paceline.errors import ConfigError
from paceline.sim.step_times.experts import ExpertGroup, ExpertTable
from paceline.sim.step_times.models import ModelShape
from paceline.sim.step_times.tables import AttentionTable, Curve

__all__ = ["GraphPadding", "Interconnect", "ProfileStepTimes", "find_profile", "profiled_degree"]

# runs of an operator in one layer; others run once
_PER_LAYER: Final = {"layernorm": 2}
# operators that run once in a step, on all its tokens
_ONCE: Final = frozenset({"embedding", "final_layernorm"})
_MICRO: Final = 1e-6
# largest step whose time is computed at once; larger ones when they are asked for
_TABULATED: Final = 2048


@dataclass(frozen=True, slots=True)
class GraphPadding:
    """Captured graphs for steps up to the largest size, which are padded to the next size."""

    # ascending
    sizes: tuple[int, ...] = ()

    @classmethod
    def like_vllm(cls, max_num_seqs: int) -> GraphPadding:
        """Return vLLM's default capture sizes: 1, 2, 4, then multiples of 8 to 256 and of 16
        beyond, up to the smaller of 512 and twice the running requests."""
        most = min(2 * max_num_seqs, 512)
        sizes = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)]
        return cls(tuple(size for size in sizes if size <= most))

    def padded(self, num_tokens: int) -> int:
        """Return the tokens that the matrices are computed for."""
        if not self.sizes or num_tokens > self.sizes[-1]:
            return num_tokens
        return self.sizes[bisect_left(self.sizes, num_tokens)]


@dataclass(frozen=True, slots=True)
class Interconnect:
    """Links between the GPUs of a replica, for a ring all-reduce after each half of a layer."""

    degree: int = 1
    # bytes per second of one GPU's link
    bandwidth: float = 0.0
    # duration of an empty all-reduce, s
    latency: float = 0.0

    def __post_init__(self) -> None:
        if self.degree > 1 and self.bandwidth <= 0:
            raise ConfigError(
                f"{self.degree} GPUs need a link bandwidth above 0, got {self.bandwidth}"
            )
        if self.latency < 0:
            raise ConfigError(f"a link's latency must be 0 or more seconds, got {self.latency}")

    def all_reduce(self, num_bytes: float) -> float:
        """Return the seconds of one all-reduce."""
        if self.degree < 2:
            return 0.0
        return self.latency + 2 * (self.degree - 1) / self.degree * num_bytes / self.bandwidth


class ProfileStepTimes:
    """Step times from a profile; see the module.

    Args:
        folder: folder of the tables.
        prefix: their common prefix; None: the only one in the folder.
        model: None: the one that the meta file names.
        models: shapes in which its name is looked up first.
        link: link of one engine's GPUs; None: there is one GPU.
        host_seconds: added to every step that is larger than the captured graphs, for launches and
            other work that is not in the tables.
        experts: engines that share a mixture of experts; None: this engine has all experts.

    Raises:
        ConfigError: a missing or malformed table, an unknown model, or a profile for several GPUs
            without their link.
    """

    def __init__(
        self,
        folder: Path,
        prefix: str | None = None,
        *,
        model: ModelShape | None = None,
        models: Sequence[ModelShape] = (),
        link: Interconnect | None = None,
        padding: GraphPadding | None = None,
        host_seconds: float = 0.0,
        experts: ExpertGroup | None = None,
    ) -> None:
        prefix = find_profile(folder) if prefix is None else prefix
        self.model = model or _model_of(folder, prefix, models)
        self._layers = self.model.num_layers
        link = _checked(link, prefix, folder)
        padding = padding or GraphPadding()
        if not 0.0 <= host_seconds < math.inf:
            raise ConfigError(f"host_seconds must be 0 or more, got {host_seconds}")
        self._host = host_seconds
        self._captured = padding.sizes[-1] if padding.sizes else 0
        self._attention = AttentionTable(
            (int(a), int(b), int(c), int(d), float(e))
            for a, b, c, d, e in _rows(folder / f"{prefix}-attention.csv", 5)
        )
        dense = _curves(folder / f"{prefix}-dense.csv")
        heads = _curves(folder / f"{prefix}-per_sequence.csv")
        self._experts = (experts or ExpertGroup()) if self.model.num_experts else None
        self._member = self._experts.join() if self._experts else 0
        self._expert_seconds = self._expert_layer(folder, prefix)

        def dense_seconds(tokens: int) -> float:
            tokens = padding.padded(tokens)
            layer = sum(
                _PER_LAYER.get(name, 1) * curve(tokens)
                for name, curve in dense.items()
                if name not in _ONCE
            )
            once = sum(dense[name](tokens) for name in _ONCE if name in dense)
            reduced = link.all_reduce(2.0 * tokens * self.model.hidden_size)
            return (self._layers * layer + once) * _MICRO + 2 * self._layers * reduced

        def head_seconds(sequences: int) -> float:
            return sum(curve(sequences) for curve in heads.values()) * _MICRO

        self._dense_at = dense_seconds
        self._head_at = head_seconds
        self._dense = [0.0, *(dense_seconds(n) for n in range(1, _TABULATED + 1))]
        self._heads = [0.0, *(head_seconds(n) for n in range(1, 513))]
        path = folder / f"{prefix}-skew_fit.csv"
        self._skew = _SkewTable(_rows(path, 7)) if path.exists() else None

    def seconds(self, plan: SchedulerOutput) -> float:
        wide_tokens = samples = 0
        wide_keys = 0.0
        keys: list[int] = []
        for _, start, num_tokens, _, sampled in plan.rows:
            samples += sampled
            if num_tokens == 1:
                keys.append(start + 1)
            else:
                wide_tokens += num_tokens
                wide_keys += num_tokens * (start + 0.5 * num_tokens)
        history = wide_keys / wide_tokens - 0.5 * wide_tokens if wide_tokens else 0.0
        return self.of(wide_tokens, history, keys, samples)

    def of(self, chunk: int, history: float, keys: list[int], samples: int) -> float:
        """Return the seconds of a step.

        Args:
            chunk: prompt tokens; 0: there are none.
            history: keys before them, see ``AttentionTable.at``.
            keys: keys that each row of one token attends to.
            samples: number of rows that sample.
        """
        attention = self._attention_at(chunk, history, keys)
        own_tokens = num_tokens = chunk + len(keys)
        group = self._experts
        padded = False
        if group is not None:
            most = group.most_tokens(self._member, own_tokens)
            padded = self.is_captured(most)
            num_tokens = most if padded else own_tokens
        dense = (
            self._dense[num_tokens] if num_tokens < len(self._dense) else self._dense_at(num_tokens)
        )
        host = 0.0 if self.is_captured(num_tokens) else self._host
        seconds = host + dense + self._layers * attention * _MICRO
        if group is not None:
            everyone, seconds = group.meet(self._member, own_tokens, seconds)
            if padded:
                everyone = num_tokens * group.num_engines
            seconds += self._layers * self._expert_seconds(everyone)
        head = self._heads[samples] if samples < len(self._heads) else self._head_at(samples)
        return seconds + head

    def is_captured(self, num_tokens: int) -> bool:
        """Whether a captured graph covers a step of ``num_tokens`` tokens."""
        return num_tokens <= self._captured

    def _expert_layer(self, folder: Path, prefix: str) -> Callable[[int], float]:
        """Return a layer's seconds for experts by the tokens of all engines; 0 without experts."""
        group, model = self._experts, self.model
        if group is None:
            return lambda num_tokens: 0.0
        path = folder / f"{prefix}-moe.csv"
        if not path.exists():
            # a GPU holds whole experts in any sharing, so they are measured once
            path = folder / (re.sub(r"-tp\d+$", "-tp1", prefix) + "-moe.csv")
        rows = _rows(path, 3)
        table = ExpertTable((int(a), int(b), float(c)) for a, b, c in rows)
        return lambda num_tokens: group.layer_seconds(table, model, num_tokens)

    def _attention_at(self, chunk: int, history: float, keys: list[int]) -> float:
        """Return the microseconds of one layer."""
        rows = len(keys)
        if self._skew is None or rows < 2:
            return self._attention.at(chunk, history, rows, (sum(keys) / max(1, rows),))[0]
        mean, share, longer = two_point(keys)
        if longer <= mean:
            return self._attention.at(chunk, history, rows, (mean,))[0]
        even, worst = self._attention.at(chunk, history, rows, (mean, longer))
        return even + self._skew.alpha(chunk, rows, share, longer, history) * (worst - even)


def two_point(keys: Sequence[int]) -> tuple[float, float, float]:
    """Return the distribution on two lengths with the same mean, spread and skewness as ``keys``:
    its mean, the share of the longer ones, and their length (the mean where all are equal)."""
    rows = len(keys)
    mean = sum(keys) / rows
    distances = [k - mean for k in keys]
    squares = [d * d for d in distances]
    spread = math.sqrt(sum(squares) / rows)
    if spread < 1e-3 * mean:
        return mean, 0.5, mean
    skewness = sum(map(operator.mul, squares, distances)) / (rows * spread**3)
    # p(1 - p) = 1 / (4 + skewness^2), the smaller share on the side of the tail
    share = 0.5 * (1.0 - skewness / math.sqrt(4.0 + skewness * skewness))
    return mean, share, mean + spread * math.sqrt((1.0 - share) / share)


class _SkewTable:
    """alpha by bucket: chunk (nearest measured), rows, position of the mean between the shortest
    and the longest, longest, history. Labels carry their upper bounds (``n<=128``); values above
    all of them belong to ``>``."""

    def __init__(self, rows: Iterator[Sequence[str]]) -> None:
        self._alphas: dict[tuple[int, ...], float] = {}
        chunks: set[int] = set()
        bounds: list[set[float]] = [set() for _ in range(4)]
        parsed = []
        total = weight = 0.0
        for chunk, *labels, alpha, samples in rows:
            uppers = [_upper_bound(label) for label in labels]
            for known, upper in zip(bounds, uppers, strict=True):
                known.add(upper)
            chunks.add(int(chunk))
            parsed.append((int(chunk), uppers, float(alpha)))
            total += float(alpha) * float(samples)
            weight += float(samples)
        self._chunks = sorted(chunks)
        self._bounds = [sorted(known) for known in bounds]
        for first, uppers, value in parsed:
            index = [bisect_left(b, u) for b, u in zip(self._bounds, uppers, strict=True)]
            self._alphas[(first, *index)] = value
        # average of all buckets, for those that were not measured
        self._default = total / weight if weight else 0.0

    def alpha(self, chunk: int, rows: int, share: float, longest: float, history: float) -> float:
        """Return alpha: 0 as if all rows had the mean length, 1 as if all had the longest."""
        nearest = min(self._chunks, key=lambda known: abs(known - chunk))
        values = (rows, 100.0 * share, longest, max(0.0, history))
        buckets = [bisect_left(b, value) for b, value in zip(self._bounds, values, strict=True)]
        return self._alphas.get((nearest, *buckets), self._default)


def find_profile(folder: Path) -> str:
    """Return the prefix of the only profile in a folder.

    Raises:
        ConfigError: there is none, or several; the message lists them.
    """
    found = sorted(path.name.removesuffix("-dense.csv") for path in folder.glob("*-dense.csv"))
    if len(found) != 1:
        listed = ", ".join(found) or "none"
        raise ConfigError(f"{folder} should hold one profile (*-dense.csv), found: {listed}")
    return found[0]


def _checked(link: Interconnect | None, prefix: str, folder: Path) -> Interconnect:
    """Return the link for the number of GPUs at the end of the profile's name."""
    degree = profiled_degree(prefix)
    link = link or Interconnect()
    if link.degree != degree:
        raise ConfigError(
            f"{folder / prefix} was measured on one of {degree} GPU(s) and holds no communication; "
            f"the link given joins {link.degree}: give the bandwidth of theirs (and its latency), "
            "as in profile:FOLDER,PREFIX,link=16,latency=20us"
        )
    return link


def profiled_degree(prefix: str) -> int:
    """Return the GPUs of one replica, from the end of a profile's name (``-tp2``); else 1."""
    match = re.search(r"-tp(\d+)$", prefix)
    return int(match[1]) if match else 1


def _model_of(folder: Path, prefix: str, models: Sequence[ModelShape]) -> ModelShape:
    """Return the model that the longest matching ``*-meta.yaml`` names."""
    metas = [
        path
        for path in folder.glob("*-meta.yaml")
        if prefix.startswith(re.sub(r"-tp\d+$", "", path.name.removesuffix("-meta.yaml")))
    ]
    for path in sorted(metas, key=lambda path: len(path.name), reverse=True):
        match = re.search(r"^model:\s*(\S+)", path.read_text(encoding="utf-8-sig"), re.MULTILINE)
        if match:
            return ModelShape.named(match.group(1), models)
    raise ConfigError(f"{folder}: no {prefix}-meta.yaml that names a model at the left margin")


def _rows(path: Path, width: int) -> Iterator[Sequence[str]]:
    """Yield rows below the header. Raises ConfigError with file and line for another width."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            reader = csv.reader(lines)
            next(reader, None)
            for row in reader:
                if len(row) != width:
                    raise ConfigError(
                        f"{path}:{reader.line_num}: {len(row)} columns, expected {width}"
                    )
                yield row
    except OSError as error:
        raise ConfigError(f"cannot read the profile: {error}") from error


def _curves(path: Path) -> dict[str, Curve]:
    """Return a curve for each layer; duplicates are averaged."""
    sums: dict[str, Counter[float]] = defaultdict(Counter)
    counts: dict[str, Counter[float]] = defaultdict(Counter)
    for layer, size, value in _rows(path, 3):
        sums[layer][float(size)] += float(value)  # type: ignore[assignment]
        counts[layer][float(size)] += 1
    return {
        layer: Curve({size: total / counts[layer][size] for size, total in of_layer.items()})
        for layer, of_layer in sums.items()
    }


def _upper_bound(label: str) -> float:
    """Return the bound in ``n<=128``, ``sr<=15%``, ``kvB<=4k`` or ``kp=0``; infinity for ``>``."""
    match = re.fullmatch(r"[A-Za-z]+(<=|=|>)(\d+)(k?)%?", label)
    if match is None:
        raise ConfigError(f"{label!r} is not a bucket of a skew table")
    if match.group(1) == ">":
        return float("inf")
    return float(match.group(2)) * (1024 if match.group(3) else 1)
