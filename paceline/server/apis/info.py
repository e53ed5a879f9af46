"""The endpoints that describe the server, and the tokenizer's two with their bodies;
``llama_cpp.info`` has those of llama-server.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any, Final
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

import paceline
from paceline.errors import InvalidRequestError
from paceline.http.errors import HttpError
from paceline.server.apis.llama_cpp.info import ContentBody, tokens_of_content
from paceline.server.generation.service import Service
from paceline.server.observability.metrics.server import CONTENT_TYPE
from paceline.server.protocol.body import Body
from paceline.server.protocol.field_types import (
    MODEL,
    boolean,
    check_model,
    needed,
    refused,
    string,
    token_ids,
)
from paceline.server.protocol.generation import TemplateBody
from paceline.server.protocol.requests import parse_template_options
from paceline.server.transport.endpoint import JSON_BODY, with_ignored
from paceline.server.transport.middleware import may_administer, read_object
from paceline.server.transport.responses import Routes, encoded

__all__ = [
    "DetokenizeBody",
    "TokenizeMessagesBody",
    "TokenizePromptBody",
    "info_router",
    "model_card",
]

_WITH_CONTENT: Final = refused(
    " goes with content; with prompt and messages it is add_special_tokens and return_token_strs",
    (),
)


class _Tokenize(Body):
    return_token_strs = boolean(note="not with `content`")
    add_special = parse_special = with_pieces = _WITH_CONTENT


class TokenizePromptBody(_Tokenize):
    model = MODEL
    prompt = needed(string(), note="of `prompt`, `messages` and `content` one")
    add_special_tokens = boolean(True, note="not with `content`; with `messages` false by default")


class TokenizeMessagesBody(TemplateBody, _Tokenize):
    """The fields of a chat body that affect its prompt."""

    add_special_tokens = boolean(note="not with `content`; with `messages` false by default")


class DetokenizeBody(Body):
    model = MODEL
    tokens = needed(token_ids())


def info_router(service: Service) -> Routes:
    routes = Routes(service)

    async def health(_request: Request) -> Response:
        service.check_health()
        # clients of llama-server look for this field
        return encoded({"status": "ok"})

    async def live(_request: Request) -> Response:
        service.check_alive()
        return encoded({})

    async def version(request: Request) -> Response:
        info = service.client.info
        told: dict[str, Any] = {"version": paceline.__version__}
        if info.kv_port and may_administer(request):
            # who may name a source learns of this one
            told["kv"] = {"port": info.kv_port, "fingerprint": info.kv_fingerprint}
        return encoded(told)

    async def load(_request: Request) -> Response:
        return encoded({"server_load": service.in_flight})

    async def metrics(_request: Request) -> Response:
        return Response(service.metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def models(_request: Request) -> Response:
        names = service.rules.listed_models
        return encoded({"object": "list", "data": [model_card(service, name) for name in names]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        check_model(name, service.rules)
        return encoded(model_card(service, name))

    async def tokenizer_info(_request: Request) -> Response:
        if not service.config.enable_tokenizer_info:
            raise HttpError(
                404, "GET /tokenizer_info is served with --enable-tokenizer-info-endpoint alone"
            )
        return encoded(_tokenizer_info(service))

    async def tokenize(request: Request) -> Response:
        return await _tokenize(service, request)

    async def detokenize(request: Request) -> Response:
        return await _detokenize(service, request)

    routes.add("GET", "/health", health)
    routes.add("GET", "/health/ready", health)
    routes.add("GET", "/health/live", live)
    routes.add("GET", "/ping", health)
    routes.add("POST", "/ping", health)
    routes.add("GET", "/version", version)
    routes.add("GET", "/load", load)
    routes.add("GET", "/metrics", metrics)
    routes.add("GET", "/tokenizer_info", tokenizer_info)
    routes.add("GET", "/v1/models", models)
    routes.add("GET", "/v1/models/{name:path}", model)
    routes.add("POST", "/tokenize", tokenize, JSON_BODY)
    routes.add("POST", "/detokenize", detokenize, JSON_BODY)
    return routes


def model_card(service: Service, name: str) -> dict[str, Any]:
    """Return a model or an adapter as vLLM's ``/v1/models`` shows it."""
    adapter, own = service.rules.adapters.get(name), {}
    if adapter is not None and service.adapters is not None:
        news = service.adapters.status_of(name)
        status = "loading" if news is None else news.status
        digest = sha256(f"{service.model_digest} {adapter.digest}".encode()).hexdigest()[:32]
        own = {
            "root": adapter.root, "parent": service.model_name, "status": status, "digest": digest,
            # of its last load, for gateways
            "load_seconds": 0.0 if news is None else news.seconds,
        }  # fmt: skip
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "paceline",
        "root": service.client.info.model,
        "parent": None,
        "max_model_len": service.rules.max_model_len,
        # what holds where a request gives none
        "default_sampling": dict(service.rules.default_sampling),
        # the field that llama-server has
        "meta": {
            "n_vocab": service.client.info.vocab_size,
            "n_ctx": service.rules.max_model_len,
        },
        "digest": service.model_digest,
        "permission": [
            {
                "id": f"modelperm-{uuid4().hex}",
                "object": "model_permission",
                "created": service.created,
                "allow_create_engine": False,
                "allow_sampling": True,
                "allow_logprobs": True,
                "allow_search_indices": False,
                "allow_view": True,
                "allow_fine_tuning": False,
                "organization": "*",
                "group": None,
                "is_blocking": False,
            }
        ],
        **own,
    }


