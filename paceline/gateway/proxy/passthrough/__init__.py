"""Requests that one engine alone can answer: what it keeps, and token counts."""
