"""A model that computes one step of the engine in one native call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from ctypes import addressof
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline import __version__
from paceline.backends.machine.cpu import choose_threads
from paceline.backends.machine.yielding import Beside, at_once
from paceline.backends.native.adapters import step_pointers
from paceline.backends.native.config import NativeConfig, NativeSettings
from paceline.backends.native.library import ABI, Offer, Owner, Step, check, digest, library
from paceline.backends.native.packed import PackedCopies
from paceline.backends.native.tensors import TYPES, RawTensor, Tensor, locate
from paceline.backends.runner.interface import RowAdapter
from paceline.checkpoints.model.config import ModelConfig
from paceline.errors import ConfigError

__all__ = ["SECTIONS", "NativeModel", "Rope"]

# parts of a step that ``NativeModel.seconds`` times separately
SECTIONS: Final = (
    "embed", "norm", "qkv", "rope", "attend", "encode", "out", "route", "gate_up", "down", "head",
)  # fmt: skip
# cosines and sines
Rope: TypeAlias = tuple[NDArray[np.float32], NDArray[np.float32]]
# any integer type; others than int32 are converted
Integers = NDArray[np.integer[Any]]


def _checked_ropes(model: ModelConfig, rope: Rope, sliding_rope: Rope | None) -> list[Rope]:
    """Return the model's one or two pairs of rotary tables. Raises ConfigError for others."""
    given = [rope]
    if model.sliding_rope is not None:
        if sliding_rope is None:
            raise ConfigError("layers with a window have rotary tables of their own")
        given.append(sliding_rope)
    ropes = []
    for pair in given:
        cos, sin = (np.ascontiguousarray(table, dtype=np.float32) for table in pair)
        if cos.shape != sin.shape or cos.ndim != 2 or cos.shape[1] != model.head_dim // 2:
            raise ConfigError(
                f"rotary tables have shapes {list(cos.shape)} and {list(sin.shape)}, "
                f"expected [positions, {model.head_dim // 2}]"
            )
        ropes.append((cos, sin))
    if len({len(cos) for cos, _ in ropes}) > 1:
        raise ConfigError("rotary tables are for different numbers of positions")
    return ropes


def _configured(
    model: ModelConfig, settings: NativeSettings, rope: Rope, sliding_rope: Rope | None
) -> tuple[NativeConfig, list[Rope]]:
    """Return the library's configuration on this machine, and the rotary tables to set."""
    config = NativeConfig.of(model, settings)
    ropes = _checked_ropes(model, rope, sliding_rope)
    config.max_positions = ropes[0][0].shape[0]
    config.threads = choose_threads(settings.threads)
    return config, ropes


def _step(*given: Integers) -> tuple[Step, list[NDArray[np.int32]]]:
    """Return a step of token ids, positions, query_start, block tables and rows, and the arrays
    that it points to. Raises ConfigError where their sizes disagree."""
    arrays = [np.ascontiguousarray(array, dtype=np.int32) for array in given]
    tokens, positions, starts, tables, rows = arrays
    sequences = len(starts) - 1
    if len(positions) != len(tokens) or sequences < 0 or tables.shape[:1] != (sequences,):
        raise ConfigError(
            f"{len(tokens)} token ids, {len(positions)} positions, query_start of {len(starts)} "
            f"and block tables of shape {list(tables.shape)} do not go together"
        )
    step = Step(
        tokens=len(tokens),
        sequences=sequences,
        table_width=tables.shape[1] if tables.ndim == 2 else 0,
        sampled=len(rows),
        token_ids=tokens.ctypes.data,
        positions=positions.ctypes.data,
        query_start=starts.ctypes.data,
        tables=tables.ctypes.data,
        sample_rows=rows.ctypes.data,
    )
    return step, arrays


