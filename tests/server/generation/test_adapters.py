"""Names of adapters over a fake engine: loads of one name at once, and names that cannot be."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.engine.types import AdapterStatus
from paceline.errors import InvalidRequestError, UnknownModelError
from paceline.http.errors import HttpError
from paceline.server.generation.adapters import AdapterNames
from paceline.server.protocol.field_types import check_model
from paceline.server.protocol.rules import NamedAdapter
from paceline.server.settings.config import AdapterConfig, AdapterModule
from tests.server.protocol.test_requests import RULES

pytestmark = pytest.mark.anyio


class Client:
    """An engine that loads anything, once ``may_load`` is set."""

    def __init__(self) -> None:
        self.adapters: dict[str, AdapterStatus] = {}
        self.paths: list[str] = []
        self.pinned: list[str] = []
        self.may_load = asyncio.Event()
        self.may_load.set()

    async def load_adapter(self, key: str, path: str, *, pinned: bool = False) -> AdapterStatus:
        if pinned:
            self.pinned.append(key)
        self.paths.append(Path(path).name)
        await self.may_load.wait()
        self.adapters[key] = AdapterStatus(key, "resident", digest=Path(path).name)
        return self.adapters[key]

    def register_adapter(
        self, key: str, path: str, digest: str = "", *, pinned: bool = False
    ) -> None:
        raise AssertionError("no engine follows another here")

    def unload_adapter(self, key: str) -> None:
        self.adapters.pop(key, None)


def make_names(
    root: Path, client: Client, *modules: AdapterModule, resolve: bool = False
) -> AdapterNames:
    for name in ("one", "two"):
        (root / name).mkdir()
    config = AdapterConfig(modules=modules, roots=(root,), resolve=root if resolve else None)
    by_name: dict[str, NamedAdapter] = {}
    return AdapterNames(client, config, ("model",), by_name)


async def test_a_load_is_not_answered_with_that_of_another_path(tmp_path: Path) -> None:
    client = Client()
    names = make_names(tmp_path, client)
    client.may_load.clear()
    first = asyncio.create_task(names.load("x", "one"))
    again = asyncio.create_task(names.load("x", "one"))
    while not client.paths:
        await asyncio.sleep(0.001)
    with pytest.raises(InvalidRequestError, match="being loaded from another path"):
        await names.load("x", "two")
    second = asyncio.create_task(names.load("x", "two", in_place=True))
    await asyncio.sleep(0.02)
    assert client.paths == ["one"]
    client.may_load.set()
    await asyncio.gather(first, again, second)
    assert client.paths == ["one", "two"]
    assert names.by_name["x"].digest == "two"
    assert [each.digest for each in client.adapters.values()] == ["two"]


async def test_pins_reach_the_engine(tmp_path: Path) -> None:
    client = Client()
    names = make_names(tmp_path, client, AdapterModule("x", str(tmp_path / "one"), pinned=True))
    await names.load_given()
    await names.load("y", "two")
    await names.load("z", "two", pinned=True)
    # loaded again it is as that load says
    await names.load("x", "two", in_place=True)
    assert client.pinned == ["x#0", "z#2"]


async def test_a_pin_that_meets_a_load_without_is_not_answered_as_pinned(tmp_path: Path) -> None:
    client = Client()
    names = make_names(tmp_path, client)
    client.may_load.clear()
    first = asyncio.create_task(names.load("x", "one"))
    while not client.paths:
        await asyncio.sleep(0.001)
    with pytest.raises(InvalidRequestError, match="or pinned or not"):
        await names.load("x", "one", pinned=True)
    second = asyncio.create_task(names.load("x", "one", in_place=True, pinned=True))
    client.may_load.set()
    await asyncio.gather(first, second)
    assert client.pinned == [names.by_name["x"].key] == list(client.adapters)


async def test_a_name_that_is_loaded_again_stays_applied(tmp_path: Path) -> None:
    names = make_names(tmp_path, Client())
    await names.load("x", "one")
    names.apply({0: 0.5})
    await names.load("x", "two", in_place=True)
    assert (names.by_name["x"].root, names.by_name["x"].applied) == ("two", 0.5)


async def test_the_models_name_is_no_adapters_also_at_start(tmp_path: Path) -> None:
    names = make_names(tmp_path, Client(), AdapterModule("model", str(tmp_path / "one")))
    with pytest.raises(InvalidRequestError, match="is a name of the model"):
        await names.load_given()


async def test_what_is_too_long_for_a_file_is_not_there(tmp_path: Path) -> None:
    names = make_names(tmp_path, Client(), resolve=True)
    with pytest.raises(HttpError) as caught:
        await names.load("x", "y" * 256)
    assert caught.value.status == 404
    await names.resolve("y" * 256)
    await names.resolve("\N{SNOWMAN}" * 100)
    assert not names.by_name
    await names.resolve("one")
    assert list(names.by_name) == ["one"]


def test_an_unknown_name_is_answered_with_some_of_many_adapters() -> None:
    rules = replace(RULES, adapters={f"a{i}": NamedAdapter(f"a{i}", "", "") for i in range(1000)})
    assert check_model("a999", rules) == "a999"
    with pytest.raises(UnknownModelError, match=r", a19 and 980 more adapters$"):
        check_model("b", rules)
