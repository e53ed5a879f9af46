"""The simulator against live servers; see ``__main__``."""
