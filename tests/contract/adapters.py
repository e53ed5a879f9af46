"""A tiny model with adapters as files, merged models next to it, and servers over them."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from safetensors.numpy import load_file, save_file

from paceline.checkpoints.open import open_checkpoint
from paceline.cli.flags.settings import EngineSettings
from paceline.cli.wiring import build_core
from paceline.engine.local import LocalEngineClient
from paceline.engine.testing import ByteTokenizer
from paceline.server.app import create_app, service_of
from paceline.server.settings.config import AdapterConfig, AdapterModule, ServerConfig
from tests.backends.torch.models import save_model
from tests.checkpoints.adapters import (
    Pairs,
    random_pairs,
    write_gguf_adapter,
    write_peft,
)
from tests.server.helpers import connect

VOCAB = ByteTokenizer().vocab_size
NAMES = ("a", "b", "c")
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
PROMPT = "a prompt of several whole blocks, the same for every model and every adapter"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model at ``base``, adapters a, b and c at ``adapters/NAME``, each merged at ``NAME``."""
    folder = tmp_path_factory.mktemp("adapters")
    save_model(folder / "base", "llama", vocab_size=VOCAB, tie_word_embeddings=True)
    config = open_checkpoint(folder / "base").config
    weights = load_file(folder / "base/model.safetensors")
    for seed, name in enumerate(NAMES):
        pairs: Pairs = random_pairs(config, rank=4, seed=seed)
        write_peft(folder / "adapters" / name, pairs, lora_alpha=2)
        merged = dict(weights)
        for (layer, module), (a, b) in pairs.items():
            weight = f"model.layers.{layer}.{module}.weight"
            merged[weight] = weights[weight] + 0.5 * (b @ a)
        shutil.copytree(folder / "base", folder / name)
        save_file(merged, folder / name / "model.safetensors", {"format": "pt"})
    write_gguf_adapter(folder / "adapters/c.gguf", config, pairs, alpha=2)
    return folder


def make_client(folder: Path, model: str, **settings: Any) -> LocalEngineClient:
    values: dict[str, Any] = {
        "model_name": "base", "model_path": str(folder / model), "compute": "native",
        "dtype": "float32", "kv_dtype": "float32", "num_blocks": 200, "threads": 1,
        "speculative_config": None, "enable_lora": model == "base", "lora_bytes": 64 << 20,
    }  # fmt: skip
    core, info = build_core(EngineSettings.of(**(values | settings)))
    return LocalEngineClient(core, info, ByteTokenizer())


@asynccontextmanager
async def serving(
    folder: Path, model: str = "base", config: AdapterConfig | None = None, **settings: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, LocalEngineClient, FastAPI]]:
    client = make_client(folder, model, **settings)
    try:
        config = config or AdapterConfig(
            modules=tuple(AdapterModule(n, str(folder / "adapters" / n)) for n in NAMES),
            allow_runtime=True, roots=(folder / "adapters",),
        )  # fmt: skip
        app = create_app(client, ServerConfig(adapters=config))
        if (names := service_of(app).adapters) is not None:
            await names.load_given()
        async with connect(app) as http:
            yield http, client, app
    finally:
        await client.close()


async def say(http: httpx.AsyncClient, model: str, prompt: str = PROMPT, **more: Any) -> list[int]:
    """Greedy ids of one model."""
    body = {"model": model, "prompt": prompt, "max_tokens": 12, "temperature": 0,
            "return_token_ids": True, "ignore_eos": True}  # fmt: skip
    answer = (await http.post("/v1/completions", json=body | more)).json()
    assert answer.get("model") == model, answer
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


@pytest.fixture(scope="session")
def exact(folder: Path) -> Iterator[dict[str, list[int]]]:
    """Ids of the base and of each merged model, served alone."""

    async def ids(model: str) -> list[int]:
        async with serving(folder, model) as (http, _, _):
            return await say(http, "base")

    found = {name: asyncio.run(ids(name)) for name in ("base", *NAMES)}
    assert len({tuple(each) for each in found.values()}) == 4
    yield found
