"""llama-server's endpoint that fills in the middle of a text."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from paceline.backends.reference.null import NullBackend
from paceline.engine.testing import ByteTokenizer, null_client
from paceline.server import ServerConfig, create_app
from paceline.server.apis.llama_cpp.info import fim_tokens
from tests.server.helpers import connect


class FimTokenizer(ByteTokenizer):
    """With the tokens of Qwen2.5-Coder."""

    SPECIAL = ByteTokenizer.SPECIAL | {
        259: "<|fim_prefix|>",
        260: "<|fim_suffix|>",
        261: "<|fim_middle|>",
        262: "<|repo_name|>",
        263: "<|file_sep|>",
    }

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        for token_id, special in self.SPECIAL.items():
            if text == special:
                return [token_id]
        return super().encode(text, add_special_tokens=add_special_tokens)


@pytest.fixture
async def coder(anyio_backend: str) -> AsyncIterator[httpx.AsyncClient]:
    tokenizer = FimTokenizer()
    backend = NullBackend(vocab_size=tokenizer.vocab_size, max_model_len=512)
    client = null_client(backend, tokenizer=tokenizer)
    async with connect(create_app(client, ServerConfig())) as http:
        yield http
    await client.close()


async def test_the_middle_is_filled_in(coder: httpx.AsyncClient) -> None:
    body = {"input_prefix": "def f", "input_suffix": "return", "n_predict": 3}
    body |= {"logit_bias": [["a", 100]]}
    answer = (await coder.post("/infill", json=body)).json()
    prompt = "<|bos|><|fim_prefix|>def f<|fim_suffix|>return<|fim_middle|>"
    assert answer["prompt"] == prompt and answer["tokens_predicted"] == 3
    files = [{"filename": "a.py", "text": "import b"}, {"text": "x"}]
    more = body | {"input_extra": files, "prompt": "go"}
    shown = (await coder.post("/infill", json=more)).json()["prompt"]
    assert shown == (
        "<|bos|><|repo_name|>repository\n<|file_sep|>a.py\nimport b\n<|file_sep|>tmp\nx\n"
        "<|file_sep|>filename\n" + prompt.removeprefix("<|bos|>") + "go"
    )
    # where it writes such a token it is done, unless it is to go on
    end = body | {"logit_bias": [[263, 100]]}
    assert (await coder.post("/infill", json=end)).json()["stop_type"] == "eos"
    further = (await coder.post("/infill", json=end | {"ignore_eos": True})).json()
    assert further["stop_type"] == "limit"
    for fault in ({"input_suffix": None}, {"input_prefix": 5}, {"input_extra": [5]}):
        answer = (await coder.post("/infill", json=body | fault)).json()
        assert next(iter(fault)) in answer["error"]["message"]


async def test_a_model_without_such_tokens_says_so(http: httpx.AsyncClient) -> None:
    answer = await http.post("/infill", json={"input_prefix": "a", "input_suffix": "b"})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert "no tokens for filling in" in error["message"]
    assert fim_tokens(ByteTokenizer()) is None
