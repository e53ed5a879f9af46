"""Metrics and traces of requests, and readings of these metrics."""
