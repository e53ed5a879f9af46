"""Analytic step times: the least that a step's arithmetic and memory traffic must take.

Each operator takes the longer of its arithmetic and its traffic (the roofline of Williams et al.,
CACM 2009), at the shares of the peaks that good kernels achieve (``HardwareCard``)::

    matrices    2 * weights * T FLOP                     weights + activations, once per step;
                                                         of experts: those that a token goes to, and
                                                         those that at least one of T goes to
    attention   4 * layers * heads * head_dim * keys     keys and values of every row's context
    head        2 * hidden * vocabulary * samples        its weights

plus one launch overhead per step, and two all-reduces per layer for tensor parallelism.

This module does not know the scheduler or any kernel.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from operator import itemgetter
from typing import Any, Final

from paceline.core.outputs import SchedulerOutput
from paceline.errors import ConfigError
from paceline.sim.step_times.models import ModelShape
from paceline.sim.step_times.profile import Interconnect

__all__ = ["HardwareCard", "RooflineStepTimes", "known_hardware"]


# fields of a ScheduledRow by index in the tuple, for loops that run in C
_START: Final = itemgetter(1)
_SAMPLES: Final = itemgetter(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareCard:
    """One accelerator, by its maker's figures."""

    name: str
    # dense 16-bit FLOP/s
    flops: float
    # bytes per second of its memory
    bandwidth: float
    # bytes of its memory
    memory: float
    # bytes per second of one device's link to its peers, one direction; 0: none but the host
    link_bandwidth: float
    # shares of the peaks that good kernels achieve on large problems
    flops_efficiency: float = 0.7
    bandwidth_efficiency: float = 0.8
    # duration of a step that computes nothing, s
    step_overhead: float = 0.001
    # where the numbers are published
    source: str = ""

    def __post_init__(self) -> None:
        if min(self.flops, self.bandwidth, self.memory) <= 0:
            raise ConfigError(f"hardware {self.name}: flops, bandwidth, memory must be above 0")
        if not (0 < self.flops_efficiency <= 1 and 0 < self.bandwidth_efficiency <= 1):
            raise ConfigError(f"hardware {self.name}: efficiencies must be in (0, 1]")

    @classmethod
    def named(cls, name: str) -> HardwareCard:
        """Return a card of ``hardware.json``, in any case and with any separators ("rtx4090").
        Raises ConfigError that lists them for another name."""
        cards = known_hardware()
        for card in cards:
            if _plain(card.name) == _plain(name):
                return card
        raise ConfigError(
            f"no card for hardware {name!r}; known: {', '.join(card.name for card in cards)}"
        )


def _plain(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def known_hardware() -> tuple[HardwareCard, ...]:
    """Return every card of ``hardware.json``."""
    data: list[dict[str, Any]] = json.loads(
        files("paceline.sim.step_times").joinpath("hardware.json").read_text()
    )
    return tuple(HardwareCard(**entry) for entry in data)


class RooflineStepTimes:
    """Step times by a roofline; see the module.

    Args:
        degree: devices that share every matrix (tensor parallelism).
        weight_bytes, kv_bytes: bytes per value; None: weights as stored, or 16 bits.
    """

    def __init__(
        self,
        card: HardwareCard,
        model: ModelShape,
        *,
        degree: int = 1,
        weight_bytes: float | None = None,
        kv_bytes: float = 2.0,
    ) -> None:
        if degree < 1:
            raise ConfigError(f"degree must be at least 1 device, got {degree}")
        if degree > 1 and card.link_bandwidth <= 0:
            raise ConfigError(f"{card.name} has no link to its peers: degree must be 1")
        weight_bytes = model.bytes_per_weight if weight_bytes is None else weight_bytes
        self.card = card
        self.model = model
        self.degree = degree
        flops = degree * card.flops * card.flops_efficiency
        bandwidth = degree * card.bandwidth * card.bandwidth_efficiency
        shared = model.num_layers * model.shared_parameters
        experts = model.num_layers * model.expert_parameters
        head = model.hidden_size * model.vocab_size
        self._overhead = card.step_overhead
        self._matrix_compute = 2.0 * (shared + model.experts_per_token * experts) / flops
        self._matrix_read = shared * weight_bytes / bandwidth
        # seconds to read one expert in every layer
        self._expert_read = experts * weight_bytes / bandwidth
        self._head_compute = 2.0 * head / flops
        self._head_read = head * weight_bytes / bandwidth
        # each token writes and reads its activations a few times per layer
        inner = model.experts_per_token * model.expert_intermediate_size
        width = 2 * model.hidden_size + 3 * (inner or model.intermediate_size)
        self._activation = 2.0 * model.num_layers * width * 2.0 / bandwidth
        self._attend = 4.0 * model.num_layers * model.num_heads * model.head_dim / flops
        self._read = model.kv_bytes_per_token(kv_bytes) / bandwidth
        link = Interconnect(degree, card.link_bandwidth, 5e-6) if degree > 1 else Interconnect()
        self._reduces = 2 * model.num_layers
        self._link = link
        weights = model.num_parameters * weight_bytes
        # bytes left for keys and values when a tenth of the memory is kept free
        self.kv_capacity_bytes = 0.9 * degree * card.memory - weights
        if self.kv_capacity_bytes <= 0:
            raise ConfigError(
                f"{model.name} needs {weights / 2**30:.1f} GiB for its weights, {degree} x "
                f"{card.name} has {degree * card.memory / 2**30:.1f} GiB"
            )
        self._kv_bytes_per_token = model.kv_bytes_per_token(kv_bytes)

    def num_blocks(self, block_size: int) -> int:
        """Return the KV blocks that fit in addition to the weights."""
        return max(1, int(self.kv_capacity_bytes / (block_size * self._kv_bytes_per_token)))

    def seconds(self, plan: SchedulerOutput) -> float:
        rows = plan.rows
        tokens = plan.num_tokens
        samples = sum(map(_SAMPLES, rows))
        context = tokens + sum(map(_START, rows))
        if tokens == len(rows):
            # every row has one token
            compute = context - 0.5 * tokens
        else:
            compute = sum([n * (start + 0.5 * n) for _, start, n, _, _ in rows])
        read = self._matrix_read
        if self._expert_read:
            read += self._expert_read * self.model.experts_reached(tokens)
        matrices = max(self._matrix_compute * tokens, read + self._activation * tokens)
        attention = max(self._attend * compute, self._read * context)
        head = max(self._head_compute * samples, self._head_read) if samples else 0.0
        seconds: float = self._overhead + matrices + attention + head
        if self.degree > 1:
            seconds += self._reduces * self._link.all_reduce(2.0 * tokens * self.model.hidden_size)
        return seconds
