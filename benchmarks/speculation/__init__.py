"""What drafting tokens brings; ``python -m benchmarks.speculation``."""
