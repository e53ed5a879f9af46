"""Names of models to places on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects

from paceline.checkpoints import resolve as resolve_module
from paceline.checkpoints.aliases import ALIASES
from paceline.checkpoints.pull import cached_path
from paceline.checkpoints.resolve import default_cache_dir, find_local, resolve_model
from paceline.core.errors import CheckpointError

ALIAS = "smollm2-135m"


def put_in_cache(cache: Path) -> Path:
    """A sparse file of the right size under the alias's name."""
    path = cached_path(ALIASES[ALIAS], cache)
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(ALIASES[ALIAS].gguf_bytes)
    return path


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PACELINE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_cache_dir() == tmp_path / ".cache" / "paceline"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_dir() == tmp_path / "xdg" / "paceline"
    monkeypatch.setenv("PACELINE_CACHE", "~/own")
    assert default_cache_dir() == tmp_path / "own"


def test_an_alias_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_local(ALIAS, tmp_path) is None
    path = put_in_cache(tmp_path)
    assert find_local(ALIAS, tmp_path) == path
    found = resolve_model(ALIAS, cache_dir=tmp_path, offline=True)
    assert (found.name, found.path, found.kind) == (ALIAS, path, "gguf")
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    assert find_local(ALIAS) == path == resolve_model(ALIAS, offline=True).path


def test_a_file_of_the_wrong_size_is_not_the_model(tmp_path: Path) -> None:
    path = put_in_cache(tmp_path)
    with path.open("ab") as file:
        file.write(b"x")
    assert find_local(ALIAS, tmp_path) is None
    assert find_local("no-such-alias", tmp_path) is None


def test_an_alias_that_is_not_there_offline(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"paceline pull smollm2-135m"):
        resolve_model(ALIAS, cache_dir=tmp_path, offline=True)


def test_an_alias_is_pulled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def fake(*args: Any) -> Path:
        calls.append(args)
        return tmp_path / "m.gguf"

    monkeypatch.setattr(resolve_module, "pull", fake)

    def progress(stage: str, done: int, total: int) -> None:
        pass

    found = resolve_model(ALIAS, cache_dir=tmp_path, progress=progress)
    assert found.path == tmp_path / "m.gguf"
    assert calls == [(ALIAS, tmp_path, progress)]


def test_files_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "model").mkdir()
    file = tmp_path / "m.gguf"
    file.write_bytes(b"")
    assert resolve_model(str(file)).kind == "gguf"
    assert resolve_model(str(tmp_path)).kind == "hf"
    monkeypatch.chdir(tmp_path)
    # a folder that is there goes before the hub
    assert resolve_model("org/model").path == Path("org/model")
    assert resolve_model("./m.gguf").path == Path("m.gguf")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/m.gguf").path == file
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"is a \.bin file"):
        resolve_model("weights.bin")


@pytest.mark.parametrize("name", ["nothing", "./nothing", "/no/such/m.gguf", "org/m.gguf", "a/b/c"])
def test_a_name_that_is_nothing(name: str) -> None:
    with pytest.raises(CheckpointError, match="no model"):
        resolve_model(name)


@pytest.mark.parametrize(
    "name",
    [
        "../etc",
        "a/../../etc",
        "..",
        "org/..",
        "..\\windows",
        "org%2fmodel",
        "%2e%2e/etc",
        "org/%2E%2E",
        "org%5Cmodel",
        "%252e%252e/x",
        "a\0b",
        "a%00b",
        "a\nb",
        "a\x7fb",
        "",
        "a" * 5000,
    ],
)
def test_a_name_that_climbs_or_hides_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"encoded character|control characters|characters"):
        resolve_model(name, cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """A stand-in for huggingface_hub that notes how it is called."""
    calls: list[dict[str, Any]] = []

    def snapshot_download(repo_id: str, **options: Any) -> str:
        calls.append({"repo_id": repo_id, **options})
        if repo_id == "org/gone":
            raise OSError("404 Client Error\nsecond line")
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def test_a_hub_id(hub: list[dict[str, Any]], tmp_path: Path) -> None:
    found = resolve_model("org/Some-Model_1.5B", cache_dir=tmp_path)
    assert (found.name, found.kind) == ("org/Some-Model_1.5B", "hf")
    assert found.path == tmp_path / "snapshot"
    assert hub[0]["repo_id"] == "org/Some-Model_1.5B" and hub[0]["local_files_only"] is False
    resolve_model("org/model", offline=True)
    assert hub[1]["local_files_only"] is True


def test_what_is_asked_of_the_hub_runs_no_code(hub: list[dict[str, Any]]) -> None:
    resolve_model("org/model")
    wanted = {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
    }
    refused = {
        "pytorch_model.bin",
        "modeling_own.py",
        "model.py",
        "consolidated.safetensors",
        "training_args.bin",
        "model.pt",
        "model.pkl",
        "original/params.json",
        "README.md",
    }
    kept = set(
        filter_repo_objects(sorted(wanted | refused), allow_patterns=hub[0]["allow_patterns"])
    )
    assert kept == wanted


def test_a_hub_that_fails_is_explained(hub: list[dict[str, Any]]) -> None:
    with pytest.raises(CheckpointError, match=r"HF_TOKEN.*404 Client Error$"):
        resolve_model("org/gone")
    with pytest.raises(CheckpointError, match="downloads are off"):
        resolve_model("org/gone", offline=True)


def test_the_real_hub_client_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="downloads are off"):
        resolve_model("paceline-tests/no-such-model", offline=True)
