"""Finding, loading and describing the compiled library (``csrc/paceline_native.h``)."""

from __future__ import annotations

import ctypes
import functools
import hashlib
from ctypes import POINTER, c_char_p, c_double, c_int, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import ClassVar, Final, NamedTuple

from paceline.backends.native.config import NativeConfig
from paceline.errors import ConfigError

__all__ = [
    "ABI",
    "Draw",
    "Limits",
    "Logprobs",
    "Offer",
    "Owner",
    "Step",
    "check",
    "digest",
    "library",
    "limits",
    "unavailable_reason",
    "variants",
]

# PACELINE_ABI of the header that the structures below mirror
ABI: Final = 22
_PATH: Final = Path(__file__).parent / "_lib.so"
_AGAIN: Final = "build it again: python -m paceline.backends.native.build"


# of ``paceline_hand_over``; what it raises is printed and ignored
Offer: Final = ctypes.CFUNCTYPE(None)


class Step(ctypes.Structure):
    """Mirror of PacelineStep."""

    _fields_ = (
        ("tokens", c_int64),
        ("sequences", c_int64),
        ("table_width", c_int64),
        ("sampled", c_int64),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("query_start", c_void_p),
        ("tables", c_void_p),
        ("window_tables", c_void_p),
        ("sample_rows", c_void_p),
        ("logits", c_void_p),
        ("likeliest", c_void_p),
        ("hidden", c_void_p),
        ("adapters", c_void_p),
        ("adapter_scales", c_void_p),
    )


