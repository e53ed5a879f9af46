"""Adapters from a request's name to the kernels: a tiny model, a server over it, adapters as files.

Answers are compared with those of a model that has the adapter merged into its weights, or that
serves nothing else.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import shutil
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.backends.native import unavailable_reason
from paceline.checkpoints.open import open_checkpoint
from paceline.cli import wiring
from paceline.core.memory import kv_cache
from paceline.core.memory.kv_cache import root_hash
from paceline.engine.fanout import request_of
from paceline.engine.testing import ByteTokenizer
from paceline.engine.types import GenerationRequest
from paceline.errors import ConfigError
from paceline.server.settings.config import AdapterConfig
from tests.checkpoints.adapters import (
    random_pairs,
    tensors_of,
    write_peft,
)
from tests.contract.adapters import NAMES, NGRAM, PROMPT, make_client, say, serving

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason())),
]


@pytest.mark.parametrize("compute", ["native", "torch"])
async def test_one_batch_serves_the_base_and_every_adapter(
    folder: Path, exact: dict[str, list[int]], compute: str
) -> None:
    more = {} if compute == "native" else {"kv_dtype": "auto"}
    async with serving(folder, compute=compute, **more) as (http, _, _):
        names = ["base", *NAMES, "b", "base", "a"]
        found = await asyncio.gather(*(say(http, name) for name in names))
        assert found == [exact[name] for name in names]
        # prefixes of one are no prefixes of another, also one after the other and warm
        for name in (*NAMES, "base", *reversed(NAMES)):
            assert await say(http, name) == exact[name]


async def test_a_step_in_which_no_row_has_an_adapter_is_one_of_a_model_without_any(
    folder: Path, exact: dict[str, list[int]]
) -> None:
    async with serving(folder) as (http, client, _):
        model = client._core._backend._runner.model  # type: ignore[attr-defined]
        forward, named = model.forward, []

        def note(ids: Any, positions: Any, batch: Any, *rest: Any, **more: Any) -> Any:
            named.append(batch.adapters)
            return forward(ids, positions, batch, *rest, **more)

        model.forward = note
        assert await say(http, "base") == exact["base"]
        assert len(named) >= 12 and all(each is None for each in named)
        assert await say(http, "a") == exact["a"]
        assert named[-1] is not None


async def test_every_api_answers_under_the_adapters_name(folder: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    async with serving(folder) as (http, client, _):
        computed: list[str | None] = []
        generate = client.generate

        def note(request: GenerationRequest, sink: Any = None) -> Any:
            computed.append(request.adapter)
            return generate(request, sink)

        client.generate = note  # type: ignore[method-assign]
        for path, body in {
            "/v1/chat/completions": {"messages": chat},
            "/v1/completions": {"prompt": "hi"},
            "/v1/responses": {"input": "hi", "max_output_tokens": 16},
            "/v1/messages": {"messages": chat},
            "/inference/v1/generate": {"token_ids": [1, 2]},
            "/api/chat": {"messages": chat, "stream": False},
            "/completion": {"prompt": "hi", "n_predict": 2},
        }.items():
            answers = []
            for model in ("a", "base"):
                more = (
                    {} if "max_output_tokens" in body or "n_predict" in body else {"max_tokens": 2}
                )
                if path == "/inference/v1/generate":
                    more = {"sampling_params": more}
                elif path == "/api/chat":
                    more = {"options": {"num_predict": 2}}
                got = await http.post(path, json={"model": model, **body, **more})
                assert got.status_code == 200, (path, got.text)
                told = got.headers.get("x-paceline-adapter")
                assert told == ("resident" if model == "a" else None), path
                answers.append(got.json())
            assert [answer["model"] for answer in answers] == ["a", "base"], path
            # a name alone could be that of an answer without the adapter
            assert computed == ["a#0", None], path
            computed.clear()
        events = await http.post(
            "/v1/chat/completions",
            json={"model": "b", "messages": chat, "max_tokens": 2, "stream": True},
        )
        assert events.headers["x-paceline-adapter"] == "resident"
        assert events.text.count('"model":"b"') >= 2
        for path, body in {
            "/v1/chat/completions": {"messages": chat, "max_tokens": 2},
            "/v1/completions": {"prompt": "hi", "max_tokens": 2},
            "/v1/responses": {"input": "hi", "max_output_tokens": 16},
            "/v1/messages": {"messages": chat, "max_tokens": 2},
            "/api/chat": {"messages": chat, "options": {"num_predict": 2}},
            "/api/generate": {"prompt": "hi", "options": {"num_predict": 2}},
            "/completion": {"prompt": "hi", "n_predict": 2},
        }.items():
            text = (await http.post(path, json={"model": "b", "stream": True, **body})).text
            named = set(re.findall(r'"model":"([^"]*)"', text.replace('": "', '":"')))
            assert named == {"b"}, (path, text)
        cards = {card["id"]: card for card in (await http.get("/v1/models")).json()["data"]}
        assert list(cards) == ["base", *NAMES]
        assert cards["a"]["parent"] == "base"
        assert cards["a"]["status"] == "resident"
        # what was calibrated with one does not hold for another
        assert len({card["digest"] for card in cards.values()}) == 4
        got = await http.post("/v1/completions", json={"model": "d", "prompt": "hi"})
        assert got.status_code == 404
        assert "served: base, a, b, c" in got.text


async def test_few_places_serve_many_adapters(folder: Path, exact: dict[str, list[int]]) -> None:
    """One place in memory: others are loaded when a request names them, and none in use goes."""
    async with serving(folder, max_cpu_loras=1) as (http, client, _):
        assert [news.status for news in client.adapters.values()].count("resident") == 1
        names = list(itertools.islice(itertools.cycle(NAMES), 9))
        assert await asyncio.gather(*(say(http, n) for n in names)) == [exact[n] for n in names]
        books = client._core.adapters.books  # type: ignore[union-attr]
        assert books.num_evicted >= 4
        books.check_integrity()
        idle = 'running_lora_adapters="",waiting_lora_adapters=""'
        for _ in range(6000):
            # an idle engine tells once a second
            if idle in (text := (await http.get("/metrics")).text):
                break
            await asyncio.sleep(0.01)
        samples = {f.name: f.samples for f in text_string_to_metric_families(text)}
        (info,) = samples["vllm:lora_requests_info"]
        assert info.labels["running_lora_adapters"] == info.labels["waiting_lora_adapters"] == ""
        count = {s.name: s.value for each in samples.values() for s in each}
        assert count["paceline:adapter_loads_total"] >= 5
        assert count["paceline:adapter_evictions_total"] == books.num_evicted
        assert count["paceline:adapters_resident"] == 1
        assert count["paceline:adapter_wait_seconds_total"] > 0
        # the wait is part of what a request is told, and of the time to its first token
        body = {"model": "a", "prompt": PROMPT, "max_tokens": 2, "explain": True}
        await say(http, "b")
        got = await http.post("/v1/completions", json=body)
        assert got.headers["x-paceline-adapter"] == "loaded"
        (told,) = got.json()["usage"]["timeline"]
        assert told["waited_ms"]["adapter"] > 0


async def test_a_cap_on_adapters_of_one_step_delays_and_changes_nothing(
    folder: Path, exact: dict[str, list[int]]
) -> None:
    async with serving(folder, max_adapters=1) as (http, client, _):
        most = 0

        def note(plan: Any) -> None:
            nonlocal most
            running = client._core.scheduler.requests
            keys = {r.asked.adapter.key for r in running if r.asked.adapter and r.block_ids}
            most = max(most, len(keys))

        client._core.on_plan = note
        names = ["a", "b", "base", "c", "a"]
        assert await asyncio.gather(*(say(http, n) for n in names)) == [exact[n] for n in names]
        assert most == 1


async def test_a_grammar_holds_what_every_adapter_says(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks are of the request's grammar and logits of its adapter, in one batch."""
    # grammars are compiled for the model's own tokenizer, and this model has none
    monkeypatch.setattr(wiring, "build_tokenizer", lambda _: ByteTokenizer())
    fields: dict[str, Any] = {"structured_outputs": {"regex": "[a-z]{12}"}, "ignore_eos": False}
    wanted = {}
    for name in ("base", *NAMES):
        async with serving(folder, name) as (http, _, _):
            wanted[name] = await say(http, "base", **fields), await say(http, "base")
    held = [each for each, _ in wanted.values()]
    assert len({tuple(ids) for ids in held}) == 4
    assert all(re.fullmatch("[a-z]{12}", ByteTokenizer().decode(ids)) for ids in held)
    async with serving(folder) as (http, _, _):
        for _ in range(2):
            # the second time the grammar is compiled and prefixes are warm
            asked = [(name, more) for name in wanted for more in (fields, {})]
            found = await asyncio.gather(*(say(http, name, **more) for name, more in asked))
            assert found == [ids for each in wanted.values() for ids in each]


