"""Bad input: each fault gets its own 4xx that names the field, and the server lives on."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.server.helpers import chat_body

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
JSON = {"Content-Type": "application/json"}

# field, value, what the message must say
BAD_EVERYWHERE: list[tuple[str, Any, str]] = [
    ("max_tokens", 0, "at least 1, got 0"),
    ("max_tokens", -1, "-1"),
    ("max_tokens", "7", "must be an integer, got '7'"),
    ("max_tokens", 1.5, "must be an integer, got 1.5"),
    ("max_tokens", True, "must be an integer, got True"),
    ("max_tokens", [], "a list of 0"),
    ("max_tokens", 2**31, "2147483648"),
    ("max_tokens", 10**400, "1329 bits"),
    ("max_tokens", 512, "maximum context length is 512"),
    ("n", 0, "in [1, 128], got 0"),
    ("n", -1, "got -1"),
    ("n", 129, "got 129"),
    ("n", 10**18, "1000000000000000000"),
    ("n", "2", "'2'"),
    ("temperature", -0.1, "-0.1"),
    ("temperature", 101, "101"),
    ("temperature", "hot", "'hot'"),
    ("temperature", 10**400, "out of range"),
    ("temperature", {}, "an object of 0"),
    ("top_p", 0, "in (0, 1], got 0"),
    ("top_p", 1.01, "1.01"),
    ("top_k", -2, "-2"),
    ("top_k", 2**63, "9223372036854775808"),
    ("top_k", 1.0, "1.0"),
    ("min_p", -0.5, "-0.5"),
    ("min_p", 2, "2"),
    ("presence_penalty", 2.1, "2.1"),
    ("frequency_penalty", -3, "-3"),
    ("repetition_penalty", 0, "0"),
    ("repetition_penalty", 1e300, "1e+300"),
    ("seed", 2**63, "9223372036854775808"),
    ("seed", "x", "'x'"),
    ("seed", 1.0, "1.0"),
    ("logit_bias", [], "must be an object"),
    ("logit_bias", {"259": 1}, "0 to 258"),
    ("logit_bias", {"-1": 1}, "'-1'"),
    ("logit_bias", {"a": 1}, "'a'"),
    ("logit_bias", {"1": 100.5}, "100.5"),
    ("logit_bias", {"1": "5"}, "'5'"),
    ("logit_bias", {"9" * 5000: 1}, "5000 characters"),
    ("logit_bias", {"\u0661": 1}, "\u0661"),
    ("stop", 5, "got 5"),
    ("stop", ["a", None], "must be a string"),
    ("stop", "", "1 to 1024 characters, got 0"),
    ("stop", ["x"] * 17, "got 17"),
    ("stop", ["x" * 1025], "got 1025"),
    ("stop_token_ids", [259], "259"),
    ("stop_token_ids", [-1], "-1"),
    ("stop_token_ids", [1.5], "1.5"),
    ("stop_token_ids", "1", "must be a list"),
    ("stop_token_ids", list(range(129)), "got 129"),
    ("stop_token_ids", [2**70], "1180591620717411303424"),
    ("min_tokens", -1, "-1"),
    ("min_tokens", 9, "max_tokens=5"),
    ("ignore_eos", "yes", "true or false"),
    ("ignore_eos", 1, "true or false"),
    ("stream", "true", "true or false"),
    ("skip_special_tokens", 0, "true or false"),
    ("include_stop_str_in_output", [], "true or false"),
    ("return_token_ids", "no", "true or false"),
    ("return_tokens_as_token_ids", 2, "true or false"),
    ("add_special_tokens", "x", "true or false"),
    ("stream_options", 5, "must be an object"),
    ("stream_options", {"include_usage": 1}, "stream_options.include_usage must be true or"),
    ("priority", 1.5, "must be an integer"),
    ("priority", 2**63, "9223372036854775808"),
    ("cache_salt", "", "1 to 1024 characters, got 0"),
    ("cache_salt", "x" * 1025, "got 1025"),
    ("cache_salt", 7, "must be a string"),
    ("speculation", 3, "must be an object"),
    ("speculation", {"max_tokens": -1}, "speculation.max_tokens"),
    ("speculation", {"max_tokens": 33}, "speculation.max_tokens"),
    ("request_id", "a b", "printable ASCII"),
    ("request_id", "\u00e9", "printable ASCII"),
    ("request_id", "x" * 129, "129"),
    ("truncate_prompt_tokens", 0, "got 0"),
    ("truncate_prompt_tokens", -2, "-2"),
    ("truncate_prompt_tokens", "3", "'3'"),
    ("truncation_side", "middle", "left or right"),
    ("model", 5, "must be a string"),
    # known elsewhere, not served here
    ("response_format", {"type": "xml"}, "'xml'"),
    ("response_format", "json", "must be an object"),
    ("structured_outputs", ["a"], "must be an object"),
    ("structured_outputs", {"structural_tag": "{}"}, "structural_tag"),
    ("guided_json", {"type": "object"}, "not served yet"),
    ("guided_regex", "(a+)+$", "not served yet"),
    ("guided_choice", ["a"], "not served yet"),
    ("guided_grammar", "root ::= root", "not served yet"),
    ("use_beam_search", True, "not served yet"),
    ("length_penalty", 2.0, "not served yet"),
    ("prompt_logprobs", 21, "in [0, 20], got 21"),
    ("prompt_logprobs", True, "must be an integer"),
    ("prompt_embeds", "AAAA", "not served yet"),
    ("allowed_token_ids", [259], "0 to 258"),
    ("allowed_token_ids", [], "nothing could be sampled"),
    ("bad_words", ["x"] * 129, "128 strings, got 129"),
    ("bad_words", "x", "must be a list"),
    ("kv_transfer_params", {"a": 1}, "not served yet"),
    ("stream_interval", 5, "not served yet"),
    ("spaces_between_special_tokens", False, "not served yet"),
]

BAD_CHAT: list[tuple[str, Any, str]] = [
    ("messages", None, "messages is missing"),
    ("messages", [], "at least 1 message"),
    ("messages", "hi", "must be a list"),
    ("messages", {}, "must be a list"),
    ("messages", ["hi"], "messages[0] must be an object"),
    ("messages", [{}], "messages[0].role"),
    ("messages", [{"role": "robot", "content": "x"}], "'robot'"),
    ("messages", [{"role": ["user"], "content": "x"}], "a list of 1"),
    ("messages", [{"role": "user"}], "messages[0].content"),
    ("messages", [{"role": "user", "content": None}], "messages[0].content"),
    ("messages", [{"role": "user", "content": 5}], "messages[0].content"),
    ("messages", [{"role": "user", "content": [5]}], "messages[0].content[0]"),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}], "content[0].text"),
    ("messages", [{"role": "user", "content": [{"type": "x", "text": "a"}]}], "must be 'text'"),
    ("messages", [{"role": "user", "content": [{"type": {}}]}], "must be 'text'"),
    (
        "messages",
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///x"}}]}],
        "images are not served yet",
    ),
    ("messages", [{"role": "user", "content": [{"type": "input_audio"}]}], "audio are not served"),
    ("messages", [{"role": "user", "content": "x", "name": 5}], "messages[0].name"),
    ("messages", [{"role": "user", "content": "x", "tool_calls": [{}]}], "assistant messages"),
    ("messages", [{"role": "assistant", "tool_calls": [{}]}], "function.name"),
    ("messages", [{"role": "assistant", "tool_calls": "x"}], "must be a list"),
    (
        "messages",
        [
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "f", "arguments": "__import__('os')"}}],
            }
        ],
        "function.arguments",
    ),
    ("logprobs", 5, "true or false"),
    ("top_logprobs", 3, "needs logprobs=true"),
    ("prediction", "text", "must be an object"),
    ("prediction", {"content": "x"}, "prediction.type must be"),
    ("prediction", {"type": "content"}, "prediction.content must be"),
    ("prediction", {"type": "content", "content": [{"type": "image"}]}, "prediction.content[0]"),
    ("prediction", {"type": "content", "content": [{"type": "text", "text": 3}]}, "content[0]"),
    ("top_logprobs", 21, "20 at most"),
    ("max_completion_tokens", 0, "at least 1, got 0"),
    ("max_completion_tokens", "5", "'5'"),
    ("tools", [{"type": "function", "function": {"name": "a b"}}], "'a b'"),
    ("tools", [{"type": "function", "function": {"name": "f"}}] * 2, "its own"),
    ("tools", [{"type": "function", "function": {"name": "f", "parameters": 1}}], "a schema"),
    ("tools", [{"type": "function", "function": {"name": "f"}}] * 129, "128 tools, got 129"),
    ("tools", [{"type": "function", "function": {"name": "f", "description": 5}}], "a string"),
    ("tools", [{"type": "web_search", "function": {"name": "f"}}], "with type 'function'"),
    ("parallel_tool_calls", "no", "true or false"),
    ("tools", [5], "tools[0]"),
    ("tools", "f", "must be a list"),
    ("tool_choice", "auto", "needs tools"),
    ("functions", [{"name": "f"}], "not served yet"),
    ("documents", [{"text": "x"}], "not served yet"),
    ("modalities", ["text", "audio"], "not served yet"),
    ("chat_template", "{{ 1 }}", "not accepted"),
    ("chat_template_kwargs", {"tokenize": True}, "must not set tokenize"),
    ("chat_template_kwargs", [1], "must be an object"),
    ("reasoning_effort", "huge", "'huge'"),
    ("continue_final_message", 1, "true or false"),
]

BAD_TEXT: list[tuple[str, Any, str]] = [
    ("prompt", None, "prompt is missing"),
    ("prompt", [], "an empty list"),
    ("prompt", [[]], "0 tokens"),
    ("prompt", 5, "got 5"),
    ("prompt", {}, "an object of 0"),
    ("prompt", [1, "a"], "must hold token ids, got 'a'"),
    ("prompt", ["a", 1], "prompt[1] is 1"),
    ("prompt", ["a", [1]], "prompt[1] is a list of 1"),
    ("prompt", [[1], ["a"]], "got 'a'"),
    ("prompt", [[1], [[2]]], "a list of 1"),
    ("prompt", [-1], "-1"),
    ("prompt", [259], "0 to 258"),
    ("prompt", [2**31], "2147483648"),
    ("prompt", [1.0], "1.0"),
    ("prompt", [True], "True"),
    ("prompt", [None], "None"),
    ("prompt", ["x"] * 1025, "1025 prompts; at most 1024"),
    ("prompt", [1] * 512, "the prompt has 512 tokens"),
    ("prompt", "x" * 508, "514 tokens (509 in the prompt, 5 in the output)"),
    ("logprobs", 21, "20 at most"),
    ("logprobs", -1, "-1"),
    ("logprobs", True, "must be an integer"),
    ("echo", "x", "true or false"),
    ("suffix", "end", "not served yet"),
    ("best_of", 2, "not served yet"),
]

ROWS = (
    [(CHAT, chat_body(max_tokens=5) | {name: bad}, name, say) for name, bad, say in BAD_EVERYWHERE]
    + [(CHAT, chat_body(max_tokens=5) | {name: bad}, name, say) for name, bad, say in BAD_CHAT]
    + [
        (TEXT, {"prompt": "x", "max_tokens": 5} | {name: bad}, name, say)
        for name, bad, say in BAD_TEXT
    ]
)


@pytest.mark.parametrize(
    ("path", "body", "param", "says"), ROWS, ids=[f"{row[2]}-{i}" for i, row in enumerate(ROWS)]
)
async def test_bad_field(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], param: str, says: str
) -> None:
    for stream in (True,) if param == "stream_options" else (False, True):
        response = await http.post(path, json={"stream": stream} | body)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, 400), error
        assert error["type"] == "BadRequestError"
        # a prompt too long for the output asked for can be mended on either side
        assert error["param"] == ("max_tokens" if "in the output" in says else param), error
        assert says in error["message"], error["message"]
        assert len(error["message"]) < 500
    alive = await http.post(TEXT, json={"prompt": "ok", "max_tokens": 1})
    assert alive.status_code == 200


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "empty"),
        (b"{", "not valid JSON"),
        (b"[]", "must be a JSON object, got list"),
        (b'"x"', "must be a JSON object, got str"),
        (b"null", "must be a JSON object, got NoneType"),
        (b'{"temperature": NaN}', "not valid JSON"),
        (b'{"temperature": Infinity}', "not valid JSON"),
        (b'{"temperature": -Infinity}', "not valid JSON"),
        (b'{"temperature": 1e999}', "out of range"),
        (b'{"prompt": "\\ud800"}', "not valid JSON"),
        (b'{"prompt": "\xff"}', "not valid JSON"),
        (b'{"prompt": "x"} {}', "not valid JSON"),
        (b'{"prompt": ' + b"[" * 100 + b"]" * 100 + b"}", "deeper than 64"),
        (b"[" * 200_000, "deeper than 64"),
        (b'{"a":' * 50_000, "deeper than 64"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize"])
async def test_bad_json(http: httpx.AsyncClient, path: str, body: bytes, says: str) -> None:
    response = await http.post(path, content=body, headers=JSON)
    assert response.status_code == 400
    assert says in response.json()["error"]["message"]


async def test_stream_options_need_a_stream(http: httpx.AsyncClient) -> None:
    body = chat_body(stream_options={"include_usage": True})
    error = (await http.post(CHAT, json=body)).json()["error"]
    assert (error["code"], error["param"]) == (400, "stream_options")
    assert "needs stream=true" in error["message"]


async def test_wrong_content_type(http: httpx.AsyncClient) -> None:
    response = await http.post(
        TEXT, content=b'{"prompt": "x"}', headers={"Content-Type": "text/plain"}
    )
    assert response.status_code == 400
    assert "application/json" in response.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "application/vnd.api+json"])
async def test_json_content_types(http: httpx.AsyncClient, kind: str) -> None:
    response = await http.post(
        TEXT, content=b'{"prompt": "x", "max_tokens": 1}', headers={"Content-Type": kind}
    )
    assert response.status_code == 200


async def test_a_byte_order_mark_is_passed_over(http: httpx.AsyncClient) -> None:
    kind = {"Content-Type": "application/json"}
    asked = b'\xef\xbb\xbf{"prompt": "x", "max_tokens": 1}'
    assert (await http.post(TEXT, content=asked, headers=kind)).status_code == 200
    for bad in (b"\xef\xbb\xbf", b"\xef\xbb\xbf\xef\xbb\xbf{}", b"\xff\xfe{\0}\0"):
        assert (await http.post(TEXT, content=bad, headers=kind)).status_code == 400, bad


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("name", ["nobody", "", "../../etc/passwd", "x" * 5000, "a\nb"])
async def test_unknown_model(http: httpx.AsyncClient, path: str, name: str) -> None:
    response = await http.post(path, json={**chat_body(), "prompt": "x", "model": name})
    error = response.json()["error"]
    assert response.status_code == 404
    assert (error["type"], error["param"], error["code"]) == ("NotFoundError", "model", 404)
    assert "tiny" in error["message"]
    assert len(error["message"]) < 300


async def test_body_too_large(http: httpx.AsyncClient) -> None:
    response = await http.post(TEXT, content=b" " * (8 * 2**20 + 1), headers=JSON)
    assert response.status_code == 413
    assert str(8 * 2**20) in response.json()["error"]["message"]


async def test_body_that_grows_too_large(http: httpx.AsyncClient) -> None:
    async def drip() -> Any:
        for _ in range(9 * 16):
            yield b" " * 2**16

    response = await http.post(TEXT, content=drip(), headers=JSON)
    assert response.status_code == 413


async def test_long_messages_of_errors_are_cut(http: httpx.AsyncClient) -> None:
    response = await http.post(TEXT, json={"prompt": "x", "seed": "y" * 1_000_000})
    assert response.status_code == 400
    assert len(response.content) < 500
    assert "1000000 characters" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/v1/nothing", 404, "NotFoundError"),
        ("GET", CHAT, 405, "BadRequestError"),
        ("DELETE", "/v1/models", 405, "BadRequestError"),
        ("GET", "/v1/models/nobody", 404, "NotFoundError"),
        ("GET", "/%2e%2e/%2e%2e/etc/passwd", 404, "NotFoundError"),
    ],
)
async def test_errors_of_the_router(
    http: httpx.AsyncClient, method: str, path: str, status: int, kind: str
) -> None:
    response = await http.request(method, path)
    assert response.status_code == status
    error = response.json()["error"]
    assert (error["type"], error["code"]) == (kind, status)


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/tokenize", {}, "neither"),
        ("/tokenize", {"prompt": "x", "messages": []}, "both"),
        ("/tokenize", {"prompt": 5}, "must be a string"),
        ("/tokenize", {"messages": []}, "at least 1 message"),
        ("/detokenize", {}, "tokens is missing"),
        ("/detokenize", {"tokens": [300]}, "0 to 258"),
        ("/detokenize", {"tokens": "x"}, "must be a list"),
    ],
)
async def test_tokenizer_endpoints(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], says: str
) -> None:
    response = await http.post(path, json=body)
    assert response.status_code == 400
    assert says in response.json()["error"]["message"]


async def test_many_unknown_fields_are_ignored(http: httpx.AsyncClient) -> None:
    body = {"prompt": "x", "max_tokens": 1} | {f"field_{i}": {"x": [i]} for i in range(2000)}
    response = await http.post(TEXT, content=json.dumps(body), headers=JSON)
    assert response.status_code == 200


async def test_a_path_cannot_write_to_a_terminal(
    http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "paceline.server"):
        answer = await http.get("/v1/models/%1b[2Jx%0d%c2%9b1m")
    assert answer.status_code == 404
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("refused")]
    assert line.isprintable() and line.isascii() and "path=/v1/models/\\x1b[2Jx" in line
