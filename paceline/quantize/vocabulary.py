"""The tokenizer of a folder as keys of a GGUF file.

The file names the way to split text into words instead of describing it (``tokenizer.ggml.pre``).
As llama.cpp's converter does, the name is found by trying: a text is encoded by the folder's
tokenizer and by what would be read back under each name. A tokenizer that no name matches is
refused.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from gguf import GGUFValueType
from tokenizers import Tokenizer

from paceline.checkpoints.gguf.sampling import KEYS
from paceline.checkpoints.gguf.tokenizer import CONTROL, USER_DEFINED, build_tokenizer
from paceline.checkpoints.model.config import ModelConfig
from paceline.checkpoints.model.json_file import read_json_object
from paceline.engine.text.special_tokens import end_texts, token_text
from paceline.engine.text.tokenizer import HFTokenizer, folder_templates, load_tokenizer
from paceline.errors import CheckpointError, ConfigError
from paceline.quantize.source import Field
from paceline.quantize.text import own_text

__all__ = ["vocabulary_fields"]

# llama.cpp's names of the ways that ``build_tokenizer`` knows, one of each
_PRE: Final = (
    "gpt-2", "smollm", "llama-bpe", "dbrx", "qwen2", "stablelm2", "tekken", "gpt-4o",
)  # fmt: skip
_NORMAL: Final = 1
_UNKNOWN: Final = 2
_UNUSED: Final = 5
_BYTE: Final = 6
# pieces that split differently under different names
_PROBE: Final = (
    "I'M we'll they'RE it's  two   spaces\ttab\n\n\nlines \r\n 3 33 333 3333333 3.14e-10 $100,000 "
    "camelCase HTTPServer snake_case --flag <html> a/b//c ...!!! ¿Qué? 北京 日本語 한국어 русский "
    "déjà vu de\u0301ja\u0300 🙂🚀👩\u200d💻 \u00a0 ½ ² Ⅷ عربي हिन्दी ไทย\n\tif x == 1:\n  pass\n"
)
# the special tokens that a file names by their ids, and what the tokenizer's config calls them
_NAMED: Final = {
    "bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token",
}  # fmt: skip


def vocabulary_fields(folder: Path, config: ModelConfig) -> list[Field]:
    """Return the keys of a folder's tokenizer, chat templates and sampling defaults.

    Raises ConfigError for a tokenizer that would be read back as another one.
    """
    tokenizer = load_tokenizer(folder)
    keys = _Keys(folder, tokenizer, config.vocab_size).found
    tokenizer_config = read_json_object(folder / "tokenizer_config.json") or {}
    templates = folder_templates(folder, tokenizer_config)
    for name, template in sorted(templates.items()):
        suffix = "" if name == "default" else f".{name}"
        keys[f"tokenizer.chat_template{suffix}"] = template
    named = sorted(name for name in templates if name != "default")
    if named:
        keys["tokenizer.chat_templates"] = named
    keys |= _sampling(read_json_object(folder / "generation_config.json") or {})
    return [Field(name, _plain(value), *_kind(value)) for name, value in keys.items()]


def _sampling(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the folder's defaults of sampling, which servers take where a request has none."""
    found: dict[str, Any] = {}
    for name, key in KEYS.items():
        value = generation.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[key] = int(value) if name == "top_k" else float(value)
    return found


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, array) else value


def _kind(value: Any) -> tuple[GGUFValueType, GGUFValueType | None]:
    if isinstance(value, list):
        return GGUFValueType.ARRAY, GGUFValueType.STRING
    if isinstance(value, array):
        inner = GGUFValueType.FLOAT32 if value.typecode == "f" else GGUFValueType.INT32
        return GGUFValueType.ARRAY, inner
    kinds = {
        bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32,
        str: GGUFValueType.STRING,
    }  # fmt: skip
    return kinds[type(value)], None