async def test_a_name_that_is_loaded_again_has_the_new_contents(
    folder: Path, exact: dict[str, list[int]], tmp_path: Path
) -> None:
    shutil.copytree(folder / "adapters/a", tmp_path / "x")
    config = AdapterConfig(allow_runtime=True, roots=(tmp_path,))
    load = {"lora_name": "x", "lora_path": "x"}
    async with serving(folder, config=config) as (http, client, _):
        got = await http.post("/v1/load_lora_adapter", json=load)
        assert got.text == "Success: LoRA adapter 'x' added successfully."
        assert await say(http, "x") == exact["a"]
        shutil.rmtree(tmp_path / "x")
        shutil.copytree(folder / "adapters/b", tmp_path / "x")
        again = await http.post("/v1/load_lora_adapter", json=load)
        assert again.status_code == 400
        assert "load_inplace" in again.text
        # a request that is under way ends on what it began with
        running = asyncio.create_task(say(http, "x", max_tokens=100))
        while not any(r.first_token_time for r in client._core.scheduler.requests):
            await asyncio.sleep(0.001)
        got = await http.post("/v1/load_lora_adapter", json=load | {"load_inplace": True})
        assert got.status_code == 200
        assert await say(http, "x") == exact["b"]
        assert (await running)[:12] == exact["a"]
        assert [await say(http, "base"), await say(http, "x")] == [exact["base"], exact["b"]]
        before = client._core.adapters.books.num_bytes  # type: ignore[union-attr]
        # a request that is under way keeps what it uses
        running = asyncio.create_task(say(http, "x", max_tokens=100))
        while not any(r.first_token_time for r in client._core.scheduler.requests):
            await asyncio.sleep(0.001)
        got = await http.post("/v1/unload_lora_adapter", json={"lora_name": "x"})
        assert got.text == "Success: LoRA adapter 'x' removed successfully."
        assert (
            await http.post("/v1/completions", json={"model": "x", "prompt": "a"})
        ).status_code == 404
        assert client._core.adapters.books.num_bytes == before  # type: ignore[union-attr]
        assert (await running)[:12] == exact["b"]
        for _ in range(200):
            if not client._core.adapters.books.num_bytes:  # type: ignore[union-attr]
                break
            await asyncio.sleep(0.01)
        assert before > 0 == client._core.adapters.books.num_bytes  # type: ignore[union-attr]


