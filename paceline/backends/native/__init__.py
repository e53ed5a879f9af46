"""The native CPU compute path: a whole model step in one call of a small C++ library.

Needs the compiled ``_lib`` next to this file (built by ``make``, or by
``python -m paceline.backends.native.build``); where it cannot be used, ``unavailable_reason()``
says why, and the pure PyTorch path serves instead. Nothing here imports torch.
"""

from paceline.backends.native.block_formats import Kinds, choose_kinds, packed_bytes
from paceline.backends.native.config import DTYPES, KV_DTYPES, NativeSettings, unsupported_reason
from paceline.backends.native.library import unavailable_reason, variants
from paceline.backends.native.model import NativeModel
from paceline.backends.native.tensors import BLOCKS, KEPT, OWN_BITS, RawTensor, checkpoint_tensors

__all__ = [
    "BLOCKS",
    "DTYPES",
    "KEPT",
    "KV_DTYPES",
    "OWN_BITS",
    "Kinds",
    "NativeModel",
    "NativeSettings",
    "RawTensor",
    "checkpoint_tensors",
    "choose_kinds",
    "packed_bytes",
    "unavailable_reason",
    "unsupported_reason",
    "variants",
]
