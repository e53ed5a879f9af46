"""What clients see when something breaks; run with ``python -m benchmarks.faults``."""
