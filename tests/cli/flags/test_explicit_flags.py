"""Flags that differ from their default, as the page's operations tab shows them."""

import pytest

from paceline.cli.flags.options import engine_settings
from paceline.cli.main import build_parser
from paceline.cli.serve.command import _server_config


def given(*flags: str) -> dict[str, tuple[str, str]]:
    args = build_parser(("serve",)).parse_args(["serve", *flags])
    return {setting.flag: (setting.value, setting.default) for setting in args.given(args)}


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([], {}),
        # what is given as it would be anyway is no difference
        (["--port", "8000", "--max-num-seqs", "256"], {}),
        (["--max-num-seqs", "64"], {"--max-num-seqs": ("64", "256")}),
        (["some/model"], {"MODEL": ("some/model", "smollm2-135m")}),
        (["--no-ui"], {"--no-ui": ("", "")}),
        (["--strict-fields"], {"--strict-fields": ("", "")}),
        (["--no-enable-prefix-caching"], {"--no-enable-prefix-caching": ("", "on")}),
        (["--no-adaptive-token-budget"], {"--no-adaptive-token-budget": ("", "on")}),
        (["--drain-timeout", "2.5"], {"--drain-timeout": ("2.5", "30")}),
        (
            ["--rate-limit-requests", "60/minute"],
            {"--rate-limit-requests": ("60/minute", "no limit")},
        ),
        (["--max-header-size", "1MiB"], {"--max-header-size": ("1MiB", "64KiB")}),
        (["--served-model-name", "a", "b"], {"--served-model-name": ("a b", "MODEL as given")}),
        (
            ["--slo-class", "chat=ttft:500,best-effort", "--slo-class", "x=tpot:20"],
            {"--slo-class": ("chat=ttft:500,best-effort x=tpot:20", "")},
        ),
    ],
)
def test_what_was_given_and_what_holds_without_it(
    flags: list[str], told: dict[str, tuple[str, str]]
) -> None:
    assert given(*flags) == told


def test_no_url_is_shown_whole() -> None:
    found = given(
        "--rate-limit-storage", "redis://user:hush@cache:6379/0?password=hush",
        "--otlp-endpoint", "https://collector:4318/v1?token=hush",
    )  # fmt: skip
    assert found["--rate-limit-storage"][0] == "redis://cache:6379"
    assert found["--otlp-endpoint"][0] == "https://collector:4318"
    # nor is one that is none
    assert given("--otlp-endpoint", "http://a@b:hush@[::1/x")["--otlp-endpoint"][0] == "http://[::1"
    assert "hush" not in str(found)


def test_the_server_is_given_them() -> None:
    args = build_parser(("serve",)).parse_args(["serve", "--backend", "null"])
    config = _server_config(args, engine_settings(args), (), 1)
    assert [setting.flag for setting in config.given] == ["--backend"]
