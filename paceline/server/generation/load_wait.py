"""The seconds that a request has waited for its model, where one server has several.

A context variable: everything that answers a request runs in its context, and a server of one model
never sets it.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Final

__all__ = ["LOAD_WAIT"]

LOAD_WAIT: Final = ContextVar("LOAD_WAIT", default=0.0)
