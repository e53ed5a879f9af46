"""Gain by draft tokens; ``python -m benchmarks.speculation``."""
