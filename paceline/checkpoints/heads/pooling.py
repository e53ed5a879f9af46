"""Whether a checkpoint's files describe a pooled model, and how it is pooled.

::

    config.json                          architectures: XModel, XForSequenceClassification
    modules.json                         sentence-transformers' pipeline, a folder for each module
    1_Pooling/config.json                hidden states that count: last, mean, cls
    2_Dense/                             one more matrix, with a bias and an activation
    3_Normalize                          vectors are scaled to length 1
    1_LogitScore/config.json             the score is a token's logit, less another one's
    config_sentence_transformers.json    prompts by name
    sentence_bert_config.json            max_seq_length, do_lower_case
    GGUF                                 <architecture>.pooling_type

This module does not know compute paths, or the tensors of a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from paceline.checkpoints.gguf.encoder import GGUF_ENCODERS
from paceline.checkpoints.hf.folder import HFFolder, Module
from paceline.core.pooling import CLASSIFY, CONVERTS, EMBED, RUNNERS
from paceline.errors import CheckpointError, ConfigError

__all__ = [
    "QWEN3_TEMPLATE",
    "TOKENIZER_TEMPLATE",
    "PoolingFiles",
    "pooling_of_folder",
    "pooling_of_gguf",
]

# values of ``PoolingFiles.score_template``
TOKENIZER_TEMPLATE: Final = "tokenizer"
QWEN3_TEMPLATE: Final = "qwen3"

_CLASSIFIER: Final = "ForSequenceClassification"
_GENERATOR: Final = ("ForCausalLM", "LMHeadModel")
_MODES: Final = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
# names of modes in newer files
_NAMED_MODES: Final = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
# llama.cpp's enum llama_pooling_type
_GGUF_MODES: Final = {1: "mean", 2: "cls", 3: "last"}
_ACTIVATIONS: Final = {
    "Identity": "identity", "Sigmoid": "sigmoid", "Softmax": "softmax", "Tanh": "tanh",
    "GELU": "gelu", "ReLU": "relu",
}  # fmt: skip
_BIDIRECTIONAL: Final = ("bert", "roberta", "xlm-roberta")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingFiles:
    """Description of pooling by a model's files."""

    # EMBED or CLASSIFY
    task: str
    # "last", "mean" or "cls"
    pooling: str
    # "normalize", "sigmoid", "softmax" or "identity": the last function
    activation: str
    # file that says so, for users
    why: str
    # sentence-transformers' Dense modules, in order
    dense: tuple[Module, ...] = ()
    # the score is the first token's logit, minus the second's if there is one
    score_tokens: tuple[int | str, ...] = ()
    labels: tuple[str, ...] = ()
    prompts: tuple[tuple[str, str], ...] = ()
    default_prompt: str | None = None
    max_seq_length: int | None = None
    lower_case: bool = False
    is_matryoshka: bool = False
    dimensions: tuple[int, ...] = ()
    # template that joins query and document: TOKENIZER_TEMPLATE, the folder's chat template, which
    # has the roles "query" and "document"; QWEN3_TEMPLATE; None: the tokenizer's own one for pairs
    score_template: str | None = None
    # model_type of an encoder, which sees the whole prompt; None: a decoder
    encoder: str | None = None

    @property
    def described(self) -> str:
        """What requests get and which file says so, for the ready line."""
        what = "embeddings" if self.task == EMBED else "classes"
        return f"{what} by {self.pooling} pooling, {self.activation} last ({self.why})"


def _check_purpose(runner: str, convert: str) -> None:
    for flag, value, known in (("runner", runner, RUNNERS), ("convert", convert, CONVERTS)):
        if value not in known:
            raise ConfigError(f"--{flag} must be one of {', '.join(known)}, got {value!r}")
    if runner == "generate" and convert != "auto":
        raise ConfigError(
            f"--convert {convert} makes a pooling model, and --runner generate asks for one that "
            "generates: leave one out"
        )


def pooling_of_gguf(
    path: Path, metadata: Mapping[str, Any], runner: str = "auto", convert: str = "auto"
) -> PoolingFiles | None:
    """Return how a GGUF file with these ``metadata`` is pooled, as ``pooling_of_folder`` does."""
    _check_purpose(runner, convert)
    encoder = name if (name := metadata.get("general.architecture")) in GGUF_ENCODERS else None
    key = f"{name}.pooling_type"
    kind = metadata.get(key)
    if runner == "generate":
        if encoder is not None:
            raise ConfigError(
                f"--runner generate: {path} is a {encoder}, which has no head that predicts "
                "tokens; leave the flag out"
            )
        return None
    if encoder is not None and kind not in (None, *_GGUF_MODES):
        raise CheckpointError(
            f"{path}: {key}={kind!r:.20} is not read, only {', '.join(map(str, _GGUF_MODES))}: "
            "use the model's Hugging Face folder"
        )
    mode = _GGUF_MODES.get(kind) if isinstance(kind, int) else None
    if encoder is None and mode is None and runner == "auto" and convert == "auto":
        return None
    if convert == CLASSIFY:
        raise ConfigError(
            f"--convert classify needs a head, which is not read from GGUF: {path} gives "
            "embeddings; use the model's Hugging Face folder"
        )
    # as for a folder whose files leave it open
    usual = ("last", "the last token") if encoder is None else ("cls", "the first token")
    why = f"no pooling_type, so {usual[1]}" if mode is None else f"{key}={kind}"
    return PoolingFiles(
        task=EMBED, pooling=mode or usual[0], activation="normalize", why=why, encoder=encoder
    )


