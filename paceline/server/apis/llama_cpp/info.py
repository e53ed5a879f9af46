"""Information that llama-server's endpoints return, and its text functions: properties, slots,
templates, tokens, and prompts to be filled in."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import paceline
from paceline.engine.protocol import Tokenizer
from paceline.errors import InvalidRequestError
from paceline.http.fields import check_string, show
from paceline.server.apis.llama_cpp.protocol import Part, parse_parts, part_schema
from paceline.server.apis.llama_cpp.serving import NO_SLOT, generation_settings, sampling_settings
from paceline.server.generation.service import Entry, Service
from paceline.server.protocol import schemas
from paceline.server.protocol.body import Body
from paceline.server.protocol.field_types import (
    MODEL,
    array,
    boolean,
    described,
    needed,
    string,
    token_schema,
)
from paceline.server.protocol.generation import TemplateBody
from paceline.server.protocol.requests import RequestRules, parse_completion, parse_template_options
from paceline.server.protocol.schemas import Schema

__all__ = [
    "ContentBody",
    "FimTokens",
    "InfillBody",
    "fim_tokens",
    "infill_prompt",
    "properties",
    "slots",
    "template_applied",
    "tokens_of_content",
]

# tokens before the prefix, before the suffix, before the text to write; and, if a model has them,
# before the name of a repository and of a file
_FIM: Final = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<repo_name>", "<file_sep>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<reponame>", "<filename>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>", "", ""),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", "", ""),
    ("▁<PRE>", "▁<SUF>", "▁<MID>", "", ""),
)
_MAX_FILES: Final = 256
_FILE: Final = schemas.record({"text": schemas.STRING}, {"filename": schemas.STRING})


class FimTokens(NamedTuple):
    """Ids of the tokens by which a model fills in the middle of a text."""

    prefix: int
    suffix: int
    middle: int
    # None: it reads one file at a time
    repository: int | None
    file: int | None

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end the output, in addition to the model's usual ones."""
        return frozenset(token for token in self if token is not None)


def fim_tokens(tokenizer: Tokenizer) -> FimTokens | None:
    """Return the model's tokens; None if it has none."""

    def find(text: str) -> int | None:
        ids = tokenizer.encode(text, add_special_tokens=False) if text else []
        whole = len(ids) == 1 and ids[0] in tokenizer.special_token_ids
        return ids[0] if whole else None

    for texts in _FIM:
        prefix, suffix, middle, repository, file = map(find, texts)
        if prefix is not None and suffix is not None and middle is not None:
            both = repository is not None and file is not None
            return FimTokens(prefix, suffix, middle, repository, file if both else None)
    return None


class InfillBody(Body, partial=True):
    """The fields of ``/infill`` beyond those of ``/completion``."""

    input_prefix = needed(string())
    input_suffix = needed(string())
    input_extra = array(schemas.array(_FILE))
    prompt = described(parse_parts, part_schema, note="the beginning of what goes between")


def infill_prompt(
    body: dict[str, Any], rules: RequestRules, fim: FimTokens | None, model: str
) -> dict[str, Any]:
    """Return the body of ``/completion`` for one of ``/infill``.

    Raises:
        InvalidRequestError: the model cannot fill in text, or a field is invalid.
    """
    asked = InfillBody.read(body, rules)
    extra = asked.input_extra or []
    if fim is None:
        raise InvalidRequestError(
            f"the model {model} has no tokens for filling in the middle of a text; models made for "
            "code have, such as Qwen2.5-Coder and StarCoder2",
            "model",
        )
    if len(extra) > _MAX_FILES:
        raise InvalidRequestError(
            f"input_extra may hold {_MAX_FILES} files, got {len(extra)}", "input_extra"
        )
    # an empty text first, so that the tokenizer adds its leading tokens
    parts: list[Part] = [""]
    if extra and fim.repository is not None and fim.file is not None:
        parts += [fim.repository, "repository\n"]
        for name, text in map(_file, extra):
            parts += [fim.file, f"{name}\n{text}\n"]
        parts += [fim.file, "filename\n"]
    else:
        parts += [text for _, text in map(_file, extra)]
    parts += [fim.prefix, asked.input_prefix, fim.suffix, asked.input_suffix, fim.middle]
    parts += asked.prompt or ("",)
    kept = {name: value for name, value in body.items() if not name.startswith("input_")}
    return kept | {"prompt": parts}


