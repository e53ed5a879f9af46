"""Simulation: the scheduler that serves, driven by a virtual clock. Knows no tensors and no HTTP."""
