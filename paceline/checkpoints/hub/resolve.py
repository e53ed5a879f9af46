"""Resolution of a user's name of a model to the files on disk.

A name is tried as, in this order: an alias (``smollm2-135m``), an existing folder or ``.gguf``
file, a short name of the catalogue, a name on the hub (``names``). Names may come from a config
file or a caller, so none may leave a folder: ``..``, encoded slashes and control characters are
refused before the disk is read.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from paceline.checkpoints.hub.catalogue import ALIASES, catalogue
from paceline.checkpoints.hub.names import parse_hub_name, parts_of
from paceline.checkpoints.hub.pip_models import Progress, cached_path, is_cached, pull
from paceline.errors import CheckpointError

__all__ = ["ResolvedModel", "default_cache_dir", "find_local", "resolve_model"]

# of a branch, tag or commit; none leaves a folder
_REVISION: Final = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}(?:/[A-Za-z0-9][A-Za-z0-9._-]{0,99}){0,4}"
)
_ENCODED: Final = re.compile(r"%(?:2e|2f|5c|00|25)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that is on this machine."""

    # as the user wrote it; the default name that it is served under
    name: str
    path: Path
    kind: Literal["hf", "gguf"]


def default_cache_dir() -> Path:
    """Return ``PACELINE_CACHE``, else ``XDG_CACHE_HOME/paceline``, else ``~/.cache/paceline``."""
    if own := os.environ.get("PACELINE_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "paceline"
    return Path.home() / ".cache" / "paceline"


def find_local(alias: str, cache_dir: Path | None = None) -> Path | None:
    """Return the model of ``alias`` if it was pulled before, else None, without the network."""
    entry = ALIASES.get(alias)
    folder = cache_dir or default_cache_dir()
    return cached_path(entry, folder) if entry and is_cached(entry, folder) else None


def resolve_model(
    name: str,
    *,
    cache_dir: Path | None = None,
    offline: bool = False,
    refresh: bool = False,
    revision: str | None = None,
    progress: Progress | None = None,
) -> ResolvedModel:
    """Find ``name``; fetch it unless ``offline`` if it is an alias or on the hub and not yet here.
    ``refresh`` asks the hub for its newest version even where the model is here. ``revision`` is a
    branch, tag or commit of a hub model; None: main.

    Hub models are kept in Hugging Face's own cache (``HF_HOME``), aliases under ``cache_dir``.

    Raises:
        CheckpointError: no such model, an unsafe name, or it cannot be fetched.
    """
    _refuse_unsafe(name)
    folder = cache_dir or default_cache_dir()
    wanted = "main" if revision is None else revision
    if wanted != "main" and not _REVISION.fullmatch(wanted):
        raise CheckpointError(f"{wanted!r:.80} is not the name of a branch, tag or commit")
    if wanted != "main" and (name in ALIASES or Path(name).expanduser().exists()):
        raise CheckpointError(
            f"revision {wanted} is of a repository on the hub, and {name} is not from there: leave "
            "it out"
        )
    if name in ALIASES:
        local = find_local(name, folder)
        if local is None and offline:
            raise CheckpointError(
                f"{name} is not in {folder} and downloads are off; "
                f"run `paceline pull {name}` where there is a network"
            )
        return ResolvedModel(name, local or pull(name, folder, progress), "gguf")

    path = Path(name).expanduser()
    if path.is_dir():
        return ResolvedModel(name, path, "hf")
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise CheckpointError(
                f"{path} is a {path.suffix or 'nameless'} file; "
                "give a .gguf file or a folder with config.json and safetensors"
            )
        # the first part of a split file has the metadata
        return ResolvedModel(name, path.with_name(parts_of(path.name)[0]), "gguf")
    row = catalogue().get(name)
    reference = parse_hub_name(row.hub if row else name)
    if reference is None:
        raise CheckpointError(
            f"no model {name!r}: not one of {', '.join(ALIASES)} or `paceline pull --list`, no "
            "such file or folder, and not a name on the hub like org/name or org/name:Q4_K_M"
        )
    reference = replace(reference, revision=wanted)
    # imported here: a server started on a local model never needs it
    from paceline.checkpoints.hub.client import hub_model

    try:
        found, selection = hub_model(reference, offline=offline, refresh=refresh, progress=progress)
    except CheckpointError as error:
        if not reference.path:
            raise
        # the name may have been meant as a path
        raise CheckpointError(f"no model {name!r} on this machine; {error}") from None
    return ResolvedModel(name, found, selection.kind)


def _refuse_unsafe(name: str) -> None:
    if not name or len(name) > 4096:
        raise CheckpointError(f"a model name has 1 to 4096 characters, got {len(name)}")
    if any(ord(character) < 32 or ord(character) == 127 for character in name):
        raise CheckpointError(f"model name {name!r:.80} holds control characters")
    if ".." in re.split(r"[/\\]", name) or _ENCODED.search(name):
        raise CheckpointError(
            f"model name {name!r:.80} holds '..' or an encoded character; "
            "to use a folder elsewhere give its absolute path"
        )
