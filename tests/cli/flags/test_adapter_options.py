"""Flags for adapters: what each of them changes, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.cli.flags.adapter_options import (
    adapter_config,
    adapter_settings,
    add_adapter_options,
)
from paceline.cli.flags.arguments import Parser
from paceline.cli.flags.settings import EngineSettings
from paceline.errors import ConfigError


def parse(*flags: str) -> Any:
    parser = Parser(prog="paceline serve")
    add_adapter_options(parser)
    return parser.parse_args(flags)


def test_without_flags_nothing_changes() -> None:
    settings = EngineSettings.of()
    assert settings.changed(**adapter_settings(parse())) == settings
    assert not adapter_config(parse()).modules


def test_every_flag_reaches_the_engine_or_the_server(tmp_path: Path) -> None:
    args = parse(
        "--enable-lora", "--lora-modules", "sql=/a/b",
        '{"name": "chat", "path": "c=d", "pinned": true}',
        "--max-loras", "3", "--max-cpu-loras", "7", "--max-lora-rank", "16",
        "--lora-memory", "1MiB", "--lora-dtype", "float32", "--allow-runtime-lora",
        "--lora-root", str(tmp_path),
        "--lora-resolve", str(tmp_path),
    )  # fmt: skip
    settings = EngineSettings.of().changed(**adapter_settings(args))
    assert settings.enable_lora
    assert settings.scheduler.max_adapters == 3
    assert (settings.max_cpu_loras, settings.max_lora_rank) == (7, 16)
    assert (settings.lora_bytes, settings.lora_dtype) == (1 << 20, "float32")
    assert EngineSettings.from_json(settings.to_json()) == settings
    config = adapter_config(args)
    assert [(m.name, m.path, m.pinned) for m in config.modules] == [
        ("sql", "/a/b", False), ("chat", "c=d", True),
    ]  # fmt: skip
    assert config.allow_runtime
    assert config.roots == (tmp_path,)
    assert config.resolve == tmp_path


def test_vllms_variables_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True")
    monkeypatch.setenv("VLLM_LORA_RESOLVER_CACHE_DIR", str(tmp_path))
    config = adapter_config(parse("--enable-lora", "--lora-root", str(tmp_path)))
    assert config.allow_runtime
    assert config.resolve == tmp_path
    # they say what --enable-lora does, and do not ask for it
    adapter_settings(parse())
    assert not adapter_config(parse()).allow_runtime


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--lora-modules", "a=b"], "--lora-modules has no effect without --enable-lora"),
        (["--max-loras", "2"], "--max-loras has no effect without --enable-lora"),
        (["--enable-lora", "--lora-modules", "a=b", "a=c"], "names 'a' twice"),
        (["--enable-lora", "--allow-runtime-lora"], "--allow-runtime-lora needs --lora-root"),
        (["--enable-lora", "--lora-root", "/a"], "--lora-root has no effect without --allow-"),
        (["--lora-dtype", "auto"], "--lora-dtype has no effect without --enable-lora"),
        (["--allow-runtime-lora"], "--allow-runtime-lora has no effect without --enable-lora"),
        (["--lora-resolve", "/a"], "--lora-resolve has no effect without --enable-lora"),
        (
            ["--enable-lora", "--allow-runtime-lora", "--lora-root", "/no/such/folder"],
            "--lora-root /no/such/folder is no",
        ),
    ],
)
def test_what_cannot_be_is_refused(flags: list[str], said: str) -> None:
    args = parse(*flags)
    with pytest.raises(ConfigError) as caught:
        adapter_settings(args)
        adapter_config(args)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "text", ["a", "=b", "a=", '{"name": "a"}', '{"name": "a", "path": "b", "x": 1}']
)
def test_a_module_is_a_name_and_a_path(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--lora-modules", text)
    assert "name" in capsys.readouterr().err
