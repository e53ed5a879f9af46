"""Commands that serve: ``paceline serve`` with its engine process, ``paceline gateway``."""
