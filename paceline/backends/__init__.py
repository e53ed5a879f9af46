"""Backends carry plans out; all pass the same contract tests.

``reference/`` computes nothing. A model is loaded by ``loading/``, which chooses between the
compute paths ``native/`` and ``torch/``; ``runner/`` is the same for both, and ``drafting/`` lies
above it. Only ``torch/`` imports torch, and it is only imported where it is needed.
"""