def pooling_of_folder(
    folder: HFFolder, runner: str = "auto", convert: str = "auto"
) -> PoolingFiles | None:
    """Return how a model is pooled; None: it generates.

    Args:
        runner: one of RUNNERS; "generate" and "pooling" decide what "auto" leaves to the files.
        convert: one of CONVERTS: the task of a model whose files do not name it.

    Raises:
        ConfigError: these files do not support what was asked for.
        CheckpointError: files that contradict each other, or values that are not supported.
    """
    _check_purpose(runner, convert)
    config, modules = folder.config or {}, folder.modules
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    model_type = config.get("model_type")
    encoder = model_type if model_type in _BIDIRECTIONAL else None
    if config.get("use_bidirectional_attention") is True:
        encoder = str(model_type)
    generates = encoder is None and (name.endswith(_GENERATOR) or not name)
    if runner == "generate":
        if not generates:
            raise ConfigError(
                f"--runner generate: {folder.path} is a {name or encoder}, which has no head that "
                "predicts tokens; leave the flag out"
            )
        return None
    if runner == convert == "auto" and generates and not modules:
        return None
    task = convert
    if convert == "auto":
        scores = name.endswith(_CLASSIFIER) or "LogitScore" in modules
        task = CLASSIFY if scores else EMBED
    found = (
        _classifier(folder, config, name, encoder)
        if task == CLASSIFY
        else _embedder(folder, name, encoder)
    )
    return replace(found, **_shared(folder, config), encoder=encoder)


def _embedder(folder: HFFolder, name: str, encoder: str | None) -> PoolingFiles:
    modules = folder.modules
    if name.endswith(_CLASSIFIER):
        raise ConfigError(
            f"--convert embed: {folder.path} is a {name}, trained to classify; leave the flag out"
        )
    if "Pooling" not in modules:
        pooling = "last" if encoder is None else "cls" if encoder in _BIDIRECTIONAL else "mean"
        return PoolingFiles(
            task=EMBED, pooling=pooling, activation="normalize",
            why=f"no modules.json, so what is usual of {name or 'such models'}: {pooling}",
        )  # fmt: skip
    pooling = _mode(modules["Pooling"])
    return PoolingFiles(
        task=EMBED,
        pooling=pooling,
        activation="normalize" if "Normalize" in modules else "identity",
        why=f"modules.json: {', '.join(modules)}",
        dense=tuple(module for kind, module in modules.items() if kind.startswith("Dense")),
    )


def _classifier(
    folder: HFFolder, config: Mapping[str, Any], name: str, encoder: str | None
) -> PoolingFiles:
    pooling = "last" if encoder is None else "cls"
    source = folder.chat_template()
    knows_roles = source is not None and all(
        f'"{role}"' in source or f"'{role}'" in source for role in ("query", "document")
    )
    template = TOKENIZER_TEMPLATE if knows_roles else None
    if (scored := folder.modules.get("LogitScore")) is not None:
        return PoolingFiles(
            task=CLASSIFY, pooling=pooling, activation="sigmoid", labels=("LABEL_0",),
            why="modules.json: LogitScore", score_tokens=_score_tokens(scored),
            score_template=template,
        )  # fmt: skip
    if name.endswith(_CLASSIFIER):
        labels = _labels(config)
        activation = _class_activation(config, len(labels))
        return PoolingFiles(
            task=CLASSIFY, pooling=pooling, activation=activation, labels=labels,
            why=f"{name} with {len(labels)} label{'s' * (len(labels) != 1)}",
            score_template=template,
        )  # fmt: skip
    tokens = config.get("classifier_from_token")
    is_qwen3 = config.get("model_type") == "qwen3"
    if tokens is None and is_qwen3:
        # Qwen3-Reranker's training: "no" and "yes" after its own template
        tokens = ["no", "yes"]
    if (
        encoder is not None
        or not isinstance(tokens, list)
        or len(tokens) not in (1, 2)
        or not all(isinstance(token, str) for token in tokens)
    ):
        raise ConfigError(
            f"--convert classify: {folder.path} is a {name or 'model'} without a classifier's "
            "head, without a LogitScore module, and its config.json names no classifier_from_token "
            "(a list of one token, or of two: no, yes)"
        )
    return PoolingFiles(
        task=CLASSIFY,
        pooling="last",
        activation="sigmoid",
        labels=("LABEL_0",),
        why=f"the logits of {' and '.join(map(repr, tokens))}",
        # as in LogitScore: the token that means yes comes first
        score_tokens=tuple(reversed(tokens)),
        score_template=template or (QWEN3_TEMPLATE if is_qwen3 else None),
    )


