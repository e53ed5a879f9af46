"""Paceline: LLM serving whose scheduler paces every step to the caller's latency target."""

__all__ = ["__version__"]

__version__ = "0.1.0"
