"""Choice of the matrices that get more than four bits, by what each costs and how large it is.

What a product costs is measured: with its weights alone rounded to the nearest in 4 bits, how far
are the model's answers from what they were? Between 4, 5 and 8 bits the cost falls with the square
of a step, so one measurement is enough. All of them run through the model together: behind each
layer the text has one stream more for each of its products, so every layer is read once a product
and none is kept.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Mapping
from typing import Final

import torch

from paceline.backends.torch.linear import DenseLinear, Linear
from paceline.checkpoints.gguf.container import SIZES, GGUFType
from paceline.checkpoints.model.checkpoint import Checkpoint
from paceline.errors import CheckpointError, ConfigError
from paceline.quantize.rounding import levels_of, round_nearest
from paceline.quantize.streams import Maker, Streams, dense

__all__ = ["KINDS", "allocate", "check_size", "group_of", "losses", "share_of"]

# few bits first
KINDS: Final = (GGUFType.Q4_1, GGUFType.Q5_1, GGUFType.Q8_0)
# of the calibration text: pieces, and tokens of each. Fewer order the products alike
_PIECES: Final = 2
_LENGTH: Final = 128
# steps of a range of 2, of which Q8_0 has one on both sides of 0
_STEPS: Final = {GGUFType.Q4_1: 15, GGUFType.Q5_1: 31, GGUFType.Q8_0: 254}
_EXPERTS: Final = re.compile(r"\.experts\..*")


def group_of(name: str) -> str:
    """Return the name of what gets one kind with a matrix: what multiplies the same rows, and all
    experts of a layer, which files and kernels keep together."""
    name = _EXPERTS.sub(".experts", name)
    for part, first in (("k_proj", "q_proj"), ("v_proj", "q_proj"), ("up_proj", "gate_proj")):
        name = name.replace(f".{part}.", f".{first}.")
    return name


def losses(
    checkpoint: Checkpoint,
    windows: torch.Tensor,
    names: frozenset[str],
    progress: Callable[[int, int], None] = lambda done, layers: None,
) -> dict[str, float]:
    """Return the KL in nats a token that each group costs when it alone is rounded to 4 bits.

    Args:
        windows: token ids of the calibration text, [pieces, length].
        names: the matrices that may be rounded.
        progress: is called with the layers done and all.

    Raises CheckpointError for weights or activations that are not finite.
    """
    step = max(1, len(windows) // _PIECES)
    text = windows[::step, :_LENGTH][:_PIECES]
    streams, layers = Streams(checkpoint, text.shape[1]), checkpoint.config.num_hidden_layers
    found: list[str] = []
    with torch.inference_mode():
        # the model as it is, then one stream for each group so far
        every = [streams.embed(text)]
        for index in range(layers):
            before, groups = every[0].clone(), _groups_of_layer(names, index)
            with streams.layer(index, dense) as layer:
                for x in every:
                    streams.run(index, layer, x)
            for group in groups:
                x = before.clone()
                with streams.layer(index, _rounding(group, names)) as layer:
                    streams.run(index, layer, x)
                every.append(x)
                found.append(group)
            # the last layer is done with the head
            if index + 1 < layers:
                progress(index + 1, layers)
        with streams.head() as head:
            exact = head(every[0]).log_softmax(1)
            costs = [_divergence(exact, head(x).log_softmax(1)) for x in every[1:]]
    progress(layers, layers)
    if not all(map(torch.isfinite, map(torch.tensor, costs))):
        raise CheckpointError(f"{checkpoint.path}: a weight or an activation is not finite")
    return dict(zip(found, costs, strict=True))


def check_size(size: float) -> None:
    """Raise ConfigError for a size that no choice of kinds has."""
    least = _bits(KINDS[0]) / _bits(KINDS[-1])
    if not least <= size <= 1:
        raise ConfigError(
            f"--size {size:g} must be from {least:.2f}, which is 4 bits in all matrices, to 1, "
            "which is Q8_0 in all"
        )


def allocate(
    costs: Mapping[str, float], weights: Mapping[str, int], size: float
) -> dict[str, GGUFType]:
    """Return the kind of each group.

    Each time, the group whose next kind saves most for its bits gets it, until none fits.

    Args:
        costs: see ``losses``.
        weights: numbers of weights by group.
        size: bytes of all over those in Q8_0 at most.
    """
    kinds = dict.fromkeys(costs, KINDS[0])
    left = size * _bits(KINDS[-1]) * sum(weights.values())
    left -= _bits(KINDS[0]) * sum(weights.values())
    waiting = [_upgrade(group, 0, costs, weights) for group in costs]
    heapq.heapify(waiting)
    while waiting:
        _, group, place, more = heapq.heappop(waiting)
        if more > left:
            continue
        left -= more
        kinds[group] = KINDS[place]
        if place + 1 < len(KINDS):
            heapq.heappush(waiting, _upgrade(group, place, costs, weights))
    return kinds


def share_of(kinds: Mapping[str, GGUFType], weights: Mapping[str, int]) -> float:
    """Return the bytes of matrices over those in Q8_0; both by matrix or both by group."""
    used = sum(_bits(kind) * weights[name] for name, kind in kinds.items())
    return used / (_bits(KINDS[-1]) * sum(weights[name] for name in kinds))


def _upgrade(
    group: str, place: int, costs: Mapping[str, float], weights: Mapping[str, int]
) -> tuple[float, str, int, float]:
    """Return the order, the group, its next kind's place, and the bits that this takes."""
    now, following = KINDS[place], KINDS[place + 1]
    saved = costs[group] * (_relative(now) - _relative(following))
    more = (_bits(following) - _bits(now)) * weights[group]
    return -saved / more, group, place + 1, more


def _relative(kind: GGUFType) -> float:
    return (_STEPS[KINDS[0]] / _STEPS[kind]) ** 2


def _bits(kind: GGUFType) -> float:
    values, size = SIZES[kind]
    return 8 * size / values


def _groups_of_layer(names: frozenset[str], index: int) -> list[str]:
    start = f"model.layers.{index}."
    return sorted({group_of(name) for name in names if name.startswith(start)})


def _rounding(group: str, allowed: frozenset[str]) -> Maker:
    def make(names: tuple[str, ...], weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        name = f"{names[0]}.weight"
        if name in allowed and group_of(name) == group:
            weight = round_nearest(weight, levels_of(KINDS[0])).values()
        return DenseLinear(weight, bias)

    return make


def _divergence(exact: torch.Tensor, other: torch.Tensor) -> float:
    return float((exact.exp() * (exact - other)).sum(1).double().mean())
