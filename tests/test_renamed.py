"""Each old name is answered with the new one, wherever it may stand."""

from __future__ import annotations

from dataclasses import fields

import pytest

from paceline.cli.flags.settings import EngineSettings
from paceline.cli.main import build_parser
from paceline.core.config import SchedulerConfig
from paceline.errors import ConfigError
from paceline.gateway.settings.config import GatewayConfig, parse_config
from paceline.renamed import GONE, RENAMED, is_now

ENGINE = '[[engines]]\nname = "e1"\nurl = "http://127.0.0.1:1"\n'
FLAGS = [name for name in RENAMED if name.startswith("--")]
KEYS = [name for name in RENAMED if RENAMED[name] in GatewayConfig.__struct_fields__]
OWN = {field.name for field in fields(SchedulerConfig)}
SETTINGS = [name for name in RENAMED if RENAMED[name] in OWN and name not in KEYS]


def test_every_name_is_of_one_kind() -> None:
    assert sorted([*FLAGS, *KEYS, *SETTINGS, "native"]) == sorted(RENAMED)


def test_no_new_name_is_an_old_one() -> None:
    assert not set(RENAMED.values()) & set(RENAMED)


@pytest.mark.parametrize("command", [["serve"], ["simulate", "--workload=x", "--step-times=x"]])
@pytest.mark.parametrize("name", FLAGS)
def test_flags(name: str, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args([*command, name, "1"])
    assert f"({name} is now {RENAMED[name]})" in capsys.readouterr().err


def test_a_flag_that_turns_off(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", "--no-relegate-late"])
    assert "(--no-relegate-late is now --no-demote-late)" in capsys.readouterr().err


def test_the_dtype(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", "--dtype", "native"])
    assert "(native is now gguf)" in capsys.readouterr().err
    # the way to compute is still called so
    assert build_parser().parse_args(["serve", "--compute", "native"]).compute == "native"


@pytest.mark.parametrize("name", SETTINGS)
def test_keyword_arguments(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is now {RENAMED[name]}"):
        EngineSettings.of(**{name: 1})


@pytest.mark.parametrize("name", GONE)
def test_what_is_gone(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name.startswith("--"):
        with pytest.raises(SystemExit):
            build_parser().parse_args(["serve", name])
        assert f"({name} is gone: {GONE[name]})" in capsys.readouterr().err
    else:
        with pytest.raises(ConfigError, match=f"{name} is gone: {GONE[name]}"):
            EngineSettings.of(**{name: 1})


@pytest.mark.parametrize("name", KEYS)
def test_keys_of_the_gateway(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is now {RENAMED[name]}"):
        parse_config(f"{name} = 2000\n{ENGINE}".encode())
    parse_config(f"{RENAMED[name]} = 2000\n{ENGINE}".encode())


def test_a_name_that_is_not_known_here_is_not_advised() -> None:
    assert is_now(["--max-wait"], ["--port"]) == is_now(["--port"], ["--port"]) == ""
