"""Text to token ids and back, from a Hugging Face folder or a GGUF file.

Both are loaded as a ``tokenizers.Tokenizer``; they differ in where the vocabulary, the special
tokens and the chat template are stored. torch is never imported: the API process tokenizes too.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from tokenizers import Encoding, Tokenizer

from paceline.checkpoints.gguf.container import read_gguf
from paceline.checkpoints.gguf.shards import gguf_files
from paceline.checkpoints.gguf.tokenizer import build_tokenizer, tokens_of, twins_of
from paceline.checkpoints.model.fields import gguf_special_id, token_ids
from paceline.checkpoints.model.json_file import read_json_object
from paceline.engine.text.chat_template import ChatTemplate
from paceline.engine.text.special_tokens import (
    NAMED_TOKENS,
    add_tokens_of_folder,
    end_texts,
    harmony_ends,
    has_marks,
    kinds_of,
    token_text,
    turn_end,
)
from paceline.engine.text.template_process import TemplateProcess
from paceline.errors import CheckpointError, InvalidRequestError

__all__ = ["HFTokenizer", "folder_templates", "load_tokenizer"]

# special ids of a GGUF, with the names that templates have for their texts
_GGUF_NAMES: Final = {
    "bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad", "eot": "", "eom": "",
}  # fmt: skip
MAX_TEMPLATE_BYTES: Final = 1 << 20
# most characters to tokenize while other threads wait: about half a millisecond
_SHORT_CHARS: Final = 4096


class HFTokenizer:
    """A ``tokenizers.Tokenizer`` with its chat template; implements ``protocol.Tokenizer``.

    Its results never change after construction, so any number of threads may use one.

    Args:
        twins: ids that decode as another id does, or to nothing (None).
    """

    def __init__(
        self,
        backend: Tokenizer,
        eos_token_ids: frozenset[int],
        template: ChatTemplate,
        twins: Mapping[int, int | None] = MappingProxyType({}),
    ) -> None:
        # a tokenizer.json may ask for both; a request must never be cut or padded silently
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._eos_token_ids = eos_token_ids
        self._template = template
        self._vocab_size = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        special = {i for i, token in added.items() if token.special}
        self._special = frozenset(special | {i for i, first in twins.items() if first in special})
        self._twins = twins
        self._steps = _decoder_steps(backend)
        # results of token_bytes and token_text so far
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}
        # only a sequence of bytes: the text of an id does not depend on its neighbours
        self._is_plain = self._steps - {"Sequence"} == {"ByteLevel"}

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def vocabulary(self) -> dict[str, int]:
        """Ids of all tokens by their text in the files; a new dict."""
        return self._backend.get_vocab(with_added_tokens=True)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._eos_token_ids

    @property
    def special_token_ids(self) -> frozenset[int]:
        return self._special

    @property
    def chat_template_source(self) -> str | None:
        return self._template.source(has_tools=True)

    @property
    def renders_quickly(self) -> bool:
        return self._template.is_known

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of ``text``; special tokens spelt out in it become their ids.

        Raises:
            InvalidRequestError: ``text`` holds half of a surrogate pair, which is not a character.
        """
        if len(text) > _SHORT_CHARS:
            return self.encode_batch((text,), add_special_tokens=add_special_tokens)[0]
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise _no_unicode(error) from None

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Return the ids of each of ``texts``, as ``encode`` does.

        Raises:
            InvalidRequestError: like ``encode``, for one of them.
        """
        try:
            # the one call of the library that lets other threads run; without the offsets, which
            # take a quarter of the time
            found = self._backend.encode_batch_fast(
                list(texts), add_special_tokens=add_special_tokens
            )
        except (UnicodeEncodeError, TypeError) as error:
            raise _no_unicode(error) from None
        return [encoding.ids for encoding in found]

    def encode_texts(
        self,
        texts: Sequence[tuple[str, str | None]],
        *,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
        max_second: int | None = None,
    ) -> list[tuple[list[int], int | None]]:
        """Return ids as ``protocol.Tokenizer`` says. Raises InvalidRequestError like ``encode``."""
        cuts = max_tokens is not None or max_second is not None
        # texts are truncated before the special tokens are added
        inputs: list[Any] = (
            [text for pair in texts for text in pair if text is not None]
            if cuts
            else [first if second is None else (first, second) for first, second in texts]
        )
        try:
            encoded = self._backend.encode_batch_fast(
                inputs, add_special_tokens=add_special_tokens and not cuts
            )
        except (UnicodeEncodeError, TypeError) as error:
            raise _no_unicode(error) from None
        if cuts:
            parts = iter(encoded)
            encoded = [
                self._joined(
                    next(parts),
                    None if second is None else next(parts),
                    add_special_tokens,
                    max_tokens,
                    max_second,
                )
                for _, second in texts
            ]
        return [
            (found.ids, None if second is None else _second_kind(found))
            for found, (_, second) in zip(encoded, texts, strict=True)
        ]

    def _joined(
        self,
        first: Encoding,
        second: Encoding | None,
        special: bool,
        max_tokens: int | None,
        max_second: int | None,
    ) -> Encoding:
        """Join texts without special tokens, truncated in place."""
        if max_second is not None and second is not None:
            second.truncate(max_second)
        if max_tokens is not None:
            count = self._backend.num_special_tokens_to_add(second is not None)
            parts = [first] if second is None else [first, second]
            shares = _shares([len(p) for p in parts], max(0, max_tokens - count * special))
            for part, keep in zip(parts, shares, strict=True):
                part.truncate(keep)
        return self._backend.post_process(first, second, special)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ``token_ids``; partial characters become U+FFFD, unknown ids empty."""
        ids = list(token_ids)
        if self._twins:
            firsts = [self._twins.get(token_id, token_id) for token_id in ids]
            ids = [token_id for token_id in firsts if token_id is not None]
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the exact bytes of one id by itself; empty for an id without a token.

        Changes that ``decode`` makes to a whole text (dropping the first space of SentencePiece)
        are not made here.
        """
        known = self._bytes.get(token_id)
        if known is None:
            known = self._spell(token_id)
            if 0 <= token_id < self._vocab_size:
                # called for every token of every answer; no more entries than the vocabulary
                self._bytes[token_id] = known
        return known

    def vocabulary_token(self, token_id: int) -> str:
        first = self._twins.get(token_id, token_id)
        found = self._backend.id_to_token(first) if first is not None and first >= 0 else None
        return found or ""

    def token_text(self, token_id: int) -> str | None:
        try:
            return self._texts[token_id]
        except KeyError:
            text = self._plain_text(token_id) if self._is_plain else None
            if 0 <= token_id < self._vocab_size:
                self._texts[token_id] = text
            return text

    def _plain_text(self, token_id: int) -> str | None:
        if token_id < 0:
            return None
        text = self.decode((token_id,), skip_special_tokens=False)
        # part of a character alone is U+FFFD
        return text if text.encode() == self.token_bytes(token_id) else None

    def _spell(self, token_id: int) -> bytes:
        first = self._twins.get(token_id, token_id)
        if first in self._added:
            return self._added[first].encode()
        token = self.vocabulary_token(token_id)
        if "ByteLevel" in self._steps:
            table = _byte_of_character()
            return b"".join(table.get(char, char.encode()) for char in token)
        if "ByteFallback" in self._steps and len(token) == 6 and token.startswith("<0x"):
            try:
                return bytes.fromhex(token[3:5])
            except ValueError:
                pass
        if self._steps & {"Metaspace", "Replace"}:
            token = token.replace("\u2581", " ")
        return token.encode()

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        return self._template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template=chat_template,
            template_kwargs=template_kwargs,
        )


def _no_unicode(error: Exception) -> InvalidRequestError:
    return InvalidRequestError(f"the text is not valid Unicode: {error!s:.200}")


def _second_kind(pair: Encoding) -> int | None:
    kinds = pair.type_ids
    return kinds.index(1) if 1 in kinds else None


def _shares(lengths: Sequence[int], room: int) -> list[int]:
    """Return the tokens to keep of texts of these lengths: the longer is cut first, then both."""
    if len(lengths) == 1 or sum(lengths) <= room:
        return [min(length, room) for length in lengths]
    shorter = min(*lengths, room // 2)
    first = shorter if lengths[0] <= lengths[1] else room - shorter
    return [min(lengths[0], first), min(lengths[1], room - min(lengths[0], first))]


def load_tokenizer(path: Path, chat_template: str | None = None) -> HFTokenizer:
    """Load the tokenizer of a checkpoint: a Hugging Face folder or a ``.gguf`` file.

    Args:
        chat_template: source that replaces the checkpoint's own; None: its own.

    Raises:
        CheckpointError: missing, malformed, or of a kind that is not supported.
    """
    own = None if chat_template is None else {"default": chat_template}
    if path.is_dir():
        return _from_folder(path, own)
    if path.is_file():
        return _from_gguf(path, own)
    raise CheckpointError(f"{path}: no such file or folder")


def _from_gguf(path: Path, templates: Mapping[str, str] | None = None) -> HFTokenizer:
    metadata = read_gguf(gguf_files(path)[0]).metadata
    try:
        tokens = tokens_of(metadata)
        named = {key: gguf_special_id(metadata, key, len(tokens)) for key in _GGUF_NAMES}
        special = {
            f"{name}_token": tokens[token_id]
            for key, name in _GGUF_NAMES.items()
            if name and (token_id := named[key]) is not None
        }
        template = _chat_template(templates or _gguf_templates(metadata), special)
        ends = _gguf_ends(template, tokens, [named[key] for key in ("eos", "eot", "eom")])
        backend = build_tokenizer(metadata, kinds_of(ends, tokens))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    eos = frozenset(i for i, token in enumerate(tokens) if token in ends)
    return HFTokenizer(backend, eos, template, twins_of(metadata))


def _gguf_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return templates by name."""
    prefix = "tokenizer.chat_template"
    return {
        key[len(prefix) + 1 :] or "default": value
        for key, value in metadata.items()
        if isinstance(value, str) and (key == prefix or key.startswith(f"{prefix}."))
    }


