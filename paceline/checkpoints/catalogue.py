"""Short names of models on the hub: ``catalogue.json``, which is data alone.

A row says where the model is and who says so. None was run here (``tried``), and sizes and digests
are those that the hub states when a model is pulled, so the file holds none.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from paceline.checkpoints.json_file import read_json_object
from paceline.core.errors import CheckpointError

__all__ = ["CatalogueRow", "catalogue"]


@dataclass(frozen=True, slots=True)
class CatalogueRow:
    """One model that somebody may want."""

    name: str
    # as ``hub_names`` reads it: "org/repo" or "org/repo:Q4_K_M"
    hub: str
    # for people: what the model is
    title: str
    # "1.7B"
    parameters: str
    # SPDX identifier of the weights' licence, LicenseRef-... where there is none
    licence: str
    # whether its conditions must be accepted, and a token given
    gated: bool
    # the page that says so
    source: str
    # whether it was served and its answers looked at, by whoever wrote the row
    tried: bool


@functools.cache
def catalogue() -> Mapping[str, CatalogueRow]:
    """By name. Raises CheckpointError for a file that somebody has spoilt."""
    path = Path(__file__).with_suffix(".json")
    fields = read_json_object(path)
    if fields is None:
        raise CheckpointError(f"{path} is missing; install paceline again")
    rows = [CatalogueRow(**row) for row in fields["models"]]
    return MappingProxyType({row.name: row for row in rows})
