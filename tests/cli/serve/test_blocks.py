"""``--kv-store`` and ``--kv-port`` from flags to answers: over restarts, between two engines."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.cli.flags.arguments import Parser
from paceline.cli.flags.block_options import add_block_options, block_settings
from paceline.cli.flags.settings import EngineSettings
from paceline.cli.wiring import build_core, build_tokenizer
from paceline.engine.local import LocalEngineClient
from paceline.engine.types import EngineStats
from paceline.errors import ConfigError, InvalidRequestError
from paceline.http.keys import ApiKey
from paceline.server import ServerConfig, create_app
from paceline.server.app import service_of
from paceline.server.batches.answering import _ENDPOINTS
from tests.backends.torch.models import save_model
from tests.server.helpers import connect, metric, scrape

NULL = EngineSettings.of(
    model_name="null", model_path=None, backend="null", num_blocks=256, max_num_batched_tokens=64,
    max_num_seqs=8, speculative_config={"method": "off"},
)  # fmt: skip
COMPLETIONS = "/v1/completions"
USER, ADMIN = "user-key-0123456789", "admin-key-0123456789"
KEYS = (ApiKey.of("alice", "user", USER), ApiKey.of("root", "admin", ADMIN))


def parse(*flags: str) -> Any:
    parser = Parser(prog="paceline serve")
    add_block_options(parser)
    parser.set_defaults(host="127.0.0.1")
    return parser.parse_args(flags)


def test_every_flag_reaches_the_engine() -> None:
    settings = EngineSettings.of()
    assert settings.changed(**block_settings(parse())) == settings
    flags = ("--kv-store", "blocks", "--kv-store-size", "2GiB", "--kv-port", "0")
    settings = settings.changed(**block_settings(parse(*flags)))
    assert settings.kv_store == os.path.abspath("blocks")
    assert (settings.kv_store_bytes, settings.kv_port) == (2 << 30, 0)
    assert EngineSettings.from_json(settings.to_json()) == settings
    with pytest.raises(ConfigError, match="--kv-store-size has no effect without --kv-store"):
        block_settings(parse("--kv-store-size", "2GiB"))


@asynccontextmanager
async def serving(
    settings: EngineSettings, config: ServerConfig | None = None
) -> AsyncIterator[tuple[httpx.AsyncClient, LocalEngineClient]]:
    core, info = build_core(settings)
    client = LocalEngineClient(core, info, build_tokenizer(settings))
    try:
        async with connect(create_app(client, config or ServerConfig())) as http:
            yield http, client
    finally:
        await client.close()


def body(length: int = 100, **fields: Any) -> dict[str, Any]:
    prompt = [1, *(7 * n % 90 for n in range(length - 1))]
    return {
        "prompt": prompt,
        "max_tokens": 9,
        "temperature": 0.0,
        "return_token_ids": True,
    } | fields


async def ask(
    http: httpx.AsyncClient, sent: dict[str, Any], key: str = ""
) -> tuple[list[int], int]:
    """Return the tokens of an answer, and how many prompt tokens were cached."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    response = await http.post(COMPLETIONS, json=sent, headers=headers)
    assert response.status_code == 200, response.text
    answer = response.json()
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["token_ids"], cached


async def test_a_restart_finds_what_was_computed(tmp_path: Path) -> None:
    settings = NULL.changed(kv_store=str(tmp_path))
    async with serving(settings) as (http, client):
        cold, cached = await ask(http, body())
        assert cached == 0 and client.stats.blocks is not None and client.stats.blocks.store_up
    async with serving(settings) as (http, client):
        assert await ask(http, body()) == (cold, 96)
        text = await scrape(http)
        hits = metric(text, "paceline:kv_fetch_tokens_total", source="disk", result="hit")
        assert hits == 96 and metric(text, "paceline:kv_store_up") == 1
        assert metric(text, "paceline:kv_store_moved_bytes_total", way="read") == 96 * 8
        assert metric(text, "paceline:kv_store_bytes") > 96 * 8
        # another caller's salt is another prefix
        assert (await ask(http, body(cache_salt="s")))[1] == 0
        # and nothing is shared with a prompt whose log-probabilities are wanted
        assert (await ask(http, body(prompt_logprobs=0)))[1] == 0
    async with serving(settings.changed(block_size=8)) as (http, client):
        assert (await ask(http, body()))[1] == 0, "another layout"


async def test_a_peer_gives_what_it_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_KV_KEY", "shared")
    settings = NULL.changed(kv_port=0)
    async with serving(settings) as (first, giver), serving(settings) as (second, taker):
        told = (await first.get("/version")).json()["kv"]
        assert told["port"] == giver.info.kv_port > 0
        source = {"url": f"tcp://127.0.0.1:{told['port']}", "fingerprint": told["fingerprint"]}
        cold, _ = await ask(first, body(max_tokens=40))
        # a stream that goes on here behind 20 tokens: prompt and output come
        rest, _ = await ask(
            second, body(max_tokens=40, resume_output_ids=cold[:20], kv_source=source)
        )
        assert cold[:20] + rest == cold
        stats = taker.stats.blocks
        assert stats is not None and stats.fetched == (("peer", "hit", 112),)
        while not (giver.stats.blocks and giver.stats.blocks.sent_tokens == 112):
            await ask(first, body(5))
        # another model's blocks are not asked for; a peer that is gone is computed
        other = source | {"fingerprint": "0" * 64}
        gone = source | {"url": "tcp://127.0.0.1:9"}
        for wrong in (other, gone):
            prompt = body(90, kv_source=wrong, prompt=[*range(2, 92)])
            await ask(second, prompt | {"cache_salt": wrong["url"]})


