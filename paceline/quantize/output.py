"""The GGUF file of a rounded model: the source's metadata and tensors, matrices in fewer bits."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from numpy.typing import NDArray

from paceline.checkpoints.gguf.container import SIZES, GGUFType
from paceline.checkpoints.model.checkpoint import Checkpoint
from paceline.errors import CheckpointError, ConfigError
from paceline.quantize.layers import RoundedTensor
from paceline.quantize.source import Source, StoredTensor

__all__ = ["GGUFOutput", "bytes_of", "matrices_of", "refuse_few_bits"]

# rows of a matrix that are converted at a time
_ROWS: Final = 4096
# what a file of a kind is called in general.file_type
_FILE_TYPES: Final = {
    GGUFType.Q4_1: gguf.LlamaFileType.MOSTLY_Q4_1,
    GGUFType.Q5_1: gguf.LlamaFileType.MOSTLY_Q5_1,
    GGUFType.Q8_0: gguf.LlamaFileType.MOSTLY_Q8_0,
}
# weights of a block of any kind that is written
_BLOCK: Final = 32
_QUANTIZATION_VERSION: Final = 2
_SIXTEEN_BITS: Final = ("F16", "BF16", "F32", "F64")


def matrices_of(checkpoint: Checkpoint) -> frozenset[str]:
    """Return the matrices of the layers that are rounded: all whose rows are whole blocks, but
    routers, whose errors would choose other experts."""
    return frozenset(
        name
        for name in checkpoint.tensor_names()
        if name.endswith("_proj.weight")
        and name.startswith("model.layers.")
        and checkpoint.tensor_shape(name)[-1] % _BLOCK == 0
    )


def refuse_few_bits(checkpoint: Checkpoint, names: Collection[str]) -> None:
    """Raise ConfigError where matrices have less than 16 bits: rounding twice loses more than
    rounding the original once."""
    few = {
        name: kind
        for name in sorted(names)
        if (kind := checkpoint.tensor_type(name)) not in _SIXTEEN_BITS
    }
    if few:
        name, kind = next(iter(few.items()))
        raise ConfigError(
            f"{checkpoint.path}: {len(few)} of {len(names)} matrices are in fewer than 16 bits "
            f"already, such as {name} in {kind}; start from the model in 16 bits"
        )


def bytes_of(shape: Sequence[int], kind: GGUFType) -> int:
    """Return the bytes of a tensor's values."""
    values, size = SIZES[kind]
    return math.prod(shape) // values * size


class GGUFOutput:
    """A file to be written from a model, its matrices in ``kinds``."""

    def __init__(self, source: Source, kinds: Mapping[str, GGUFType]) -> None:
        self._source, self._kinds = source, kinds
        self._tensors = source.tensors()

    def size(self) -> int:
        """Return the bytes of all tensors."""
        return sum(bytes_of(tensor.shape, self._kind_of(tensor)) for tensor in self._tensors)

    def write(self, target: Path, rounded: Callable[[str], RoundedTensor]) -> None:
        """Write the file under its name only once it is whole. ``rounded`` returns a matrix of
        ``kinds``. Raises OSError."""
        partial = target.with_name(f"{target.name}.partial")
        try:
            self._write(partial, rounded)
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)

    def _write(self, path: Path, rounded: Callable[[str], RoundedTensor]) -> None:
        writer = gguf.GGUFWriter(path, self._source.architecture)
        for field in self._source.fields():
            writer.add_key_value(field.name, field.value, field.kind, sub_type=field.inner)
        most, _ = Counter(self._kinds.values()).most_common(1)[0]
        writer.add_file_type(_FILE_TYPES[most])
        writer.add_quantization_version(_QUANTIZATION_VERSION)
        for tensor in self._tensors:
            kind = self._kind_of(tensor)
            writer.add_tensor_info(
                tensor.name,
                tensor.shape,
                np.dtype(np.float32),
                bytes_of(tensor.shape, kind),
                gguf.GGMLQuantizationType(kind),
            )
        with closing(writer):
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for tensor in self._tensors:
                writer.write_tensor_data(self._data(tensor, rounded))
                self._source.checkpoint.release()

    def _kind_of(self, tensor: StoredTensor) -> GGUFType:
        """Return the type of a tensor in the new file."""
        if tensor.parts and tensor.parts[0] in self._kinds:
            return self._kinds[tensor.parts[0]]
        # the embedding and the head are rounded to 8 bits, which costs next to nothing
        if tensor.parts in (("model.embed_tokens.weight",), ("lm_head.weight",)) and (
            tensor.shape[-1] % SIZES[GGUFType.Q8_0][0] == 0
        ):
            return GGUFType.Q8_0
        return tensor.type

    def _data(self, tensor: StoredTensor, rounded: Callable[[str], RoundedTensor]) -> NDArray[Any]:
        source, kind = self._source, self._kind_of(tensor)
        if tensor.parts and tensor.parts[0] in self._kinds:
            return np.concatenate(
                [source.stored_rows(name, rounded(name).blocks) for name in tensor.parts]
            )
        if kind == tensor.type:
            return source.stored_bytes(tensor)
        values = source.checkpoint.tensor(tensor.parts[0])
        if not np.isfinite(values).all():
            raise CheckpointError(f"{source.checkpoint.path}: tensor {tensor.name} has values that "
                                  "are not finite")  # fmt: skip
        return np.concatenate(
            [
                gguf.quants.quantize(values[start : start + _ROWS], gguf.GGMLQuantizationType(kind))
                for start in range(0, len(values), _ROWS)
            ]
        )
