"""The cost of constrained generation; see ``__main__``."""
