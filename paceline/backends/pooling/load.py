"""Loading of pooling heads from a model's files, their description for requests, and the runner."""

from __future__ import annotations

import codecs
from dataclasses import replace
from pathlib import Path
from typing import Final

from paceline.backends.pooling.runner import Dense, HiddenModel, PoolingHead, PoolingRunner
from paceline.checkpoints.heads.pooling import PoolingFiles
from paceline.checkpoints.hf.checkpoint import HFCheckpoint
from paceline.checkpoints.hf.folder import Module
from paceline.checkpoints.model.checkpoint import Checkpoint
from paceline.checkpoints.model.encoder import EncoderFiles
from paceline.checkpoints.weights.safetensors import read_entries, values_of
from paceline.core.backend import BackendInfo
from paceline.core.pooling import EMBED, PoolingInfo
from paceline.errors import CheckpointError, ConfigError

__all__ = ["make_runner", "score_token_ids"]

# sentence-transformers' names of a Dense module's function
_FUNCTIONS: Final = {"Identity": "identity", "Tanh": "tanh", "GELU": "gelu", "ReLU": "relu"}


def make_runner(
    model: HiddenModel,
    files: PoolingFiles,
    checkpoint: Checkpoint | EncoderFiles,
    dimensions: tuple[int, ...],
    info: BackendInfo,
) -> tuple[PoolingRunner, BackendInfo]:
    """Load the layers behind a model whose hidden states are pooled; return what runs both, and
    ``info`` with the description of the vectors.

    Args:
        dimensions: sizes that embeddings may be cut to, overriding the files; (): by the files.

    Raises:
        CheckpointError: tensors that are missing, or of another shape than the labels.
        ConfigError: sizes that the model does not have, or a classifier for which this kind of file
            has no head.
    """
    if files.task == EMBED:
        layers = [_dense(module) for module in files.dense]
    elif isinstance(checkpoint, EncoderFiles):
        layers = _encoder_layers(checkpoint)
    else:
        layers = [_token_head(files, checkpoint) if files.score_tokens else _head(checkpoint)]
    # even without a function of its own, a model can be asked for embeddings of length 1
    function = "normalize" if files.task == EMBED else files.activation
    head = PoolingHead(checkpoint.config.hidden_size, layers, function)
    if files.labels and head.size != len(files.labels):
        raise CheckpointError(
            f"{checkpoint.path}: the head gives {head.size} numbers, and config.json names "
            f"{len(files.labels)} labels"
        )
    chosen = dimensions or files.dimensions
    if dimensions and files.task != EMBED:
        raise ConfigError("--matryoshka-dimensions are of embeddings, and this model classifies")
    for size in chosen:
        if size > head.size:
            raise ConfigError(f"dimension {size} of embeddings that have {head.size} numbers")
    vectors = PoolingInfo(
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
    runner = PoolingRunner(
        model, head, vectors, vocab_size=info.vocab_size, block_size=info.block_size
    )
    return runner, replace(info, pooling=vectors)


def _dense(module: Module) -> Dense:
    folder = module.path
    named = str(module.config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    function = _FUNCTIONS.get(named.rpartition(".")[2])
    if function is None:
        raise CheckpointError(f"{folder}: activation {named!r:.80} is not supported")
    entries = read_entries(folder)
    weight, bias = entries.get("linear.weight"), entries.get("linear.bias")
    if weight is None or len(weight.shape) != 2:
        raise CheckpointError(f"{folder} has no matrix linear.weight")
    return Dense(values_of(weight), None if bias is None else values_of(bias), function)


def _encoder_layers(checkpoint: EncoderFiles) -> list[Dense]:
    first, last = "pooler.dense", "classifier"
    if checkpoint.config.model_type != "bert":
        first, last = "classifier.dense", "classifier.out_proj"
    return [
        Dense(checkpoint.tensor(f"{name}.weight"), checkpoint.tensor(f"{name}.bias"), function)
        for name, function in ((first, "tanh"), (last, "identity"))
    ]


def _head(checkpoint: Checkpoint | EncoderFiles) -> Dense:
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


def score_token_ids(folder: Path, files: PoolingFiles) -> tuple[int, ...]:
    """Return the ids of ``files.score_tokens``. Raises CheckpointError for an unknown token."""
    if all(isinstance(token, int) for token in files.score_tokens):
        return tuple(int(token) for token in files.score_tokens)
    # imported here: an engine makes no text, and rarely needs such ids
    from tokenizers import Tokenizer

    try:
        data = (folder / "tokenizer.json").read_bytes()
        tokenizer = Tokenizer.from_buffer(data.removeprefix(codecs.BOM_UTF8))
    except Exception as error:
        raise CheckpointError(
            f"{folder / 'tokenizer.json'} cannot be read: {error!s:.200}"
        ) from None
    found = []
    for token in files.score_tokens:
        token_id = token if isinstance(token, int) else tokenizer.token_to_id(token)
        if token_id is None:
            raise CheckpointError(f"{folder}: {token!r:.40}, which is scored by, is no one token")
        found.append(token_id)
    return tuple(found)
