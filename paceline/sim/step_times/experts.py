"""Mixture-of-experts layers in operator profiles: what the experts take, and what engines that
share them take together.

A profile of such a model has, beside its other tables,

    PREFIX-moe.csv    tokens, activated_experts, time_us      (one layer on one GPU)

where ``tokens`` are those computed on the GPU and ``activated_experts`` those of its experts that
at least one token goes to. How many these are is not known without the model's weights; what is
assumed is that every expert is as likely as the next (``ModelShape.experts_reached``).

Engines with expert parallelism (vLLM: ``data_parallel_size`` with ``enable_expert_parallel``) hold
a part of the experts each. In every layer each sends its tokens to all (all-gather) and gets its
tokens' sums back (reduce-scatter), so they compute in step, and whoever is done first waits::

    engine 0   attention | gather | experts 0..63   of all tokens | scatter | ...
    engine 1   attention | gather | experts 64..127 of all tokens | scatter | ...

Where captured graphs cover the steps of all engines, all pad to the one with the most tokens
(``vllm/v1/worker/dp_utils.py``); larger steps are not padded.

Here engines keep step by what is known of the others when a step is planned: the last step that
each of them planned. An engine without requests is not told from one whose last step is still
running.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.core.errors import ConfigError
from paceline.sim.step_times.models import ModelShape
from paceline.sim.step_times.tables import Curve, bracket

__all__ = ["ExpertGroup", "ExpertTable"]


class ExpertTable:
    """Microseconds of one layer's experts over (tokens, activated experts): linear in both.

    Args:
        rows: (tokens, activated_experts, time).
    """

    def __init__(self, rows: Iterable[tuple[int, int, float]]) -> None:
        by_count: dict[int, dict[float, float]] = {}
        for tokens, count, value in rows:
            by_count.setdefault(count, {})[tokens] = value
        if not by_count:
            raise ConfigError("the table of experts is empty")
        self._counts = sorted(by_count)
        self._curves = [Curve(by_count[count]) for count in self._counts]

    def at(self, tokens: float, activated: float) -> float:
        low, weight = bracket(self._counts, activated)
        # fewer experts than were ever measured cost no less than those
        weight = max(0.0, weight)
        first = self._curves[low](tokens)
        if weight == 0.0:
            return first
        return (1.0 - weight) * first + weight * self._curves[low + 1](tokens)


class ExpertGroup:
    """Engines that share one model's experts. Each joins, and says at every step what it brings.

    Args:
        num_engines: how many share them; 1: an engine has all its experts itself.
        degree: GPUs of one engine, each with its part of the engine's experts.
        bandwidth: bytes per second of one GPU's link, one direction.
        latency: seconds of one collective of nothing.
    """

    def __init__(
        self,
        num_engines: int = 1,
        *,
        degree: int = 1,
        bandwidth: float = 0.0,
        latency: float = 0.0,
    ) -> None:
        if min(num_engines, degree) < 1:
            raise ConfigError(f"num_engines={num_engines} and degree={degree} must be at least 1")
        if num_engines > 1 and bandwidth <= 0:
            raise ConfigError(
                f"{num_engines} engines that share experts need a link bandwidth above 0, got "
                f"{bandwidth}"
            )
        self.num_engines = num_engines
        self._shares = num_engines * degree
        self._bandwidth = bandwidth
        self._latency = latency
        # of the last step of each member: its tokens, and seconds of all but its experts
        self._last: list[tuple[int, float]] = []

    def join(self) -> int:
        """A new member's number. Raises ConfigError once there are as many as engines."""
        if len(self._last) >= self.num_engines:
            raise ConfigError(f"an expert group of {self.num_engines} engines is full")
        self._last.append((0, 0.0))
        return len(self._last) - 1

    def most_tokens(self, member: int, num_tokens: int) -> int:
        """Tokens of the largest step, ``num_tokens`` being those of ``member``."""
        return max(num_tokens, *(t for i, (t, _) in enumerate(self._last) if i != member), 0)

    def meet(self, member: int, num_tokens: int, seconds: float) -> tuple[int, float]:
        """What a step of ``member`` amounts to beside the others' last ones: the tokens of all, and
        the seconds, all but the experts', until the slowest is done."""
        self._last[member] = num_tokens, seconds
        return sum(t for t, _ in self._last), max(s for _, s in self._last)

    def layer_seconds(self, table: ExpertTable, model: ModelShape, num_tokens: int) -> float:
        """One layer's experts and what is sent for them.

        Args:
            num_tokens: of all engines together.
        """
        shares, engines = self._shares, self.num_engines
        # a token goes to ``experts_per_token`` experts, of which each GPU has its share
        reached = model.experts_reached(num_tokens) / shares
        seconds = 1e-6 * table.at(num_tokens / shares, reached)
        if engines > 1:
            # each engine receives the others' tokens in 16 bits, and sends as much back
            moved = (engines - 1) / engines * num_tokens * 2.0 * model.hidden_size
            seconds += 2.0 * (self._latency + moved / self._bandwidth)
        return seconds
