"""``/v1/embeddings`` over tiny models: OpenAI's shapes, the numbers, and what is refused."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from numpy.typing import NDArray

from paceline.http.rate_limits.rates import KeyLimits, Rate
from paceline.server import ServerConfig
from tests.pooling.models import (
    add_modules,
    assert_close,
    byte_tokenizer,
    change_config,
    hidden_states,
    make_bert,
    make_decoder,
    word_tokenizer,
)
from tests.pooling.serving import serving
from tests.server.helpers import metric, scrape

TEXTS = ["the quick brown fox", "a lazy dog, over and over and over", "x"]
SIZE = 32


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As Qwen3-Embedding: the last token, a prompt for queries, sizes that it may be cut to."""
    folder = make_decoder(tmp_path_factory.mktemp("qwen3"), "Qwen3", "ForCausalLM")
    add_modules(folder, "lasttoken", prompts={"query": "Find: ", "document": ""})
    change_config(folder, matryoshka_dimensions=[8, 16])
    return folder


@pytest.fixture(scope="module")
async def http(qwen3: Path, anyio_backend: str) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(qwen3, max_num_batched_tokens=64, max_num_seqs=8) as client:
        yield client


def expected(folder: Path, ids: list[int], size: int = SIZE) -> NDArray[np.float32]:
    vector = hidden_states(folder, ids)[-1][:size]
    return vector / np.linalg.norm(vector)


def ids_of(text: str) -> list[int]:
    ids: list[int] = byte_tokenizer().encode(text).ids
    return ids


async def ask(http: httpx.AsyncClient, status: int = 200, **body: Any) -> Any:
    answer = await http.post("/v1/embeddings", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def vectors(answer: Any) -> list[NDArray[np.float32]]:
    assert [item["index"] for item in answer["data"]] == list(range(len(answer["data"])))
    return [np.array(item["embedding"], dtype=np.float32) for item in answer["data"]]


async def test_texts_and_ids_in_every_shape(http: httpx.AsyncClient, qwen3: Path) -> None:
    right = [expected(qwen3, ids_of(text)) for text in TEXTS]
    ids = [ids_of(text) for text in TEXTS]
    for given, wanted in (
        (TEXTS[0], right[:1]),
        (TEXTS, right),
        (ids[1], right[1:2]),
        (ids, right),
    ):
        answer = await ask(http, model="tiny", input=given)
        for found, vector in zip(vectors(answer), wanted, strict=True):
            assert_close(found, vector)
    assert answer["object"] == "list" and answer["model"] == "tiny"
    assert {item["object"] for item in answer["data"]} == {"embedding"}
    total = sum(map(len, ids))
    assert answer["usage"] == {"prompt_tokens": total, "total_tokens": total}


async def test_base64_is_the_same_numbers(http: httpx.AsyncClient) -> None:
    plain = vectors(await ask(http, input=TEXTS))
    packed = await ask(http, input=TEXTS, encoding_format="base64")
    for item, vector in zip(packed["data"], plain, strict=True):
        found = np.frombuffer(base64.b64decode(item["embedding"]), dtype="<f4")
        assert np.array_equal(found, vector)


async def test_dimensions_cut_before_the_length_is_made_1(
    http: httpx.AsyncClient, qwen3: Path
) -> None:
    (found,) = vectors(await ask(http, input=TEXTS[0], dimensions=8))
    assert_close(found, expected(qwen3, ids_of(TEXTS[0]), 8))
    (whole,) = vectors(await ask(http, input=TEXTS[0], dimensions=SIZE))
    assert len(whole) == SIZE
    error = (await ask(http, 400, input="x", dimensions=9))["error"]
    assert error["param"] == "dimensions" and "8, 16" in error["message"]


async def test_prompts_of_the_files_and_without_the_last_function(
    http: httpx.AsyncClient, qwen3: Path
) -> None:
    (found,) = vectors(await ask(http, input="fox", prompt_name="query"))
    assert_close(found, expected(qwen3, ids_of("Find: fox")))
    (raw,) = vectors(await ask(http, input="fox", use_activation=False))
    assert_close(raw, hidden_states(qwen3, ids_of("fox"))[-1])
    error = (await ask(http, 400, input="fox", prompt_name="nobody"))["error"]
    assert "'query', 'document'" in error["message"]


async def test_truncation_keeps_what_ends_a_text(http: httpx.AsyncClient, qwen3: Path) -> None:
    text = "a lazy dog " * 20
    (found,) = vectors(answer := await ask(http, input=text, truncate_prompt_tokens=-1))
    ids = ids_of(text)
    assert answer["usage"]["prompt_tokens"] == 128
    assert_close(found, expected(qwen3, [*ids[:127], ids[-1]]))
    message = (await ask(http, 400, input=text))["error"]["message"]
    assert "128 tokens" in message and "221" in message and "truncate_prompt_tokens" in message
    # as long as can be
    (longest,) = vectors(await ask(http, input="z" * 127))
    assert_close(longest, expected(qwen3, ids_of("z" * 127)))


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({}, "input", "missing"),
        ({"input": []}, "input", "at least one"),
        ({"input": ""}, "input[0]", "characters"),
        ({"input": [[]]}, "input", "not empty"),
        ({"input": [1, "a"]}, "input[0]", "token ids"),
        ({"input": [999]}, "input[0]", "999"),
        ({"input": ["a"] * 2049}, "input", "2048"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "base64"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1"),
        ({"input": "a", "endianness": "big"}, "endianness", "little-endian"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages", "/tokenize"),
    ],
)
async def test_bad_bodies(
    http: httpx.AsyncClient, body: dict[str, Any], param: str, said: str
) -> None:
    error = (await ask(http, 400, **body))["error"]
    assert error["param"] == param and said in error["message"], error


async def test_it_generates_no_text(http: httpx.AsyncClient) -> None:
    said = [{"role": "user", "content": "a"}]
    for path, body in (
        ("/v1/completions", {"prompt": "a", "max_tokens": 2}),
        ("/v1/completions", {"prompt": "a", "stream": True}),
        ("/v1/chat/completions", {"messages": said}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": said, "max_tokens": 2}),
        ("/api/generate", {"prompt": "a"}),
        ("/completion", {"prompt": "a"}),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"max_tokens": 2}}),
    ):
        answer = await http.post(path, json=body)
        assert answer.status_code == 400, (path, answer.text)
        assert "does not generate text" in answer.text and "/v1/embeddings" in answer.text
    for path in ("/classify",):
        answer = await http.post(path, json={"input": "a"})
        assert answer.status_code == 400 and "/v1/embeddings" in answer.text
    answer = await http.post("/v1/embeddings", json={"model": "other", "input": "a"})
    assert answer.status_code == 404


