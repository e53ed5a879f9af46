"""Names of models to places on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoints.hub import client
from paceline.checkpoints.hub import resolve as resolve_module
from paceline.checkpoints.hub.catalogue import ALIASES, catalogue, next_better
from paceline.checkpoints.hub.names import HubReference, Selection, parse_hub_name
from paceline.checkpoints.hub.pip_models import cached_path
from paceline.checkpoints.hub.resolve import default_cache_dir, find_local, resolve_model
from paceline.errors import CheckpointError

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


@pytest.mark.parametrize("name", ["nothing", "./nothing", "/no/such/m.gguf", "org/m.gguf", "a:b/c"])
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


def test_a_part_of_a_split_file_stands_for_all(tmp_path: Path) -> None:
    for each in (1, 2):
        (tmp_path / f"m-0000{each}-of-00002.gguf").touch()
    found = resolve_model(str(tmp_path / "m-00002-of-00002.gguf"))
    assert found.path.name == "m-00001-of-00002.gguf"


def test_a_short_name_is_a_name_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def hub_model(reference: HubReference, **options: Any) -> tuple[Path, Selection]:
        asked.append((reference, options))
        return Path("/m.gguf"), Selection("gguf", "m.gguf", ("m.gguf",))

    monkeypatch.setattr(client, "hub_model", hub_model)
    found = resolve_model("qwen3-1.7b-q8", refresh=True)
    assert (found.name, found.path, found.kind) == ("qwen3-1.7b-q8", Path("/m.gguf"), "gguf")
    options = {"offline": False, "refresh": True, "progress": None}
    assert asked == [(HubReference("Qwen/Qwen3-1.7B-GGUF", "", "Q8_0"), options)]


def test_the_catalogue_is_data_that_can_be_followed() -> None:
    rows = catalogue()
    assert 24 <= len(rows) <= 36
    for name, row in rows.items():
        assert name == row.name and name not in ALIASES
        # no folder or file is likely to have such a name, and no other name hides it
        assert parse_hub_name(name) is None
        reference = parse_hub_name(row.hub)
        assert reference is not None and not reference.path
        assert row.source == f"https://huggingface.co/{reference.repo}"
        assert row.licence and row.title and float(row.parameters.removesuffix("B")) > 0
        assert row.tried is False, "nothing could be downloaded where this was written"
        assert row.ifeval is None or 0 < row.ifeval < 100
        assert row.billions > 0


@pytest.mark.parametrize(
    ("name", "gigabytes", "better"),
    [
        ("smollm2-135m", 8.0, "smollm2-360m"),
        # 0.72 GB are more than half of it
        ("smollm2-135m", 1.4, None),
        # of two with as many parameters the better; one that is gated is smaller
        ("smollm2-360m", 8.0, "qwen3-1.7b"),
        ("qwen2.5-1.5b", 8.0, "qwen3-1.7b"),
        ("smollm3-3b", 800.0, None),
        # nothing is known of how they answer
        ("gemma3-1b", 8.0, None),
        ("my-model", 8.0, None),
    ],
)
def test_the_next_better_model_that_fits(name: str, gigabytes: float, better: str | None) -> None:
    found = next_better(name, int(gigabytes * 1e9))
    assert (found and found.name) == better
