"""Names with a ``*``: what they match, where it goes, and what a caller sees of it."""

from __future__ import annotations

import pytest

from paceline.errors import ConfigError
from paceline.gateway import ModelConfig
from paceline.gateway.settings.aliases import Aliases, stem_of
from paceline.gateway.settings.config import KeyConfig, check_config, parse_config
from paceline.http.keys import ApiKey
from tests.gateway.fault_server import scripted
from tests.gateway.helpers import CHAT, GOOD, WHOLE, chat, configured, gateway_over, streamed


@pytest.mark.parametrize(
    ("alias", "name", "stem"),
    [
        ("gpt-*", "gpt-4o", "4o"),
        ("*", "org/model:tag", "org/model:tag"),
        ("a-*-b", "a-x-b", "x"),
        ("*-fast", "m-fast", "m"),
        # nothing is no name, and what overlaps is none either
        ("gpt-*", "gpt-", None),
        ("ab*bc", "abc", None),
        ("gpt-*", "gpt", None),
        # what could be more than a name where it is put
        ("*", "..", None),
        ("*", "a b", None),
        ("*", "a\r\nx: y", None),
        ("*", "a?b", None),
        ("*", "a" * 201, None),
        ("*", "*", None),
    ],
)
def test_what_a_star_stands_for(alias: str, name: str, stem: str | None) -> None:
    assert stem_of(alias, name) == stem


def test_the_one_that_says_most_counts() -> None:
    aliases = Aliases(["*", "gpt-4*", "plain", "gpt-*"])
    assert aliases.find("gpt-4o") == ("gpt-4*", "o")
    assert aliases.find("gpt-3") == ("gpt-*", "3")
    assert aliases.find("claude") == ("*", "claude")
    assert Aliases(["gpt-*"]).find("claude") is None


async def test_where_it_goes_and_what_its_caller_sees() -> None:
    models = (
        ModelConfig(name="exact", tiers=(("e1:m",),)),
        ModelConfig(name="cloud/*", tiers=(("e2:far-*",), ("e1:m",))),
        ModelConfig(name="any-*", tiers=(("e1",),)),
    )
    async with (
        scripted(WHOLE, models=("m",)) as near,
        scripted(WHOLE, models=("far-big", "far-small")) as far,
        gateway_over(configured(near, far, models=models)) as (gateway, client),
    ):
        for name in ("big", "small"):
            answer = await client.post(CHAT, json=chat(model=f"cloud/{name}"))
            assert answer.json()["model"] == f"cloud/{name}"
            assert "x-paceline-fallback" not in answer.headers
        assert [body["model"] for body in far.bodies] == ["far-big", "far-small"]
        # the only model that an engine has serves any name
        far.script[:] = [GOOD]
        near.script[:] = [GOOD]
        told = streamed(await client.post(CHAT, json=chat(model="any-thing", stream=True)))
        assert {chunk["model"] for chunk in told[:-1]} == {"any-thing"}
        assert near.bodies[-1]["model"] == "m"
        # a later tier says what it served instead
        gateway.upstreams.by_name["e2"].draining = True
        answer = await client.post(CHAT, json=chat(model="cloud/big", stream=True))
        assert answer.headers["x-paceline-fallback"] == "m"
        # nothing is kept by what callers wrote
        for kept in (gateway._lengths.models, gateway._bytes_per_token.models):
            assert kept <= {"exact", "cloud/*", "any-*"}
        listed = (await client.get("/v1/models")).json()["data"]
        assert [entry["id"] for entry in listed] == ["exact"]
        unknown = await client.post(CHAT, json=chat(model="cloud"))
        assert unknown.status_code == 404 and "exact, cloud/*, any-*" in unknown.text


async def test_a_key_may_use_an_alias_or_names_of_it() -> None:
    models = (ModelConfig(name="a-*", tiers=(("e1",),)), ModelConfig(name="b-*", tiers=(("e1",),)))
    keys = (
        KeyConfig(name="ann", models=("a-*",)),
        KeyConfig(name="bob", models=("a-1", "b-2")),
    )
    rows = {"ann": [200, 200, 403, 403], "bob": [200, 403, 403, 200]}
    secrets = tuple(ApiKey.of(name, "user", f"secret-{name}") for name in rows)
    async with (
        scripted(WHOLE) as engine,
        gateway_over(configured(engine, models=models, keys=keys), secrets) as (_, client),
    ):
        for name, wanted in rows.items():
            headers = {"authorization": f"Bearer secret-{name}"}
            found = [
                (await client.post(CHAT, json=chat(model=model), headers=headers)).status_code
                for model in ("a-1", "a-2", "b-1", "b-2")
            ]
            assert found == wanted, name


ENGINE = '[[engines]]\nname = "a"\nurl = "http://127.0.0.1:8001"\n[[models]]\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('name = "a*b*"\ntiers = [["a"]]', "may contain one [*]"),
        ('name = "a*"\ntiers = [["a"]]\nlength_over = {"9" = "b"}', "no length_over"),
        ('name = "b"\ntiers = [["a:x-*"]]', "which repeats that of the name"),
        ('name = "b*"\ntiers = [["a:*-*"]]', "one in each"),
        (
            'name = "b*"\ntiers = [["a"]]\n'
            '[[models]]\nname = "c"\ntiers = [["a"]]\nlength_over = {"9" = "b*"}',
            "which is not another model here",
        ),
        (
            'name = "b*"\ntiers = [["a"]]\n[[keys]]\nname = "ann"\nmodels = ["c"]',
            "there is no model 'c'",
        ),
        (
            'name = "b*"\ntiers = [["a"]]\n[[prices]]\ninput = 1\noutput = 1\n'
            '[[keys]]\nname = "ann"\nbudget = "1/day"\nover_budget = "b*"',
            "there is no model 'b[*]'",
        ),
    ],
)
def test_what_cannot_be(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config((ENGINE + text).encode())


def test_a_budget_wants_a_price_of_whatever_it_stands_for() -> None:
    text = ENGINE + 'name = "b*"\ntiers = [["a:x-*"]]\n[[keys]]\nname = "ann"\nbudget = "1/day"\n'
    one = '[[prices]]\nmodel = "x-1"\ninput = 1\noutput = 1\n'
    with pytest.raises(ConfigError, match="need a price of a:x-"):
        parse_config((text + one).encode())
    check_config(parse_config((text + one.replace('model = "x-1"\n', "")).encode()))
