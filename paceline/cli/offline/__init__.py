"""Commands that answer without a server: ``chat``, ``run``, ``generate``."""
