"""The vocabulary of a GGUF file as a ``tokenizers.Tokenizer``.

Three kinds exist for the supported architectures. ``gpt2`` is byte-level BPE with explicit merges;
``tokenizer.ggml.pre`` names the way to split text into words before merging. ``llama`` is
SentencePiece BPE: a score per piece instead of merges, spaces written as U+2581, unknown characters
as bytes. ``bert`` is WordPiece, whose pieces begin with U+2581 at the start of a word, instead of
with BERT's ``##`` elsewhere.

Source of the word patterns: the published tokenizer.json of each model family that llama.cpp's
converter maps to the name in ``tokenizer.ggml.pre``.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from paceline.checkpoints.model.fields import gguf_special_id, warn_once
from paceline.errors import CheckpointError

__all__ = [
    "CONTROL",
    "SUPPORTED_PRE_TOKENIZERS",
    "USER_DEFINED",
    "build_tokenizer",
    "tokens_of",
    "twins_of",
]

# values of tokenizer.ggml.token_type
_UNKNOWN: Final = 2
CONTROL: Final = 3
USER_DEFINED: Final = 4
_BYTE: Final = 6
# token types that are matched whole in a text
_WHOLE: Final = frozenset({_UNKNOWN, CONTROL, USER_DEFINED})

# longest piece that is considered; SentencePiece's default is 16 characters
MAX_PIECE_CHARS: Final = 128
MAX_SPLITS: Final = 8_000_000

_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SYMBOLS: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
# patterns for words that end where lower case turns into upper case
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_HUMP_1: Final = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
_HUMP_2: Final = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_SYMBOLS_SLASH: Final = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"


@dataclass(frozen=True, slots=True)
class _Words:
    """The way to split text into words before merging."""

    # None: the pattern of GPT-2, built into ByteLevel
    pattern: str | None = None
    # split off every digit, before the pattern is applied
    single_digits: bool = False
    # compose characters (NFC) first
    compose: bool = False
    # a word that is in the vocabulary is taken whole, without merging
    ignore_merges: bool = False
    # whether to start with bos when tokenizer.ggml.add_bos_token does not say
    add_bos: bool = False


_GPT2: Final = _Words()
_DIGITS: Final = _Words(single_digits=True)
_LLAMA3: Final = _Words(
    f"{_CONTRACTIONS}|{_WORD}|\\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}",
    ignore_merges=True,
    add_bos=True,
)
_DBRX: Final = _Words(f"{_CONTRACTIONS}|{_WORD}|\\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}")
_QWEN2: Final = _Words(f"{_CONTRACTIONS}|{_WORD}|\\p{{N}}|{_SYMBOLS}|{_SPACES}", compose=True)
_STABLELM2: Final = _Words(f"{_CONTRACTIONS}|{_WORD}|\\p{{N}}|{_SYMBOLS}|{_SPACES}")
_TEKKEN: Final = _Words(
    f"{_HUMP_1}|{_HUMP_2}|\\p{{N}}|{_SYMBOLS_SLASH}|{_SPACES}",
    ignore_merges=True,
    add_bos=True,
)
_GPT4O: Final = _Words(
    f"{_HUMP_1}{_CONTRACTIONS}?|{_HUMP_2}{_CONTRACTIONS}?|\\p{{N}}{{1,3}}|"
    f"{_SYMBOLS_SLASH}|{_SPACES}"
)
_WORDS: Final[dict[str, _Words]] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _DBRX),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    "stablelm2": _STABLELM2,
    "tekken": _TEKKEN,
    "gpt-4o": _GPT4O,
}
SUPPORTED_PRE_TOKENIZERS: Final = tuple(_WORDS)


def build_tokenizer(
    metadata: Mapping[str, Any], kinds: Mapping[str, int] = MappingProxyType({})
) -> Tokenizer:
    """Build the tokenizer described by a GGUF file's ``tokenizer.ggml.*`` keys.

    Ids are those of the file; control and unknown tokens are special, user-defined ones are matched
    whole but are text. Entries that ``twins_of`` names decode to nothing useful.

    Args:
        kinds: types for texts that may have another one in the file; "user-defined" has no effect
            on the file's control tokens.

    Raises:
        CheckpointError: an unsupported kind, missing keys, or arrays that disagree.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens, names = tokens_of(metadata), _distinct(metadata)
    vocab = {token: token_id for token_id, token in enumerate(names)}
    types = _numbers(metadata, "token_type", len(tokens))
    if kind == "gpt2":
        tokenizer, add_bos = _byte_level(metadata, vocab)
    elif kind == "llama":
        tokenizer, add_bos = _sentencepiece(metadata, names, vocab, types), True
    elif kind == "bert":
        return _wordpiece(metadata, names, vocab)
    else:
        raise CheckpointError(
            f"tokenizer.ggml.model {kind!r:.40} is not supported; these are: gpt2, llama, bert"
        )
    found = {t: i for t, i in zip(tokens, types or (), strict=False) if i in _WHOLE and t}
    found |= {
        text: kind
        for text, kind in kinds.items()
        if text in vocab and (kind == CONTROL or text not in found)
    }
    tokenizer.add_special_tokens(
        [
            AddedToken(text, special=True, normalized=False)
            for text, kind in found.items()
            if kind != USER_DEFINED
        ]
    )
    tokenizer.add_tokens(
        [
            AddedToken(text, special=False, normalized=False)
            for text, kind in found.items()
            if kind == USER_DEFINED
        ]
    )
    _add_ends(tokenizer, metadata, names, add_bos)
    return tokenizer


