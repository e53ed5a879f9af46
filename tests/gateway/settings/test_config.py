"""What a configuration may say, and what is told of one that may not be."""

from __future__ import annotations

import pytest

from paceline.errors import ConfigError
from paceline.gateway.settings.config import Secret, parse_config

TWO = (
    '[[engines]]\nname = "a"\nurl = "http://h"\n[[models]]\nname = "small"\ntiers = [["a"]]\n'
    '[[models]]\nname = "m"\ntiers = [["a"]]\n[models.cascade]\nsmall = "small"\n'
)
ENGINE = '[[engines]]\nname = "a"\nurl = "http://127.0.0.1:8001"\n'


def test_a_good_one() -> None:
    config = parse_config(
        ENGINE.encode() + b'[[engines]]\nname = "b"\nurl = "https://example.com/v1"\ncloud = true\n'
        b'[[models]]\nname = "chat"\ntiers = [["a"], ["b:small"]]\nlength_over = {"4096" = "x"}\n'
        b'[[models]]\nname = "x"\ntiers = [["b"]]\n'
    )
    assert [engine.name for engine in config.engines] == ["a", "b"]
    assert config.models[0].tiers == (("a",), ("b:small",)) and config.max_attempts == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "engines"),
        ("engines = []", "at least one"),
        ("oops", "the configuration:"),
        (ENGINE + "colour = 1", "unknown field `colour`"),
        (ENGINE + ENGINE, "two engines are named 'a'"),
        (ENGINE.replace("http://", "ftp://"), "url must be http"),
        (ENGINE.replace("127.0.0.1:8001", "169.254.169.254"), "hands out credentials in clouds"),
        (ENGINE.replace("127.0.0.1:8001", "u:p@host"), "may not hold a user"),
        (ENGINE.replace("127.0.0.1:8001", ":p@host"), "may not hold a user, a password"),
        (ENGINE.replace("127.0.0.1:8001", "@host"), "may not hold a user"),
        (ENGINE.replace("8001", "80010"), "url"),
        (ENGINE.replace('"a"', '"a b"'), "letters, digits"),
        (ENGINE + 'api_key_env = "PACELINE_NO_SUCH"', "PACELINE_NO_SUCH is not set"),
        (ENGINE + 'kind = "azure"', "needs an api_version"),
        (ENGINE + 'api_version = "2024-10-21"', "other kinds have none"),
        (ENGINE + 'models = ["x", "x"]', "models must be different names"),
        (ENGINE + "max_concurrent = -1", "0 or more, got -1"),
        ("max_attempts = 0\n" + ENGINE, "max_attempts must be at least 1, got 0"),
        ("port = 70000\n" + ENGINE, "port must be 0 to 65535, got 70000"),
        (ENGINE + '[[models]]\nname = "m"\ntiers = []', "must name at least one engine"),
        (ENGINE + '[[models]]\nname = "m"\ntiers = [["z"]]', "no engine 'z'; there are a"),
        (
            ENGINE + '[[models]]\nname = "m"\ntiers = [["a"]]\nlength_over = {"9" = "m"}',
            "which is not another model here",
        ),
        (
            ENGINE + '[[models]]\nname = "m"\ntiers = [["a"]]\nlength_over = {"x" = "n"}',
            "numbers of tokens",
        ),
        (
            ENGINE
            + '[[engines]]\nname = "far"\nurl = "https://h"\ncloud = true\n[[models]]\nname = "m"\n'
            'tiers = [["a"]]\nlocal_only = true\nlength_over = {"9" = "l"}\n'
            '[[models]]\nname = "l"\ntiers = [["far"]]',
            "in its length_over are cloud = true",
        ),
        (TWO + "max_loss = 0", "cascade.max_loss must lie between 0 and 1, got 0"),
        (TWO + "max_loss = 1.0", "between 0 and 1, got 1"),
        (
            TWO + 'calibration = "f"\nunder_load = {max_loss = 0.04}',
            "under_load.max_loss must be at least max_loss 0.05 and below 1, got 0.04",
        ),
        (
            TWO + 'calibration = "f"\nunder_load = {max_loss = 0.1, full_wait = 0.0}',
            "full_wait must be above 0 and below 3600 s, got 0",
        ),
        (TWO + "prefix_tokens = 0", "prefix_tokens must be 1 to 256, got 0"),
        (TWO + 'mode = "route"', "mode route needs a calibration"),
        (TWO + "under_load = {max_loss = 0.1}", "under_load needs a calibration"),
        (TWO.replace('small = "small"', 'small = "m"'), "names 'm', which is not another model"),
        (
            TWO.replace('tiers = [["a"]]\n[[', 'tiers = [["a"]]\ncascade = {small = "m"}\n[['),
            "which has a cascade or length_over itself",
        ),
        (TWO.replace('"m"', '"m*"'), "a name with a \\* has no cascade"),
        ("local_only_patterns = ['(']\n" + ENGINE, "no regular expression"),
        ('local_only_tags = ["a, b"]\n' + ENGINE, "'a, b' is no tag"),
        ('local_only_tags = [" "]\n' + ENGINE, "' ' is no tag"),
        (TWO + 'conversation_header = "x chat"', "'x chat' is no name of a header"),
        (
            ENGINE + 'cloud = true\n[[models]]\nname = "m"\ntiers = [["a"]]\nlocal_only = true',
            "all its engines are cloud",
        ),
    ],
)
def test_what_is_wrong_is_named(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("[", r"\[")):
        parse_config(text.encode())


@pytest.mark.parametrize(
    "user", ["ann:hunter2", ":hunter2", "hunter2", ":hunter2/x", "ann:hunter2#"]
)
def test_a_password_is_refused_and_not_repeated(user: str) -> None:
    text = ENGINE.replace("127.0.0.1:8001", f"{user}@host:8001")
    with pytest.raises(ConfigError) as refused:
        parse_config(text.encode())
    assert "hunter2" not in str(refused.value)


def test_secrets_do_not_show() -> None:
    assert repr(Secret("sk-123")) == "'***'" and f"{[Secret('sk-123')]}" == "['***']"
