"""A head that guesses for the served model, from its folder."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from paceline.backends.drafting import Drafting, DraftPlan
from paceline.backends.formats import Formats
from paceline.backends.head_drafting import FeatureTap, HeadDraft
from paceline.backends.settings import BackendSettings
from paceline.backends.steps import LoadedModel
from paceline.checkpoints.config import ModelConfig
from paceline.checkpoints.eagle3 import Eagle3Head
from paceline.core.errors import CheckpointError, ConfigError

__all__ = ["choose_head"]


def choose_head(
    settings: BackendSettings, config: ModelConfig, formats: Formats, device: str, length: int
) -> DraftPlan:
    """Args:
        config: the served model's.
        length: the longest request.

    Raises ConfigError for one that cannot guess for the served model, CheckpointError for one that
    cannot be read.
    """
    assert settings.draft_path is not None
    path = Path(settings.draft_path)
    if formats.compute != "torch":
        raise ConfigError(
            f"speculative_config: the EAGLE-3 head {path} reads hidden states, which the path "
            f"{formats.compute!r} does not tell: serve with --compute torch, or have tokens "
            'guessed by a draft model ("method": "draft_model") or by the same weights in 4 bits '
            '("self")'
        )
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
    from paceline.backends.torch.machine import choose_dtype

    dtype = choose_dtype(formats.dtype, device)
    return DraftPlan(
        block_bytes(head.config, settings.block_size, dtype),
        head.num_values * dtype.itemsize,
        f"guesses by the EAGLE-3 head {path.name} in {formats.dtype}, torch",
        partial(
            _load, head, layers, settings=settings, dtype=formats.dtype, device=device,
            length=length, vocab_size=config.vocab_size,
        ),
    )  # fmt: skip


def _check_tokens(head: Eagle3Head, config: ModelConfig) -> None:
    """Raises ConfigError where its tokens are not the served model's."""
    ids, path = head.token_ids(), head.path
    if ids.min() < 0 or ids.max() >= config.vocab_size:
        raise ConfigError(
            f"speculative_config: the EAGLE-3 head {path} guesses tokens {ids.min()} to "
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


def _load(
    head: Eagle3Head,
    layers: tuple[int, ...],
    served: LoadedModel,
    num_blocks: int,
    *,
    settings: BackendSettings,
    dtype: str,
    device: str,
    length: int,
    vocab_size: int,
) -> tuple[LoadedModel, Drafting]:
    import torch

    from paceline.backends.torch.eagle3 import Eagle3Step
    from paceline.backends.torch.machine import choose_dtype
    from paceline.backends.torch.step import TorchStep

    assert isinstance(served.model, TorchStep)
    with torch.inference_mode():
        model = Eagle3Step(
            head,
            served.model.embedding,
            num_blocks=num_blocks,
            block_size=settings.block_size,
            max_model_len=length,
            dtype=choose_dtype(dtype, device),
            device=torch.device(device),
        )
    draft = HeadDraft(
        model,
        served.sampler,
        vocab_size=vocab_size,
        num_blocks=num_blocks,
        block_size=settings.block_size,
    )
    return served._replace(model=FeatureTap(served.model, layers, draft)), draft
