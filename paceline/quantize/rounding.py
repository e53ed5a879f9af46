"""Rounding of a matrix to few bits so that its products change least, and the bytes of its blocks.

The error that counts is not that of the weights but that of the outputs on real inputs: with ``H``
the sum of ``x x^T`` over a calibration text, a row that is rounded from ``w`` to ``v`` costs
``(v - w) H (v - w)^T``. Three steps make that small, each for all rows at once:

1. the range of a group of 32 columns is searched, not taken from its minimum and maximum;
2. columns are rounded in order, and the error of each is compensated by those not rounded yet
   (GPTQ: Frantar et al. 2022, arXiv 2210.17323);
3. ``sweeps`` times over all groups, first the group's scale and minimum, then each of its values is
   set to what is best while all else stays (coordinate descent, as in QuantEase: Behdin et al.
   2023, arXiv 2309.01885).

The result is in GGUF's own blocks, which say ``scale * value + minimum``, both numbers in float16.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.checkpoints.gguf.container import GGUFType

__all__ = [
    "GROUP",
    "Rounded",
    "as_blocks",
    "levels_of",
    "output_error",
    "round_matrix",
    "round_nearest",
]

# columns with one scale and one minimum
GROUP: Final = 32
# columns whose errors are handed on together
_BLOCK: Final = 128
# most rows that are rounded at once: their part of a step stays in the processor's second cache
_ROWS: Final = 1024
# of H's diagonal, added to itself: inputs of another text hang together in other ways than those of
# the one that was read. On texts that were not, products' errors are 3 to 9 % less than with 0.1 of
# its mean alone, which gives 3 to 8 % less than 0.01 of it (docs/lab-log/kernels.md)
_OWN_DAMPING: Final = 0.67
# of its mean, added to all of it, so that it can be inverted
_DAMPING: Final = 0.01
# shares of a group's range that are tried
_SHARES: Final = tuple(1.0 - 0.04 * step for step in range(11))
_LEVELS: Final = {GGUFType.Q4_1: 15, GGUFType.Q5_1: 31}


def levels_of(kind: GGUFType) -> int:
    """Return the largest value that a type's blocks hold: 15 for Q4_1, 31 for Q5_1."""
    return _LEVELS[kind]


@dataclass(frozen=True, slots=True, eq=False)
class Rounded:
    """A matrix [rows, columns] in groups of GROUP columns."""

    # [rows, columns], whole numbers from 0 to the type's levels, as float32
    codes: torch.Tensor
    # [rows, groups], each a number that float16 holds, as float32
    scales: torch.Tensor
    minimums: torch.Tensor

    def values(self) -> torch.Tensor:
        """Return what the blocks stand for, [rows, columns] in float32."""
        grouped = self.codes.view(len(self.codes), -1, GROUP)
        return (grouped * self.scales[..., None] + self.minimums[..., None]).view_as(self.codes)


def output_error(values: torch.Tensor, target: torch.Tensor, hessian: torch.Tensor) -> float:
    """Return the squared error of the outputs over that of a matrix of zeros."""
    difference = values - target
    lost = float((difference @ hessian).mul_(difference).sum())
    return lost / max(float((target @ hessian).mul_(target).sum()), 1e-30)


def round_nearest(weight: torch.Tensor, levels: int) -> Rounded:
    """Round between each group's minimum and maximum, as ``--dtype q4`` does while loading."""
    grouped = weight.view(len(weight), -1, GROUP)
    scales, minimums = _range(grouped.amin(2), grouped.amax(2), levels)
    codes = _codes(grouped, scales[..., None], minimums[..., None], levels)
    return Rounded(codes.view_as(weight), scales, minimums)


