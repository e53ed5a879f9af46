"""Tests of ``benchmarks.promises``."""
