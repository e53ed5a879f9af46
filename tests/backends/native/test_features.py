"""Which kernels are chosen, by what cpuid says and by what the system lets a process use.

A wrong choice is an illegal instruction, on a machine that is not this one: so processors are
described by their bits, as Intel's manual numbers them.
"""

from __future__ import annotations

import numpy as np
import pytest

from paceline.backends.native import unavailable_reason, variants
from paceline.backends.native.single_kernels import PackedMatrix, variants_for
from paceline.errors import ConfigError

pytestmark = pytest.mark.skipif(
    unavailable_reason() is not None or variants() == ("portable",),
    reason=str(unavailable_reason() or "no x86 processor"),
)

# (word, bit): leaf 1 ecx, leaf 7 ebx, leaf 7 ecx, leaf 7.1 eax
OSXSAVE = (0, 27)
AVX2 = {"avx": (0, 28), "fma": (0, 12), "f16c": (0, 29), "avx2": (1, 5)}
AVX512 = {"f": (1, 16), "dq": (1, 17), "bw": (1, 30), "vl": (1, 31)}
VNNI, AVX_VNNI, BF16 = (2, 11), (3, 4), (3, 5)
EVERYTHING = {OSXSAVE, *AVX2.values(), *AVX512.values(), VNNI, AVX_VNNI, BF16}
ORDER = ["avx512bf16", "avx512", "avx512bw", "avxvnni", "avx2", "portable"]
# XCR0: x87 always; SSE and AVX registers; mask registers and both halves of the 512-bit ones
YMM, ZMM = 0x7, 0xE7


def found(bits: set[tuple[int, int]], states: int) -> list[str]:
    words = [0, 0, 0, 0]
    for word, bit in bits:
        words[word] |= 1 << bit
    return variants_for(*words, states).split(",")


def test_the_best_comes_first_and_the_portable_one_is_always_there() -> None:
    assert found(EVERYTHING, ZMM) == ORDER
    assert found(EVERYTHING - {BF16}, ZMM) == ORDER[1:]
    # Zen 4
    assert found(EVERYTHING - {AVX_VNNI}, ZMM) == [*ORDER[:3], *ORDER[4:]]
    # Skylake-X and its servers
    assert found(EVERYTHING - {VNNI, AVX_VNNI, BF16}, ZMM) == ["avx512bw", "avx2", "portable"]
    assert found(set(), 0) == ["portable"]


@pytest.mark.parametrize("missing", AVX512)
def test_half_of_avx512_is_none(missing: str) -> None:
    """Knights Landing has no BW: what the kernels use must all be there."""
    assert found(EVERYTHING - {AVX512[missing], AVX_VNNI}, ZMM) == ["avx2", "portable"]


def test_bfloat16_products_are_not_used_without_those_of_bytes() -> None:
    assert found(EVERYTHING - {VNNI}, ZMM) == ORDER[2:]


def test_avx_vnni_needs_no_avx512() -> None:
    """Alder Lake to Arrow Lake: no AVX-512 at all."""
    assert found({OSXSAVE, *AVX2.values(), AVX_VNNI}, YMM) == ["avxvnni", "avx2", "portable"]


@pytest.mark.parametrize("missing", AVX2)
def test_half_of_avx2_is_none(missing: str) -> None:
    assert found(EVERYTHING - {AVX2[missing]}, ZMM) == ["portable"]


def test_what_the_system_does_not_save_is_not_used() -> None:
    """cpuid advertises what a hypervisor or kernel has not enabled; using it is SIGILL."""
    assert found(EVERYTHING, YMM) == ["avxvnni", "avx2", "portable"]
    # the lower 16 registers' upper halves alone, or no mask registers
    for states in (YMM | 0x40, YMM | 0xC0):
        assert found(EVERYTHING, states) == ["avxvnni", "avx2", "portable"]
    assert found(EVERYTHING, 0x3) == ["portable"]
    # without OSXSAVE nobody can ask what is saved
    assert found(EVERYTHING - {OSXSAVE}, ZMM) == ["portable"]


def test_other_states_that_are_saved_change_nothing() -> None:
    """AMX tiles and protection keys, as on Sapphire Rapids: there are no kernels for tiles
    (docs/adr/0004-native-kernels.md)."""
    assert found(EVERYTHING, ZMM | 0x60200) == found(EVERYTHING, ZMM)


def test_the_environment_lowers_the_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left out is neither listed nor used, also where it is asked for by name."""
    weights = np.ones((4, 32), dtype=np.float32)
    # as make test may be run, to play a lesser machine
    monkeypatch.delenv("PACELINE_ISA", raising=False)
    best, *others = variants()
    for place, name in enumerate(others):
        monkeypatch.setenv("PACELINE_ISA", name)
        assert variants() == tuple(others[place:])
        with pytest.raises(ConfigError, match=f"'{best}' does not run here; these do: {name}"):
            PackedMatrix(weights, "float32", isa=best)
        PackedMatrix(weights, "float32", isa=name).close()
    # as a makefile passes on a variable that is not set
    monkeypatch.setenv("PACELINE_ISA", "")
    assert variants() == (best, *others)


def test_a_level_that_does_not_run_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_ISA", raising=False)
    there = ", ".join(variants())
    monkeypatch.setenv("PACELINE_ISA", "avx10")
    expected = f"PACELINE_ISA: instruction set 'avx10' does not run here; these do: {there}$"
    with pytest.raises(ConfigError, match=expected):
        variants()
    with pytest.raises(ConfigError, match=expected):
        PackedMatrix(np.ones((4, 32), dtype=np.float32), "float32")
