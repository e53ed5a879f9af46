"""Queues: requests that wait, that run, or that wait for another request's prompt."""
