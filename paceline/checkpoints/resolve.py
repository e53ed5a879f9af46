"""From what a user calls a model to the files on disk.

A name is tried as, in this order: an alias (``smollm2-135m``), an existing folder or ``.gguf``
file, a hub id (``org/name``). Names may come from a config file or a caller, so nothing in one can
climb out of a folder: ``..``, encoded slashes and control characters are refused before anything
looks at the disk.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from paceline.checkpoints.aliases import ALIASES
from paceline.checkpoints.pull import Progress, cached_path, is_cached, pull
from paceline.core.errors import CheckpointError

__all__ = ["ResolvedModel", "default_cache_dir", "find_local", "resolve_model"]

# what a checkpoint needs; no pickles, no Python, and not the second copy some repositories keep
_HUB_FILES: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "model.safetensors.index.json",
    "model*.safetensors",
)
_HUB_ID: Final = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}", re.ASCII
)
_ENCODED: Final = re.compile(r"%(?:2e|2f|5c|00|25)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that is on this machine."""

    # as the user wrote it; the name it is served under unless told otherwise
    name: str
    path: Path
    kind: Literal["hf", "gguf"]


def default_cache_dir() -> Path:
    """``PACELINE_CACHE``, else ``XDG_CACHE_HOME/paceline``, else ``~/.cache/paceline``."""
    if own := os.environ.get("PACELINE_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "paceline"
    return Path.home() / ".cache" / "paceline"


def find_local(alias: str, cache_dir: Path | None = None) -> Path | None:
    """The model of ``alias`` if it was pulled before, else None. Never touches the network."""
    entry = ALIASES.get(alias)
    folder = cache_dir or default_cache_dir()
    return cached_path(entry, folder) if entry and is_cached(entry, folder) else None


def resolve_model(
    name: str,
    *,
    cache_dir: Path | None = None,
    offline: bool = False,
    progress: Progress | None = None,
) -> ResolvedModel:
    """Find ``name``, fetching it if it is an alias or a hub id and ``offline`` is false.

    Hub models are kept in Hugging Face's own cache (``HF_HOME``), aliases under ``cache_dir``.

    Raises:
        CheckpointError: no such model, an unsafe name, or it cannot be fetched.
    """
    _refuse_unsafe(name)
    folder = cache_dir or default_cache_dir()
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
        return ResolvedModel(name, path, "gguf")
    if _HUB_ID.fullmatch(name) and not name.endswith(".gguf"):
        return ResolvedModel(name, _from_hub(name, offline), "hf")
    raise CheckpointError(
        f"no model {name!r}: not one of {', '.join(ALIASES)}, no such file or folder, "
        "and not a hub id like org/name"
    )


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


def _from_hub(repo_id: str, offline: bool) -> Path:
    # imported here: a server started on a local model never needs it
    import huggingface_hub

    try:
        return Path(
            huggingface_hub.snapshot_download(
                repo_id, allow_patterns=list(_HUB_FILES), local_files_only=offline
            )
        )
    except Exception as error:
        # the hub client's errors come from several libraries and change with its version; every
        # one of them means that the model could not be had
        detail = (str(error).strip() or type(error).__name__).splitlines()[0]
        advice = (
            "downloads are off and it is not in the local cache"
            if offline
            else "check the name, the network and, for gated models, HF_TOKEN"
        )
        raise CheckpointError(
            f"cannot get {repo_id} from the hub: {advice}. The hub client said: {detail:.300}"
        ) from error