class _Keys:
    """The keys of one tokenizer, as ``build_tokenizer`` takes them."""

    def __init__(self, folder: Path, tokenizer: HFTokenizer, rows: int) -> None:
        self._folder, self._tokenizer = folder, tokenizer
        self._json = read_json_object(folder / "tokenizer.json") or {}
        model = self._json.get("model") or {}
        if model.get("type", "BPE") != "BPE" or "merges" not in model:
            self._refuse(f"its kind is {model.get('type')!r:.40}, only BPE is written")
        self._texts, self._types = self._tokens(model, rows)
        self.found: dict[str, Any] = {
            "tokenizer.ggml.tokens": self._texts,
            "tokenizer.ggml.token_type": array("i", self._types),
        }
        self._add_named()
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
        if model.get("byte_fallback"):
            self._add_pieces(merges)
        else:
            if not merges:
                # GGUF has no empty arrays
                self._refuse("it has no merges")
            self.found["tokenizer.ggml.model"] = "gpt2"
            self.found["tokenizer.ggml.merges"] = merges
        self._choose()

    def _refuse(self, why: str) -> None:
        raise ConfigError(f"{self._folder}: its tokenizer cannot be written as GGUF: {why}")

    def _tokens(self, model: Mapping[str, Any], rows: int) -> tuple[list[str], list[int]]:
        """Return the texts and types of all ids; rows of the embedding without a token get names
        that no text has."""
        vocabulary = self._tokenizer.vocabulary
        if (most := max(vocabulary.values())) >= rows:
            self._refuse(f"it has an id {most}, the embedding has {rows} rows")
        texts = [f"[PAD{index}]" for index in range(rows)]
        types = [_UNUSED] * rows
        plain = model.get("vocab") or {}
        listed = {token.get("content") for token in self._json.get("added_tokens") or ()}
        unknown = model.get("unk_token")
        for text, index in vocabulary.items():
            texts[index] = text
            if text == unknown:
                types[index] = _UNKNOWN
            elif index in self._tokenizer.special_token_ids:
                types[index] = CONTROL
            elif text in listed or text not in plain:
                types[index] = USER_DEFINED
            elif model.get("byte_fallback") and len(text) == 6 and text.startswith("<0x"):
                types[index] = _BYTE
            else:
                types[index] = _NORMAL
        return texts, types

    def _add_named(self) -> None:
        """Add the ids of special tokens, and whether texts begin or end with one."""
        config = read_json_object(self._folder / "tokenizer_config.json") or {}
        special = read_json_object(self._folder / "special_tokens_map.json") or {}
        ids = self._tokenizer.vocabulary
        prefix = "tokenizer.ggml"
        for name, key in _NAMED.items():
            text = token_text(config.get(key)) or token_text(special.get(key))
            if text in ids:
                self.found[f"{prefix}.{name}_token_id"] = ids[text]
        ends = sorted(self._tokenizer.eos_token_ids)
        eos = self.found.setdefault(f"{prefix}.eos_token_id", ends[0] if ends else 0)
        # readers know some ends by their texts, so those that they do not know come first
        known = end_texts(self._texts, [self._texts[eos]])
        more = sorted(set(ends) - {eos}, key=lambda token_id: self._texts[token_id] in known)
        if lost := [text for token_id in more[2:] if (text := self._texts[token_id]) not in known]:
            self._refuse(
                f"{len(ends)} tokens end an answer, and a file can name 3 of them: not {lost[0]!r}"
            )
        self.found |= {
            f"{prefix}.{name}_token_id": token_id
            for name, token_id in zip(("eot", "eom"), more, strict=False)
        }
        encoded = self._tokenizer.encode("a")
        bare = self._tokenizer.encode("a", add_special_tokens=False)
        bos = self.found.get(f"{prefix}.bos_token_id")
        self.found[f"{prefix}.add_bos_token"] = encoded != bare and encoded[0] == bos
        self.found[f"{prefix}.add_eos_token"] = encoded != bare and encoded[-1] == eos

    def _add_pieces(self, merges: list[str]) -> None:
        """Add scores: of SentencePiece's pieces the one that is made first has the best."""
        made: dict[str, int] = {}
        for rank, merge in enumerate(merges):
            made.setdefault(merge.replace(" ", ""), rank)
        last = float(len(merges))
        self.found["tokenizer.ggml.model"] = "llama"
        self.found["tokenizer.ggml.scores"] = array(
            "f", [-float(made.get(text, last)) for text in self._texts]
        )

    def _choose(self) -> None:
        """Add the first choice that encodes the probe as the folder does."""
        expected = self._tokenizer.encode(probe := _PROBE + own_text())
        choices: list[dict[str, Any]] = (
            [{"tokenizer.ggml.pre": name} for name in _PRE]
            if self.found["tokenizer.ggml.model"] == "gpt2"
            else [
                {"tokenizer.ggml.pre": "default", "tokenizer.ggml.add_space_prefix": prefix}
                for prefix in (True, False)
            ]
        )
        around: str | None = None
        for choice in choices:
            try:
                read: Tokenizer = build_tokenizer({**self.found, **choice})
            except CheckpointError as error:
                self._refuse(str(error))
            if read.encode(probe).ids == expected:
                around = self._differs_around(read)
                if around is None:
                    self.found |= choice
                    return
        if around is not None:
            self._refuse(f"text next to its token {around!r} has other ids")
        self._refuse(
            f"a text of {len(expected)} tokens has other ids under each of the {len(choices)} ways "
            "to split words that are known"
        )

    def _differs_around(self, read: Tokenizer) -> str | None:
        """Return a token that is matched whole, and next to which text is read differently: some
        take spaces with them, or count as whole words alone, which a file cannot say."""
        for text, kind in zip(self._texts, self._types, strict=True):
            if kind in (_UNKNOWN, CONTROL, USER_DEFINED):
                probe = f"a {text} b{text}c"
                if read.encode(probe).ids != self._tokenizer.encode(probe):
                    return text
        return None
