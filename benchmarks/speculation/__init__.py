"""What guessing tokens brings; ``python -m benchmarks.speculation``."""
