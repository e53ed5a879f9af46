"""Version of what is made of a model: servers that keep it ask for it without loading PyTorch."""

from __future__ import annotations

from typing import Final

__all__ = ["VERSION"]

# raised when a file, or a part of an earlier run, would no longer be what this code makes
VERSION: Final = 4