def _tokenizer_info(service: Service) -> dict[str, Any]:
    """Return the known fields of a ``tokenizer_config.json``."""
    tokenizer = service.client.tokenizer
    spelt = tokenizer.vocabulary_token
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": tokenizer.chat_template_source,
        "model_max_length": service.rules.max_model_len,
        "vocab_size": tokenizer.vocab_size,
        "eos_tokens": [spelt(token) for token in sorted(tokenizer.eos_token_ids)],
        "all_special_tokens": [spelt(token) for token in sorted(tokenizer.special_token_ids)],
        "all_special_ids": sorted(tokenizer.special_token_ids),
    }


async def _tokenize(service: Service, request: Request) -> Response:
    values = await read_object(request, service.config)
    if values.get("content") is not None:
        asked = ContentBody.read(values, service.rules)
        return with_ignored(encoded(await tokens_of_content(service, asked)), asked)
    has_messages = values.get("messages") is not None
    if has_messages == (values.get("prompt") is not None):
        raise InvalidRequestError(
            f"give either prompt or messages, or content as llama-server takes it, got "
            f"{'both' if has_messages else 'neither'}",
            "prompt",
        )
    body: TokenizeMessagesBody | TokenizePromptBody
    if has_messages:
        body = TokenizeMessagesBody.read(values, service.rules)
        template = parse_template_options(body, service.rules)
        tokens = await service.prompts.chat(template, add_special_tokens=body.add_special_tokens)
    else:
        body = TokenizePromptBody.read(values, service.rules)
        special = body.add_special_tokens
        tokens = await service.prompts.encode(body.prompt, add_special_tokens=special)
    strings = None
    if body.return_token_strs:
        spelt = service.client.tokenizer.vocabulary_token
        strings = [spelt(token) for token in tokens]
    answer = {
        "count": len(tokens),
        "max_model_len": service.rules.max_model_len,
        "tokens": tokens,
        "token_strs": strings,
    }
    return with_ignored(encoded(answer), body)


async def _detokenize(service: Service, request: Request) -> Response:
    values = await read_object(request, service.config)
    body = DetokenizeBody.read(values, service.rules)
    text = await service.prompts.decode(body.tokens)
    # named as in vLLM, and as in llama-server
    return with_ignored(encoded({"prompt": text, "content": text}), body)
