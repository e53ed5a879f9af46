"""Adapters while engines end, models are swapped, files change, and callers come and go."""

from __future__ import annotations

import asyncio
import os
import random
import re
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from paceline.backends.native import unavailable_reason
from paceline.cli.flags.settings import ENGINE_PROCESS, EngineSettings
from paceline.engine.local import LocalEngineClient
from paceline.engine.models.client import LoadableClient, Start
from paceline.engine.models.front import FrontClient
from paceline.engine.models.ledger import Account
from paceline.engine.models.model import ModelSpec
from paceline.engine.models.pool import ModelPool
from paceline.engine.models.states import ModelStates
from paceline.engine.process.client import ProcessEngineClient
from paceline.engine.protocol import EngineClient, Tokenizer
from paceline.engine.supervision.supervisor import SupervisedEngineClient
from paceline.engine.testing import ByteTokenizer
from paceline.engine.types import AdapterStatus
from paceline.errors import EngineLostError, InvalidRequestError
from paceline.server.app import SeveralModels, create_app, service_of
from paceline.server.generation.adapters import AdapterNames
from paceline.server.settings.config import AdapterConfig, AdapterModule, ServerConfig
from tests.contract.adapters import NAMES, PROMPT, make_client, say, serving
from tests.server.helpers import connect

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason())),
]


