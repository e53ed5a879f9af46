"""Short names of models on the hub, from ``catalogue.json``, which is data alone.

A row names the model's repository and a source for it. ``tried`` tells whether it was run; sizes
and digests are those that the hub states when a model is pulled, so the file has none.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from paceline.checkpoints.model.json_file import read_json_object
from paceline.errors import CheckpointError

__all__ = ["CatalogueRow", "catalogue"]


@dataclass(frozen=True, slots=True)
class CatalogueRow:
    """One model in the catalogue."""

    name: str
    # name for ``names``: "org/repo" or "org/repo:Q4_K_M"
    hub: str
    # title for users
    title: str
    # number of parameters, such as "1.7B"
    parameters: str
    # SPDX identifier of the weights' licence, LicenseRef-... where it has none
    licence: str
    # whether the hub wants a token of a user who has accepted its conditions
    gated: bool
    # page that this information is from
    source: str
    # whether it was served and its answers checked before the row was written
    tried: bool


@functools.cache
def catalogue() -> Mapping[str, CatalogueRow]:
    """Return the rows by name. Raises CheckpointError for a malformed file."""
    path = Path(__file__).with_suffix(".json")
    fields = read_json_object(path)
    if fields is None:
        raise CheckpointError(f"{path} is missing; install paceline again")
    rows = [CatalogueRow(**row) for row in fields["models"]]
    return MappingProxyType({row.name: row for row in rows})
