"""A tokenizer for tiny models: the ASCII bytes, of which 3 and 4 end an output."""

from __future__ import annotations

from typing import Final

from paceline.engine.testing import ByteTokenizer

__all__ = ["END", "VOCAB", "Ascii"]

VOCAB: Final = 128
END: Final = 3


class Ascii(ByteTokenizer):
    """The tiny models' 128 ids as characters."""

    @property
    def vocab_size(self) -> int:
        return VOCAB

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset({END, 4})

    @property
    def special_token_ids(self) -> frozenset[int]:
        return frozenset({END, 4})
