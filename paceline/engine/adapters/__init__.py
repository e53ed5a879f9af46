"""Adapters of one engine: what is registered, what is in memory, and who uses it."""