async def test_pooling_gives_the_same(http: httpx.AsyncClient) -> None:
    wanted = vectors(await ask(http, input=TEXTS))
    answer = (await http.post("/pooling", json={"input": TEXTS, "task": "embed"})).json()
    for item, vector in zip(answer["data"], wanted, strict=True):
        assert item["object"] == "pooling"
        assert_close(np.array(item["data"], dtype=np.float32), vector)
    answer = await http.post("/pooling", json={"input": "a", "task": "token_embed"})
    assert answer.status_code == 400 and "'embed'" in answer.text


async def test_metrics_count_prompts_and_no_output(qwen3: Path) -> None:
    async with serving(qwen3) as http:
        count = (await ask(http, input=TEXTS))["usage"]["prompt_tokens"]
        text = await scrape(http)
    assert metric(text, "vllm:prompt_tokens_total") == count
    assert metric(text, "vllm:generation_tokens_total") == 0
    assert metric(text, "vllm:request_success_total", finished_reason="stop") == len(TEXTS)
    assert metric(text, "vllm:iteration_tokens_total_sum") == count
    assert metric(text, "vllm:time_to_first_token_seconds_count") == len(TEXTS)
    assert metric(text, "vllm:request_params_max_tokens_count") == 0
    assert metric(text, "vllm:request_prompt_tokens_sum") == count
    assert metric(text, "vllm:num_requests_running") == 0


async def test_rate_limits_count_prompt_tokens(qwen3: Path) -> None:
    config = ServerConfig(limits=KeyLimits(tokens=Rate.parse("60/minute")))
    async with serving(qwen3, config) as http:
        answer = await http.post("/v1/embeddings", json={"input": "z" * 39})
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-remaining-tokens"] == "20"
        answer = await http.post("/v1/embeddings", json={"input": "z" * 39})
        assert answer.status_code == 429, answer.text


async def embed(http: httpx.AsyncClient, path: str, status: int = 200, **body: Any) -> Any:
    answer = await http.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


