"""Tokens of a Hugging Face folder that its tokenizer.json does not list, or not as special.

As in transformers: each entry of ``added_tokens_decoder`` in tokenizer_config.json (in older
folders added_tokens.json) is one token, special if it says so, and the named ones are special.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

from paceline.checkpoints.model.json_file import read_json_object
from paceline.checkpoints.model.special_ids import warn_once
from paceline.errors import CheckpointError

__all__ = ["NAMED_TOKENS", "add_tokens_of_folder", "token_text"]

NAMED_TOKENS: Final = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_LISTS: Final = ("additional_special_tokens", "extra_special_tokens")
_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")
_MOST: Final = 1 << 16
# upper limit of ids if the vocabulary's size is not given
_ANY: Final = 1 << 31


def add_tokens_of_folder(
    backend: Tokenizer, folder: Path, config: Mapping[str, Any], special_map: Mapping[str, Any]
) -> None:
    """Add to ``backend`` the tokens that only ``config`` (tokenizer_config.json), ``special_map``
    (special_tokens_map.json) and added_tokens.json have.

    Raises:
        CheckpointError: the files do not hold lists of tokens.
    """
    size = (read_json_object(folder / "config.json") or {}).get("vocab_size")
    room = size if type(size) is int else _ANY
    # in the order in which new tokens get ids
    named = dict.fromkeys((*_named(config), *_named(special_map)))
    known = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
    listed = sorted(_listed(folder, config, named).items())
    for token_id, token in listed:
        if token.content in known and token.special <= known[token.content]:
            continue
        if backend.token_to_id(token.content) is None and backend.get_vocab_size() >= room:
            warn_once(
                f"{folder}: added_tokens_decoder gives {token.content!r:.60} the id {token_id}, "
                f"the vocabulary has {room} entries: it counts as absent"
            )
            continue
        backend.add_tokens([token])
        if (found := backend.token_to_id(token.content)) != token_id:
            warn_once(
                f"{folder}: added_tokens_decoder gives {token.content!r:.60} the id {token_id}, "
                f"behind tokenizer.json's vocabulary it is {found}"
            )
    for text in named:
        if backend.token_to_id(text) is not None or backend.get_vocab_size() < room < _ANY:
            backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])


def token_text(value: Any) -> str | None:
    """Return the text of a token, which is a string or the fields of an AddedToken."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _named(values: Mapping[str, Any]) -> Iterable[str]:
    """Return texts that are special by their role."""
    found = [values.get(f"{name}_token") for name in NAMED_TOKENS]
    for key in _LISTS:
        more = values.get(key)
        found += more.values() if isinstance(more, Mapping) else more or ()
    return filter(None, map(token_text, found))


def _listed(
    folder: Path, config: Mapping[str, Any], named: Collection[str]
) -> dict[int, AddedToken]:
    """Return tokens by the id that the folder gives them."""
    listed = config.get("added_tokens_decoder")
    if listed is None:
        older = read_json_object(folder / "added_tokens.json") or {}
        listed = {
            token_id: {"content": text, "special": text in named, "normalized": text not in named}
            for text, token_id in older.items()
        }
    if not isinstance(listed, Mapping) or len(listed) > _MOST:
        raise CheckpointError(
            f"{folder}: added_tokens_decoder is {listed!r:.80}, must be an object"
        )
    found: dict[int, AddedToken] = {}
    for key, value in listed.items():
        text = token_text(value)
        if text is None or not str(key).isdecimal() or len(str(key)) > 9:
            raise CheckpointError(
                f"{folder}: added_tokens_decoder[{key!r:.20}] is {value!r:.80}, must be a token of "
                "an id"
            )
        flags = {flag: value[flag] for flag in _FLAGS if isinstance(value.get(flag), bool)}
        found[int(key)] = AddedToken(text, **flags)
    return found
