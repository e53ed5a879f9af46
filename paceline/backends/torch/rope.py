"""Rotary position embedding in the decoder.

Dimension ``i`` of a head's first half is rotated against dimension ``i`` of its second half, by the
angles of ``backends.runner.rope``.
"""

from __future__ import annotations

import torch

from paceline.backends.runner.rope import rotary_tables
from paceline.checkpoints.model.config import ModelConfig, RopeConfig

__all__ = ["RotaryTable"]


class RotaryTable:
    """Cosines and sines of positions ``[0, length)``, in the model's dtype.

    A row of ``cos`` is [c, c] and of ``sin`` [-s, s], so that with the halves of x swapped the
    rotation is ``x * cos + swap(x) * sin``. Computed in float32, then cast. ``rope`` is the
    embedding of some layers; None: ``config.rope``.
    """

    def __init__(
        self,
        config: ModelConfig,
        length: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        rope: RopeConfig | None = None,
    ) -> None:
        cos, sin = (torch.from_numpy(table) for table in rotary_tables(config, length, rope))
        self._cos = torch.cat((cos, cos), dim=-1)[:, None].to(device=device, dtype=dtype)
        self._sin = torch.cat((-sin, sin), dim=-1)[:, None].to(device=device, dtype=dtype)
        self._half = config.head_dim // 2

    def rows(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines for positions [T]: two tensors [T, 1, head_dim], once a step."""
        return self._cos[positions], self._sin[positions]

    def rotate_(self, heads: torch.Tensor, rows: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Rotate heads [T, N, head_dim] in place."""
        cos, sin = rows
        swapped = heads.roll(self._half, -1)
        torch.addcmul(heads * cos, swapped, sin, out=heads)