class NativeModel(Owner):
    """Weights packed for this machine, a paged KV cache and a team of threads.

    Used from one thread at a time; calls release the interpreter lock. The calling thread computes
    with ``threads - 1`` others.

    Args:
        tensors: every tensor of the model under its Hugging Face name, each packed and released
            before the next is taken.
        rope: cosines and sines, each float32 [positions, head_dim / 2], scaling factors included;
            their length bounds the positions of a step.
        sliding_rope: the same for layers with a window, if the model has another one for these.
        copies: where a copy of the packed weights is read, if there is one, instead of
            ``tensors``, and is else written.
        beside: does that, on any thread.

    Raises:
        ConfigError: no library, an unsupported shape, or tensors missing or of a wrong shape.
    """

    _FREE = "paceline_destroy"

    def __init__(
        self,
        model: ModelConfig,
        tensors: Iterable[tuple[str, Tensor]],
        rope: Rope,
        settings: NativeSettings,
        *,
        sliding_rope: Rope | None = None,
        copies: PackedCopies | None = None,
        beside: Beside = at_once,
    ) -> None:
        self._library = library()
        self._config, ropes = _configured(model, settings, rope, sliding_rope)
        self._logits = np.empty((0, self._config.vocab), dtype=np.float32)
        # index of the first of each row's largest logits in the last step, -1 where one is not
        # finite, [R]; a view that the next step overwrites
        self.likeliest = self._most_likely = np.empty(0, dtype=np.int32)
        self._handle = None
        try:
            beside(lambda: self._make(tensors, settings, copies))
            for index, (cos, sin) in enumerate(ropes):
                addresses = cos.ctypes.data, sin.ctypes.data
                check(self._library.paceline_set_rope(self._handle, index, *addresses))
            check(self._library.paceline_ready(self._handle))
        except BaseException:
            self.close()
            raise

    def _make(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        settings: NativeSettings,
        copies: PackedCopies | None,
    ) -> None:
        """Make the model, and pack the tensors or take the copy of what was packed before."""
        self._handle = self._library.paceline_create(ctypes.byref(self._config))
        if self._handle is None:
            check(-1)
        about: dict[str, object] = {} if copies is None else {
            "abi": ABI, "library": digest(), "version": __version__, "isa": self.isa,
            "dtype": settings.dtype, "kinds": settings.kinds.hex(), "has_head": settings.has_head,
        }  # fmt: skip
        if copies is not None and copies.read(about, self._pieces()):
            check(self._library.paceline_restored(self._handle))
            return
        for name, tensor in tensors:
            self._load(name, tensor)
        if copies is not None:
            copies.write(about, self._pieces())

    def _load(self, name: str, tensor: Tensor) -> None:
        place = locate(name)
        if isinstance(tensor, RawTensor):
            data: NDArray[Any] = np.ascontiguousarray(tensor.data)
            type_number, rows, columns = TYPES[tensor.type], data.shape[0], tensor.columns
        else:
            data = np.ascontiguousarray(tensor, dtype=np.float32)
            rows, columns = (1, data.shape[0]) if data.ndim == 1 else data.shape
            type_number = TYPES["F32"]
        status = self._library.paceline_load(
            self._handle, *place, type_number, data.ctypes.data, rows, columns
        )
        check(status)

    def _pieces(self) -> list[memoryview]:
        """Memory of everything that ``tensors`` are packed into."""
        pieces: list[memoryview] = []
        size = ctypes.c_int64()
        while address := self._library.paceline_piece(self.handle, len(pieces), ctypes.byref(size)):
            memory = (ctypes.c_uint8 * size.value).from_address(address)
            pieces.append(memoryview(memory).cast("B"))
        return pieces

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, KV heads and dimensions of a head."""
        return self._config.heads, self._config.kv_heads, self._config.head_dim

    @property
    def kv_bytes_per_block(self) -> int:
        """Bytes of one block's keys and values over all layers without window blocks."""
        return int(self._library.paceline_block_bytes(self.handle))

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed matrices."""
        return int(self._library.paceline_weight_bytes(self.handle))

    @property
    def isa(self) -> str:
        """The kernel variant in use, e.g. "avx512bf16"."""
        name: bytes = self._library.paceline_isa(self.handle)
        return name.decode()

    def forward(
        self,
        token_ids: Integers,
        positions: Integers,
        query_start: Integers,
        block_tables: Integers,
        sample_rows: Integers,
        *,
        needs_logits: bool = True,
        window_tables: Integers | None = None,
        adapters: Sequence[RowAdapter | None] | None = None,
    ) -> NDArray[np.float32]:
        """Run one step: store keys and values of all tokens, attend causally, give logits.

        Args:
            token_ids: [T], sequence after sequence.
            positions: [T], consecutive within a sequence; a token sees its sequence's blocks up to
                its own position.
            query_start: [S + 1], first row of each sequence, then T; a sequence may have no rows.
            block_tables: [S, width], block ids by position // block_size.
            sample_rows: [R], ascending rows whose logits are wanted.
            needs_logits: False: ``likeliest`` suffices.
            window_tables: window blocks in place of those in ``block_tables``, if there are any.
            adapters: [S], each from ``adapters.NativeAdapter`` or None; None: no sequence has one.

        Returns:
            [R, vocab] float32, a view that the next call overwrites; [0, vocab] unless
            ``needs_logits``.

        Raises:
            ConfigError: an id, position or block out of range; then nothing has run.
        """
        step, arrays = _step(token_ids, positions, query_start, block_tables, sample_rows)
        rows = arrays[-1]
        if window_tables is not None:
            arrays.append(np.ascontiguousarray(window_tables, dtype=np.int32))
            if arrays[-1].shape != arrays[3].shape:
                raise ConfigError("window tables are not of the block tables' shape")
            step.window_tables = arrays[-1].ctypes.data
        if adapters is not None:
            handles, scales = step_pointers(adapters)
            step.adapters, step.adapter_scales = addressof(handles), addressof(scales)
        if needs_logits and len(self._logits) < len(rows):
            self._logits = np.empty((len(rows), self._config.vocab), dtype=np.float32)
        if len(self._most_likely) < len(rows):
            self._most_likely = np.empty(len(rows), dtype=np.int32)
        step.logits = self._logits.ctypes.data if needs_logits else None
        step.likeliest = self._most_likely.ctypes.data
        check(self._library.paceline_forward(self.handle, ctypes.byref(step)))
        self.likeliest = self._most_likely[: len(rows)]
        return self._logits[: len(rows) if needs_logits else 0]

    def hidden(
        self,
        token_ids: Integers,
        positions: Integers,
        query_start: Integers,
        block_tables: Integers,
        rows: Integers,
    ) -> NDArray[np.float32]:
        """Run a step as ``forward`` does, but return for ``rows`` the input of the last norm,
        without the factor ``residual_scale``: [R, hidden] float32. Raises ConfigError likewise."""
        step, arrays = _step(token_ids, positions, query_start, block_tables, rows)
        found = np.empty((len(arrays[-1]), self._config.hidden), dtype=np.float32)
        step.hidden = found.ctypes.data
        check(self._library.paceline_forward(self.handle, ctypes.byref(step)))
        return found

    def hand_over(self, wanted: int, offer: Callable[[], None], slice_s: float) -> int:
        """Call ``offer`` between layers of a step while the 64 bits at the address ``wanted`` are
        not zero, at most every ``slice_s`` seconds; return the number of layers."""
        self._offer = Offer(offer)
        return int(self._library.paceline_hand_over(self.handle, wanted, self._offer, slice_s))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) in all layers, in order."""
        if not pairs:
            return
        source, destination = (np.array(side, dtype=np.int64) for side in zip(*pairs, strict=True))
        check(
            self._library.paceline_copy_blocks(
                self.handle, source.ctypes.data, destination.ctypes.data, len(pairs)
            )
        )

    def profile(self, on: bool) -> None:
        """Start timing the parts of a step from zero, or stop."""
        self._library.paceline_profile(self.handle, int(on))

    def seconds(self) -> dict[str, float]:
        """Seconds spent in each of ``SECTIONS`` since ``profile(True)``."""
        values = (ctypes.c_double * len(SECTIONS))()
        self._library.paceline_seconds(self.handle, values)
        return dict(zip(SECTIONS, values, strict=True))
