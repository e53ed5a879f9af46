"""Benchmarks: method in the docstring, a table for people, the last line JSON."""