def round_matrix(
    weight: torch.Tensor, hessian: torch.Tensor, levels: int, *, sweeps: int = 3, threads: int = 1
) -> Rounded:
    """Round a matrix as the module describes. With more than one thread, PyTorch's own number of
    threads is 1 meanwhile, and the caller's when this returns.

    Args:
        weight: [rows, columns] in float32, columns a multiple of GROUP.
        hessian: [columns, columns] in float32, which is damped in place while this runs: of wide
            matrices it is the largest of all that is in memory.
        levels: see ``levels_of``.
        threads: rows are shared out among them; the result is the same for any number.

    Raises ValueError for values that are not finite.
    """
    # a sum takes no memory, and is finite where all of it is
    if not bool(torch.isfinite(weight.sum() + hessian.sum())):
        raise ValueError("a weight or an activation is not finite")
    diagonal = hessian.diagonal()
    before = diagonal.clone()
    # a column that no input reaches is rounded as it is
    least = max(float(diagonal.mean()) * _DAMPING, 1e-12)
    diagonal.mul_(1 + _OWN_DAMPING).add_(least)
    upper = _inverse_factor(hessian)

    def of_rows(part: torch.Tensor) -> Rounded:
        with torch.inference_mode():
            rounded = _compensated(part, upper, levels)
            for _ in range(sweeps):
                _improve(rounded, part, hessian, levels)
        return rounded

    with _one_thread_each(threads) as pool:
        # pairs of parts, so that two threads, which most small machines have, end together
        pairs = -(-len(weight) // (2 * _ROWS))
        parts = list(pool.map(of_rows, weight.tensor_split(2 * pairs)))
    diagonal.copy_(before)
    return Rounded(
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat([part.minimums for part in parts]),
    )


@contextmanager
def _one_thread_each(threads: int) -> Iterator[ThreadPoolExecutor]:
    """Yield threads within which PyTorch uses one each. Steps of a few thousand numbers are not
    worth sharing out, and rows are independent."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            yield pool
    finally:
        torch.set_num_threads(before)


def _inverse_factor(hessian: torch.Tensor) -> torch.Tensor:
    """Return the upper triangular U with ``U^T U`` the inverse of ``hessian``."""
    # with rows and columns in reverse, the lower factor of H becomes an upper one, R R^T = H
    reverse = torch.linalg.cholesky(hessian.flip(0, 1)).flip(0, 1)
    inverse = torch.eye(len(hessian))
    torch.linalg.solve_triangular(reverse, inverse, upper=True, out=inverse)
    return inverse


def _range(low: torch.Tensor, high: torch.Tensor, levels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and minimum of ranges, in numbers that float16 holds."""
    scales = ((high - low) / levels).half().float()
    # a group of equal values, or of a range that float16 calls zero
    return torch.where(scales > 0, scales, torch.ones_like(scales)), low.half().float()


def _codes(
    values: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor, levels: int
) -> torch.Tensor:
    return ((values - minimum) / scale).round_().clamp_(0, levels)


def _search(
    values: torch.Tensor, importance: torch.Tensor, levels: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and minimum, [rows], of the tried ranges of a group, [rows, GROUP], whose error
    is least, columns weighted by ``importance``, [GROUP]."""
    low, high = values.amin(1), values.amax(1)
    middle, half = (low + high) / 2, (high - low) / 2
    best = torch.full_like(low, torch.inf)
    best_scale, best_minimum = _range(low, high, levels)
    for share in _SHARES:
        scale, minimum = _range(middle - half * share, middle + half * share, levels)
        for _ in range(2):
            codes = _codes(values, scale[:, None], minimum[:, None], levels)
            error = (codes * scale[:, None] + minimum[:, None] - values).square_() @ importance
            better = error < best
            best = torch.where(better, error, best)
            best_scale = torch.where(better, scale, best_scale)
            best_minimum = torch.where(better, minimum, best_minimum)
            # the line through these codes with the least error
            total = importance.sum()
            mean_code, mean_value = codes @ importance / total, values @ importance / total
            centred = codes - mean_code[:, None]
            spread = centred.square() @ importance
            slope = (centred * values) @ importance / spread.clamp_min(1e-12)
            fitted = slope.half().float()
            scale = torch.where(fitted > 0, fitted, scale)
            minimum = (mean_value - scale * mean_code).half().float()
    return best_scale, best_minimum


def _compensated(weight: torch.Tensor, upper: torch.Tensor, levels: int) -> Rounded:
    """Round column by column; ``upper``: see ``_inverse_factor``."""
    rows, columns = weight.shape
    left = weight.t().contiguous()
    codes = torch.empty_like(left)
    scales = torch.empty(columns // GROUP, rows)
    minimums = torch.empty_like(scales)
    importance = upper.diagonal().square().reciprocal()
    for start in range(0, columns, _BLOCK):
        end = min(start + _BLOCK, columns)
        errors = torch.empty(end - start, rows)
        for column in range(start, end):
            group = column // GROUP
            if column % GROUP == 0:
                chosen = slice(column, column + GROUP)
                scales[group], minimums[group] = _search(
                    left[chosen].t(), importance[chosen], levels
                )
            scale, minimum = scales[group], minimums[group]
            codes[column] = _codes(left[column], scale, minimum, levels)
            error = left[column] - torch.addcmul(minimum, codes[column], scale)
            error /= upper[column, column]
            errors[column - start] = error
            left[column + 1 : end].addr_(upper[column, column + 1 : end], error, alpha=-1)
        left[end:].addmm_(upper[start:end, end:].t(), errors, alpha=-1)
    return Rounded(codes.t().contiguous(), scales.t().contiguous(), minimums.t().contiguous())


def _improve(rounded: Rounded, target: torch.Tensor, hessian: torch.Tensor, levels: int) -> None:
    """Set scale, minimum and values of one group after the other to what is best, in place."""
    values = rounded.values()
    # half the derivative of the error by each value, by columns
    slope = (hessian @ (values - target).t()).contiguous()
    for group in range(rounded.scales.shape[1]):
        chosen = slice(group * GROUP, (group + 1) * GROUP)
        inner = hessian[chosen, chosen]
        before = values[:, chosen].t().contiguous()
        codes = rounded.codes[:, chosen].t().contiguous()
        scale, minimum = rounded.scales[:, group].clone(), rounded.minimums[:, group].clone()
        here = slope[chosen]
        # the best change of scale and minimum, two equations with two unknowns for each row
        of_codes = inner @ codes
        cc, c1, one = (codes * of_codes).sum(0), of_codes.sum(0), inner.sum()
        right_c, right_1 = (here * codes).sum(0), here.sum(0)
        determinant = (cc * one - c1 * c1).clamp_min(1e-20)
        new_scale = (scale - (one * right_c - c1 * right_1) / determinant).half().float()
        new_minimum = (minimum - (cc * right_1 - c1 * right_c) / determinant).half().float()
        change = codes * new_scale + new_minimum - before
        gain = (2 * here * change + change * (inner @ change)).sum(0)
        better = (gain < 0) & (new_scale > 0)
        scale = torch.where(better, new_scale, scale)
        minimum = torch.where(better, new_minimum, minimum)
        now = codes * scale + minimum
        local = here + inner @ (now - before)
        for index in range(GROUP):
            wanted = now[index] - local[index] / inner[index, index]
            code = _codes(wanted, scale, minimum, levels)
            value = torch.addcmul(minimum, code, scale)
            local.addr_(inner[index], value - now[index])
            now[index], codes[index] = value, code
        slope.addmm_(hessian[:, chosen], now - before)
        values[:, chosen] = now.t()
        rounded.codes[:, chosen] = codes.t()
        rounded.scales[:, group], rounded.minimums[:, group] = scale, minimum


def as_blocks(rounded: Rounded, kind: GGUFType) -> NDArray[np.uint8]:
    """Return the bytes of every row, [rows, bytes of a row]; see ggml's block_q4_1, block_q5_1."""
    rows = len(rounded.codes)
    codes = rounded.codes.to(torch.uint8).numpy().reshape(rows, -1, GROUP)
    numbers = torch.stack((rounded.scales, rounded.minimums), -1).half().numpy()
    parts = [numbers.view(np.uint8).reshape(rows, -1, 4)]
    if kind == GGUFType.Q5_1:
        high = np.packbits(codes >> 4, axis=-1, bitorder="little")
        parts.append(high)
        codes = codes & 15
    half = GROUP // 2
    parts.append(codes[..., :half] | codes[..., half:] << 4)
    return np.concatenate(parts, axis=-1).reshape(rows, -1)
