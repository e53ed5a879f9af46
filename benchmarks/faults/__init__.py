"""Faults and their effects on clients; run with ``python -m benchmarks.faults``."""
