"""The page over the null engine of the server's tests."""

from tests.server.conftest import anyio_backend, engine

__all__ = ["anyio_backend", "engine"]
