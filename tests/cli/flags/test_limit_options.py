"""Flags about limits: each sets its setting and no other, and its help tells the default."""

import re
from dataclasses import replace
from typing import Any

import pytest

from paceline.cli.flags.arguments import Parser
from paceline.cli.flags.limit_options import add_limit_options, limit_settings
from paceline.errors import ConfigError
from paceline.http.bounds import Bounds
from paceline.http.rate_limits.rates import KeyLimits, Rate
from paceline.server import ServerConfig


def config(*flags: str) -> ServerConfig:
    parser = Parser(prog="paceline test")
    add_limit_options(parser)
    return ServerConfig(**limit_settings(parser.parse_args(flags)))


@pytest.mark.parametrize(
    ("flags", "changes"),
    [
        (["--rate-limit-requests", "60/minute"], {"limits": KeyLimits(requests=Rate(60, 60))}),
        (["--rate-limit-tokens", "5/10s"], {"limits": KeyLimits(tokens=Rate(5, 10))}),
        (["--max-concurrent-per-key", "3"], {"limits": KeyLimits(concurrent=3)}),
        (
            ["--rate-limit-storage", "redis://h:1/0", "--rate-limit-requests", "5/10s"],
            {"rate_limit_storage": "redis://h:1/0", "limits": KeyLimits(requests=Rate(5, 10))},
        ),
        (["--max-header-size", "2KiB"], {"bounds": Bounds(max_head_bytes=2048)}),
        (["--max-headers", "9"], {"bounds": Bounds(max_headers=9)}),
        (["--max-json-depth", "5"], {"bounds": Bounds(max_json_depth=5)}),
        (["--max-json-items", "99"], {"bounds": Bounds(max_json_items=99)}),
        (["--max-connections", "7"], {"bounds": Bounds(max_connections=7)}),
        (["--receive-timeout", "0"], {"bounds": Bounds(receive_timeout=0.0)}),
        (["--keep-alive-timeout", "600"], {"bounds": Bounds(keep_alive_timeout=600.0)}),
        (
            ["--cors-origin", "https://a.example", "--cors-origin", "https://b.example"],
            {"cors_origins": ("https://a.example", "https://b.example")},
        ),
        (["--allowed-host", "*.example.org"], {"allowed_hosts": ("*.example.org",)}),
        (["--no-ui"], {"ui": False, "timeline_history": 0}),
        (["--no-timeline"], {"timeline_history": 0}),
        (["--timeline-history", "1MiB"], {"timeline_history": 2**20}),
        (["--share-prefix-cache"], {"share_prefix_cache": True}),
    ],
)
def test_a_flag_sets_its_setting_and_no_other(flags: list[str], changes: dict[str, Any]) -> None:
    assert config(*flags) == replace(ServerConfig(), **changes) != ServerConfig()


def test_without_flags_there_are_defaults() -> None:
    assert config() == ServerConfig()


def test_the_help_tells_the_defaults() -> None:
    parser = Parser(prog="paceline test")
    add_limit_options(parser)
    told = dict(re.findall(r"--([\w-]+) [A-Z]+\s[^(]*\(default\s+([\d.]+)", parser.format_help()))
    bounds = Bounds()
    assert told == {
        "max-headers": str(bounds.max_headers),
        "max-json-depth": str(bounds.max_json_depth),
        "max-json-items": str(bounds.max_json_items),
        "max-connections": str(bounds.max_connections),
        "max-header-size": str(bounds.max_head_bytes // 1024),
        "receive-timeout": f"{bounds.receive_timeout:g}",
        "keep-alive-timeout": f"{bounds.keep_alive_timeout:g}",
        "timeline-history": str(ServerConfig().timeline_history // 2**20),
    }


@pytest.mark.parametrize(
    "flags",
    [
        ["--rate-limit-requests", "60"],
        ["--rate-limit-tokens", "0/minute"],
        ["--max-concurrent-per-key", "0"],
        ["--max-headers", "1"],
        ["--max-json-depth", "65"],
        ["--receive-timeout", "-1"],
        ["--keep-alive-timeout", "-1"],
    ],
)
def test_bad_values_end_in_a_usage_error(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        config(*flags)
    assert ended.value.code == 2 and flags[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ["--rate-limit-storage", "memory://"],
        ["--rate-limit-storage", "redis://h:1/0"],
        # counted where they run, not there
        ["--rate-limit-storage", "redis://h:1/0", "--max-concurrent-per-key", "3"],
        ["--cors-origin", "example.org"],
        ["--allowed-host", "a:80"],
        ["--max-header-size", "1023B"],
    ],
)
def test_what_cannot_be_is_a_configuration_error(flags: list[str]) -> None:
    with pytest.raises(ConfigError):
        config(*flags)
