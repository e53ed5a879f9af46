"""Tokens that a folder lists outside its tokenizer.json, and texts that end a model's answer.

As in transformers: each entry of ``added_tokens_decoder`` in tokenizer_config.json (in older
folders added_tokens.json) is one token, special if it says so, and the named ones are special.

A GGUF names one end of sequence, and often types the token that ends a turn as plain text. So the
texts that are known to end turns count as ends, as in llama.cpp, and so does the token that the
chat template writes after an assistant's message.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

from paceline.checkpoints.gguf.tokenizer import CONTROL, USER_DEFINED
from paceline.checkpoints.model.fields import warn_once
from paceline.checkpoints.model.json_file import read_json_object
from paceline.errors import CheckpointError, InvalidRequestError, RequestFailedError

__all__ = [
    "NAMED_TOKENS",
    "add_tokens_of_folder",
    "end_texts",
    "harmony_ends",
    "has_marks",
    "kinds_of",
    "token_text",
    "turn_end",
]

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


# the texts that llama.cpp (src/llama-vocab.cpp) takes for ends of generation, and <|end_of_text|>
_KNOWN: Final = frozenset(
    {
        "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>",
        "<|end_of_text|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "</s>", "<EOT>",
        "_<EOT>", "[EOT]", "[EOS]", "<eos>", "<turn|>", "<|tool_response>", "<end_of_utterance>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
    }
)  # fmt: skip
# if all of a group are tokens, the text ends a message, and the answer goes on
_ENDS_A_MESSAGE: Final = (
    ({"<|return|>", "<|call|>", "<|end|>"}, "<|end|>"),
    ({"<|calls|>", "<|flush|>", "<|end|>"}, "<|end|>"),
    ({"<|tool_response>", "</s>"}, "</s>"),
)
_HARMONY: Final = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>", "<|end|>")
# form of the marks of turns
_MARK: Final = re.compile(r"<[^<>\n]{1,64}>|\[[^\[\]\n]{1,64}\]")
_PROBES: Final = ("Qxaz", "Qxbz", "Qxcz")


def end_texts(tokens: Collection[str], named: Collection[str]) -> frozenset[str]:
    """Return the texts of a vocabulary that end an answer.

    Args:
        named: the ends that the file names, and the one with which the chat template ends a turn.
    """
    ends = _KNOWN.intersection(tokens) | set(named)
    return frozenset(ends - {end for group, end in _ENDS_A_MESSAGE if ends >= group})


def harmony_ends(find: Callable[[str], int | None]) -> tuple[frozenset[int], frozenset[int]]:
    """Return the ids that end an answer, and those that only end a message, of a vocabulary that
    marks messages as gpt-oss does; none for others. ``find`` returns a token's id."""
    ids = [find(text) for text in ("<|return|>", "<|call|>", "<|end|>", "<|channel|>")]
    if None in ids:
        return frozenset(), frozenset()
    ends, call, message, _ = (token_id for token_id in ids if token_id is not None)
    return frozenset({ends, call}), frozenset({message})


def kinds_of(ends: Collection[str], tokens: Collection[str]) -> dict[str, int]:
    """Return types of GGUF tokens that override the file's: ends are control tokens; harmony's
    marks in prompts are single tokens."""
    kinds = dict.fromkeys(ends, CONTROL)
    if "<|end|>" in tokens and {"<|return|>", "<|call|>"} <= set(ends):
        kinds |= dict.fromkeys((mark for mark in _HARMONY if mark in tokens), USER_DEFINED)
    return kinds


def has_marks(source: str, tokens: Collection[str]) -> bool:
    """Return whether a chat template writes tokens of which one could end a turn."""
    marks = set(_MARK.findall(source))
    # a mark that is put together from parts may be any
    made = any(char in mark for mark in marks for char in "{'\"")
    return made or not marks.intersection(tokens) <= _KNOWN


def turn_end(render: Callable[[list[dict[str, Any]]], str], tokens: Collection[str]) -> str | None:
    """Return the token that the chat template writes after an assistant's message; None: it writes
    none, or refuses a plain conversation."""
    roles = ("user", "assistant", "user")
    try:
        text = render([{"role": r, "content": c} for r, c in zip(roles, _PROBES, strict=True)])
    except (InvalidRequestError, RequestFailedError):
        return None
    _, answer, again = _PROBES
    found = _MARK.match(text.partition(answer)[2].partition(again)[0].lstrip())
    return found[0] if found is not None and found[0] in tokens else None