@pytest.mark.parametrize("host", ["::1", "::", "localhost"])
def test_the_port_is_at_any_kind_of_address(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_KV_KEY", "shared")
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("there is no IPv6 here")
    core, info = build_core(NULL.changed(kv_port=0, kv_host=host))
    try:
        at = "127.0.0.1" if host == "localhost" else "::1"
        socket.create_connection((at, info.kv_port), 60).close()
    finally:
        core.close()


async def test_only_an_admins_key_names_a_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_KV_KEY", "shared")
    config = ServerConfig(api_keys=KEYS)
    source = {"url": "tcp://127.0.0.1:9", "fingerprint": "0" * 64}
    async with serving(NULL.changed(kv_port=0), config) as (http, _):
        for key, status, tells in ((USER, 403, False), (ADMIN, 200, True)):
            headers = {"Authorization": f"Bearer {key}"}
            sent = body(kv_source=source)
            response = await http.post(COMPLETIONS, json=sent, headers=headers)
            assert response.status_code == status, response.text
            told = (await http.get("/version", headers=headers)).json()
            assert ("kv" in told) == tells
        headers = {"Authorization": f"Bearer {ADMIN}"}
        for wrong, says in (
            ({"url": "http://a:1"}, "kv_source.url must be tcp://HOST:PORT, got 'http://a:1'"),
            ({"fingerprint": "ab"}, "kv_source.fingerprint"),
            ({"extra": 1}, "extra"),
        ):
            sent = body(kv_source=source | wrong)
            response = await http.post(COMPLETIONS, json=sent, headers=headers)
            if "extra" not in wrong:
                assert response.status_code == 400 and says in response.text


async def test_a_batchs_line_names_no_source() -> None:
    async with serving(NULL) as (_, client):
        service = service_of(create_app(client, ServerConfig()))
        for path in (COMPLETIONS, "/v1/chat/completions", "/inference/v1/generate"):
            with pytest.raises(InvalidRequestError, match="kv_source is not served in batches"):
                _ENDPOINTS[path](service, service.rules, {"kv_source": {}}, "", "a", 0.0)


@pytest.mark.parametrize(
    ("changes", "environment", "says"),
    [
        ({"kv_port": 0}, {}, "--kv-port 0 needs a key that peers share: set PACELINE_KV_KEY"),
        ({"kv_store": "/proc/x"}, {}, "--kv-store /proc/x"),
        ({"kv_store": "a", "kv_store_bytes": 9}, {}, "--kv-store-size 9 is too small"),
        ({"kv_store": "a", "enable_prefix_caching": False}, {}, "--no-enable-prefix-caching"),
        ({"kv_port": 1, "kv_host": "192.0.2.1"}, {"PACELINE_KV_KEY": "k"}, "--kv-port 1: "),
    ],
)
def test_what_cannot_be_is_refused(
    changes: dict[str, Any],
    environment: dict[str, str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PACELINE_KV_KEY", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=says):
        build_core(NULL.changed(**changes))


@pytest.mark.parametrize("compute", ["native", "torch"])
def test_a_models_blocks_come_back_bit_for_bit(tmp_path: Path, compute: str) -> None:
    save_model(tmp_path / "model", "gemma3", sliding_window=40)
    settings = EngineSettings.of(
        model_name="m", model_path=str(tmp_path / "model"), backend="torch", compute=compute,
        kv_cache_bytes=8 << 20, max_num_seqs=4, max_num_batched_tokens=64, threads=1,
        kv_store=str(tmp_path / "blocks"),
    )  # fmt: skip
    core, info = build_core(settings)
    try:
        assert info.num_window_blocks == 0, "window blocks are not moved"
        keeper = core.blocks
        assert keeper is not None and "--kv-store and --kv-port move whole blocks" in info.choice
        data = os.urandom(3 * keeper.block_bytes)
        keeper._memory.write_blocks([5, 2, 7], data).result(60)
        size = keeper.block_bytes
        again = keeper._memory.read_blocks([7, 5]).result(60)
        assert again == data[2 * size :] + data[:size]
        other = replace(settings.load, dtype="float32", kv_dtype="auto")
    finally:
        core.close()
    changed, _ = build_core(replace(settings, load=replace(other, isa=settings.load.isa)))
    try:
        assert changed.blocks is not None
        same = changed.info.dtype == core.info.dtype and changed.info.kv_dtype == core.info.kv_dtype
        assert (changed.blocks.fingerprint == keeper.fingerprint) == same
    finally:
        changed.close()


def test_blocks_are_those_of_the_weights_that_are_read(tmp_path: Path) -> None:
    prints = []
    for name in ("model", "few"):
        save_model(tmp_path / name, "llama", **({"vocab_size": 120} if name == "few" else {}))
    for weights in (None, str(tmp_path / "few")):
        settings = EngineSettings.of(
            model_name="m", model_path=str(tmp_path / "model"), backend="torch",
            kv_cache_bytes=8 << 20, max_num_seqs=4, max_num_batched_tokens=64, threads=1,
            kv_store=str(tmp_path / "blocks"), weights_path=weights,
        )  # fmt: skip
        core, _ = build_core(settings)
        assert core.blocks is not None
        prints.append(core.blocks.fingerprint)
        core.close()
    digests = json.loads((tmp_path / "blocks" / "digests.json").read_text())
    assert prints[0] != prints[1]
    assert {Path(json.loads(each)[0]).parent.name for each in digests} == {"model", "few"}


def test_stats_without_blocks_are_none() -> None:
    assert EngineStats(time=0.0, num_steps=0).blocks is None