async def test_bad_loads_say_what_is_wrong(folder: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(folder / "adapters/a", root / "a")
    shutil.copytree(folder / "adapters/b", tmp_path / "outside")
    (root / "link").symlink_to(tmp_path / "outside")
    (root / "linked").mkdir()
    for file in (tmp_path / "outside").iterdir():
        (root / "linked" / file.name).symlink_to(file)
    config = open_checkpoint(folder / "base").config
    write_peft(root / "dora", random_pairs(config), use_dora=True)
    pairs = random_pairs(config)
    head = {"base_model.model.score.modules_to_save.weight": np.zeros((4, 4), np.float32)}
    write_peft(root / "head", pairs, tensors_of(pairs) | head, modules_to_save=["score"])
    write_peft(root / "list", pairs, modules_to_save=["score"])
    write_peft(root / "large", random_pairs(config, rank=2048))
    adapters = AdapterConfig(allow_runtime=True, roots=(root,))
    async with serving(folder, config=adapters, lora_bytes=4 << 20) as (http, _, _):

        async def load(name: str, path: str) -> httpx.Response:
            return await http.post(
                "/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path}
            )

        outside = str(tmp_path / "outside")
        for path in ("../outside", outside, "/etc", "link", "linked", "a/../../outside"):
            got = await load("x", path)
            assert got.status_code == 403, (path, got.text)
        assert (await load("x", "nothing")).status_code == 404
        got = await load("x", "dora")
        assert got.status_code == 400
        assert "use_dora=True is not served" in got.text
        got = await load("x", "head")
        assert got.status_code == 400
        assert "score.modules_to_save.weight" in got.text
        # without tensors the list is harmless
        assert (await load("list", "list")).status_code == 200
        got = await http.post("/v1/unload_lora_adapter", json={"lora_name": "list"})
        assert got.status_code == 200
        got = await load("base", "a")
        assert got.status_code == 400
        got = await load("x", "large")
        assert got.status_code == 507, got.text
        assert "of 4096 KiB for adapters 0 KiB are in use" in got.text
        twice = await asyncio.gather(load("x", "a"), load("x", "a"))
        assert [each.status_code for each in twice] == [200, 200]
        assert (
            await http.post("/v1/unload_lora_adapter", json={"lora_name": "y"})
        ).status_code == 404
        assert [card["id"] for card in (await http.get("/v1/models")).json()["data"]] == [
            "base",
            "x",
        ]
        # whatever was refused, the engine lives
        assert len(await say(http, "x")) == len(await say(http, "base")) == 12
    async with serving(folder, config=AdapterConfig()) as (http, _, _):
        got = await http.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "a"})
        assert got.status_code == 403


