"""config.json and generation_config.json of a Hugging Face folder to ModelConfig.

Reads the fields that all architectures share; each one's module in ``architectures`` reads the
rest. Both spellings of rotary embedding are read: ``rope_theta`` with ``rope_scaling``, and
``rope_parameters`` (transformers 5).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from paceline.checkpoints.architectures import ARCHITECTURES, Architecture
from paceline.checkpoints.hf.folder import HFFolder
from paceline.checkpoints.model.config import ModelConfig
from paceline.checkpoints.model.fields import Fields, ids_within, token_ids
from paceline.checkpoints.weights.quantised import FP8, INSTEAD, MXFP4, Quantisation
from paceline.errors import CheckpointError

__all__ = [
    "NEUTRAL",
    "SUPPORTED_ARCHITECTURES",
    "HFConfig",
    "config_from",
    "quantisation_of",
    "read_hf_config",
]

SUPPORTED_ARCHITECTURES: Final = tuple(item.class_name for item in ARCHITECTURES.values())
_BY_CLASS: Final = {item.class_name: item for item in ARCHITECTURES.values()}
_GENERATOR: Final = "ForCausalLM"
# suffixes of classes with the same layers, but without a head that predicts tokens
_HEADLESS: Final = (
    "TextForSequenceClassification", "ForSequenceClassification", "TextModel", "Model",
)  # fmt: skip

# Fields that change the arithmetic of a decoder, and the values at which they do not. A config with
# another value is refused unless its architecture reads the field: in files of other architectures,
# or made by hand, it stands for something that would be missing here.
NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
    {
        "attention_multiplier": (1.0,),
        "attn_logit_softcapping": (None,),
        "clip_qkv": (None,),
        "embedding_multiplier": (1.0,),
        "final_logit_softcapping": (None,),
        "logit_scale": (1.0,),
        "logits_scaling": (1.0,),
        "n_routed_experts": (None, 0),
        "no_rope_layers": (None, []),
        "num_experts": (None, 0, 1),
        "num_local_experts": (None, 0, 1),
        "query_pre_attn_scalar": (None,),
        "residual_multiplier": (1.0,),
        "rope_local_base_freq": (None,),
        "scale_depth": (None,),
        "scale_emb": (None, 1.0),
        "use_bidirectional_attention": (None, False),
    }
)


class HFConfig(NamedTuple):
    """What the configs of a folder say of its tensors."""

    # with ``stored_dtype`` float32, which follows from the tensors
    model: ModelConfig
    # the class has no head that predicts tokens
    is_headless: bool
    # None: no matrix is quantised
    quantisation: Quantisation | None


def read_hf_config(folder: HFFolder) -> HFConfig:
    """Return what the folder's configs say.

    Raises:
        CheckpointError: no config.json, an unsupported architecture, code of its own, unsupported
            quantisation of weights, or a value of the wrong type or size.
    """
    if folder.config is None:
        raise CheckpointError(
            f"{folder.path} has no config.json, so it is not a Hugging Face checkpoint"
        )
    try:
        return config_from(folder.config, folder.generation)
    except CheckpointError as error:
        raise CheckpointError(f"{folder.path / 'config.json'}: {error}") from None


def config_from(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> HFConfig:
    """Return what ``raw``, a config.json, and ``generation``, a generation config, say.

    Raises:
        CheckpointError: as for ``read_hf_config``.
    """
    architecture, is_headless = _architecture(raw)
    fields = Fields(raw, architecture.defaults)
    quantisation = quantisation_of(fields.raw)
    for name, neutral in NEUTRAL.items():
        value = raw.get(name)
        if value is not None and value not in neutral and name not in architecture.reads:
            raise CheckpointError(
                f"{name}={value!r:.40} is not supported for {architecture.model_type}"
            )
    activations = architecture.activations
    activation = fields.raw.get(architecture.activation_field, activations[0])
    if activation not in activations:
        raise CheckpointError(
            f"{architecture.activation_field} {activation!r:.40} is not supported, "
            f"only {activations[0]}"
        )
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    head_dim = fields.head_dim(hidden, heads)
    partial = fields.partial_rotary()
    if partial != 1.0 and not (architecture.partial_rotary and 0 < partial < 1):
        raise CheckpointError(f"partial_rotary_factor={partial} is not supported, only 1.0")
    vocab = fields.whole("vocab_size")
    ends = _ends(fields, generation, vocab, required=not is_headless)
    for key in ("bos_token_id", "pad_token_id"):
        if type(token_id := raw.get(key)) is int:
            ids_within((token_id,), f"config.json: {key}", vocab)
    bos = token_ids(fields.raw.get("bos_token_id"), "bos_token_id")
    shared = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": fields.whole("intermediate_size"),
        "num_hidden_layers": fields.whole("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.whole("num_key_value_heads", heads),
        "head_dim": head_dim,
        "rotary_dim": None if partial == 1.0 else int(head_dim * partial),
        "max_position_embeddings": fields.whole("max_position_embeddings"),
        "rms_norm_eps": fields.number(fields.raw, "rms_norm_eps", 1e-6),
        # a class without a head has only the embedding
        "tie_word_embeddings": is_headless or fields.flag("tie_word_embeddings"),
        "eos_token_ids": ends,
        "bos_token_id": next((token_id for token_id in bos if 0 <= token_id < vocab), None),
    }
    knobs = dict(architecture.knobs(fields))
    if "rope" not in knobs:
        knobs["rope"] = fields.rope(aliases=architecture.rope_aliases)
    model = ModelConfig(
        model_type=architecture.model_type, stored_dtype="float32", **(shared | knobs)
    )
    return HFConfig(model, is_headless, quantisation)


def _ends(
    fields: Fields, generation: Mapping[str, Any], vocab: int, *, required: bool
) -> frozenset[int]:
    """Return the ids that end an answer. Raises CheckpointError where one is ``required`` and all
    named ids are outside the vocabulary."""
    named = {
        "config.json": token_ids(fields.raw.get("eos_token_id"), "eos_token_id"),
        "generation_config.json": token_ids(generation.get("eos_token_id"), "eos_token_id"),
    }
    ids = frozenset[int]().union(*named.values())
    if required and ids and not any(0 <= token_id < vocab for token_id in ids):
        raise CheckpointError(
            f"end-of-sequence id {min(ids)} of a vocabulary of {vocab}: answers would never end"
        )
    return frozenset[int]().union(
        *(ids_within(each, f"{file}: eos_token_id", vocab) for file, each in named.items())
    )


def _architecture(raw: Mapping[str, Any]) -> tuple[Architecture, bool]:
    """Return the architecture, and whether the class lacks a head that predicts tokens."""
    architectures = raw.get("architectures")
    names = architectures if isinstance(architectures, list) and architectures else None
    if names is None:
        # configs saved from a bare config object lack "architectures"
        model_type = raw.get("model_type")
        if isinstance(model_type, str) and model_type in ARCHITECTURES:
            return ARCHITECTURES[model_type], False
        found = f"model_type {model_type!r:.80}"
    else:
        if isinstance(names[0], str) and names[0] in _BY_CLASS:
            return _BY_CLASS[names[0]], False
        for ending in _HEADLESS:
            if isinstance(names[0], str) and names[0].endswith(ending):
                named = _BY_CLASS.get(names[0].removesuffix(ending) + _GENERATOR)
                if named is not None:
                    return named, True
        found = f"architecture {names[0]!r:.80}"
    own_code = (
        " It would need Python code from the checkpoint (auto_map), which Paceline never runs."
        if "auto_map" in raw
        else ""
    )
    raise CheckpointError(
        f"{found} is not supported; these are: {', '.join(SUPPORTED_ARCHITECTURES)}.{own_code}"
    )


def quantisation_of(config: Mapping[str, Any]) -> Quantisation | None:
    """Return the quantisation that a config.json describes; None: it describes none.

    Raises:
        CheckpointError: an unsupported kind; the message names it and alternatives.
    """
    raw = config.get("quantization_config")
    if raw is None:
        return None
    if not isinstance(raw, Mapping):
        raise CheckpointError(f"quantization_config is {raw!r:.80}, must be an object")
    method = raw.get("quant_method")
    if method in ("fp8", "fbgemm_fp8"):
        return _fp8(raw)
    if method == "compressed-tensors":
        return _compressed(raw)
    if method == "gptq":
        return _gptq(raw)
    if method == "awq":
        return _awq(raw)
    if method == "mxfp4":
        return Quantisation(MXFP4, 4)
    raise CheckpointError(f"weights quantised by {method!r:.40} are not read: {INSTEAD}")


def _fp8(raw: Mapping[str, Any]) -> Quantisation:
    kind = raw.get("fmt", "e4m3")
    if kind != "e4m3":
        raise CheckpointError(f"FP8 of the kind {kind!r:.40} is not read, only e4m3: {INSTEAD}")
    block = raw.get("weight_block_size")
    if block is None:
        return Quantisation(FP8)
    if not isinstance(block, list) or len(block) != 2 or not all(_is_count(n) for n in block):
        raise CheckpointError(f"weight_block_size is {block!r:.80}, must be [rows, columns]")
    return Quantisation(FP8, block=(block[0], block[1]))


def _compressed(raw: Mapping[str, Any]) -> Quantisation:
    layout = raw.get("format")
    groups = raw.get("config_groups")
    if layout != "float-quantized" or not isinstance(groups, Mapping):
        raise CheckpointError(
            f"compressed-tensors of the format {layout!r:.40} is not read: {INSTEAD}"
        )
    if not groups:
        raise CheckpointError(
            f"config_groups is empty, so nothing says how weights are stored: {INSTEAD}"
        )
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        kind = weights if isinstance(weights, Mapping) else {}
        if (kind.get("num_bits"), kind.get("type")) != (8, "float"):
            raise CheckpointError(
                f"config_groups.{name}: weights of {kind.get('num_bits')!r:.20} bits, "
                f"{kind.get('type')!r:.20}, are not read: {INSTEAD}"
            )
    block = next(iter(groups.values()))["weights"].get("block_structure")
    return _fp8({"weight_block_size": block})


def _gptq(raw: Mapping[str, Any]) -> Quantisation:
    layout = "marlin" if raw.get("is_marlin_format") else raw.get("checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise CheckpointError(f"GPTQ in the format {layout!r:.40} is not read: {INSTEAD}")
    bits = raw.get("bits")
    if type(bits) is not int or bits not in (4, 8):
        raise CheckpointError(
            f"GPTQ of {bits!r:.20} bits is not read, only of the whole numbers 4 and 8: {INSTEAD}"
        )
    # the first version stores zeros minus one
    return Quantisation("GPTQ", bits, _group_size(raw), int(layout == "gptq"))


def _awq(raw: Mapping[str, Any]) -> Quantisation:
    layout = raw.get("version", "gemm")
    if str(layout).lower() != "gemm":
        raise CheckpointError(f"AWQ in the format {layout!r:.40} is not read: {INSTEAD}")
    bits = raw.get("bits", raw.get("w_bit"))
    if type(bits) is not int or bits != 4:
        raise CheckpointError(
            f"AWQ of {bits!r:.20} bits is not read, only of the whole number 4: {INSTEAD}"
        )
    if not raw.get("zero_point", True):
        raise CheckpointError(f"AWQ without zero points is not read: {INSTEAD}")
    return Quantisation("AWQ", 4, _group_size(raw))


def _group_size(raw: Mapping[str, Any]) -> int:
    size = raw.get("group_size", raw.get("q_group_size"))
    if size != -1 and not _is_count(size):
        raise CheckpointError(f"group_size is {size!r:.40}, must be -1 or a number of inputs")
    return int(size)


def _is_count(value: Any) -> bool:
    return type(value) is int and 1 <= value < 1 << 31
