"""llama-server's own endpoints, as its clients read them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from paceline.backends.reference.null import NullBackend
from paceline.engine.local import LocalEngineClient
from paceline.engine.testing import ByteTokenizer, null_client
from paceline.errors import InvalidRequestError
from paceline.http.keys import ApiKey
from paceline.server import ServerConfig, create_app
from paceline.server.apis.llama_cpp.protocol import SAMPLERS, LlamaBody, parse_parts
from paceline.server.app import service_of
from paceline.server.protocol.body import REFUSED, fields_of
from paceline.server.transport.responses import UNSERVED_METHODS
from tests.server.helpers import VOCAB, chat_prompt, connect, events, expected_text
from tests.server.test_api_doc import RULES

PATH = "/completion"
LETTER_A = ord("a")


def ids(text: str) -> list[int]:
    return ByteTokenizer().encode(text)


def told(text: str) -> list[dict[str, Any]]:
    """The events of a stream, which has no [DONE]."""
    lines = text.removesuffix("\n\n").split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def ask(http: httpx.AsyncClient, prompt: Any = "One", **fields: Any) -> Any:
    answer = await http.post(PATH, json={"prompt": prompt, "n_predict": 5} | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def refused(http: httpx.AsyncClient, says: str, path: str = PATH, **fields: Any) -> None:
    answer = await http.post(path, json={"prompt": "One"} | fields)
    error = answer.json()["error"]
    assert set(error) == {"code", "message", "type"} and error["code"] == answer.status_code == 400
    assert error["type"] == "invalid_request_error" and says in error["message"], error


async def test_an_answer_has_what_is_documented(http: httpx.AsyncClient) -> None:
    tokens, text = expected_text(ids("One"), 5)
    answer = await ask(http, seed=7, return_tokens=True)
    assert (answer["content"], answer["tokens"], answer["stop"]) == (text, tokens, True)
    assert (answer["stop_type"], answer["stopping_word"]) == ("limit", "")
    assert (answer["tokens_predicted"], answer["tokens_evaluated"]) == (5, 4)
    assert (answer["prompt"], answer["model"], answer["id_slot"]) == ("<|bos|>One", "tiny", -1)
    assert answer["truncated"] is False
    settings = answer["generation_settings"]
    assert (settings["n_predict"], settings["seed"], settings["n_ctx"]) == (5, 7, 512)
    times = answer["timings"]
    assert times["cache_n"] + times["prompt_n"] == 4 and times["predicted_n"] == 5
    assert times["prompt_ms"] > 0 and times["predicted_ms"] > 0
    assert times["prompt_per_second"] == pytest.approx(1e3 * times["prompt_n"] / times["prompt_ms"])
    assert times["predicted_per_second"] * times["predicted_per_token_ms"] == pytest.approx(1e3)
    assert (await ask(http))["tokens"] == []
    # the other name, and nothing but what was asked for
    fields = {"response_fields": ["content", "generation_settings/n_predict", "nothing/here"]}
    body = {"prompt": "One", "max_tokens": 5} | fields
    some = (await http.post("/completions", json=body)).json()
    assert some == {"content": text, "generation_settings/n_predict": 5}


async def test_a_stream_ends_with_all_but_the_text(http: httpx.AsyncClient) -> None:
    whole = await ask(http, return_tokens=True)
    body = {"prompt": "One", "n_predict": 5, "stream": True, "timings_per_token": True}
    answer = await http.post(PATH, json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *parts, last = told(answer.text)
    assert {part["stop"] for part in parts} == {False}
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
    assert parts[-1]["timings"]["predicted_n"] == 5
    assert (last["stop"], last["content"], last["tokens"]) == (True, "", [])
    assert last["stop_type"] == "limit" and set(whole) <= set(last)
    assert (
        "timings"
        not in told((await http.post(PATH, json=body | {"timings_per_token": None})).text)[0]
    )


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("hé", [ids("hé")]),
        ([104, 105], [[104, 105]]),
        # the special token goes before what begins with a text
        (["h", 105], [[256, 104, 105]]),
        ([104, "i<|im_end|>", 3], [[104, 105, 258, 3]]),
        ({"prompt_string": "h"}, [ids("h")]),
        (["h", "i"], [ids("h"), ids("i")]),
        ([[104], "i", [1, "j"], {"prompt_string": "k"}], [[104], ids("i"), [1, 106], ids("k")]),
    ],
)
async def test_every_shape_of_prompt(
    http: httpx.AsyncClient, prompt: Any, tokens: list[list[int]]
) -> None:
    answer = await ask(http, prompt, cache_prompt=False)
    answers = answer if isinstance(answer, list) else [answer]
    assert isinstance(answer, list) == (len(tokens) > 1)
    for index, (found, prompt_ids) in enumerate(zip(answers, tokens, strict=True)):
        assert (found["index"], found["content"]) == (index, expected_text(prompt_ids, 5)[1])
        assert found["tokens_evaluated"] == len(prompt_ids)


async def test_a_list_of_one_is_a_list_and_completions_are_several(http: httpx.AsyncClient) -> None:
    assert len(await ask(http, ["One"])) == 1
    several = await ask(http, ["One", "Two"], n_cmpl=2)
    assert [answer["index"] for answer in several] == [0, 1, 2, 3]
    texts = [answer["content"] for answer in several]
    assert texts[0] == texts[1] != texts[2] == texts[3]
    body = {"prompt": ["One", "Two"], "n_predict": 3, "stream": True}
    events = told((await http.post(PATH, json=body)).text)
    ends = [event["index"] for event in events if event["stop"]]
    assert sorted(ends) == [0, 1]


async def test_how_an_answer_ends(http: httpx.AsyncClient) -> None:
    def always(token: int) -> list[Any]:
        return [[token, 100]]

    word = await ask(http, stop=["", "aaa"], logit_bias=always(LETTER_A))
    assert (word["content"], word["stop_type"], word["stopping_word"]) == ("", "word", "aaa")
    ended = await ask(http, logit_bias=always(ByteTokenizer.IM_END), return_tokens=True)
    assert (ended["stop_type"], ended["tokens"]) == ("eos", [ByteTokenizer.IM_END])
    further = await ask(http, logit_bias=always(ByteTokenizer.IM_END), ignore_eos=True)
    assert (further["stop_type"], further["tokens_predicted"]) == ("limit", 5)
    # the context ends it, and more than that may be asked for
    for limit in (-1, -2, 10**6):
        full = await ask(http, n_predict=limit, logit_bias=always(LETTER_A))
        assert full["truncated"] and full["tokens_predicted"] == 508
    lines = {"logit_bias": always(ord("\n")), "n_predict": -1}
    assert (await ask(http, **lines))["has_new_line"]


async def test_a_prompt_alone_is_cached_and_another_reads_it(http: httpx.AsyncClient) -> None:
    prompt = "a prompt of several blocks of the cache " * 3
    alone = await ask(http, prompt, n_predict=0, return_tokens=True)
    assert (alone["content"], alone["tokens"], alone["tokens_predicted"]) == ("", [], 0)
    assert alone["stop_type"] == "limit" and alone["timings"]["predicted_n"] == 0
    assert alone["generation_settings"]["n_predict"] == 0 and alone["tokens_cached"] == 0
    again = await ask(http, prompt)
    assert again["tokens_cached"] == again["timings"]["cache_n"] > 0
    apart = await ask(http, prompt, cache_prompt=False)
    assert apart["tokens_cached"] == 0 and apart["content"] == again["content"]


@pytest.mark.parametrize(
    "bias",
    [
        [[LETTER_A, 100]],
        [["a", 100]],
        {"a": 100},
        {str(LETTER_A): 100},
        # all that the first would have chosen is taken out again
        [[ord("b"), 200], [LETTER_A, 100], [ord("b"), False]],
    ],
)
async def test_every_shape_of_bias(http: httpx.AsyncClient, bias: Any) -> None:
    assert (await ask(http, logit_bias=bias))["content"] == "aaaaa"


async def test_probabilities(http: httpx.AsyncClient) -> None:
    answer = await ask(http, n_probs=2, return_tokens=True)
    rows = answer["completion_probabilities"]
    assert [row["id"] for row in rows] == answer["tokens"]
    for row in rows:
        assert row["logprob"] <= 0 and bytes(row["bytes"]) == bytes([row["id"]])
        # the null backend knows one candidate
        assert row["top_logprobs"] == [{k: v for k, v in row.items() if k != "top_logprobs"}]
    body = {"prompt": "One", "n_predict": 5, "n_probs": 2, "stream": True}
    *parts, _ = told((await http.post(PATH, json=body)).text)
    assert [row for part in parts for row in part["completion_probabilities"]] == rows
    assert "completion_probabilities" not in await ask(http)


async def test_a_grammar_is_kept_to(http: httpx.AsyncClient) -> None:
    answer = await ask(http, grammar='root ::= "yes" | "no"')
    assert answer["content"] in ("yes", "no") and "yes" in answer["generation_settings"]["grammar"]
    assert (await ask(http, json_schema={"enum": [12]}))["content"] == "12"
    await refused(http, "mean the same", grammar='root ::= "a"', json_schema={})


async def test_methods_are_done_as_named_or_refused(http: httpx.AsyncClient) -> None:
    hot = {"temperature": 0.8, "top_p": 0.9, "min_p": 0.1, "top_k": 7, "repeat_penalty": 1.1}
    settings = (await ask(http, samplers=SAMPLERS, **hot))["generation_settings"]
    assert all(settings[name] == value for name, value in hot.items())
    # what is left out is not done, by letters too
    bare = (await ask(http, samplers="kt", **hot))["generation_settings"]
    assert (bare["top_k"], bare["temperature"]) == (7, 0.8)
    assert (bare["top_p"], bare["min_p"], bare["repeat_penalty"]) == (1.0, 0.0, 1.0)
    theirs = ["penalties", "dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]
    await refused(http, "top_p before min_p", samplers=theirs, **hot)
    await refused(http, "top_p before temperature", samplers=theirs, **hot | {"min_p": 0})
    # one of them alone, or none at all, has no order
    for same in ({"top_p": 1, "min_p": 0}, {"temperature": 0}, {"temperature": 1, "min_p": 0}):
        await ask(http, samplers=theirs, **hot | same)
    await refused(http, "samplers", samplers=["infill"])
    await refused(http, "twice", samplers=["top_k", "top_k"])


async def test_no_field_is_dropped_in_silence(
    http: httpx.AsyncClient, engine: LocalEngineClient
) -> None:
    async def names(**fields: Any) -> str | None:
        answer = await http.post(PATH, json={"prompt": "One", "n_predict": 1} | fields)
        assert answer.status_code == 200, answer.text
        found: str | None = answer.headers.get("x-paceline-ignored-fields")
        return found

    idle = {"id_slot": 3, "n_keep": 5, "n_cache_reuse": 256, "return_progress": True}
    assert await names(**idle, n_predit=4) == ", ".join([*idle, "n_predit"])
    assert await names(id_slot=-1, n_keep=0, n_discard=0, dry_base=1.75, mirostat_tau=5.0) is None
    # known to the other APIs alone
    assert await names(echo=True) == "echo"
    assert await names(repeat_last_n=64, repeat_penalty=1.1) == "repeat_last_n"
    for whole in ({"repeat_last_n": -1}, {"repeat_last_n": 0}, {"repeat_last_n": 512}):
        assert await names(**whole, repeat_penalty=1.1) is None
    assert await names(repeat_last_n=64) is None
    off = (await ask(http, repeat_last_n=0, repeat_penalty=1.1))["generation_settings"]
    assert off["repeat_penalty"] == 1.0
    undone = [name for name, field in fields_of(LlamaBody).items() if field.status == REFUSED]
    assert len(undone) >= 12
    for name in undone:
        await refused(http, name, **{name: 5})
    assert await names(lora=[{"id": 0, "scale": 0}], mirostat=0, xtc_probability=0.0) is None
    await refused(http, "there is no adapter 0", lora=[{"id": 0, "scale": 0.5}])
    async with connect(create_app(engine, ServerConfig(strict_fields=True))) as strict:
        for fields in ({"id_slot": 3}, {"n_predit": 4}, {"repeat_last_n": 9, "repeat_penalty": 2}):
            await refused(strict, next(iter(fields)), **fields)
        await ask(strict, id_slot=-1)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prompt": None}, "prompt is missing"),
        ({"prompt": []}, "0 prompts"),
        ({"prompt": [1, [2]]}, "must hold token ids"),
        ({"prompt": [VOCAB]}, "holds token id"),
        ({"prompt": 5}, "prompt must be"),
        ({"prompt": {"prompt_string": "x", "multimodal_data": ["eA=="]}}, "text alone"),
        ({"prompt": "x" * 600}, "context length"),
        ({"n_predict": -3}, "n_predict"),
        ({"n_probs": 21}, "n_probs"),
        ({"logit_bias": [[1]]}, "[token, bias]"),
        ({"logit_bias": [[VOCAB, 1]]}, "logit_bias"),
        ({"logit_bias": 5}, "logit_bias"),
        ({"logit_bias": [["a", 1e9]]}, "logit_bias"),
        ({"temperature": -1}, "temperature"),
        ({"grammar": "root ::= ("}, "grammar"),
    ],
)
async def test_faults_are_named(http: httpx.AsyncClient, fields: dict[str, Any], says: str) -> None:
    await refused(http, says, **fields)


async def test_errors_have_its_shape(http: httpx.AsyncClient, engine: LocalEngineClient) -> None:
    unknown = await http.post(PATH, json={"prompt": "x", "model": "else"})
    assert unknown.status_code == 404
    assert unknown.json()["error"]["type"] == "not_found_error"
    for (method, path), why in UNSERVED_METHODS.items():
        answer = await http.request(method, path, json={})
        assert answer.status_code == 405 and why in answer.json()["error"]["message"]
        assert "POST" not in answer.headers["Allow"]
    slot = await http.post("/slots/0", json={})
    assert slot.status_code == 404 and "share the prefix cache" in slot.text
    inputs = await http.options("/v1/responses/input_tokens")
    assert inputs.headers["Allow"] == "POST"
    keys = (ApiKey.of("u", "user", "user-key-1"),)
    async with connect(create_app(engine, ServerConfig(api_keys=keys))) as guarded:
        for path in (PATH, "/infill", "/slots/1"):
            error = (await guarded.post(path, json={})).json()["error"]
            assert (error["code"], error["type"]) == (401, "authentication_error")
        key = {"Authorization": "Bearer user-key-1"}
        answer = await guarded.get("/slots", headers=key)
        assert answer.json()["error"]["type"] == "permission_error"


async def test_what_breaks_a_stream_is_its_last_event(poisoned: httpx.AsyncClient) -> None:
    body = {"prompt": [104, 105], "stream": True, "n_predict": 300}
    bias = {"logit_bias": [[7, 100]]}
    answer = await poisoned.post(PATH, json=body | bias)
    error = told(answer.text)[-1]["error"] if answer.status_code == 200 else answer.json()["error"]
    assert (error["code"], error["type"]) == (500, "server_error")


async def test_a_time_limit_ends_an_answer_with_a_line(anyio_backend: str) -> None:
    client = null_client(NullBackend(vocab_size=VOCAB, max_model_len=4096, step_time=0.002))
    async with connect(create_app(client, ServerConfig())) as http:
        body: dict[str, Any] = {"n_predict": 2000, "t_max_predict_ms": 60}
        line = await ask(http, **body, logit_bias=[[10, 100]])
        assert line["stop_type"] == "limit" and 10 < line["tokens_predicted"] < 1000
        assert set(line["content"]) == {"\n"} and not line["truncated"]
        several = await ask(http, ["One", "Two"], **body, logit_bias=[[10, 100]])
        assert all(1 < answer["tokens_predicted"] < 1000 for answer in several)
        # no line, no limit
        body["n_predict"] = 100
        assert (await ask(http, **body, logit_bias=[[97, 100]]))["tokens_predicted"] == 100
    await client.close()


async def test_slots_are_the_requests_under_way(anyio_backend: str) -> None:
    client = null_client(
        NullBackend(vocab_size=VOCAB, max_model_len=4096, step_time=0.005), max_num_seqs=2
    )
    app = create_app(client, ServerConfig())
    async with connect(app) as http:
        free = (await http.get("/slots")).json()
        assert [slot["id"] for slot in free] == [0, 1]
        assert not any(slot["is_processing"] for slot in free)
        slow = {"n_predict": 1000, "temperature": 0.5, "logit_bias": [[97, 100]]}
        tasks = [asyncio.create_task(ask(http, "One", **slow)) for _ in range(2)]
        async with asyncio.timeout(10.0):
            while True:
                busy = (await http.get("/slots")).json()
                if all(s["is_processing"] and s["next_token"]["n_decoded"] > 3 for s in busy):
                    break
                await asyncio.sleep(0.01)
        for slot in busy:
            assert (slot["n_prompt_tokens"], slot["n_ctx"]) == (4, 4096)
            assert slot["params"]["temperature"] == 0.5 and slot["params"]["n_predict"] == 1000
            assert sum(slot["next_token"][name] for name in ("n_decoded", "n_remain")) == 1000
        full = await http.get("/slots?fail_on_no_slot=1")
        assert full.status_code == 503
        assert full.json()["error"]["type"] == "unavailable_error"
        tasks[0].cancel()
        await asyncio.gather(*tasks[:1], return_exceptions=True)
        async with asyncio.timeout(10.0):
            while len(service_of(app).under_way.entries()) > 1:
                await asyncio.sleep(0.01)
        assert (await http.get("/slots?fail_on_no_slot=1")).status_code == 200
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with asyncio.timeout(10.0):
            while service_of(app).under_way.entries():
                await asyncio.sleep(0.01)
    await client.close()


async def test_properties(http: httpx.AsyncClient) -> None:
    told = (await http.get("/props")).json()
    settings = told["default_generation_settings"]
    assert settings["n_ctx"] == 512 and told["total_slots"] == 256
    assert (settings["params"]["temperature"], settings["params"]["n_predict"]) == (1.0, -1)
    assert told["modalities"] == {"vision": False, "audio": False}
    assert (told["model_alias"], told["model_path"]) == ("tiny", "null-model")
    assert (await http.get("/lora-adapters")).json() == []
    assert (await http.get("/health")).json() == {"status": "ok"}
    (card, *_) = (await http.get("/v1/models")).json()["data"]
    assert card["meta"] == {"n_vocab": VOCAB, "n_ctx": 512}


async def test_properties_tell_the_models_own_defaults(engine: LocalEngineClient) -> None:
    config = ServerConfig(default_sampling={"temperature": 0.2, "top_k": 5})
    async with connect(create_app(engine, config)) as http:
        params = (await http.get("/props")).json()["default_generation_settings"]["params"]
        assert (params["temperature"], params["top_k"]) == (0.2, 5)
        settings = (await ask(http))["generation_settings"]
        assert (settings["temperature"], settings["top_k"]) == (0.2, 5)


async def test_a_template_is_applied_and_not_run(http: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": "hi"}]
    told = (await http.post("/apply-template", json={"messages": messages})).json()
    assert list(told) == ["prompt"]
    assert ByteTokenizer().encode(told["prompt"], add_special_tokens=False) == chat_prompt("hi")
    bad = await http.post("/apply-template", json={})
    assert bad.status_code == 400 and bad.json()["error"]["type"] == "invalid_request_error"


async def test_tokens_of_content(http: httpx.AsyncClient) -> None:
    async def tokens(**body: Any) -> Any:
        answer = await http.post("/tokenize", json=body)
        assert answer.status_code == 200, answer.text
        assert list(answer.json()) == ["tokens"]
        return answer.json()["tokens"]

    assert await tokens(content="hi") == [104, 105]
    assert await tokens(content="hi", add_special=True) == ids("hi")
    assert await tokens(content="hi", parse_special=False) == [104, 105]
    assert await tokens(content=[1, "h", 2]) == [1, 104, 2]
    assert await tokens(content="") == []
    pieces = await tokens(content="há<|im_end|>", with_pieces=True)
    assert [piece["piece"] for piece in pieces] == ["h", [195], [161], "<|im_end|>"]
    assert [piece["id"] for piece in pieces] == [104, 195, 161, 258]
    for body, says in (
        ({"content": "a<|im_end|>", "parse_special": False}, "parse_special"),
        ({"content": 5}, "content"),
        ({"prompt": "x", "with_pieces": True}, "with_pieces goes with content"),
    ):
        answer = await http.post("/tokenize", json=body)
        assert answer.status_code == 400 and says in answer.json()["error"]["message"]
    back = (await http.post("/detokenize", json={"tokens": [104, 105]})).json()
    assert back == {"prompt": "hi", "content": "hi"}


def test_parts_are_of_the_vocabulary() -> None:
    with pytest.raises(InvalidRequestError, match="content"):
        parse_parts([True], "content", RULES)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_the_other_answers_have_its_times_where_asked(
    http: httpx.AsyncClient, path: str
) -> None:
    body: dict[str, Any] = {"max_tokens": 4, "logit_bias": {str(LETTER_A): 100}}
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    body |= chat if "chat" in path else {"prompt": "hi"}
    assert "timings" not in (await http.post(path, json=body)).json()
    asked = body | {"timings_per_token": True}
    whole = (await http.post(path, json=asked)).json()
    times, usage = whole["timings"], whole["usage"]
    assert times["predicted_n"] == usage["completion_tokens"] == 4
    assert times["cache_n"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert times["cache_n"] + times["prompt_n"] == usage["prompt_tokens"]
    assert times["prompt_ms"] > 0 and times["predicted_ms"] > 0
    text = (await http.post(path, json=asked | {"stream": True})).text
    *parts, last = events(text)
    assert not any("timings" in part for part in parts)
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["timings"]["predicted_n"] == 4
    # all choices of a prompt together, and one prompt alone
    several = (await http.post(path, json=asked | {"n": 2})).json()
    assert several["timings"]["predicted_n"] == 8
    if "prompt" in body:
        both = await http.post(path, json=asked | {"prompt": ["a", "b"]})
        assert both.status_code == 400 and "timings_per_token" in both.text
    else:
        generate = {"token_ids": [1], "sampling_params": {"timings_per_token": True}}
        assert (await http.post("/inference/v1/generate", json=generate)).status_code == 400
