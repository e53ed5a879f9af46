"""Loading of heads that read the served model's hidden states, from their own folder or its."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from paceline.backends.drafting.draft_head import FeatureTap, HeadDraft, HeadModel
from paceline.backends.drafting.draft_model import DraftPlan
from paceline.backends.loading.formats import Formats
from paceline.backends.loading.plan import LoadPlan
from paceline.backends.runner.drafting import Drafting
from paceline.backends.runner.interface import LoadedModel
from paceline.checkpoints.heads.eagle3 import Eagle3Head
from paceline.checkpoints.heads.mtp import MTPLayers
from paceline.checkpoints.model.config import ModelConfig
from paceline.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from paceline.backends.torch.head import HeadSettings
    from paceline.backends.torch.model import DecoderWeights

    # (the served model's weights, settings, blocks) -> a head that drafts for it
    _Make: TypeAlias = Callable[[DecoderWeights, HeadSettings, int], HeadModel]

__all__ = ["choose_eagle3", "choose_mtp"]


def choose_eagle3(plan: LoadPlan) -> DraftPlan:
    """Choose an EAGLE-3 head for the model of ``plan``.

    Raises ConfigError for a head that cannot draft for the served model, CheckpointError for one
    that cannot be read.
    """
    assert plan.settings.draft_path is not None
    path, config, formats = Path(plan.settings.draft_path), plan.checkpoint.config, plan.formats
    _check_path(f"the EAGLE-3 head {path} reads", formats)
    head = Eagle3Head(path)
    try:
        layers = head.layers(config.num_hidden_layers)
    except CheckpointError as error:
        raise ConfigError(f"speculative_config: {error}") from None
    wanted = len(layers) * config.hidden_size
    if head.num_features != wanted:
        raise ConfigError(
            f"speculative_config: the EAGLE-3 head {path} reads {head.num_features} numbers, and "
            f"{len(layers)} layers of the served model give {wanted}: it is another model's head"
        )
    _check_tokens(head, config)
    from paceline.backends.torch.attention import block_bytes

    head_settings = _head_settings(plan)
    return DraftPlan(
        block_bytes(head.config, head_settings.block_size, head_settings.dtype),
        head.num_values * head_settings.dtype.itemsize,
        f"drafts by the EAGLE-3 head {path.name} in {formats.dtype}, torch",
        partial(_load, partial(_eagle3, head), layers, head_settings, config.vocab_size),
    )


def choose_mtp(plan: LoadPlan) -> DraftPlan:
    """Choose the MTP layers of the served model's own checkpoint. Raises ConfigError where it has
    none, or none that can draft."""
    checkpoint, formats = plan.checkpoint, plan.formats
    _check_path(f"MTP layers of {checkpoint.path} read", formats)
    try:
        layers = MTPLayers(checkpoint)
    except CheckpointError as error:
        raise ConfigError(f"speculative_config: {error}") from None
    from paceline.backends.torch.mtp import mtp_block_bytes

    config, head_settings = checkpoint.config, _head_settings(plan)
    count = layers.num_layers
    return DraftPlan(
        mtp_block_bytes(layers, head_settings.block_size, head_settings.dtype),
        layers.num_values * head_settings.dtype.itemsize,
        f"drafts by {count} MTP layer{'s' if count > 1 else ''} in {formats.dtype}, torch",
        # the head reads the last layer's output
        partial(
            _load,
            partial(_mtp, layers),
            (config.num_hidden_layers,),
            head_settings,
            config.vocab_size,
        ),
    )


def _check_path(reads: str, formats: Formats) -> None:
    """Raise ConfigError for a compute path that does not expose hidden states."""
    if formats.compute != "torch":
        raise ConfigError(
            f"speculative_config: {reads} hidden states, which the path "
            f"{formats.compute!r} does not tell: serve with --compute torch, or have tokens "
            'drafted by a draft model ("method": "draft_model") or by the same weights in 4 bits '
            '("self")'
        )


def _check_tokens(head: Eagle3Head, config: ModelConfig) -> None:
    """Raise ConfigError where its tokens are not the served model's."""
    ids, path = head.token_ids(), head.path
    if ids.min() < 0 or ids.max() >= config.vocab_size:
        raise ConfigError(
            f"speculative_config: the EAGLE-3 head {path} drafts tokens {ids.min()} to "
            f"{ids.max()}, and the served model has {config.vocab_size}"
        )
    if head.embeds not in (0, config.vocab_size):
        raise ConfigError(
            f"speculative_config: the EAGLE-3 head {path} embeds {head.embeds} tokens, and the "
            f"served model has {config.vocab_size}"
        )
    if not head.embeds and head.config.hidden_size != config.hidden_size:
        raise ConfigError(
            f"speculative_config: the EAGLE-3 head {path} is {head.config.hidden_size} wide and "
            f"brings no embeddings; the served model's are {config.hidden_size} wide"
        )


def _head_settings(plan: LoadPlan) -> HeadSettings:
    import torch

    from paceline.backends.torch.head import HeadSettings
    from paceline.backends.torch.machine import choose_dtype

    dtype = choose_dtype(plan.formats.dtype, plan.device)
    device = torch.device(plan.device)
    return HeadSettings(plan.settings.block_size, plan.max_model_len, dtype, device)


def _eagle3(
    head: Eagle3Head, weights: DecoderWeights, head_settings: HeadSettings, num_blocks: int
) -> HeadModel:
    from paceline.backends.torch.eagle3 import Eagle3Step

    return Eagle3Step(head, weights.embedding, head_settings, num_blocks)


def _mtp(
    layers: MTPLayers, weights: DecoderWeights, head_settings: HeadSettings, num_blocks: int
) -> HeadModel:
    from paceline.backends.torch.mtp import MTPStep

    return MTPStep(layers, weights, head_settings, num_blocks)


def _load(
    make: _Make,
    layers: tuple[int, ...],
    head_settings: HeadSettings,
    vocab_size: int,
    served: LoadedModel,
    num_blocks: int,
) -> tuple[LoadedModel, Drafting]:
    """
    Args:
        layers: layers whose input the head reads.
        vocab_size: the served model's.
    """
    import torch

    from paceline.backends.torch.step import TorchStep

    assert isinstance(served.model, TorchStep)
    with torch.inference_mode():
        model = make(served.model.weights, head_settings, num_blocks)
    draft = HeadDraft(
        model,
        served.sampler,
        vocab_size=vocab_size,
        num_blocks=num_blocks,
        block_size=head_settings.block_size,
    )
    return served._replace(model=FeatureTap(served.model, layers, draft)), draft