def _gguf_ends(
    template: ChatTemplate, tokens: list[str], named: Sequence[int | None]
) -> frozenset[str]:
    """Return the texts of tokens that end an answer."""
    known = frozenset(tokens)
    texts = {tokens[token_id] for token_id in named if token_id is not None}
    if has_marks(template.source(has_tools=False) or "", known):
        written = turn_end(partial(template.render, add_generation_prompt=False), known)
        texts |= set() if written is None else {written}
        template.close()
    return end_texts(known, texts)


def _from_folder(folder: Path, templates: Mapping[str, str] | None = None) -> HFTokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no tokenizer.json. If it has a tokenizer.model or vocab.json, make one "
            "with transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    try:
        backend = Tokenizer.from_buffer(path.read_bytes().removeprefix(codecs.BOM_UTF8))
    except Exception as error:
        # the library raises bare Exception for everything it does not understand in the file
        raise CheckpointError(f"{path} is not a tokenizer: {error!s:.300}") from None
    config = read_json_object(folder / "tokenizer_config.json") or {}
    special_map = read_json_object(folder / "special_tokens_map.json") or {}
    add_tokens_of_folder(backend, folder, config, special_map)
    special: dict[str, str] = {}
    for name in NAMED_TOKENS:
        key = f"{name}_token"
        text = token_text(config.get(key)) or token_text(special_map.get(key))
        if text is not None:
            special[key] = text

    eos: set[int] = set()
    size: Any = None
    for file_name in ("config.json", "generation_config.json"):
        values = read_json_object(folder / file_name) or {}
        size = values.get("vocab_size", size)
        try:
            eos |= token_ids(values.get("eos_token_id"), "eos_token_id")
        except CheckpointError as error:
            raise CheckpointError(f"{folder / file_name}: {error}") from None
    if "eos_token" in special:
        token_id = backend.token_to_id(special["eos_token"])
        if token_id is not None:
            eos.add(token_id)
    ends, messages = harmony_ends(backend.token_to_id)
    eos = (eos | ends) - messages
    if type(size) is int:
        # the reader of the config warns of the others
        eos = {token_id for token_id in eos if 0 <= token_id < size}
    templates = templates or folder_templates(folder, config)
    return HFTokenizer(backend, frozenset(eos), _chat_template(templates, special))