def tokens_of(metadata: Mapping[str, Any]) -> list[str]:
    """Return the texts of all tokens. Raises CheckpointError where the file has none."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise CheckpointError("the file holds no tokenizer (tokenizer.ggml.tokens)")
    return tokens


def twins_of(metadata: Mapping[str, Any]) -> dict[int, int | None]:
    """Return the entries that never encode a text, by id: a duplicate with the id of its first
    occurrence, an empty one with None."""
    first: dict[str, int] = {}
    twins: dict[int, int | None] = {}
    for token_id, name in enumerate(_names(metadata)):
        if not name:
            twins[token_id] = None
        elif (known := first.setdefault(name, token_id)) != token_id:
            twins[token_id] = known
    return twins


def _names(metadata: Mapping[str, Any]) -> list[str]:
    """Return texts as the library spells them; llama.cpp's converter renames BERT's pieces."""
    tokens = tokens_of(metadata)
    if metadata.get("tokenizer.ggml.model") == "bert":
        return [_piece_name(token) for token in tokens]
    return tokens


def _distinct(metadata: Mapping[str, Any]) -> list[str]:
    """Return the library's names of the vocabulary. Those of ``twins_of`` get names that no text
    contains: byte zero is spelt differently and takes part in no merge."""
    names, twins = _names(metadata), twins_of(metadata)
    if not twins:
        return names
    some = ", ".join(f"{i} ({names[i]!r:.40})" for i in list(twins)[:3])
    warn_once(
        f"tokenizer.ggml.tokens has {len(twins)} doubled or empty of {len(names)} entries, such as "
        f"{some}: they decode, and the first of equal ones encodes"
    )
    return [f"\0{i}" if i in twins else name for i, name in enumerate(names)]


def _numbers(metadata: Mapping[str, Any], name: str, count: int) -> array[Any] | None:
    """Return a numeric array with an entry per token, or None when the file has none."""
    key = f"tokenizer.ggml.{name}"
    values = metadata.get(key)
    if values is None:
        return None
    if not isinstance(values, array) or len(values) != count:
        found = len(values) if isinstance(values, (array, list)) else repr(values)[:40]
        raise CheckpointError(f"{key} has {found} entries for {count} tokens")
    return values


def _byte_level(metadata: Mapping[str, Any], vocab: dict[str, int]) -> tuple[Tokenizer, bool]:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str) or pre not in _WORDS:
        raise CheckpointError(
            f"tokenizer.ggml.pre {pre!r:.40} is not supported; "
            f"these are: {', '.join(SUPPORTED_PRE_TOKENIZERS)}"
        )
    words = _WORDS[pre]
    tokenizer = Tokenizer(_bpe(vocab, _merges(metadata), ignore_merges=words.ignore_merges))
    steps: list[pre_tokenizers.PreTokenizer] = []
    if words.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if words.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(words.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if words.compose:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, words.add_bos


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    lines = metadata.get("tokenizer.ggml.merges")
    if not isinstance(lines, list):
        raise CheckpointError("tokenizer.ggml.merges is missing, which a gpt2 tokenizer needs")
    merges = []
    for index, line in enumerate(lines):
        # tokens contain no spaces: byte-level text spells a space as another character
        left, _, right = line.partition(" ") if isinstance(line, str) else ("", "", "")
        if not left or not right:
            raise CheckpointError(f"tokenizer.ggml.merges[{index}] is {line!r:.60}, not a pair")
        merges.append((left, right))
    return merges


def _bpe(vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab=vocab, merges=merges, **options)
    except Exception as error:
        # the library raises bare Exception for a merge with a part or result outside the vocabulary
        raise CheckpointError(f"tokenizer.ggml.merges do not fit the vocabulary: {error}") from None


def _sentencepiece(
    metadata: Mapping[str, Any],
    tokens: list[str],
    vocab: dict[str, int],
    types: array[Any] | None,
) -> Tokenizer:
    scores = _numbers(metadata, "scores", len(tokens))
    if scores is None:
        raise CheckpointError("tokenizer.ggml.scores is missing, which a llama tokenizer needs")
    if types is None:
        raise CheckpointError("tokenizer.ggml.token_type is missing, which a llama tokenizer needs")
    unknown_id = gguf_special_id(metadata, "unknown", len(tokens)) or 0
    merges = _merges_from_scores(tokens, scores.tolist(), types.tolist())
    has_bytes = all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    tokenizer = Tokenizer(
        _bpe(
            vocab,
            merges,
            unk_token=tokens[unknown_id],
            fuse_unk=True,
            byte_fallback=has_bytes,
        )
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    replace = normalizers.Replace(" ", "\u2581")
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("\u2581"), replace]) if prefix else replace
    )
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _wordpiece(metadata: Mapping[str, Any], names: list[str], vocab: dict[str, int]) -> Tokenizer:
    """Build a tokenizer like BERT's. The file does not say whether text is made lower case: it is
    if no piece has a capital letter."""

    def special(name: str, *keys: str) -> tuple[str, int]:
        for key in keys:
            token_id = gguf_special_id(metadata, key, len(names))
            if token_id is not None:
                return names[token_id], token_id
        if name in vocab:
            return name, vocab[name]
        raise CheckpointError(f"tokenizer.ggml.{keys[0]}_token_id is not among {len(names)} tokens")

    unknown, _ = special("[UNK]", "unknown")
    first = special("[CLS]", "cls", "bos")
    # the format's own spelling is "seperator"
    last = special("[SEP]", "seperator", "separator", "eos")
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token=unknown))
    lowered = all(name == name.lower() or _is_bracketed(name) for name in names)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowered)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in names if _is_known(name)]
    )
    tokenizer.post_processor = processors.BertProcessing(last, first)
    return tokenizer


def _piece_name(token: str) -> str:
    if not token or _is_bracketed(token):
        return token
    return token[1:] if token.startswith("\u2581") else f"##{token}"


def _is_bracketed(token: str) -> bool:
    return token.startswith("[") and token.endswith("]")


def _is_known(name: str) -> bool:
    """Whether it is one of BERT's own special tokens, and not one of its many unused ones."""
    return name in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def _merges_from_scores(
    tokens: list[str], scores: list[float], types: list[int]
) -> list[tuple[str, str]]:
    """Return merges that give the same tokens as SentencePiece.

    SentencePiece joins the two neighbours whose joint piece scores best; so every way to cut a
    piece into two pieces is a merge, ranked by the piece's score.
    """
    no_text = (_UNKNOWN, CONTROL, _BYTE)
    pieces = {
        token: token_id
        for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind not in no_text
    }
    if (longest := max(map(len, pieces), default=0)) > MAX_PIECE_CHARS:
        raise CheckpointError(
            f"the vocabulary has a piece of {longest} characters, at most {MAX_PIECE_CHARS} are "
            "supported"
        )
    if (splits := sum(map(len, pieces))) > MAX_SPLITS:
        raise CheckpointError(
            f"the vocabulary's pieces have {splits} characters, at most {MAX_SPLITS} are supported"
        )
    ranked: list[tuple[float, int, int, str, str]] = []
    find = pieces.get
    for piece, token_id in pieces.items():
        score = scores[token_id]
        if not math.isfinite(score):
            raise CheckpointError(f"tokenizer.ggml.scores[{token_id}] is {score}")
        for cut in range(1, len(piece)):
            if (left := find(piece[:cut])) is not None and (right := find(piece[cut:])) is not None:
                ranked.append((-score, left, right, piece[:cut], piece[cut:]))
    ranked.sort()
    return [(left_piece, right_piece) for *_, left_piece, right_piece in ranked]


def _add_ends(
    tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: list[str], add_bos: bool
) -> None:
    """Add the tokens that ``add_special_tokens`` puts around a text."""
    parts: dict[str, tuple[str, int]] = {}
    for name, default in (("bos", add_bos), ("eos", False)):
        token_id = gguf_special_id(metadata, name, len(tokens))
        if token_id is not None and metadata.get(f"tokenizer.ggml.add_{name}_token", default):
            parts[name] = (tokens[token_id], token_id)
    if parts:
        single = [parts[name][0] if name in parts else "" for name in ("bos", "eos")]
        # a list, because in a template string a token's text could be parsed as syntax
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[text for text in (single[0], "$A", single[1]) if text],
            pair=None,
            special_tokens=list(set(parts.values())),
        )
