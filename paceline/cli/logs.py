"""Where log lines go: standard error, one line each, so that standard output stays for answers."""

from __future__ import annotations

import logging

__all__ = ["configure_logging"]

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# chatty at info about things nobody here asked for
_QUIET = ("httpx", "huggingface_hub", "filelock", "urllib3")


def configure_logging(level: str) -> None:
    """Set up the root logger of this process; a later call changes the level."""
    logging.basicConfig(level=level.upper(), format=_FORMAT)
    logging.getLogger().setLevel(level.upper())
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
