"""What it takes to send a prompt's keys and values from one replica to another."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import ConfigError

__all__ = ["KVTransfer"]


@dataclass(frozen=True, slots=True)
class KVTransfer:
    """Transfer of a prompt's keys and values from one replica to another."""

    bytes_per_token: float
    # bytes per second
    bandwidth: float
    # duration of an empty transfer, s
    latency: float = 0.0
    # whether it begins when the steps that its replica has under way end: Paceline's engines copy
    # blocks between steps
    between_steps: bool = False

    def __post_init__(self) -> None:
        if self.bandwidth <= 0 or self.bytes_per_token < 0 or self.latency < 0:
            raise ConfigError(
                f"a KV transfer needs bandwidth above 0 and nothing below 0, got {self}"
            )

    def seconds(self, num_tokens: int) -> float:
        return self.latency + num_tokens * self.bytes_per_token / self.bandwidth
