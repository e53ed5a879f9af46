"""Simulation: the scheduler that serves, driven by a virtual clock. No tensors, no HTTP."""