class Draw(ctypes.Structure):
    """Mirror of PacelineDraw."""

    _fields_ = (
        ("rows", c_int64),
        ("vocab", c_int64),
        ("logits", c_void_p),
        ("likeliest", c_void_p),
        ("masks", c_void_p),
        ("temperature", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("uniform", c_void_p),
        ("tokens", c_void_p),
    )


class Logprobs(ctypes.Structure):
    """Mirror of PacelineLogprobs."""

    _fields_ = (
        ("rows", c_int64),
        ("vocab", c_int64),
        ("count", c_int64),
        ("logits", c_void_p),
        ("tokens", c_void_p),
        ("own", c_void_p),
        ("ranks", c_void_p),
        ("top_tokens", c_void_p),
        ("top", c_void_p),
    )


_SIGNATURES: Final = {
    "paceline_abi": (c_int, ()),
    "paceline_error": (c_char_p, ()),
    "paceline_variants": (c_char_p, ()),
    "paceline_create": (c_void_p, (POINTER(NativeConfig),)),
    "paceline_destroy": (None, (c_void_p,)),
    "paceline_load": (
        c_int,
        (c_void_p, c_int, c_int64, c_int64, c_int, c_void_p, c_int64, c_int64),
    ),
    "paceline_set_rope": (c_int, (c_void_p, c_int, c_void_p, c_void_p)),
    "paceline_ready": (c_int, (c_void_p,)),
    "paceline_piece": (c_void_p, (c_void_p, c_int64, POINTER(c_int64))),
    "paceline_restored": (c_int, (c_void_p,)),
    "paceline_forward": (c_int, (c_void_p, POINTER(Step))),
    "paceline_hand_over": (c_int64, (c_void_p, c_void_p, Offer, c_double)),
    "paceline_adapter": (c_void_p, (c_void_p, c_void_p, c_void_p, c_int)),
    "paceline_adapter_set": (c_int, (c_void_p, c_int64, c_int, c_void_p, c_void_p)),
    "paceline_adapter_bytes": (c_int64, (c_void_p,)),
    "paceline_adapter_destroy": (None, (c_void_p,)),
    "paceline_limits": (None, (POINTER(c_int64),)),
    "paceline_copy_blocks": (c_int, (c_void_p, c_void_p, c_void_p, c_int64)),
    "paceline_draw": (c_int, (c_void_p, POINTER(Draw))),
    "paceline_logprobs": (c_int, (c_void_p, POINTER(Logprobs))),
    "paceline_block_bytes": (c_int64, (c_void_p,)),
    "paceline_weight_bytes": (c_int64, (c_void_p,)),
    "paceline_isa": (c_char_p, (c_void_p,)),
    "paceline_profile": (None, (c_void_p, c_int)),
    "paceline_seconds": (None, (c_void_p, POINTER(c_double))),
    "paceline_attention": (c_int, (c_void_p, POINTER(Step), c_void_p, c_void_p)),
    "paceline_cache": (c_void_p, (c_void_p, POINTER(c_int64))),
    "paceline_variants_for": (c_char_p, (POINTER(c_uint32), c_uint64)),
    "paceline_traits": (c_int, (c_char_p, POINTER(c_int64))),
    "paceline_clock_hz": (c_double, ()),
    "paceline_matrix": (c_void_p, (c_int, c_int, c_void_p, c_int64, c_int64, c_int, c_char_p)),
    "paceline_matrix_destroy": (None, (c_void_p,)),
    "paceline_matrix_multiply": (c_int, (c_void_p, c_void_p, c_int64, c_void_p, c_int)),
    "paceline_products_seconds": (c_double, (c_void_p, c_int64, c_void_p, c_int64)),
    "paceline_peak": (c_double, (c_char_p, c_int, c_int)),
    "paceline_read_seconds": (c_double, (c_void_p, c_int64, c_int, c_int)),
    "paceline_matrix_unpack": (c_int, (c_void_p, c_void_p)),
}


@functools.cache
def _load() -> ctypes.CDLL | str:
    """Return the loaded library, or the reason why there is none."""
    if not _PATH.is_file():
        return (
            "the native library was not built; install a C++ compiler and CMake, then run "
            "python -m paceline.backends.native.build"
        )
    try:
        loaded = ctypes.CDLL(str(_PATH))
        abi = loaded.paceline_abi()
        if abi != ABI:
            return f"{_PATH.name} has interface {abi}, this version needs {ABI}; {_AGAIN}"
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(loaded, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        return f"{_PATH.name} cannot be loaded: {error}; {_AGAIN}"
    return loaded


def unavailable_reason() -> str | None:
    """Return why the native path cannot run on this machine, or None where it can."""
    loaded = _load()
    return loaded if isinstance(loaded, str) else None


def library() -> ctypes.CDLL:
    """Return the loaded library. Raises ConfigError with ``unavailable_reason()``."""
    loaded = _load()
    if isinstance(loaded, str):
        raise ConfigError(loaded)
    return loaded


class Limits(NamedTuple):
    """Limits of the library that determine a step's memory, the same for all models."""

    # most keys before a window's first one that attention reads and masks
    keys_before_window: int
    # pairs of a row and an expert computed at once
    pass_pairs: int


@functools.cache
def limits() -> Limits:
    """Return the limits. Raises ConfigError with ``unavailable_reason()`` without a library."""
    out = (c_int64 * len(Limits._fields))()
    library().paceline_limits(out)
    return Limits(*out)


@functools.cache
def digest() -> str:
    """Return the SHA-256 of the library's file. Another build may pack the same weights differently
    under the same interface and package version. Raises ConfigError without a library."""
    library()
    return hashlib.sha256(_PATH.read_bytes()).hexdigest()


def variants() -> tuple[str, ...]:
    """Return the kernel variants that this machine runs, best first; () without a library.

    The environment's PACELINE_ISA excludes variants better than the one it names. Raises
    ConfigError where that one does not run here, naming those that do.
    """
    loaded = _load()
    if isinstance(loaded, str):
        return ()
    names: bytes | None = loaded.paceline_variants()
    if names is None:
        check(-1)
        return ()
    return tuple(names.decode().split(","))


class Owner:
    """Owner of one object of the library, which it frees when closed or no longer used."""

    # the library's function that frees it
    _FREE: ClassVar[str]
    # None before it is made and after it is freed
    _handle: int | None = None
    _library: ctypes.CDLL

    def close(self) -> None:
        """Free its memory and threads. Idempotent."""
        if self._handle is not None:
            getattr(self._library, self._FREE)(self._handle)
            self._handle = None

    def __del__(self) -> None:
        self.close()

    @property
    def handle(self) -> int:
        """Handle for calls of the library. Raises ConfigError once closed."""
        if self._handle is None:
            raise ConfigError(f"this {type(self).__name__} is closed")
        return self._handle


def check(status: int) -> None:
    """Raise ConfigError with the library's message where a call reported failure."""
    if status != 0:
        message: bytes = library().paceline_error()
        raise ConfigError(message.decode())