async def test_ollamas_embed_gives_the_same(http: httpx.AsyncClient, qwen3: Path) -> None:
    answer = await embed(http, "/api/embed", model="tiny:latest", input=TEXTS, keep_alive="5m")
    assert answer["model"] == "tiny:latest" and answer["total_duration"] > 0
    assert answer["prompt_eval_count"] == sum(len(ids_of(text)) for text in TEXTS)
    for found, text in zip(answer["embeddings"], TEXTS, strict=True):
        assert_close(np.array(found, np.float32), expected(qwen3, ids_of(text)))
    one = await embed(http, "/api/embed", input=TEXTS[0], dimensions=8, options={"num_ctx": 99})
    assert_close(np.array(one["embeddings"][0], np.float32), expected(qwen3, ids_of(TEXTS[0]), 8))
    # the older one does not bring vectors to length 1
    older = await embed(http, "/api/embeddings", model="tiny", prompt=TEXTS[0])
    raw = hidden_states(qwen3, ids_of(TEXTS[0]))[-1]
    assert_close(np.array(older["embedding"], np.float32), raw)
    for nothing in ({}, {"input": ""}, {"input": []}):
        assert (await embed(http, "/api/embed", **nothing))["embeddings"] == []
    assert await embed(http, "/api/embeddings", prompt="") == {"embedding": []}
    shown = (await http.post("/api/show", json={"model": "tiny"})).json()
    assert shown["capabilities"] == ["embedding"]


async def test_ollamas_embed_cuts_unless_told_not_to(http: httpx.AsyncClient, qwen3: Path) -> None:
    text = "a lazy dog " * 20
    ids = ids_of(text)
    cut = [*ids[:127], ids[-1]]
    answer = await embed(http, "/api/embed", input=text)
    assert_close(np.array(answer["embeddings"][0], np.float32), expected(qwen3, cut))
    older = await embed(http, "/api/embeddings", prompt=text)
    assert_close(np.array(older["embedding"], np.float32), hidden_states(qwen3, cut)[-1])
    refused = await embed(http, "/api/embed", 400, input=["a", text], truncate=False)
    assert "128 tokens, and input[1] has 221" in refused["error"]


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/api/embed", {"input": 3}, 400, "a text or a list of texts"),
        ("/api/embed", {"input": [3]}, 400, "texts alone"),
        ("/api/embed", {"input": ["a", ""]}, 400, "input[1]"),
        ("/api/embed", {"input": "a", "dimensions": 9}, 400, "8, 16"),
        ("/api/embed", {"input": "a", "model": "other"}, 404, "other"),
        ("/api/embed", {"model": "other"}, 404, "other"),
        ("/api/embed", {"input": "a", "prompt": "a"}, 400, "not served in /api/embed"),
        ("/api/embeddings", {"prompt": ["a"]}, 400, "prompt"),
        ("/api/embeddings", {"input": "a"}, 400, "not served in /api/embeddings"),
    ],
)
async def test_bad_bodies_of_ollamas(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], status: int, said: str
) -> None:
    assert said in (await embed(http, path, status, **body))["error"]


async def test_the_openai_sdk_reads_them(http: httpx.AsyncClient, qwen3: Path) -> None:
    async with openai.AsyncOpenAI(
        api_key="x", base_url="http://test/v1", http_client=http, max_retries=0
    ).with_options() as client:
        # it asks for base64 by itself, and unpacks that
        answer = await client.embeddings.create(model="tiny", input=TEXTS)
    assert answer.usage.prompt_tokens == sum(len(ids_of(text)) for text in TEXTS)
    for item, text in zip(answer.data, TEXTS, strict=True):
        assert_close(np.array(item.embedding, dtype=np.float32), expected(qwen3, ids_of(text)))


async def test_a_bert_with_sentence_transformers_settings(tmp_path: Path) -> None:
    folder = make_bert(tmp_path / "bert")
    random = np.random.default_rng(1)
    dense = [
        (random.standard_normal((24, SIZE), dtype=np.float32), "Tanh"),
        (random.standard_normal((16, 24), dtype=np.float32), "GELU"),
    ]
    add_modules(
        folder, "mean_tokens", dense=dense, normalize=False, prompts={"all": "what is "},
        default_prompt="all", max_seq_length=9,
    )  # fmt: skip
    text = "the capital of france"
    ids = word_tokenizer().encode("what is " + text).ids
    x = hidden_states(folder, ids).mean(0)
    x = np.tanh(dense[0][0] @ x)
    import torch

    x = torch.nn.functional.gelu(torch.from_numpy(dense[1][0] @ x)).numpy()
    async with serving(folder) as http:
        (found,) = vectors(await ask(http, input=text))
        assert_close(found, x)
        message = (await ask(http, 400, input=f"{text} {text}"))["error"]["message"]
        assert "9 tokens" in message
        models = (await http.get("/v1/models")).json()["data"]
        assert models[0]["max_model_len"] == 9
