"""Metrics and traces of the gateway's requests."""
