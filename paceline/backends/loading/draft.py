"""Choice and loading of a second model that drafts tokens for the served one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from paceline.backends.drafting.draft_model import DraftModel, DraftPlan
from paceline.backends.loading.formats import choose_formats
from paceline.backends.loading.head import choose_eagle3, choose_mtp
from paceline.backends.loading.memory_estimate import weight_bytes
from paceline.backends.loading.plan import LoadPlan, choose_loader, torch_dtype
from paceline.backends.loading.settings import BackendSettings
from paceline.backends.runner.interface import LoadedModel, ModelLoader
from paceline.checkpoints.heads.eagle3 import is_eagle3
from paceline.checkpoints.open import open_checkpoint
from paceline.errors import ConfigError

__all__ = ["choose_draft"]

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
