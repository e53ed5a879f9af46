"""Promises to callers while something else happens; see ``__main__``."""
