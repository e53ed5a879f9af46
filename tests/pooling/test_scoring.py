"""``/score``, ``/rerank`` and ``/classify`` over tiny models, against transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from tests.pooling.models import (
    add_modules,
    byte_tokenizer,
    change_config,
    hidden_states,
    logits,
    make_bert,
    make_decoder,
    make_roberta,
    word_tokenizer,
)
from tests.pooling.serving import serving

QUERY = "what is the capital of france"
DOCUMENTS = ["paris", "berlin is the capital", "the quick brown fox jumps over the lazy dog"]


async def scores_of(http: httpx.AsyncClient, **more: Any) -> list[float]:
    body = {"model": "tiny", "text_1": QUERY, "text_2": DOCUMENTS, **more}
    answer = await http.post("/score", json=body)
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [item["index"] for item in data] == list(range(len(data)))
    assert {item["object"] for item in data} == {"score"}
    return [item["score"] for item in data]


def check(found: Sequence[float], expected: Sequence[float]) -> None:
    assert np.allclose(found, expected, rtol=1e-4, atol=1e-6), (found, expected)


def sigmoid(value: Any) -> float:
    return float(1 / (1 + np.exp(-float(value))))


@pytest.mark.parametrize("roberta", [False, True])
async def test_cross_encoders(tmp_path: Path, roberta: bool) -> None:
    make = make_roberta if roberta else make_bert
    folder = make(tmp_path / "model", "ForSequenceClassification", num_labels=1)
    pairs = [word_tokenizer(roberta=roberta).encode(QUERY, text) for text in DOCUMENTS]
    kinds = [None if roberta else pair.type_ids for pair in pairs]
    raw = [logits(folder, p.ids, k)[0] for p, k in zip(pairs, kinds, strict=True)]
    expected = [sigmoid(value) for value in raw]
    async with serving(folder) as http:
        check(await scores_of(http), expected)
        check(await scores_of(http, use_activation=False), [float(value) for value in raw])
        # as many with as many
        check(await scores_of(http, text_1=[QUERY] * 3), expected)
        answer = await http.post(
            "/rerank", json={"query": QUERY, "documents": DOCUMENTS, "top_n": 2}
        )
        best = sorted(range(3), key=lambda index: -expected[index])[:2]
        results = answer.json()["results"]
        assert [item["index"] for item in results] == best
        check([item["relevance_score"] for item in results], [expected[i] for i in best])
        assert [item["document"] for item in results] == [{"text": DOCUMENTS[i]} for i in best]
        total = sum(len(pair.ids) for pair in pairs)
        assert answer.json()["usage"] == {"prompt_tokens": total, "total_tokens": total}
        refused = await http.post("/v1/embeddings", json={"input": "a"})
        assert refused.status_code == 400 and "/score" in refused.text


async def test_a_classifier_of_several_labels(tmp_path: Path) -> None:
    labels = {"0": "no", "1": "perhaps", "2": "yes"}
    folder = make_bert(tmp_path / "model", "ForSequenceClassification", num_labels=3)
    change_config(folder, id2label=labels, label2id={v: int(k) for k, v in labels.items()})
    raw = [logits(folder, word_tokenizer().encode(text).ids) for text in DOCUMENTS]
    expected = [torch.softmax(torch.from_numpy(row), 0).numpy() for row in raw]
    async with serving(folder) as http:
        answer = await http.post("/classify", json={"input": DOCUMENTS})
        for item, row in zip(answer.json()["data"], expected, strict=True):
            check(item["probs"], row.tolist())
            assert item["label"] == labels[str(int(row.argmax()))] and item["num_classes"] == 3
        answer = await http.post("/classify", json={"input": DOCUMENTS, "use_activation": False})
        for item, row in zip(answer.json()["data"], raw, strict=True):
            check(item["probs"], row.tolist())
        for path in ("/score", "/rerank"):
            refused = await http.post(
                path, json={"text_1": "a", "text_2": "a", "query": "a", "documents": ["a"]}
            )
            assert refused.status_code == 400 and "3 labels" in refused.text


async def test_a_decoder_that_classifies_in_chunks(tmp_path: Path) -> None:
    folder = make_decoder(
        tmp_path / "model", "Qwen3", "ForSequenceClassification", num_labels=2,
        problem_type="multi_label_classification",
    )  # fmt: skip
    texts = [*DOCUMENTS, "x" * 70]
    raw = [logits(folder, byte_tokenizer().encode(text).ids) for text in texts]
    async with serving(folder, max_num_batched_tokens=16, max_num_seqs=4) as http:
        answer = await http.post("/classify", json={"input": texts})
        for item, row in zip(answer.json()["data"], raw, strict=True):
            check(item["probs"], [sigmoid(value) for value in row])


async def test_the_activation_of_the_files(tmp_path: Path) -> None:
    folder = make_bert(tmp_path / "model", "ForSequenceClassification", num_labels=1)
    change_config(folder, sbert_ce_default_activation_function="torch.nn.modules.linear.Identity")
    pair = word_tokenizer().encode(QUERY, DOCUMENTS[0])
    async with serving(folder) as http:
        check(await scores_of(http, text_2=DOCUMENTS[0]),
              [float(logits(folder, pair.ids, pair.type_ids)[0])])  # fmt: skip


def yes_minus_no(folder: Path, ids: Sequence[int], yes: int, no: int) -> float:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        last = model(torch.tensor([list(ids)])).logits[0, -1]
    return sigmoid(last[yes] - last[no])


TEMPLATE = (
    "{% for m in messages if m.role == 'system' %}I: {{ m.content }} {% endfor %}"
    "Q: {{ messages|selectattr('role', 'eq', 'query')|map(attribute='content')|first }} "
    "D: {{ messages|selectattr('role', 'eq', 'document')|map(attribute='content')|first }}"
    "{% if add_generation_prompt %} A: {% endif %}"
)


@pytest.mark.parametrize("tied", [False, True])
async def test_logit_score_with_the_folders_template(tmp_path: Path, tied: bool) -> None:
    folder = make_decoder(tmp_path / "model", "Qwen3", "ForCausalLM", tie_word_embeddings=tied)
    kinds = {"": "base.modules.transformer.Transformer",
             "1_LogitScore": "cross_encoder.modules.logit_score.LogitScore"}  # fmt: skip
    (folder / "modules.json").write_text(
        json.dumps([{"path": p, "type": f"sentence_transformers.{k}"} for p, k in kinds.items()])
    )
    (folder / "1_LogitScore").mkdir()
    (folder / "1_LogitScore" / "config.json").write_text(
        json.dumps({"true_token_id": 121, "false_token_id": 110})
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE)

    def ids(text: str) -> list[int]:
        found: list[int] = byte_tokenizer().encode(text, add_special_tokens=False).ids
        return found

    texts = [f"Q: {QUERY} D: {document} A: " for document in DOCUMENTS]
    async with serving(folder) as http:
        check(await scores_of(http), [yes_minus_no(folder, ids(t), 121, 110) for t in texts])
        told = [yes_minus_no(folder, ids(f"I: be strict {t}"), 121, 110) for t in texts]
        check(await scores_of(http, instruction="be strict"), told)
        body = {"query": QUERY, "documents": ["z" * 200]}
        refused = await http.post("/rerank", json=body)
        assert refused.status_code == 400 and "max_tokens_per_doc cuts" in refused.text
        assert (await http.post("/rerank", json={**body, "max_tokens_per_doc": 9})).is_success
        for name, value in (("truncate_prompt_tokens", -1), ("add_special_tokens", False)):
            refused = await http.post("/rerank", json={**body, name: value})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == name
        cut = [f"Q: {QUERY} D: {document[:4]} A: " for document in DOCUMENTS]
        told = [yes_minus_no(folder, ids(t), 121, 110) for t in cut]
        check(await scores_of(http, max_tokens_per_doc=4), told)


async def test_a_qwen3_reranker_as_it_was_first_published(tmp_path: Path) -> None:
    folder = make_decoder(tmp_path / "model", "Qwen3", "ForCausalLM", max_position_embeddings=1024)
    change_config(folder, classifier_from_token=["n", "yes"])
    yes = byte_tokenizer().token_to_id("yes")
    no = byte_tokenizer().token_to_id("n")
    prompt = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that "
        f"answer the query\n<Query>: {QUERY}\n<Document>: {DOCUMENTS[0]}<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    ids = byte_tokenizer().encode(prompt, add_special_tokens=False).ids
    async with serving(folder, convert="classify", num_blocks=128) as http:
        check(await scores_of(http, text_2=DOCUMENTS[0]), [yes_minus_no(folder, ids, yes, no)])


async def test_embeddings_are_scored_by_their_angle(tmp_path: Path) -> None:
    folder = make_bert(tmp_path / "model")
    add_modules(folder, "mean_tokens", normalize=False, prompts={"query": "what is "})

    def vector(text: str) -> NDArray[np.float32]:
        return hidden_states(folder, word_tokenizer().encode(text).ids).mean(0)

    first = vector("what is " + QUERY)
    seconds = [vector(text) for text in DOCUMENTS]
    cosines = [float(first @ s / np.linalg.norm(first) / np.linalg.norm(s)) for s in seconds]
    async with serving(folder) as http:
        check(await scores_of(http), cosines)
        for name, value in (("max_tokens_per_doc", 4), ("softmax", False)):
            body = {"query": QUERY, "documents": DOCUMENTS, name: value}
            refused = await http.post("/rerank", json=body)
            assert refused.status_code == 400 and refused.json()["error"]["param"] == name
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            body = {"query": QUERY, "documents": [{"text": text} for text in DOCUMENTS],
                    "return_documents": False}  # fmt: skip
            answer = await http.post(path, json=body)
            results = answer.json()["results"]
            assert [r["index"] for r in results] == sorted(range(3), key=lambda i: -cosines[i])
            assert all("document" not in result for result in results)


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        ("/rerank", {"documents": ["a"]}, "query", "missing"),
        ("/rerank", {"query": "a"}, "documents", "missing"),
        ("/rerank", {"query": "a", "documents": []}, "documents", "empty"),
        ("/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n", "at least 0"),
        ("/rerank", {"query": "a", "documents": [{"image": "a"}]}, "documents[0]", "string"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1", "2 texts"),
        ("/score", {"text_2": ["a"]}, "text_1", "missing"),
        ("/score", {"text_1": "a", "text_2": "a", "instruction": "b"}, "instruction", "no place"),
        (
            "/rerank",
            {"query": "a" * 70_000, "documents": ["b"] * 250},
            "documents",
            "17500250 characters, a query counted with each of its texts; 16777216",
        ),
        ("/score", {"text_1": "a", "data_1": "b", "text_2": "a"}, "data_1", "mean the same"),
        ("/score", {"text_1": "a", "text_2": "a", "documents": "b"}, "documents", "mean the same"),
        (
            "/rerank",
            {"query": "a", "documents": [{"text": "a", "type": "image_url"}]},
            "documents",
            "documents[0].type must be 'text'",
        ),
    ],
)
async def test_bad_bodies(
    tmp_path: Path, path: str, body: dict[str, Any], param: str, said: str
) -> None:
    async with serving(make_bert(tmp_path / "model")) as http:
        answer = await http.post(path, json=body)
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == param, error
        assert said in error["message"], error


async def test_names_that_agree_and_names_that_do_not(tmp_path: Path) -> None:
    async with serving(
        make_bert(tmp_path / "model", "ForSequenceClassification", num_labels=1)
    ) as http:
        plain = await scores_of(http, use_activation=False)
        assert await scores_of(http, use_activation=False, softmax=False) == plain
        body = {"query": QUERY, "documents": DOCUMENTS, "normalize": True, "softmax": False}
        refused = await http.post("/rerank", json=body)
        assert refused.status_code == 400
        assert "normalize=True and softmax=False mean the same here" in refused.text
        documents = [{"text": "a", "id": 7, "type": "text"}, "b"]
        told = await http.post("/rerank", json={"query": QUERY, "documents": documents})
        assert told.headers["x-paceline-ignored-fields"] == "documents[0].id"


@pytest.mark.parametrize("embeds", [False, True])
async def test_what_is_too_long_is_named_as_the_caller_named_it(
    tmp_path: Path, embeds: bool
) -> None:
    folder = (
        make_bert(tmp_path / "model")
        if embeds
        else make_bert(tmp_path / "model", "ForSequenceClassification", num_labels=1)
    )
    long = " ".join(["fox"] * 80)
    beside = "" if embeds else " with {}"
    async with serving(folder) as http:
        for path, body, param, first in (
            ("/rerank", {"query": "a", "documents": ["a", long]}, "documents[1]", "query"),
            ("/score", {"text_1": "a", "text_2": ["a", "the", long]}, "text_2[2]", "text_1"),
            ("/score", {"queries": ["a", "the"], "documents": ["a", long]}, "documents[1]",
             "queries[1]"),
            ("/score", {"data_1": "a", "data_2": long}, "data_2", "data_1"),
        ):  # fmt: skip
            answer = await http.post(path, json=body)
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["param"] == param, error
            assert f"{param}{beside.format(first)} has 8" in error["message"], error
        if embeds:
            answer = await http.post("/rerank", json={"query": long, "documents": ["a"]})
            assert answer.json()["error"]["param"] == "query"
            answer = await http.post("/v1/embeddings", json={"input": ["a", [1] * 99]})
            assert answer.json()["error"]["param"] == "input[1]"
