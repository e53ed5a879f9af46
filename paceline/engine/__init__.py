"""Execution of plans: the engine's loop, its process, and the text work around it."""
