"""Loading of pooling heads from a model's files, and their description for requests."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from paceline.backends.pooling.head import Dense, PoolingHead
from paceline.checkpoints.heads.pooling import PoolingFiles, score_token_ids
from paceline.checkpoints.hf.checkpoint import HFCheckpoint, read_entries
from paceline.checkpoints.hf.encoder import EncoderCheckpoint, EncoderFiles
from paceline.checkpoints.model.checkpoint import Checkpoint
from paceline.checkpoints.model.json_file import read_json_object
from paceline.checkpoints.weights.safetensors import values_of
from paceline.core.pooling import EMBED, PoolingInfo
from paceline.errors import CheckpointError, ConfigError

__all__ = ["load_head", "pooling_info"]

# sentence-transformers' names of a Dense module's function
_FUNCTIONS: Final = {"Identity": "identity", "Tanh": "tanh", "GELU": "gelu", "ReLU": "relu"}


def pooling_info(
    files: PoolingFiles, head: PoolingHead, dimensions: tuple[int, ...]
) -> PoolingInfo:
    """Describe the vectors that a loaded model gives.

    Args:
        dimensions: sizes that embeddings may be cut to, overriding the files; (): by the files.

    Raises:
        ConfigError: sizes that the model does not have.
    """
    chosen = dimensions or files.dimensions
    if dimensions and files.task != EMBED:
        raise ConfigError("--matryoshka-dimensions are of embeddings, and this model classifies")
    for size in chosen:
        if size > head.size:
            raise ConfigError(f"dimension {size} of embeddings that have {head.size} numbers")
    return PoolingInfo(
        task=files.task,
        pooling=files.pooling,
        size=head.size,
        whole_prompts=files.encoder is not None,
        use_activation=files.activation != "identity",
        is_matryoshka=bool(chosen) or files.is_matryoshka,
        dimensions=tuple(sorted(chosen)),
        labels=files.labels,
        prompts=files.prompts,
        default_prompt=files.default_prompt,
        lower_case=files.lower_case,
        score_template=files.score_template,
    )


def load_head(
    files: PoolingFiles, checkpoint: Checkpoint | EncoderFiles, hidden_size: int
) -> PoolingHead:
    """Load the layers for a pooled hidden state.

    Raises:
        CheckpointError: tensors that are missing, or of another shape than the labels.
        ConfigError: a classifier for which this kind of file has no head.
    """
    if files.task == EMBED:
        layers = [_dense(folder) for folder in files.dense]
    elif isinstance(checkpoint, EncoderCheckpoint):
        layers = _encoder_head(checkpoint)
    elif files.score_tokens:
        layers = [_token_head(files, checkpoint)]
    else:
        layers = [_decoder_head(checkpoint)]
    # even without a function of its own, a model can be asked for embeddings of length 1
    function = "normalize" if files.task == EMBED else files.activation
    head = PoolingHead(hidden_size, layers, function)
    if files.labels and head.size != len(files.labels):
        raise CheckpointError(
            f"{checkpoint.path}: the head gives {head.size} numbers, and config.json names "
            f"{len(files.labels)} labels"
        )
    return head


def _dense(folder: Path) -> Dense:
    config = read_json_object(folder / "config.json") or {}
    named = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    function = _FUNCTIONS.get(named.rpartition(".")[2])
    if function is None:
        raise CheckpointError(f"{folder}: activation {named!r:.80} is not supported")
    entries = read_entries(folder)
    weight, bias = entries.get("linear.weight"), entries.get("linear.bias")
    if weight is None or len(weight.shape) != 2:
        raise CheckpointError(f"{folder} has no matrix linear.weight")
    return Dense(values_of(weight), None if bias is None else values_of(bias), function)


def _encoder_head(checkpoint: EncoderCheckpoint) -> list[Dense]:
    first, last = "pooler.dense", "classifier"
    if checkpoint.config.model_type != "bert":
        first, last = "classifier.dense", "classifier.out_proj"
    return [
        Dense(checkpoint.tensor(f"{name}.weight"), checkpoint.tensor(f"{name}.bias"), function)
        for name, function in ((first, "tanh"), (last, "identity"))
    ]


def _decoder_head(checkpoint: Checkpoint | EncoderFiles) -> Dense:
    weight = (
        checkpoint.head_tensor("score.weight") if isinstance(checkpoint, HFCheckpoint) else None
    )
    if weight is None or not isinstance(checkpoint, HFCheckpoint):
        raise CheckpointError(f"{checkpoint.path} has no score.weight, which would classify")
    return Dense(weight, checkpoint.head_tensor("score.bias"))


def _token_head(files: PoolingFiles, checkpoint: Checkpoint | EncoderFiles) -> Dense:
    """Return a layer of one row: the logit of one token minus that of another. A softmax over the
    two is the sigmoid of the difference."""
    if not isinstance(checkpoint, HFCheckpoint):
        raise ConfigError(f"{checkpoint.path}: scores by tokens are read from Hugging Face folders")
    if checkpoint.config.logits_softcap is not None:
        raise ConfigError(f"{checkpoint.path}: scores of logits with a soft cap are not supported")
    tied = checkpoint.config.tie_word_embeddings
    name = "model.embed_tokens.weight" if tied else "lm_head.weight"
    ids = score_token_ids(checkpoint.path, files)
    row = checkpoint.tensor_row(name, ids[0])
    for other in ids[1:]:
        row = row - checkpoint.tensor_row(name, other)
    return Dense((row / checkpoint.config.logits_divisor)[None])
