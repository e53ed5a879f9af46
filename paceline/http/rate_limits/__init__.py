"""Limits of each key: requests and tokens per time, and requests at once."""
