"""Blocks that hold keys and values: the pool, the prefix cache, and host memory."""
