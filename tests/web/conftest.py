"""The page over the null engine of the server's tests."""

from tests.server.conftest import engine

__all__ = ["engine"]
