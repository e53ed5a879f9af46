"""Textbook claims about LLM serving, simulated with the scheduler that serves: docs/studies/."""