def _mode(module: Module) -> str:
    path, config = module.path / "config.json", module.config
    named = config.get("pooling_mode")
    modes = {mode for key, mode in _MODES.items() if config.get(key) is True}
    others = [
        key
        for key, value in config.items()
        if key.startswith("pooling_mode_") and key not in _MODES and value is True
    ]
    if isinstance(named, str):
        modes, others = {_NAMED_MODES.get(named, "")}, []
    if len(modes) != 1 or "" in modes or others:
        asked = named or [*sorted(modes), *others]
        raise CheckpointError(
            f"{path} asks for {asked!r:.120}; supported is one of cls, mean and the last token"
        )
    if config.get("include_prompt") is False:
        raise CheckpointError(
            f"{path} leaves the prompt's tokens out of the mean (include_prompt), which is not "
            "supported"
        )
    return modes.pop()


def _score_tokens(module: Module) -> tuple[int, ...]:
    path, config = module.path / "config.json", module.config
    tokens = [config.get(f"{kind}_token_id") for kind in ("true", "false")]
    if tokens[1] is None:
        tokens.pop()
    found = tuple(token for token in tokens if type(token) is int and token >= 0)
    if len(found) != len(tokens):
        raise CheckpointError(f"{path}: true_token_id and false_token_id are {tokens!r:.80}")
    return found


def _labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    named = config.get("id2label")
    if isinstance(named, dict) and named:
        try:
            ordered = sorted((int(number), str(label)) for number, label in named.items())
        except ValueError:
            ordered = []
        if [number for number, _ in ordered] == list(range(len(named))):
            return tuple(label for _, label in ordered)
        raise CheckpointError(f"id2label is {named!r:.80}, must name labels 0, 1, ...")
    # default of transformers
    count = config.get("num_labels", 2)
    if type(count) is not int or not 1 <= count <= 1 << 20:
        raise CheckpointError(f"num_labels is {count!r:.40}, must be a whole number from 1")
    return tuple(f"LABEL_{number}" for number in range(count))


def _class_activation(config: Mapping[str, Any], num_labels: int) -> str:
    """Return the last function of a classifier: as sentence-transformers wrote it into the config,
    or by transformers' problem_type."""
    written = config.get("sentence_transformers")
    named = written.get("activation_fn") if isinstance(written, dict) else None
    named = named or config.get("sbert_ce_default_activation_function")
    if isinstance(named, str):
        kind = _ACTIVATIONS.get(named.rpartition(".")[2])
        if kind not in ("identity", "sigmoid", "softmax"):
            raise CheckpointError(f"the classifier's activation {named!r:.80} is not supported")
        return kind
    problem = config.get("problem_type")
    if problem == "regression":
        return "identity"
    return "sigmoid" if num_labels == 1 or problem == "multi_label_classification" else "softmax"


def _shared(folder: HFFolder, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that embedders and classifiers share."""
    wrapped, bert = folder.sentence_transformers, folder.sentence_bert
    prompts = wrapped.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(t, str) for t in prompts.values()):
        raise CheckpointError(f"prompts of config_sentence_transformers.json are {prompts!r:.80}")
    default = wrapped.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise CheckpointError(f"default_prompt_name {default!r:.80} is not among the prompts")
    longest = bert.get("max_seq_length")
    if longest is not None and (type(longest) is not int or longest < 1):
        raise CheckpointError(f"max_seq_length is {longest!r:.40}, must be at least 1")
    sizes = config.get("matryoshka_dimensions") or []
    if not isinstance(sizes, list) or not all(type(s) is int and s > 0 for s in sizes):
        raise CheckpointError(f"matryoshka_dimensions is {sizes!r:.80}, must be a list of sizes")
    return {
        "prompts": tuple((str(name), text) for name, text in prompts.items()),
        "default_prompt": default,
        "max_seq_length": longest,
        "lower_case": bert.get("do_lower_case") is True,
        "is_matryoshka": bool(sizes) or config.get("is_matryoshka") is True,
        "dimensions": tuple(sorted(sizes)),
    }
