"""A model that computes one step of the engine in one native call."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from paceline import __version__
from paceline.backends.machine.cpu import choose_threads
from paceline.backends.native.library import ABI, Config, Owner, Step, check, digest, library
from paceline.backends.native.packed import PackedCopies
from paceline.backends.native.tensors import TYPES, RawTensor, Tensor, locate
from paceline.checkpoints.model.config import ModelConfig
from paceline.errors import ConfigError

__all__ = ["CHOICES", "DTYPES", "KV_DTYPES", "SECTIONS", "NativeModel", "unsupported_reason"]

# weights: float32; bfloat16; int8 with a scale per output and activations in 8 bits with a scale
# per token; 4-bit groups of 32 (scale and minimum)
DTYPES: Final = {"float32": 0, "bfloat16": 1, "int8": 2, "q4": 3}
# int8: a scale per token and head
KV_DTYPES: Final = {"float32": 0, "bfloat16": 1, "int8": 2}
# parts of a step that ``NativeModel.seconds`` times separately
SECTIONS: Final = (
    "embed", "norm", "qkv", "rope", "attend", "encode", "out", "route", "gate_up", "down", "head",
)  # fmt: skip
# ways to find the likeliest token without logits that ``NativeModel.choices`` counts
CHOICES: Final = ("settled", "too_many", "whole")
# any integer type; others than int32 are converted
Integers = NDArray[np.integer[Any]]
_TILE: Final = 16
_MAX_HEAD_DIM: Final = 256
# PacelineConfig.activation
_ACTIVATIONS: Final = {"silu": 0, "gelu_tanh": 1, "clamped_swiglu": 2}
# range in which float32 divides by a soft cap without loss; models have about 50
_SOFTCAPS: Final = (1e-6, 1e6)
# matrices of a layer that have a kind
_KINDS: Final = 6


# fields of ModelConfig that the kernels support at these values alone, and names of the others
_ONLY: Final[tuple[tuple[str, object, str], ...]] = (
    ("bidirectional", False, "attention to both sides"),
)


def unsupported_reason(config: ModelConfig, block_size: int) -> str | None:
    """Return why a model of this shape cannot run natively, or None if it can."""
    lacking = [what for name, value, what in _ONLY if getattr(config, name) != value]
    if lacking:
        return f"{config.model_type} has {', '.join(lacking)}, which the native kernels do not have"
    for cap in (config.attention_softcap, config.logits_softcap):
        if cap is not None and not _SOFTCAPS[0] <= cap <= _SOFTCAPS[1]:
            return f"a soft cap of {cap:g} is not from {_SOFTCAPS[0]:g} to {_SOFTCAPS[1]:g}"
    if config.residual_scale != 1.0 and not config.norms_before:
        return f"{config.model_type} scales what it adds to a sum that is not normed"
    if config.head_dim % _TILE or config.head_dim > _MAX_HEAD_DIM:
        return (
            f"head_dim={config.head_dim} is not a multiple of {_TILE} up to {_MAX_HEAD_DIM}, "
            "which the native attention needs"
        )
    if block_size < 1 or block_size % _TILE:
        return f"block_size={block_size} is not a multiple of {_TILE}, the native cache's tile"
    return None


def _checked_tables(
    config: ModelConfig, *tables: NDArray[np.float32]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    cos, sin = (np.ascontiguousarray(table, dtype=np.float32) for table in tables)
    if cos.shape != sin.shape or cos.ndim != 2 or cos.shape[1] != config.head_dim // 2:
        raise ConfigError(
            f"rotary tables have shapes {list(cos.shape)} and {list(sin.shape)}, "
            f"expected [positions, {config.head_dim // 2}]"
        )
    return cos, sin


def _step(*given: Integers) -> tuple[Step, list[NDArray[np.int32]]]:
    """Return a step of token ids, positions, query_start, block tables and rows, and the arrays
    that it points to. Raises ConfigError where their sizes disagree."""
    arrays = [np.ascontiguousarray(array, dtype=np.int32) for array in given]
    tokens, places, starts, tables, rows = arrays
    sequences = len(starts) - 1
    if len(places) != len(tokens) or sequences < 0 or tables.shape[:1] != (sequences,):
        raise ConfigError(
            f"{len(tokens)} token ids, {len(places)} positions, query_start of {len(starts)} "
            f"and block tables of shape {list(tables.shape)} do not go together"
        )
    step = Step(
        tokens=len(tokens),
        sequences=sequences,
        table_width=tables.shape[1] if tables.ndim == 2 else 0,
        sampled=len(rows),
        token_ids=tokens.ctypes.data,
        positions=places.ctypes.data,
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
        sliding_rope: the same for layers with a window, if the config has another one for these.
        dtype: a key of ``DTYPES``.
        kv_dtype: a key of ``KV_DTYPES``; None: float32 for float32 weights, else bfloat16.
        threads: None: as ``machine.choose_threads`` chooses.
        isa: a name of ``variants()``; None: the best.
        screen_head: find the likeliest tokens of one or two rows without reading the whole head
            (csrc/screen.cpp), wrong only for errors of more than 6 standard deviations.
        kinds: a number for each matrix (``kinds.Kinds``); empty: all have ``dtype``, except
            tables and odd widths, which are int8 where it is "q4".
        has_head: False: only ``hidden`` is called, and ``tensors`` have no head.
        copies: where a copy of the packed weights is read, if there is one, instead of
            ``tensors``, and is else written.
        num_window_blocks: blocks behind the others, only for layers with a sliding window; 0:
            these layers use the others.

    Raises:
        ConfigError: no library, an unsupported shape, or tensors missing or of a wrong shape.
    """

    _FREE = "paceline_destroy"

    def __init__(
        self,
        config: ModelConfig,
        tensors: Iterable[tuple[str, Tensor]],
        rope: tuple[NDArray[np.float32], NDArray[np.float32]],
        *,
        dtype: str,
        num_blocks: int,
        kv_dtype: str | None = None,
        block_size: int = _TILE,
        threads: int | None = None,
        isa: str | None = None,
        screen_head: bool = False,
        sliding_rope: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None,
        kinds: bytes = b"",
        has_head: bool = True,
        copies: PackedCopies | None = None,
        num_window_blocks: int = 0,
    ) -> None:
        self._library = library()
        if dtype not in DTYPES:
            raise ConfigError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
        if kv_dtype is None:
            kv_dtype = "float32" if dtype == "float32" else "bfloat16"
        if kv_dtype not in KV_DTYPES:
            raise ConfigError(f"kv_dtype {kv_dtype!r} is not one of {', '.join(KV_DTYPES)}")
        reason = unsupported_reason(config, block_size)
        if reason is not None:
            raise ConfigError(reason)
        wanted = config.num_hidden_layers * _KINDS + 2
        if kinds and len(kinds) != wanted:
            raise ConfigError(f"{len(kinds)} kinds of matrices, expected {wanted}")
        tables = [_checked_tables(config, *rope)]
        if config.sliding_rope is not None:
            if sliding_rope is None:
                raise ConfigError("layers with a window have rotary tables of their own")
            tables.append(_checked_tables(config, *sliding_rope))
        positions = tables[0][0].shape[0]
        if any(cos.shape[0] != positions for cos, _ in tables):
            raise ConfigError("rotary tables are for different numbers of positions")
        # query heads, KV heads and dimensions of a head
        self.heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        self._vocab, self._hidden = config.vocab_size, config.hidden_size
        self._logits = np.empty((0, self._vocab), dtype=np.float32)
        self._most_likely = np.empty(0, dtype=np.int32)
        # index of the first of each row's largest logits in the last step, -1 where one is not
        # finite, [R]; a view that the next step overwrites
        self.likeliest = self._most_likely
        window = config.sliding_window if config.sliding_layers else None
        sliding = bytes(layer in config.sliding_layers for layer in range(config.num_hidden_layers))
        dense = bytes(layer in config.dense_layers for layer in range(config.num_hidden_layers))
        ropes = [1] * config.num_hidden_layers
        if config.sliding_rope is not None:
            for layer in config.sliding_layers:
                ropes[layer] = 2
        for layer in config.unrotated_layers:
            ropes[layer] = 0
        values = Config(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            inner=config.intermediate_size,
            vocab=config.vocab_size,
            max_positions=positions,
            # a number beyond 64 bits is refused for its size, and must not wrap around
            num_blocks=min(num_blocks, 2**63 - 1),
            block_size=block_size,
            num_window_blocks=min(num_window_blocks, 2**63 - 1),
            sliding_window=window or 0,
            experts=config.num_experts,
            experts_per_token=config.experts_per_token,
            expert_inner=config.expert_intermediate_size,
            tied=config.tie_word_embeddings,
            qk_norm=config.qk_norm,
            qkv_bias=config.qkv_bias,
            o_bias=config.o_bias,
            mlp_bias=config.mlp_bias,
            weights=DTYPES[dtype],
            headless=not has_head,
            kv=KV_DTYPES[kv_dtype],
            threads=choose_threads(threads),
            screens=screen_head,
            norms=1 * config.norms_before + 2 * config.norms_after,
            qk_norm_whole=config.qk_norm_whole,
            activation=_ACTIVATIONS[config.activation],
            normalise_experts=config.normalise_experts,
            router_bias=config.router_bias,
            sinks=config.attention_sinks,
            eps=config.rms_norm_eps,
            # The sum of all layers is kept divided by the factor on each layer's addend. Its norm
            # is unchanged with this epsilon, and nothing else reads the sum.
            sum_eps=config.rms_norm_eps / config.residual_scale**2,
            embedding_scale=config.embedding_scale / config.residual_scale,
            attention_scale=config.attention_scale or 0.0,
            swiglu_limit=config.swiglu_limit,
            attention_softcap=config.attention_softcap or 0.0,
            logits_softcap=config.logits_softcap or 0.0,
            ropes=bytes(ropes),
            sliding=sliding,
            dense=dense,
            kinds=kinds or None,
            isa=None if isa is None else isa.encode(),
        )
        self._handle = self._library.paceline_create(ctypes.byref(values))
        if self._handle is None:
            check(-1)
        try:
            about: dict[str, object] = {} if copies is None else {
                "abi": ABI, "library": digest(), "version": __version__, "isa": self.isa,
                "dtype": dtype, "kinds": kinds.hex(), "has_head": has_head,
            }  # fmt: skip
            if copies is not None and copies.read(about, self._pieces()):
                check(self._library.paceline_restored(self._handle))
            else:
                for name, tensor in tensors:
                    self._load(name, tensor)
                if copies is not None:
                    copies.write(about, self._pieces())
            for index, (cos, sin) in enumerate(tables):
                check(
                    self._library.paceline_set_rope(
                        self._handle, index, cos.ctypes.data, sin.ctypes.data
                    )
                )
            check(self._library.paceline_ready(self._handle))
        except BaseException:
            self.close()
            raise

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
    ) -> NDArray[np.float32]:
        """Run one step: store keys and values of all tokens, attend causally, give logits.

        Args:
            token_ids: [T], sequence after sequence.
            positions: [T], consecutive within a sequence; a token sees its sequence's blocks up to
                its own position.
            query_start: [S + 1], first row of each sequence, then T; a sequence may have no rows.
            block_tables: [S, width], block ids by position // block_size.
            sample_rows: [R], ascending rows whose logits are wanted.
            needs_logits: False: ``likeliest`` suffices, which costs less for a few rows
                (csrc/screen.cpp); it is then right unless screening is off by more than 6 standard
                deviations for one of the logits.
            window_tables: window blocks in place of those in ``block_tables``, if there are any.

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
        if needs_logits and len(self._logits) < len(rows):
            self._logits = np.empty((len(rows), self._vocab), dtype=np.float32)
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
        found = np.empty((len(arrays[-1]), self._hidden), dtype=np.float32)
        step.hidden = found.ctypes.data
        check(self._library.paceline_forward(self.handle, ctypes.byref(step)))
        return found

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

    def choices(self) -> dict[str, int]:
        """Number of rows so far in steps without logits, by how their likeliest token was found
        (``CHOICES``): settled by screening, screened in vain, or by the whole product at once."""
        counts = (ctypes.c_int64 * len(CHOICES))()
        self._library.paceline_choices(self.handle, counts)
        return dict(zip(CHOICES, counts, strict=True))

    def profile(self, on: bool) -> None:
        """Start timing the parts of a step from zero, or stop."""
        self._library.paceline_profile(self.handle, int(on))

    def seconds(self) -> dict[str, float]:
        """Seconds spent in each of ``SECTIONS`` since ``profile(True)``."""
        values = (ctypes.c_double * len(SECTIONS))()
        self._library.paceline_seconds(self.handle, values)
        return dict(zip(SECTIONS, values, strict=True))
