"""Check of the certificate and key of HTTPS, before anything slow begins."""

from __future__ import annotations

import ssl
from pathlib import Path

from paceline.errors import ConfigError

__all__ = ["check_tls_files"]


def check_tls_files(certfile: Path, keyfile: Path | None) -> None:
    """Raise ConfigError for files that cannot be used.

    Args:
        keyfile: None: the key is in ``certfile`` too.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    files = f"{certfile}" if keyfile is None else f"{certfile} and {keyfile}"
    try:
        # an explicit password keeps the library from asking the terminal for one
        context.load_cert_chain(certfile, keyfile, password="")
    except ssl.SSLError as error:
        reason = error.reason or str(error)
        raise ConfigError(
            f"{files} cannot be served with ({reason}): give a PEM certificate chain and its "
            "private key, not encrypted"
        ) from None
    except OSError as error:
        raise ConfigError(f"{files} cannot be read: {error.strerror}") from None
