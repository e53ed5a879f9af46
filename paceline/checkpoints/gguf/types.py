"""GGUF's types of tensors: numbers, values of a block and its bytes.

They equal the ``gguf`` package's, as a test checks. That package is imported only to compute values
of types that nothing here reads: it brings writers, tokenizers and tables of every architecture,
some 20 MB for each process that imports it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Final

__all__ = ["SIZES", "GGUFType"]


class GGUFType(IntEnum):
    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41


# (values of a block, its bytes)
SIZES: Final[Mapping[GGUFType, tuple[int, int]]] = MappingProxyType(
    {
        GGUFType.F32: (1, 4),
        GGUFType.F16: (1, 2),
        GGUFType.Q4_0: (32, 18),
        GGUFType.Q4_1: (32, 20),
        GGUFType.Q5_0: (32, 22),
        GGUFType.Q5_1: (32, 24),
        GGUFType.Q8_0: (32, 34),
        GGUFType.Q8_1: (32, 40),
        GGUFType.Q2_K: (256, 84),
        GGUFType.Q3_K: (256, 110),
        GGUFType.Q4_K: (256, 144),
        GGUFType.Q5_K: (256, 176),
        GGUFType.Q6_K: (256, 210),
        GGUFType.Q8_K: (256, 292),
        GGUFType.IQ2_XXS: (256, 66),
        GGUFType.IQ2_XS: (256, 74),
        GGUFType.IQ3_XXS: (256, 98),
        GGUFType.IQ1_S: (256, 50),
        GGUFType.IQ4_NL: (32, 18),
        GGUFType.IQ3_S: (256, 110),
        GGUFType.IQ2_S: (256, 82),
        GGUFType.IQ4_XS: (256, 136),
        GGUFType.I8: (1, 1),
        GGUFType.I16: (1, 2),
        GGUFType.I32: (1, 4),
        GGUFType.I64: (1, 8),
        GGUFType.F64: (1, 8),
        GGUFType.IQ1_M: (256, 56),
        GGUFType.BF16: (1, 2),
        GGUFType.TQ1_0: (256, 54),
        GGUFType.TQ2_0: (256, 66),
        GGUFType.MXFP4: (32, 17),
        GGUFType.NVFP4: (64, 36),
        GGUFType.Q1_0: (128, 18),
    }
)
