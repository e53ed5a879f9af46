"""The tiles of 256 bits keep their sums in registers, by what the compiler made of them.

gcc keeps an array of structures of two registers in memory, which stores every sum after every
product; nothing but the speed tells.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache

import pytest

from paceline.backends.native import library as library_module
from paceline.backends.native import unavailable_reason
from paceline.backends.native.single_kernels import variants_for

# whatever this machine runs of it
COMPILED = [] if unavailable_reason() else variants_for(*[0xFFFFFFFF] * 4, 0xFFFFFFFF).split(",")

pytestmark = [
    pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason())),
    pytest.mark.skipif("avx2" not in COMPILED, reason="no x86 kernels here"),
    pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump is not installed"),
]

INSTRUCTION = re.compile(r"\s*([0-9a-f]+):\s+(.*)")
JUMP = re.compile(r"j\w+\s+([0-9a-f]+)")
PRODUCT = re.compile(r"(\{vex\} )?v(pmadd|fmadd|pdpbusd)")
STORE = re.compile(r"vmov\S*\s+%[xyz]mm\d+,.*\(%r[sb]p")
# variant, tile and rows: the most vector registers that a round of its loop may store on the stack.
# A round of the 4-bit tile is a whole group of 32 columns, after which its sums in float32 go to
# memory.
TILES = {
    ("avx2", "TileFloat<(paceline::Weights)0>", 6): 0,
    ("avx2", "TileFloat<(paceline::Weights)0>", 2): 0,
    ("avx2", "TileFloat<(paceline::Weights)1>", 6): 2,
    ("avx2", "TileI8", 4): 0,
    ("avx2", "TileI8", 2): 0,
    ("avx2", "TileQ4<(paceline::Weights)3>", 4): 8,
    ("avx2", "TileQ4<(paceline::Weights)4>", 4): 8,
    ("avxvnni", "TileI8", 6): 0,
    ("avxvnni", "TileI8", 2): 0,
    ("avxvnni", "TileQ4<(paceline::Weights)3>", 6): 12,
    ("avxvnni", "TileQ4<(paceline::Weights)4>", 6): 12,
}


@cache
def _functions() -> dict[str, list[tuple[int, str]]]:
    """Addresses and instructions of every function of the library, by its demangled name."""
    command = ["objdump", "-d", "-C", "--no-show-raw-insn", str(library_module._PATH)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    functions = {}
    for part in text.split("\n\n"):
        name, _, body = part.strip().partition("\n")
        found = (INSTRUCTION.match(line) for line in body.splitlines())
        functions[name] = [(int(match[1], 16), match[2]) for match in found if match]
    return functions


def _product_loops(code: list[tuple[int, str]]) -> Iterator[list[str]]:
    """The innermost loops that have products."""
    places = {address: index for index, (address, _) in enumerate(code)}
    loops = []
    for index, (_, instruction) in enumerate(code):
        jump = JUMP.match(instruction)
        target = places.get(int(jump[1], 16)) if jump else None
        if target is not None and target <= index:
            body = [text for _, text in code[target : index + 1]]
            if any(PRODUCT.match(text) for text in body):
                loops.append((target, index, body))
    for begin, end, body in loops:
        inner = (a >= begin and b <= end and (a, b) != (begin, end) for a, b, _ in loops)
        if not any(inner):
            yield body


@pytest.mark.parametrize(("variant", "tile", "rows"), TILES)
def test_loops_of_products_store_no_sums(variant: str, tile: str, rows: int) -> None:
    wanted = f"tile_256<paceline_{variant}::{tile}, {rows}>"
    code = [code for name, code in _functions().items() if wanted in name]
    assert len(code) == 1, f"{wanted} is not in the library"
    # what is done with sums now and then is in loops too, where few instructions are products
    loops = [
        body
        for body in _product_loops(code[0])
        if sum(bool(PRODUCT.match(text)) for text in body) > len(body) / 4
    ]
    assert loops
    for body in loops:
        stores = [text for text in body if STORE.match(text)]
        assert len(stores) <= TILES[variant, tile, rows], stores
