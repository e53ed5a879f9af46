"""Fetching from a hub on this machine: what arrives, what breaks, and who is told what."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from paceline.checkpoints.hub import cache as hub_cache
from paceline.checkpoints.hub import client as hub_module
from paceline.checkpoints.hub.client import Hub
from paceline.checkpoints.hub.resolve import ResolvedModel, resolve_model
from paceline.errors import CheckpointError
from tests.checkpoints.hub_server import COMMIT, HubServer, hub_server

TOKEN = "hf_SecretSecretSecret"
FOLDER = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors.index.json": b'{"weight_map": {}}',
    "model-00001-of-00002.safetensors": os.urandom(3000),
    "model-00002-of-00002.safetensors": os.urandom(2000),
    "pytorch_model.bin": b"never asked for",
    "modeling_own.py": b"never asked for",
}
GGUF = {
    "m-Q8_0.gguf": os.urandom(5000),
    "Q4_K_M/m-Q4_K_M-00001-of-00002.gguf": os.urandom(4000),
    "Q4_K_M/m-Q4_K_M-00002-of-00002.gguf": os.urandom(1000),
    "README.md": b"text",
}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub_module, "_CHUNK", 512)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "token"))
    with hub_server() as hub:
        hub.repos = {"org/folder": dict(FOLDER), "org/gguf": dict(GGUF)}
        monkeypatch.setenv("HF_ENDPOINT", f"{hub.address}/")
        yield hub


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts follow each other at once."""
    own = Hub.of_environment

    def of_environment() -> Hub:
        made = own()
        return Hub(made.endpoint, made.token, (0.0, 0.0, 0.0))

    monkeypatch.setattr(Hub, "of_environment", staticmethod(of_environment))


def pulled(name: str, **options: Any) -> ResolvedModel:
    return resolve_model(name, refresh=True, **options)


