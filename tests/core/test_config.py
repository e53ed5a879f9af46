"""Values of settings that are refused."""

from __future__ import annotations

import pytest

from paceline.core.config import CacheConfig
from paceline.errors import ConfigError


@pytest.mark.parametrize(
    ("field", "value"), [("block_size", 0), ("num_blocks", 0), ("watermark", 1.0)]
)
def test_cache_config_refuses_bad_values(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        CacheConfig(**({"block_size": 4, "num_blocks": 4} | {field: value}))  # type: ignore[arg-type]
