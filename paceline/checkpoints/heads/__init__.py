"""Heads that draft tokens or pool, in a model's files or in files of their own."""