def content(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_folder(server: HubServer, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    found = pulled("org/folder", progress=lambda *event: seen.append(event))
    assert (found.name, found.kind) == ("org/folder", "hf")
    wanted = {name: FOLDER[name] for name in FOLDER if not name.endswith((".bin", ".py"))}
    assert content(found.path) == wanted
    total = sum(map(len, wanted.values()))
    assert ("downloading", total, total) in seen and seen[-1][0] == "checking"
    assert [done for stage, done, _ in seen if stage == "downloading"] == sorted(
        done for stage, done, _ in seen if stage == "downloading"
    )


def test_a_revision_is_asked_for_and_kept_apart(server: HubServer, tmp_path: Path) -> None:
    found = pulled("org/folder", revision="v1.0")
    assert server.of("/revision/v1.0") and not server.of("/revision/main")
    asked = len(server.requests)
    assert resolve_model("org/folder", revision="v1.0").path == found.path
    assert len(server.requests) == asked
    resolve_model("org/folder")
    assert server.of("/revision/main")
    with pytest.raises(CheckpointError, match="is not the name of a branch"):
        resolve_model("org/folder", revision="../x")
    with pytest.raises(CheckpointError, match=r"revision v1\.0 is of a repository on the hub"):
        resolve_model(str(tmp_path), revision="v1.0")


def test_what_is_here_is_taken_without_asking(server: HubServer) -> None:
    first = pulled("org/gguf:q8_0")
    assert first.path.name == "m-Q8_0.gguf" and first.path.read_bytes() == GGUF["m-Q8_0.gguf"]
    count = len(server.requests)
    for options in ({}, {"offline": True}):
        assert resolve_model("org/gguf:q8_0", **options) == first
    assert len(server.requests) == count
    # pull asks what is newest, and fetches nothing twice
    pulled("org/gguf:q8_0")
    assert len(server.requests) == count + 1
    # what was removed or cut is not taken for the model
    blob = first.path.resolve()
    blob.write_bytes(b"less")
    assert resolve_model("org/gguf:q8_0") == first
    assert first.path.read_bytes() == GGUF["m-Q8_0.gguf"]


def test_all_parts_of_a_split_file(server: HubServer) -> None:
    for name in ("org/gguf:Q4_K_M", "org/gguf", "org/gguf/Q4_K_M",
                 "org/gguf/Q4_K_M/m-Q4_K_M-00002-of-00002.gguf"):  # fmt: skip
        found = pulled(name)
        assert found.kind == "gguf" and found.path.name == "m-Q4_K_M-00001-of-00002.gguf"
        parts = {f"Q4_K_M/{name}": data for name, data in content(found.path.parent).items()}
        assert parts == {name: GGUF[name] for name in GGUF if name.startswith("Q4")}
    # each was fetched once
    assert len(server.of("00001-of-00002.gguf")) == 1


def test_the_hubs_own_client_finds_it_and_is_found(server: HubServer, tmp_path: Path) -> None:
    found = pulled("org/gguf:Q8_0")
    cache = tmp_path / "hub"
    there = huggingface_hub.try_to_load_from_cache("org/gguf", "m-Q8_0.gguf", cache_dir=cache)
    assert there == str(found.path)
    (repo,) = huggingface_hub.scan_cache_dir(cache).repos
    assert (repo.repo_id, repo.size_on_disk) == ("org/gguf", 5000)
    huggingface_hub.hf_hub_download(
        "org/folder", "config.json", cache_dir=cache, endpoint=server.address
    )
    count = len(server.of("config.json"))
    assert content(pulled("org/folder").path)["config.json"] == FOLDER["config.json"]
    assert len(server.of("config.json")) == count, "it was there"


def test_a_broken_connection_goes_on_where_it_ended(server: HubServer, quick: None) -> None:
    server.cuts["m-Q8_0.gguf"] = [1500, 1000]
    found = pulled("org/gguf:Q8_0")
    assert found.path.read_bytes() == GGUF["m-Q8_0.gguf"]
    assert [request[2] for request in server.of("m-Q8_0.gguf")] == [
        None, "bytes=1500-", "bytes=2500-",
    ]  # fmt: skip


def test_a_broken_pull_goes_on_where_it_ended(
    server: HubServer, quick: None, tmp_path: Path
) -> None:
    server.cuts["m-Q8_0.gguf"] = [2000, 0, 0, 0]
    with pytest.raises(CheckpointError, match=r"m-Q8_0.gguf came to 2000 of 5000 bytes: .*goes on"):
        pulled("org/gguf:Q8_0")
    assert [path.stat().st_size for path in tmp_path.rglob("*.incomplete")] == [2000]
    assert pulled("org/gguf:Q8_0").path.read_bytes() == GGUF["m-Q8_0.gguf"]
    assert server.of("m-Q8_0.gguf")[-1][2] == "bytes=2000-"
    assert not list(tmp_path.rglob("*.incomplete"))


def test_a_server_without_ranges_is_followed(server: HubServer, quick: None) -> None:
    server.ranges = False
    server.cuts["m-Q8_0.gguf"] = [1500]
    assert pulled("org/gguf:Q8_0").path.read_bytes() == GGUF["m-Q8_0.gguf"]


def test_a_file_that_is_not_what_its_digest_says(server: HubServer, tmp_path: Path) -> None:
    for name, spoilt in (("org/gguf:Q8_0", "m-Q8_0.gguf"), ("org/folder", "config.json")):
        server.spoilt = {spoilt}
        with pytest.raises(CheckpointError, match=f"{spoilt} is not the file it should be: its"):
            pulled(name)
        assert not list(tmp_path.rglob("*.incomplete")) and not list(tmp_path.rglob(spoilt))
        server.spoilt = set()
        pulled(name)


def test_a_busy_hub_is_asked_again(server: HubServer, quick: None) -> None:
    server.failures = [503, 429]
    assert pulled("org/gguf:Q8_0").path.is_file()
    server.failures = [503] * 4
    # what is here serves until it answers
    assert pulled("org/gguf:Q8_0").path.is_file()
    server.failures = [503] * 4
    with pytest.raises(
        CheckpointError, match=r"cannot be reached \(status 503\), and it is not in"
    ):
        pulled("org/folder")


def test_a_hub_that_cannot_be_reached(
    server: HubServer, quick: None, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    found = pulled("org/gguf:Q8_0")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")
        with caplog.at_level(logging.WARNING):
            assert pulled("org/gguf:Q8_0") == found
        assert "taking what is here" in caplog.text
        with pytest.raises(CheckpointError, match=r"Connection refused.*paceline pull org/folder"):
            pulled("org/folder")
        # another kind of the same repository, and there is but the one
        with pytest.raises(CheckpointError, match=r"of the local cache: .*no Q5_0; there are Q8_0"):
            pulled("org/gguf:Q5_0")
    monkeypatch.setenv("HF_ENDPOINT", "file:///etc")
    with pytest.raises(CheckpointError, match="HF_ENDPOINT is 'file:///etc', not an http"):
        pulled("org/folder")


def test_a_token_goes_to_the_hub_alone(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.token = TOKEN
    with pytest.raises(CheckpointError, match="has no org/gguf, or it is private: set HF_TOKEN"):
        pulled("org/gguf")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with hub_server() as cdn:
        cdn.repos = server.repos
        server.cdn = cdn.address
        cdn.cuts["m-Q8_0.gguf"] = [100]
        assert pulled("org/gguf:Q8_0").path.read_bytes() == GGUF["m-Q8_0.gguf"]
        assert [request[3] for request in cdn.requests] == [None, None]
        assert cdn.requests[1][2] == "bytes=100-"
        # the same host keeps it
        server.cdn = server.address
        server.requests.clear()
        pulled("org/gguf:Q4_K_M")
        assert {request[3] for request in server.requests} == {f"Bearer {TOKEN}"}


def test_no_message_holds_the_token(
    server: HubServer, quick: None, monkeypatch: pytest.MonkeyPatch, caplog: Any, capsys: Any
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    said = repr(Hub("https://hub", TOKEN))
    server.gated = {"org/folder"}
    with caplog.at_level(logging.DEBUG):
        for name, message in (
            ("org/folder", r"org/folder is gated: accept its conditions at http\S+/org/folder "),
            ("org/nothing", "has no org/nothing, or your token may not read it; check the name"),
        ):
            with pytest.raises(CheckpointError, match=message) as caught:
                pulled(name)
            said += str(caught.value) + repr(caught.value.__cause__)
        server.cdn = server.address
        server.cuts["m-Q8_0.gguf"] = [0] * 4
        with pytest.raises(CheckpointError, match="came to 0 of 5000 bytes") as caught:
            pulled("org/gguf:Q8_0")
        said += str(caught.value)
    said += caplog.text + "".join(capsys.readouterr())
    assert TOKEN not in said and "s3cret" not in said
    assert any(request[3] == f"Bearer {TOKEN}" for request in server.requests)


def test_no_room(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        free = (64 << 20) + 4999

    monkeypatch.setattr(hub_cache.shutil, "disk_usage", lambda path: Full)
    with pytest.raises(CheckpointError, match=r"has room for 67 MB, and 0 MB are to come: set HF_"):
        pulled("org/gguf:Q8_0")
    assert not server.of(".gguf")


@pytest.mark.parametrize(
    "change",
    [
        {"rfilename": "../../etc/passwd"},
        {"rfilename": "/etc/passwd"},
        {"rfilename": "a//b"},
        {"rfilename": "a\\b"},
        {"rfilename": 5},
        {"size": -1},
        {"size": None},
        {"lfs": {"sha256": "../../x"}},
        {"lfs": {"sha256": "A" * 64}},
        {"blobId": None},
    ],
)
def test_a_listing_that_lies(
    server: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: dict[str, Any]
) -> None:
    entry = {"rfilename": "config.json", "size": 3, "blobId": "0" * 40} | change
    body = {"sha": COMMIT, "siblings": [entry]}
    monkeypatch.setattr(
        hub_module, "parse_json_object", lambda text, what: json.loads(json.dumps(body))
    )
    with pytest.raises(CheckpointError, match="gave an answer that is not a model hub's"):
        pulled("org/folder")
    assert not (tmp_path / "hub").exists()


def test_what_others_left_in_the_cache_serves_without_a_network(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in FOLDER:
        if name.endswith((".json", ".safetensors")):
            huggingface_hub.hf_hub_download(
                "org/folder", name, cache_dir=tmp_path / "hub", endpoint=server.address
            )
    found = resolve_model("org/folder", offline=True)
    assert found.kind == "hf" and content(found.path).keys() == {
        name for name in FOLDER if name.endswith((".json", ".safetensors"))
    }
    with pytest.raises(
        CheckpointError, match="downloads are off, and it is not in the local cache"
    ):
        resolve_model("org/gguf", offline=True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    server.requests.clear()
    assert pulled("org/folder") == found
    with pytest.raises(CheckpointError, match="downloads are off"):
        pulled("org/gguf")
    assert not server.requests