async def test_a_prefix_that_is_found_by_name_would_be_noticed(
    folder: Path, exact: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests of warm prefixes fail where hashes do not hold the adapter's contents."""
    monkeypatch.setattr(kv_cache, "root_hash", lambda salt, _=None: root_hash(salt))
    async with serving(folder) as (http, _, _):
        assert await say(http, "base") == exact["base"]
        assert await say(http, "a") != exact["a"]


async def test_unknown_names_are_looked_for_in_one_folder(
    folder: Path, exact: dict[str, list[int]]
) -> None:
    config = AdapterConfig(resolve=folder / "adapters")
    async with serving(folder, config=config) as (http, _, _):
        found = await asyncio.gather(*(say(http, name) for name in ("a", "c.gguf", "a")))
        assert found == [exact["a"], exact["c"], exact["a"]]
        for name in ("../base", "nothing", "", "..", "x\0"):
            got = await http.post("/v1/completions", json={"model": name, "prompt": "a"})
            assert got.status_code == 404, name


async def test_adapters_in_bytes_are_served_next_to_weights_of_as_few_bits(folder: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(
            ConfigError, match=f"int8 loses more precision than weights in {dtype} do"
        ):
            make_client(folder, "base", dtype=dtype, lora_dtype="int8")
    with pytest.raises(ConfigError, match="int8 needs --compute native"):
        make_client(folder, "base", compute="torch", kv_dtype="auto", lora_dtype="int8")
    sizes = {}
    for lora_dtype in ("bfloat16", "int8"):
        async with serving(folder, dtype="int8", lora_dtype=lora_dtype) as (http, client, _):
            found = [await say(http, name) for name in ("base", *NAMES)]
            # one batch is as each alone, also with values in bytes
            assert await asyncio.gather(*(say(http, n) for n in ("base", *NAMES))) == found
            assert len({tuple(ids) for ids in found}) == 4
            sizes[lora_dtype] = client.adapters["a#0"].num_bytes
    assert sizes["int8"] < sizes["bfloat16"]


async def test_llama_servers_list_chooses_adapters_by_place(
    folder: Path, exact: dict[str, list[int]]
) -> None:
    async with serving(folder) as (http, _, _):

        async def complete(**more: Any) -> list[int]:
            body = {"prompt": PROMPT, "n_predict": 12, "temperature": 0, "return_tokens": True,
                    "ignore_eos": True}  # fmt: skip
            got = await http.post("/completion", json=body | more)
            assert got.status_code == 200, got.text
            ids: list[int] = got.json()["tokens"]
            return ids

        listed = (await http.get("/lora-adapters")).json()
        assert [(each["id"], each["scale"]) for each in listed] == [(0, 0.0), (1, 0.0), (2, 0.0)]
        assert await complete() == exact["base"]
        assert await complete(lora=[{"id": 1, "scale": 1.0}]) == exact["b"]
        half = await complete(lora=[{"id": 1, "scale": 0.5}])
        assert half not in (exact["b"], exact["base"])
        got = await http.post("/lora-adapters", json=[{"id": 2, "scale": 1.0}])
        assert got.json() == {"success": True}
        assert (await http.get("/lora-adapters")).json()[2]["scale"] == 1.0
        assert await complete() == exact["c"]
        assert await complete(lora=[]) == exact["base"]
        assert await complete(lora=[{"id": 2, "scale": 0}]) == exact["base"]
        assert await complete(model="a") == exact["a"]
        # other APIs name adapters as models, and are not changed by the list
        assert await say(http, "base") == exact["base"]
        for scales, said in (
            ([{"id": 0, "scale": 1}, {"id": 1, "scale": 1}], "several adapters at once"),
            ([{"id": 3, "scale": 1}], "there is no adapter 3"),
            ([{"id": "a"}], "id and scale"),
            ([{"id": 0, "scale": -1e39}], "too large for float32"),
        ):
            for path, body in (
                ("/completion", {"prompt": "a", "lora": scales}),
                ("/lora-adapters", scales),
            ):
                got = await http.post(path, json=body)
                assert got.status_code == 400, path
                assert said in got.text


@pytest.mark.parametrize(
    ("settings", "counter"),
    [
        ({"preemption": "swap", "swap_bytes": 1 << 20}, "num_swapped_in_blocks"),
        ({"preemption": "recompute"}, "num_recomputed_tokens"),
        ({"speculative_config": NGRAM, "num_blocks": 200}, "num_accepted_tokens"),
        # two adapters of three at once, next to rows without one, prompts in parts
        (
            {
                "preemption": "recompute",
                "max_adapters": 2,
                "max_num_seqs": 8,
                "max_num_batched_tokens": 16,
            },
            "num_recomputed_tokens",
        ),
    ],
    ids=["swap", "recompute", "speculation", "cap"],
)
async def test_what_the_scheduler_does_changes_no_answer(
    folder: Path, settings: dict[str, Any], counter: str
) -> None:
    names = ["base", *NAMES, *NAMES]
    async with serving(folder) as (http, _, _):
        wanted = [await say(http, name, max_tokens=70) for name in names]
    more = {"num_blocks": 24, "future_memory_check": False}
    async with serving(folder, **(more | settings)) as (http, client, _):
        adapters, scheduler = client._core.adapters, client._core.scheduler
        assert adapters is not None
        leased, preempted = True, 0

        def note(plan: Any) -> None:
            """Each request has one lease, forks share it, and it stays while preempted."""
            nonlocal leased, preempted
            adapted = [each for each in scheduler.requests if each.asked.adapter]
            uses = adapters._uses
            leased &= {request_of(each.request_id) for each in adapted} <= uses.keys()
            leased &= sum(map(adapters.books.num_leases, adapters._adapters)) == len(uses)
            preempted += any(each.num_preemptions and not each.block_ids for each in adapted)

        client._core.on_plan = note
        found = await asyncio.gather(*(say(http, name, max_tokens=70) for name in names))
        assert found == wanted
        assert getattr(client.stats.scheduler, counter) > 0
        body = {"model": "b", "prompt": PROMPT, "n": 2, "max_tokens": 70, "temperature": 0,
                "return_token_ids": True, "ignore_eos": True}  # fmt: skip
        both = (await http.post("/v1/completions", json=body)).json()["choices"]
        assert [each["token_ids"] for each in both] == [wanted[2], wanted[2]]
        assert leased
        assert (preempted > 0) == ("preemption" in settings)
