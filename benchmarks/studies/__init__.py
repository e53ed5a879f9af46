"""Textbook claims about LLM serving, simulated with the real scheduler: docs/studies/."""
