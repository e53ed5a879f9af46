"""A socket to serve on. Imports little of ours: the address is bound before anything slow
begins."""

from __future__ import annotations

import socket
from typing import Final

from paceline.errors import ConfigError

__all__ = ["SEND_BUFFER_BYTES", "bind"]

# send buffer of a connection (Linux doubles it); the default would grow to megabytes
SEND_BUFFER_BYTES: Final = 64 * 1024
_BACKLOG: Final = 2048


def bind(host: str, port: int, *, flag: str = "--port") -> socket.socket:
    """Return a listening socket; port 0 takes a free one. Raises ConfigError if it is in use.

    ``flag`` is the option that the error advises to change.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        # a name that cannot be sent to a resolver is a UnicodeError
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot resolve host {host!r}: {reason}") from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # connections inherit it
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; give another {flag}"
        ) from error
    listener.setblocking(False)
    return listener
