"""LoRA adapters for the PyTorch path: two products for the rows of each adapter of a step.

This module does not know files, requests or slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from paceline.backends.runner.interface import RowAdapter
from paceline.checkpoints.model.adapter import AdapterValues

__all__ = ["StepAdapters", "TorchAdapter"]


class TorchAdapter:
    """An adapter's matrices on the model's device."""

    def __init__(
        self,
        values: AdapterValues,
        *,
        dtype: torch.dtype,
        device: torch.device,
        pause: Callable[[], None],
    ) -> None:
        # by layer and module: [inputs, rank] and [rank, outputs], scaled
        self.products: dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]] = {}
        self.num_bytes = 0
        for pair, a, b in values.pairs:
            down = torch.from_numpy(a).to(device, dtype).T.contiguous()
            up = (torch.from_numpy(b).to(device, dtype) * pair.scale).T.contiguous()
            self.products[pair.layer, pair.module] = down, up
            self.num_bytes += down.nbytes + up.nbytes
            pause()


class StepAdapters:
    """The adapters of one step, each with the tokens that use it.

    Args:
        rows: each row's adapter; None: it has none.
        counts: tokens of each row.
    """

    def __init__(
        self, rows: Sequence[RowAdapter | None], counts: Sequence[int], device: torch.device
    ) -> None:
        tokens: dict[int, list[int]] = {}
        uses: dict[int, TorchAdapter] = {}
        factors, first = [0.0] * sum(counts), 0
        for row, count in zip(rows, counts, strict=True):
            if row is not None and row.scale:
                uses[id(row.adapter)] = row.adapter
                tokens.setdefault(id(row.adapter), []).extend(range(first, first + count))
                factors[first : first + count] = [row.scale] * count
            first += count
        scales = torch.tensor(factors, device=device)
        self._uses = [
            (uses[key], index, scales[index, None])
            for key, members in tokens.items()
            for index in [torch.tensor(members, device=device)]
        ]

    def add(
        self, layer: int, module: str, x: torch.Tensor, y: torch.Tensor, first: int = 0
    ) -> None:
        """Add to columns of ``y`` from ``first`` on, [T, outputs], what the adapters make of ``x``,
        [T, inputs]."""
        for adapter, index, scale in self._uses:
            if (product := adapter.products.get((layer, module))) is not None:
                down, up = product
                more = (x[index].to(down.dtype) @ down) @ up
                y[index, first : first + up.shape[1]] += (more * scale).to(y.dtype)
