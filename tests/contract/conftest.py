"""Fixtures of the contracts that several files share."""

from tests.contract.adapters import exact, folder

__all__ = ["exact", "folder"]
