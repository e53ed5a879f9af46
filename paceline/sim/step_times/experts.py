"""Mixture-of-experts layers in operator profiles: times of experts, and of engines that share
them.

A profile of such a model has, in addition to its other tables,

    PREFIX-moe.csv    tokens, activated_experts, time_us      (one layer on one GPU)

where ``tokens`` are those computed on the GPU and ``activated_experts`` those of its experts that
at least one token goes to. Their number cannot be known without the model's weights; it is assumed
that every expert is as likely as the next (``ModelShape.experts_reached``).

Engines with expert parallelism (vLLM: ``data_parallel_size`` with ``enable_expert_parallel``) hold
a part of the experts each. In every layer each sends its tokens to all (all-gather) and gets its
tokens' sums back (reduce-scatter), so they compute in step, and the fastest wait for the slowest::

    engine 0   attention | gather | experts 0..63   of all tokens | scatter | ...
    engine 1   attention | gather | experts 64..127 of all tokens | scatter | ...

Where captured graphs cover the steps of all engines, all pad to the one with the most tokens
(``vllm/v1/worker/dp_utils.py``); larger steps are not padded.

Here engines stay in step by what is known of the others when a step is planned: the last step that
each of them planned. An engine without requests is not distinguished from one whose last step still
runs.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.errors import ConfigError
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
        # fewer experts than were ever measured cost as much as the fewest measured
        weight = max(0.0, weight)
        first = self._curves[low](tokens)
        if weight == 0.0:
            return first
        return (1.0 - weight) * first + weight * self._curves[low + 1](tokens)


class ExpertGroup:
    """Engines that share one model's experts. Each joins, and reports its share of every step.

    Args:
        num_engines: number of engines that share them; 1: the engine has all experts itself.
        degree: GPUs of one engine, each with its part of the engine's experts.
        bandwidth: bytes per second of one GPU's link, one direction.
        latency: duration of an empty collective, s.
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
        # tokens of each member's last step, and its seconds without experts
        self._last: list[tuple[int, float]] = []

    def join(self) -> int:
        """Return a new member's number. Raises ConfigError once all engines have joined."""
        if len(self._last) >= self.num_engines:
            raise ConfigError(f"an expert group of {self.num_engines} engines is full")
        self._last.append((0, 0.0))
        return len(self._last) - 1

    def most_tokens(self, member: int, num_tokens: int) -> int:
        """Return the tokens of the largest step, ``num_tokens`` being those of ``member``."""
        return max(num_tokens, *(t for i, (t, _) in enumerate(self._last) if i != member), 0)

    def meet(self, member: int, num_tokens: int, seconds: float) -> tuple[int, float]:
        """Combine a step of ``member`` with the others' last ones; return the tokens of all, and
        the seconds until the slowest is done, without its experts."""
        self._last[member] = num_tokens, seconds
        return sum(t for t, _ in self._last), max(s for _, s in self._last)

    def layer_seconds(self, table: ExpertTable, model: ModelShape, num_tokens: int) -> float:
        """Return the seconds of one layer's experts and of the transfers for them.

        Args:
            num_tokens: tokens of all engines together.
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