def _file(value: Any) -> tuple[str, str]:
    if type(value) is not dict:
        raise InvalidRequestError(
            f"input_extra must hold objects of filename and text, got {show(value)}", "input_extra"
        )
    text = check_string(value.get("text"), "input_extra.text", 0, None)
    return check_string(value.get("filename") or "tmp", "input_extra.filename", 1, 1024), text


def properties(service: Service) -> dict[str, Any]:
    """Return the answer to ``/props``."""
    source = service.client.tokenizer.chat_template_source
    shows_tools = source is not None and "tools" in source
    return {
        "default_generation_settings": {
            "id": NO_SLOT,
            "n_ctx": service.rules.max_model_len,
            "speculative": False,
            "is_processing": service.client.stats.scheduler.num_running > 0,
            "params": _defaults(service),
        },
        "total_slots": service.client.info.max_num_seqs,
        "model_alias": service.model_name,
        "model_path": service.client.info.model,
        "chat_template": source or "",
        "chat_template_caps": {"supports_tools": shows_tools},
        "modalities": {"vision": False, "audio": False},
        "build_info": f"paceline-{paceline.__version__}",
        "is_sleeping": False,
    }


def _defaults(service: Service) -> dict[str, Any]:
    options = parse_completion({"prompt": ""}, service.rules).options
    return generation_settings(options.sampling, options, service)


def slots(service: Service) -> list[dict[str, Any]]:
    """Return the answer to ``/slots``: requests in flight, also waiting ones, then free slots."""
    taken = {entry.place: entry for entry in service.under_way.entries()}
    total = max(service.client.info.max_num_seqs, max(taken, default=-1) + 1)
    length = service.rules.max_model_len
    return [
        _slot(taken[place], length)
        if place in taken
        else {"id": place, "n_ctx": length, "speculative": False, "is_processing": False}
        for place in range(total)
    ]


def _slot(entry: Entry, length: int) -> dict[str, Any]:
    """Return one request, without its texts."""
    request, done = entry.request, entry.counted.num_output_tokens
    sampling = request.sampling
    limit = request.n * sampling.max_tokens
    return {
        "id": entry.place,
        "id_task": entry.number,
        "n_ctx": length,
        "speculative": False,
        "is_processing": True,
        "n_prompt_tokens": len(request.prompt_token_ids),
        "params": {
            "n_predict": sampling.max_tokens,
            **sampling_settings(sampling),
            "stream": not request.whole,
        },
        "next_token": {"has_next_token": True, "n_remain": limit - done, "n_decoded": done},
    }


async def template_applied(service: Service, asked: TemplateBody) -> dict[str, Any]:
    """Return the answer to ``/apply-template``."""
    template = parse_template_options(asked, service.rules)
    return {"prompt": await service.prompts.render(template)}


def _content_schema(rules: RequestRules) -> Schema:
    part = {"anyOf": [schemas.STRING, token_schema(rules)]}
    return {"anyOf": [schemas.STRING, schemas.array(part)]}


class ContentBody(Body):
    """The body of llama-server's ``/tokenize``."""

    model = MODEL
    content = needed(described(parse_parts, _content_schema, note="as llama-server takes it"))
    add_special = boolean(note="with `content`")
    parse_special = boolean(True, note="with `content`")
    with_pieces = boolean(note="with `content`")


async def tokens_of_content(service: Service, asked: ContentBody) -> dict[str, Any]:
    """Return the answer to ``/tokenize`` with ``content``."""
    parts = asked.content
    (tokens,) = await service.prompts.mixed([parts], add_special_tokens=asked.add_special)
    tokenizer = service.client.tokenizer
    if not asked.parse_special:
        (plain,) = await service.prompts.mixed([parts], add_special_tokens=False)
        if any(token in tokenizer.special_token_ids for token in plain):
            raise InvalidRequestError(
                "parse_special=False: the content has the text of a special token, which is always "
                "read as one here",
                "parse_special",
            )
    if not asked.with_pieces:
        return {"tokens": tokens}
    return {"tokens": [{"id": token, "piece": _piece(tokenizer, token)} for token in tokens]}


def _piece(tokenizer: Tokenizer, token: int) -> str | list[int]:
    """Return a token's text, or its bytes if it is a part of a character."""
    exact = tokenizer.token_bytes(token)
    try:
        return exact.decode()
    except UnicodeDecodeError:
        return list(exact)
