"""The native CPU compute path: a whole model step in one call of a small C++ library.

Needs the compiled ``_lib`` next to this file (built by ``make``, or by
``python -m paceline.backends.torch.native.build``); ``unavailable_reason()`` says why it cannot be
used, and then the pure PyTorch path serves. Nothing here imports torch.
"""

from paceline.backends.torch.native.library import unavailable_reason, variants
from paceline.backends.torch.native.model import (
    DTYPES,
    KV_DTYPES,
    NativeModel,
    unsupported_reason,
)
from paceline.backends.torch.native.tensors import RawTensor, checkpoint_tensors
from paceline.backends.torch.native.threads import available_cpus

__all__ = [
    "DTYPES",
    "KV_DTYPES",
    "NativeModel",
    "RawTensor",
    "available_cpus",
    "checkpoint_tensors",
    "unavailable_reason",
    "unsupported_reason",
    "variants",
]