async def test_a_load_whose_engine_ends_meanwhile_is_answered_503(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = AdapterConfig(allow_runtime=True, roots=(folder / "adapters",))
    load = {"lora_name": "x", "lora_path": "a"}
    async with serving(folder, config=config) as (http, client, _):

        async def lost(key: str, path: str, *, pinned: bool) -> AdapterStatus:
            raise EngineLostError("the engine process ended", 1.0)

        with monkeypatch.context() as patched:
            patched.setattr(client, "load_adapter", lost)
            got = await http.post("/v1/load_lora_adapter", json=load)
        assert got.status_code == 503, got.text
        assert [card["id"] for card in (await http.get("/v1/models")).json()["data"]] == ["base"]
        # the name is free again
        assert (await http.post("/v1/load_lora_adapter", json=load)).status_code == 200


async def test_prompts_kept_on_disk_are_found_by_the_same_contents_alone(
    folder: Path, exact: dict[str, list[int]], tmp_path: Path
) -> None:
    """Engines one after the other, the second under other names, with the same folder of blocks."""
    kept = {"kv_store": str(tmp_path / "kv"), "kv_store_bytes": 64 << 20}
    async with serving(folder, **kept) as (http, _, _):
        assert await say(http, "base") == exact["base"]
        assert await say(http, "a") == exact["a"]
    modules = [("x", "a"), ("a", "b")]
    config = AdapterConfig(
        modules=tuple(AdapterModule(n, str(folder / "adapters" / path)) for n, path in modules)
    )
    for name, wanted, found in (("a", "b", 0), ("x", "a", 64), ("base", "base", 64)):
        async with serving(folder, config=config, **kept) as (http, _, _):
            assert await say(http, name) == exact[wanted]
            text = (await http.get("/metrics")).text
            hits = re.findall(r'kv_fetch_tokens_total{[^}]*result="hit"[^}]*} (\S+)', text)
            assert sum(map(float, hits)) == found, name


async def test_adapters_of_one_of_several_models_come_back_with_it(
    folder: Path, exact: dict[str, list[int]], tmp_path: Path
) -> None:
    """Room for one model; what is cached for an adapter is on disk after a swap."""
    given = {"base": ("a", "b"), "other": ()}

    def start(name: str) -> Start:
        async def started(_: Tokenizer | None) -> EngineClient:
            kept = {"kv_store": str(tmp_path / name), "kv_store_bytes": 64 << 20}
            path = "base" if name == "base" else "c"
            return make_client(folder, path, model_name=name, **kept)

        return started

    def config_of(name: str) -> ServerConfig:
        modules = tuple(AdapterModule(n, str(folder / "adapters" / n)) for n in given[name])
        adapters = AdapterConfig(modules=modules)
        return ServerConfig(served_model_names=(name,), adapters=adapters)

    specs = [ModelSpec(name=name, account=Account(weights=10)) for name in given]
    pool = ModelPool(ModelStates(specs, 15), {name: start(name) for name in given})
    await pool.load("base")
    several = SeveralModels(
        pool=pool, configs={name: partial(config_of, name) for name in given}, first="base",
        adapters={"a": "base", "b": "base"},
    )  # fmt: skip
    app = create_app(FrontClient(pool, "base"), config_of("base"), models=several)
    wanted = exact | {"other": exact["c"]}
    async with connect(app) as http:
        cards = {card["id"]: card for card in (await http.get("/v1/models")).json()["data"]}
        assert list(cards) == ["base", "other", "a", "b"]
        assert cards["a"]["parent"] == "base"
        for number, name in enumerate(["a", "other", "b", "a", "other", "base", "a"]):
            assert await say(http, name) == wanted[name], number
        text = (await http.get("/metrics")).text
        loads = re.findall(r'model_loads_total{outcome="ready"} (\S+)', text)
        assert loads == ["5.0"]
        found = re.findall(
            r'kv_fetch_tokens_total{[^}]*model_name="base"[^}]*hit[^}]*} (\S+)', text
        )
        # a's prompt after each swap; b's and the model's were new then
        assert sum(map(float, found)) == 64 * 2, text
        await say(http, "other")
        (card,) = (c for c in (await http.get("/v1/models")).json()["data"] if c["id"] == "a")
        assert (card["parent"], card["status"]) == ("base", "registered")
        scales = (await http.get("/lora-adapters", params={"model": "base"})).json()
        assert [Path(each["path"]).name for each in scales] == ["a", "b"]
    await pool.close()


async def test_one_adapter_that_fails_leaves_the_others_to_the_next_try(
    folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder / "adapters/b", tmp_path / "b")
    away = (tmp_path / "b").rename(tmp_path / "away")
    paths = {"a": folder / "adapters/a", "b": tmp_path / "b"}
    config = AdapterConfig(modules=tuple(AdapterModule(n, str(p)) for n, p in paths.items()))
    client = LoadableClient(make_client(folder, "base"))
    try:
        for _ in range(2):
            with pytest.raises(InvalidRequestError, match="b"):
                await AdapterNames(client, config, (), {}).load_given()
        away.rename(tmp_path / "b")
        await AdapterNames(client, config, (), {}).load_given()
        assert {key: each.status for key, each in client.adapters.items()} == {
            "a#0": "resident", "b#1": "resident",
        }  # fmt: skip
    finally:
        await client.close()


async def test_files_changed_since_a_load_are_refused_after_a_swap(
    folder: Path, tmp_path: Path
) -> None:
    """Also those of an adapter that was registered while its model was not in memory."""
    for name in "ab":
        shutil.copytree(folder / "adapters/a", tmp_path / name)
    client = LoadableClient(make_client(folder, "base"))

    async def settled(engine: LocalEngineClient) -> AdapterStatus:
        client.adopt(engine)
        # messages reach the loop of who loads
        await engine.load_adapter("c", str(folder / "adapters/c"))
        while client.adapters["b"].status not in ("resident", "failed"):
            await asyncio.sleep(0.01)
        return client.adapters["b"]

    try:
        await client.unload()
        await client.load_adapter("a", str(tmp_path / "a"))
        await client.load_adapter("b", str(tmp_path / "b"), pinned=True)
        assert (await settled(make_client(folder, "base"))).status == "resident"
        await client.unload()
        shutil.rmtree(tmp_path / "b")
        shutil.copytree(folder / "adapters/b", tmp_path / "b")
        found = await settled(make_client(folder, "base"))
        assert found.status == "failed"
        assert "has changed since" in found.error
        # without waiting for a request, and before those without a pin
        assert next(iter(client.adapters)) == "b"
    finally:
        await client.close()


@pytest.mark.parametrize("seconds", [2, pytest.param(60, marks=pytest.mark.thorough)])
async def test_callers_come_and_go_over_few_places_and_none_hangs(
    folder: Path, exact: dict[str, list[int]], tmp_path: Path, seconds: float
) -> None:
    """Adapters are loaded, changed and unloaded meanwhile; requests that stay get right answers."""
    for name in ("a", "b"):
        shutil.copytree(folder / "adapters" / name, tmp_path / name)
    draw = random.Random(3)
    config = AdapterConfig(
        modules=tuple(AdapterModule(n, str(folder / "adapters" / n)) for n in NAMES),
        allow_runtime=True, roots=(tmp_path,),
    )  # fmt: skip
    async with serving(folder, config=config, max_cpu_loras=2) as (http, client, _):
        ends, answered = time.monotonic() + seconds, 0

        async def call() -> None:
            nonlocal answered
            while time.monotonic() < ends:
                name = draw.choice(["base", *NAMES, "x"])
                body = {"model": name, "prompt": PROMPT, "max_tokens": draw.randrange(1, 13),
                        "temperature": 0, "return_token_ids": True, "ignore_eos": True}  # fmt: skip
                # some leave early
                limit = draw.choice([0.01, 30, 30, 30])
                try:
                    async with asyncio.timeout(limit):
                        got = await http.post("/v1/completions", json=body)
                except TimeoutError:
                    assert limit < 1, f"a request for {name} hangs"
                    continue
                if name == "x" and got.status_code in (400, 404):
                    # it was unloaded
                    continue
                assert got.status_code == 200, got.text
                ids = got.json()["choices"][0]["token_ids"]
                wanted = [exact[each] for each in (("a", "b") if name == "x" else (name,))]
                assert ids in [each[: len(ids)] for each in wanted], name
                answered += 1

        async def change() -> None:
            while time.monotonic() < ends:
                load = {"lora_name": "x", "lora_path": draw.choice("ab"), "load_inplace": True}
                got = await http.post("/v1/load_lora_adapter", json=load)
                # 507: both places are in use
                assert got.status_code in (200, 507), got.text
                await asyncio.sleep(0.02)
                if draw.random() < 0.3:
                    await http.post("/v1/unload_lora_adapter", json={"lora_name": "x"})

        await asyncio.gather(change(), *(call() for _ in range(6)))
        assert answered > 10 * seconds
        adapters = client._core.adapters
        assert adapters is not None
        for _ in range(1000):
            if not adapters.has_leases:
                break
            await asyncio.sleep(0.01)
        assert not adapters.has_leases
        adapters.books.check_integrity()
        # one after the other they are as they were together
        assert [await say(http, n) for n in exact] == list(exact.values())


@pytest.mark.slow
async def test_a_lost_engine_is_followed_by_one_with_the_same_adapters(
    folder: Path, exact: dict[str, list[int]]
) -> None:
    settings = EngineSettings.of(
        model_name="base", model_path=str(folder / "base"), compute="native", dtype="float32",
        kv_dtype="float32", num_blocks=200, threads=1, speculative_config=None, enable_lora=True,
        lora_bytes=64 << 20,
    )  # fmt: skip

    async def start(_: ProcessEngineClient | None, number: int) -> ProcessEngineClient:
        return await ProcessEngineClient.start(ENGINE_PROCESS, settings.to_json(), ByteTokenizer)

    client = await SupervisedEngineClient.start(start)
    try:
        config = AdapterConfig(roots=(folder / "adapters",), allow_runtime=True)
        app = create_app(client, ServerConfig(adapters=config))
        names = service_of(app).adapters
        assert names is not None
        for name in NAMES:
            await names.load(name, name)
        names.unload("c")
        await names.load("idle", "c")
        await names.load("kept", "c.gguf", pinned=True)
        async with connect(app) as http:
            running = [
                asyncio.create_task(say(http, n, max_tokens=150)) for n in ("a", "b", "base")
            ]
            while client.stats.num_steps < 10:
                await asyncio.sleep(0.001)
            os.kill(client.pid, signal.SIGKILL)
            found = await asyncio.gather(*running)
            assert [ids[:12] for ids in found] == [exact["a"], exact["b"], exact["base"]]
            assert [len(ids) for ids in found] == [150] * 3
            assert client.faults.num_resent == 3
            again = await asyncio.gather(
                *(say(http, n, max_tokens=150) for n in ("a", "b", "base"))
            )
            assert again == found
            # the second engine has loaded what requests named, and knows the others
            status = {key.partition("#")[0]: each.status for key, each in client.adapters.items()}
            assert status == {
                "a": "resident", "b": "resident", "idle": "registered", "kept": "resident",
            }  # fmt: skip
            assert await say(http, "idle") == exact["c"]
    finally:
        await client.close()
