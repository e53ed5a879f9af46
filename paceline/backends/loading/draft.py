"""Choice and loading of what drafts for a served model: a second model, or a head that reads its
hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from paceline.backends.drafting.draft_head import FeatureTap, HeadDraft, HeadModel
from paceline.backends.drafting.draft_model import DraftModel, DraftPlan
from paceline.backends.loading.formats import Formats, choose_formats
from paceline.backends.loading.memory_estimate import weight_bytes
from paceline.backends.loading.plan import LoadPlan, choose_loader, torch_dtype
from paceline.backends.loading.settings import BackendSettings
from paceline.backends.runner.drafting import Drafting
from paceline.backends.runner.interface import LoadedModel, ModelLoader
from paceline.checkpoints.heads.eagle3 import Eagle3Head, is_eagle3
from paceline.checkpoints.heads.mtp import MTPLayers
from paceline.checkpoints.model.config import ModelConfig
from paceline.checkpoints.open import open_checkpoint
from paceline.errors import CheckpointError, ConfigError

__all__ = ["choose_draft", "choose_eagle3", "choose_mtp"]

if TYPE_CHECKING:
    from paceline.backends.torch.head import HeadSettings
    from paceline.backends.torch.model import DecoderWeights

    # (the served model's weights, settings, blocks) -> a head that drafts for it
    _Make: TypeAlias = Callable[[DecoderWeights, HeadSettings, int], HeadModel]


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
        partial(_load_head, partial(_eagle3, head), layers, head_settings, config.vocab_size),
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
            _load_head,
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


def _load_head(
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


# tokens by which the heads of two models with the same vocabulary may differ: they are padded to
# multiples of 64 to 1,024
_PADDING: Final = 1024


def choose_draft(plan: LoadPlan) -> DraftPlan:
    """Choose what drafts for the model of ``plan``. Raises ConfigError for what cannot."""
    choose = next(choose for matches, choose in _METHODS if matches(plan.settings))
    return choose(plan)


def _choose_model(plan: LoadPlan) -> DraftPlan:
    """Choose a second model, or the served one's own file in other formats."""
    settings, served, formats = plan.settings, plan.checkpoint, plan.formats
    length = plan.max_model_len
    assert settings.draft_path is not None
    path, config = Path(settings.draft_path), served.config
    itself = path.resolve() == plan.path.resolve()
    checkpoint = open_checkpoint(path)
    own = checkpoint.config
    if abs(own.vocab_size - config.vocab_size) > _PADDING:
        raise ConfigError(
            f"speculative_config: the draft model {path} has {own.vocab_size} tokens and the "
            f"served one {config.vocab_size}, which is more than padding ({_PADDING} at most): "
            "both must have the same vocabulary"
        )
    mirrors = itself and formats.compute == "native"
    try:
        found = choose_formats(
            own,
            compute="native" if mirrors else settings.compute,
            dtype=settings.draft_dtype,
            # copied blocks have the served model's format
            kv_dtype=formats.kv_dtype if mirrors else "auto",
            block_size=settings.block_size,
            device=plan.device,
            torch_dtype=partial(torch_dtype, device=plan.device),
            isa=formats.isa if mirrors else settings.isa,
        )
    except ConfigError as error:
        raise ConfigError(f"speculative_config: the draft model {path}: {error}") from error
    weights, served_weights = weight_bytes(checkpoint, found), weight_bytes(served, formats)
    if itself and weights >= served_weights:
        raise ConfigError(
            f"speculative_config: the model is served in {formats.dtype} "
            f"({served_weights / 1e6:.1f} MB of weights), and its drafts would be made in "
            f"{found.dtype} ({weights / 1e6:.1f} MB), which is not less: each would cost what a "
            "token does or more. Serve it in more bits (--dtype bfloat16), draft in fewer "
            '("quantization": "q4") or leave its drafts out'
        )
    if own.longest < length:
        raise ConfigError(
            f"speculative_config: the draft model {path} has {own.longest} positions and "
            f"a request may have {length}: give --max-model-len {own.longest} or less"
        )
    loader = choose_loader(
        replace(
            plan,
            path=path,
            checkpoint=checkpoint,
            formats=found,
            settings=replace(
                settings,
                packed_cache_bytes=settings.packed_cache_bytes
                if found.compute == "native"
                else None,
            ),
        )
    )
    return DraftPlan(
        loader.block_bytes,
        weights,
        f"drafts by {'itself' if itself else path.name} in {found.dtype}, {found.compute}",
        partial(_load, loader, settings.block_size, mirrors, own.vocab_size, config.vocab_size),
    )


def _load(
    loader: ModelLoader,
    block_size: int,
    mirrors: bool,
    vocab_size: int,
    served_vocab_size: int,
    served: LoadedModel,
    num_blocks: int,
) -> tuple[LoadedModel, DraftModel]:
    """Load the draft model; with ``mirrors`` its KV cache is a copy of the served model's."""
    loaded = loader.load(num_blocks, 0)
    mirror = None
    if mirrors:
        from paceline.backends.native.step import NativeStep

        assert isinstance(loaded.model, NativeStep) and isinstance(served.model, NativeStep)
        mirror = partial(loaded.model.mirror, served.model)
    return served, DraftModel(
        loaded,
        vocab_size=vocab_size,
        served_vocab_size=served_vocab_size,
        num_blocks=num_blocks,
        block_size=block_size,
        mirror=mirror,
    )


def _has_eagle3(settings: BackendSettings) -> bool:
    return settings.draft_path is not None and is_eagle3(Path(settings.draft_path))


# the first whose condition holds drafts
_METHODS: Final[
    tuple[tuple[Callable[[BackendSettings], bool], Callable[[LoadPlan], DraftPlan]], ...]
] = (
    (lambda settings: settings.draft_mtp, choose_mtp),
    (_has_eagle3, choose_eagle3),
    (lambda settings: settings.draft_path is not None, _choose_model),
)
