"""Loading of a decoder's weights from a checkpoint: read, check, fuse, cast, pack.

Each tensor passes all stages before the next one is read, so the peak is the model in its final
form plus one layer in the checkpoint's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from paceline.backends.torch.linear import MLP, DenseMLP, Linear, SparseMLP, make_linear
from paceline.backends.torch.model import DecoderWeights, LayerWeights, RMSNorm
from paceline.checkpoints.hf.checkpoint import HFCheckpoint
from paceline.checkpoints.model.checkpoint import expected_shapes, row_order
from paceline.checkpoints.model.config import ModelConfig
from paceline.errors import CheckpointError

__all__ = ["TensorReader", "TensorSource", "load_weights"]


class TensorSource(Protocol):
    """The parts of ``checkpoints.model.checkpoint.Checkpoint`` that are needed here."""

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> ModelConfig: ...

    def tensor(self, name: str) -> NDArray[np.float32]: ...

    def release(self) -> None: ...


class TensorReader:
    """Reader of tensors by name, in the config's shapes, with the wanted device and dtype.

    Args:
        stack: closes opened files.
        shapes: shapes of all tensors; None: those of a whole model of the config.
    """

    def __init__(
        self,
        source: TensorSource,
        dtype: torch.dtype,
        device: torch.device,
        stack: ExitStack,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        self._source = source
        self._shapes = expected_shapes(source.config) if shapes is None else shapes
        self._dtype, self._device = dtype, device
        self._stack = stack
        # opened safetensors shards, closed with the stack
        self._shards: dict[Path, safe_open] = {}

    def get(self, name: str) -> torch.Tensor:
        tensor = self._read(name)
        # else the pages of the whole file would stay in memory next to the finished weights
        self._source.release()
        expected = self._shapes[name]
        if tuple(tensor.shape) != expected:
            raise CheckpointError(
                f"{self._source.path}: tensor {name} has shape {list(tensor.shape)}, "
                f"its config implies {list(expected)}"
            )
        # always a copy: no tensor may point into the mapped file once the model runs
        return tensor.to(device=self._device, dtype=self._dtype, copy=True)

    def _read(self, name: str) -> torch.Tensor:
        if not isinstance(self._source, HFCheckpoint) or self._source.is_quantised(name):
            return torch.from_numpy(self._source.tensor(name))
        # safetensors maps the file, so stored bfloat16 is copied once and never widened
        path = self._source.tensor_file(name)
        try:
            if path not in self._shards:
                self._shards[path] = self._stack.enter_context(safe_open(path, framework="pt"))
            stored, rows = self._source.stored_part(name)
            tensor: torch.Tensor
            if rows is None:
                tensor = self._shards[path].get_tensor(stored)  # type: ignore[no-untyped-call]
            else:
                tensor = self._shards[path].get_slice(stored)[rows]  # type: ignore[no-untyped-call]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: cannot read tensor {name}: {error}") from error
        order = row_order(self._source.config, name)
        return tensor if order is None else tensor[torch.from_numpy(order)]

    def maybe(self, name: str) -> torch.Tensor | None:
        return self.get(name) if name in self._shapes else None

    def linear(self, *names: str) -> Linear:
        """Make one product of several projections of the same input, in the order given."""
        weights = [self.get(f"{name}.weight") for name in names]
        biases = [bias for name in names if (bias := self.maybe(f"{name}.bias")) is not None]
        return make_linear(
            torch.cat(weights) if len(weights) > 1 else weights[0].contiguous(),
            torch.cat(biases) if biases else None,
        )

    def norm(self, name: str) -> RMSNorm:
        config = self._source.config
        return RMSNorm(self.get(name), config.rms_norm_eps, config.norm_offset)

    def maybe_norm(self, name: str) -> RMSNorm | None:
        return self.norm(name) if name in self._shapes else None

    def mlp(self, name: str) -> MLP:
        config = self._source.config
        if f"{name}.router.weight" not in self._shapes:
            gate_up = self.linear(f"{name}.gate_proj", f"{name}.up_proj")
            down = self.linear(f"{name}.down_proj")
            return DenseMLP(gate_up, down, config.activation, config.swiglu_limit)
        experts = [self.mlp(f"{name}.experts.{expert}") for expert in range(config.num_experts)]
        router, bias = self.get(f"{name}.router.weight"), self.maybe(f"{name}.router.bias")
        return SparseMLP(router, bias, experts, config.experts_per_token, config.normalise_experts)

    def layers(self) -> Iterator[LayerWeights]:
        return map(self.layer, range(self._source.config.num_hidden_layers))

    def layer(self, index: int) -> LayerWeights:
        layer = f"model.layers.{index}"
        attention = f"{layer}.self_attn"
        return LayerWeights(
            input_norm=self.maybe_norm(f"{layer}.input_layernorm.weight"),
            qkv=self.linear(*(f"{attention}.{part}_proj" for part in "qkv")),
            query_norm=self.maybe_norm(f"{attention}.q_norm.weight"),
            key_norm=self.maybe_norm(f"{attention}.k_norm.weight"),
            sinks=self.maybe(f"{attention}.sinks.weight"),
            output=self.linear(f"{attention}.o_proj"),
            attention_output_norm=self.maybe_norm(f"{layer}.attention_output_norm.weight"),
            mlp_norm=self.maybe_norm(f"{layer}.post_attention_layernorm.weight"),
            mlp=self.mlp(f"{layer}.mlp"),
            mlp_output_norm=self.maybe_norm(f"{layer}.mlp_output_norm.weight"),
        )


def load_weights(
    source: TensorSource, *, dtype: torch.dtype, device: torch.device, has_head: bool = True
) -> DecoderWeights:
    """Read a whole model; without ``has_head`` all but the parts that predict tokens.

    Raises:
        CheckpointError: a tensor is missing, unreadable, or contradicts the config's shape.
    """
    with ExitStack() as stack:
        reader = TensorReader(source, dtype, device, stack)
        embedding = reader.get("model.embed_tokens.weight")
        layers = tuple(reader.layers())
        norm = reader.norm("model.norm.weight")
        tied = source.config.tie_word_embeddings or not has_head
        head_weight = embedding if tied else reader.get("lm_head.weight").contiguous()
    return DecoderWeights(
        embedding=embedding,
        layers=layers,
        norm=norm,
        head=make_linear(head_weight) if has_head else None,
        head_weight=head_weight,
    )
