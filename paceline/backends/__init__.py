"""Backends carry plans out; all pass the same contract tests.

``null`` and ``simulated`` compute nothing. A model is loaded by ``load``, which chooses between the
compute paths ``native/`` and ``torch/``; ``runner`` and ``worker`` are the same for both. Only
``torch/`` imports torch, and it is only imported where it is needed.
"""