def _chat_template(templates: Mapping[str, str], special: Mapping[str, str]) -> ChatTemplate:
    """Make a chat template; no process is started before a template needs one."""
    return ChatTemplate(templates, special, renderer=TemplateProcess(), callers=TemplateProcess())


def folder_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return a folder's chat templates by name, given its tokenizer_config.json; a file of its own
    wins over one inside JSON."""
    templates: dict[str, str] = {}
    listed = config.get("chat_template")
    if isinstance(listed, str):
        templates["default"] = listed
    elif isinstance(listed, list):
        for entry in listed:
            if isinstance(entry, Mapping) and isinstance(entry.get("template"), str):
                templates[str(entry.get("name", "default"))] = entry["template"]
    older = (read_json_object(folder / "chat_template.json") or {}).get("chat_template")
    if isinstance(older, str):
        templates["default"] = older
    files = {"default": folder / "chat_template.jinja"}
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        files[path.stem] = path
    for name, path in files.items():
        if path.is_file():
            templates[name] = _read_text(path)
    return templates


def _read_text(path: Path) -> str:
    try:
        if (size := path.stat().st_size) > MAX_TEMPLATE_BYTES:
            raise CheckpointError(f"{path} has {size} bytes, at most {MAX_TEMPLATE_BYTES} are read")
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from None


def _decoder_steps(backend: Tokenizer) -> frozenset[str]:
    """Return the types of the decoder's steps, e.g. {"Sequence", "Replace", "ByteFallback"}."""
    if backend.decoder is None:
        return frozenset()
    found: set[str] = set()
    pending = [json.loads(backend.decoder.__getstate__())]
    while pending:
        step = pending.pop()
        found.add(step["type"])
        pending.extend(step.get("decoders", ()))
    return frozenset(found)


@cache
def _byte_of_character() -> dict[str, bytes]:
    """Return GPT-2's spelling of bytes as characters, reversed.

    Printable bytes of Latin-1 are spelt as themselves, the others, in order, as the characters from
    U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    table = {chr(byte): bytes((byte,)) for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    table.update((chr(0x100 + index), bytes((byte,))) for index, byte in enumerate(others))
    return table
