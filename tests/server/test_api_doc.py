"""docs/use/api.md says what the code does: endpoints, and every field of every body."""

from __future__ import annotations

import importlib.util
import re
import typing
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from paceline.server.protocol.requests import RequestRules
from paceline.server.protocol.structured import STRUCTURED_KINDS
from paceline.server.transport.responses import UNSERVED_ROUTES

ROOT = Path(__file__).parents[2]
_SPEC = importlib.util.spec_from_file_location("api_tables", ROOT / "scripts" / "api_tables.py")
assert _SPEC is not None and _SPEC.loader is not None
api_tables = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(api_tables)
DOC = (ROOT / "docs" / "use" / "api.md").read_text()
RULES = RequestRules(
    served_model_names=("m",),
    vocab_size=259,
    max_model_len=512,
    max_choices=4,
    max_prompts=4,
    eos_token_ids=frozenset({1}),
    default_sampling={},
    trust_request_chat_template=False,
)
MESSAGES = [{"role": "user", "content": "x"}]


def section(title: str) -> str:
    return DOC.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def documented(title: str) -> dict[str, set[str]]:
    """Field names by status."""
    found: dict[str, set[str]] = {"served": set(), "ignored": set(), "refused": set()}
    for line in section(title).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[1] in found:
            names = re.findall(r"`(\w+)`", cells[0])
            assert names and not found[cells[1]] & set(names), line
            found[cells[1]] |= set(names)
    return found


async def test_every_endpoint_is_in_the_table(app: FastAPI) -> None:
    served = {
        f"{method.upper()} {path}"
        for path, methods in app.openapi()["paths"].items()
        for method in methods
    }
    assert set(re.findall(r"^\| `(\w+ /\S*)` \|", section("Endpoints"), re.M)) == served


async def test_refused_fields_are_refused_and_ignored_ones_change_nothing(
    http: httpx.AsyncClient,
) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3}),
        ("/v1/completions", {"prompt": "x", "max_tokens": 3}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 3}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 3}),
        ("/api/chat", {"messages": MESSAGES, "options": {"num_predict": 3}, "stream": False}),
        ("/api/generate", {"prompt": "x", "options": {"num_predict": 3}, "stream": False}),
        ("/completion", {"prompt": "x", "n_predict": 3}),
    ):
        told = documented(f"`{path}`")
        plain = (await http.post(path, json=body)).json()
        for name in sorted(told["refused"]):
            value: Any = {"best_of": 3, "length_penalty": 2, "stream_interval": 3}.get(name, ["x"])
            if name == "spaces_between_special_tokens":
                value = False
            answer = await http.post(path, json={**body, name: value})
            assert answer.status_code == 400 and name in answer.text, name
        for name in sorted(told["ignored"]):
            answer = await http.post(path, json={**body, name: "x"})
            assert answer.status_code == 200, (name, answer.text)
            for key in ("choices", "content", "message", "response"):
                assert answer.json().get(key) == plain.get(key)


def test_the_kinds_of_structured_output_are_named() -> None:
    text = section("Structured output")
    assert all(f"`{kind}`" in text for kind in STRUCTURED_KINDS)


def names_of(parameters: type) -> set[str]:
    return set(typing.get_type_hints(parameters))


def everything(path: str) -> set[str]:
    return set().union(*documented(f"`{path}`").values())


def test_every_field_of_the_official_sdks_has_a_status() -> None:
    from anthropic.types import message_create_params
    from openai.types import completion_create_params, embedding_create_params
    from openai.types.chat import completion_create_params as chat_params
    from openai.types.responses import response_create_params

    for path, parameters in (
        ("/v1/chat/completions", chat_params.CompletionCreateParamsBase),
        ("/v1/completions", completion_create_params.CompletionCreateParamsBase),
        ("/v1/responses", response_create_params.ResponseCreateParamsBase),
        ("/v1/embeddings", embedding_create_params.EmbeddingCreateParams),
        ("/v1/messages", message_create_params.MessageCreateParamsBase),
    ):
        # one is a header that the SDK takes as an argument
        missing = names_of(parameters) - everything(path) - {"workspace_id"}
        assert not missing, (path, missing)


# what vLLM's chat and completions read beyond OpenAI's
VLLM = """use_beam_search top_k min_p repetition_penalty length_penalty stop_token_ids
include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words
thinking_token_budget include_reasoning echo add_special_tokens structured_outputs priority
request_id session_id return_tokens_as_token_ids return_token_ids return_prompt_text
return_token_offsets cache_salt kv_transfer_params ec_transfer_params vllm_xargs
repetition_detection stream_interval routed_experts_prompt_start"""
VLLM_CHAT = """add_generation_prompt continue_final_message documents chat_template
chat_template_kwargs media_io_kwargs mm_processor_kwargs"""


def test_every_field_of_vllm_has_a_status() -> None:
    assert not set(VLLM.split()) - everything("/v1/completions")
    assert not {*VLLM.split(), *VLLM_CHAT.split()} - everything("/v1/chat/completions")


async def test_what_other_servers_have_is_not_here(http: httpx.AsyncClient) -> None:
    rows = re.findall(r"^\| (.*) \| not served \|", section("What other servers have"), re.M)
    asked = [pair.split() for row in rows for pair in re.findall(r"`(\w+ /\S+)`", row)]
    assert len(asked) > 25
    for method, path in asked:
        answer = await http.request(method, path, json={})
        assert answer.status_code == 404, (method, path)
        if path in UNSERVED_ROUTES:
            said = answer.json()["error"]["message"]
            assert said == f"{method} {path} is not served here: {UNSERVED_ROUTES[path][1]}"
    assert set(UNSERVED_ROUTES) <= {path for _, path in asked}


def test_the_tables_are_those_of_the_bodies() -> None:
    assert api_tables.page_of(DOC) == DOC, "make api-tables renews them"


@pytest.mark.parametrize(
    "path", ["/v1/embeddings", "/rerank", "/v2/rerank", "/v1/score", "/classify", "/pooling"]
)
async def test_a_model_that_generates_gives_no_vectors(http: httpx.AsyncClient, path: str) -> None:
    error = (await http.post(path, json={"input": "x"})).json()["error"]
    assert (error["code"], error["param"]) == (400, "model")
    assert "tiny does not support embeddings" in error["message"]
    assert "--runner pooling" in error["message"]
    unknown = await http.post(path, json={"input": "x", "model": "x"})
    assert unknown.status_code == 404
