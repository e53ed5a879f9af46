"""docs/operate/gateway.md says what there is."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import get_args

import msgspec

from paceline.gateway.observability.metrics import GatewayMetrics
from paceline.gateway.settings.cascade import CascadeConfig, UnderLoad
from paceline.gateway.settings.config import (
    EngineConfig,
    GatewayConfig,
    KeyConfig,
    ModelConfig,
    PoolConfig,
    PriceConfig,
    parse_config,
)
from paceline.gateway.upstreams.state import UpstreamState

PAGE = (Path(__file__).parents[2] / "docs/operate/gateway.md").read_text()


def test_every_setting_is_there_with_its_default() -> None:
    rows = {}
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 3:
            defaults = cells[1].split(", ")
            for number, name in enumerate(re.findall(r"`([a-z_]+)`", cells[0])):
                rows[name] = defaults[min(number, len(defaults) - 1)]
    kinds = (GatewayConfig, EngineConfig, PoolConfig, ModelConfig, PriceConfig, KeyConfig)
    for kind in (*kinds, CascadeConfig, UnderLoad):
        for field in msgspec.structs.fields(kind):
            # a bound has the name of the first one
            if field.name in ("engines", "pools", "models", "prices", "keys", "max_loss"):
                continue
            assert field.name in rows, field.name
            default = field.default
            if isinstance(default, bool):
                assert rows[field.name] == str(default).lower()
            elif isinstance(default, (int, float)):
                assert float(rows[field.name]) == default, field.name


def test_every_metric_is_there() -> None:
    told = set(re.findall(r"^\| `(paceline:gateway_\w+)` \| ([^|]*) \|", PAGE, re.MULTILINE))
    served = {
        (family.name, ", ".join(f"`{label}`" for label in family.labels))
        for family in GatewayMetrics().registry.describe()
    }
    assert told == served


def test_the_example_is_a_good_one() -> None:
    example, small_first, spending, clouds = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert tomllib.loads(example)["engines"]
    # the keys that they name are not set here
    config = parse_config(re.sub(r"api_key_env = .*", "", example).encode())
    assert config.models[0].pressure_fallback
    head, tables = example.partition("[[engines]]")[0], example[example.index("[[engines]]") :]
    whole = head + spending.replace('"small"', '"chat"') + tables
    priced = parse_config(re.sub(r"api_key_env = .*", "", whole).encode())
    assert [row.engine for row in priced.prices] == ["gpu1", ""]
    engines = "".join(f'[[engines]]\nname = "{n}"\nurl = "http://h"\n' for n in ("cloud", "laptop"))
    cascade = parse_config((engines + small_first).encode()).models[0].cascade
    assert cascade is not None and cascade.small == "small"
    parts = parse_config(re.sub(r"api_key_env = .*", "", clouds).encode())
    assert [engine.kind for engine in parts.engines] == ["azure", "anthropic"]


def test_every_state_is_there() -> None:
    told = re.findall(r"^\| `([a-z_-]+)` \| [^|]*\|$", PAGE, re.MULTILINE)
    assert tuple(name for name in told if name in get_args(UpstreamState)) == get_args(
        UpstreamState
    )
