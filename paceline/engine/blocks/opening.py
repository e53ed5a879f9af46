"""Keeper of blocks, made from an engine's settings, and the fingerprint of what a block's bytes
depend on, besides its tokens."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from paceline.checkpoints.gguf.shards import weight_files
from paceline.core.backend import BackendInfo, BlockMemory, ModelBackend
from paceline.core.memory.kv_cache import KVCacheManager
from paceline.engine.blocks.disk import DiskStore
from paceline.engine.blocks.keeper import BlockKeeper
from paceline.engine.blocks.peer import BlockServer, Peer
from paceline.engine.types import KvSource
from paceline.errors import ConfigError
from paceline.files import make_private_folder, write_private

__all__ = [
    "KEY_VARIABLE",
    "BlockSettings",
    "file_digests",
    "fingerprint",
    "model_files",
    "open_keeper",
]

_DIGESTS: Final = "digests.json"


def fingerprint(digests: Iterable[str], about: Mapping[str, object]) -> bytes:
    """Return 32 bytes that are equal only for equal model files and equal ``about``, which is JSON:
    formats, block size, and what the backend's ``block_layout`` says."""
    text = json.dumps({"files": list(digests), **about}, sort_keys=True)
    return hashlib.sha256(b"paceline-blocks" + text.encode()).digest()


def file_digests(files: Iterable[Path], folder: Path | None) -> list[str]:
    """Return the SHA-256 of each file. Whole files are read, since equal fingerprints of unequal
    models would mix their caches; so digests are kept in ``folder``, if there is one, until size or
    time of change differ. Raises OSError where a model's file cannot be read."""
    kept: dict[str, str] = {}
    store = None if folder is None else folder / _DIGESTS
    if store is not None:
        try:
            found = json.loads(store.read_bytes())
            kept = {k: v for k, v in found.items() if isinstance(v, str)}
        except (OSError, ValueError, AttributeError):
            kept = {}
    digests, known = [], {}
    for file in files:
        about = file.stat()
        name = json.dumps([str(file.resolve()), about.st_size, about.st_mtime_ns, about.st_ino])
        digest = kept.get(name)
        if digest is None:
            with file.open("rb") as data:
                digest = hashlib.file_digest(data, "sha256").hexdigest()
        known[name] = digest
        digests.append(digest)
    if store is not None and known.items() - kept.items():
        try:
            write_private(store, json.dumps(kept | known))
        except OSError:
            # they are computed again next time
            return digests
    return digests


# environment variable with the key that engines of one fleet share
KEY_VARIABLE: Final = "PACELINE_KV_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSettings:
    """Settings of blocks outside the pool."""

    # folder of blocks on disk, and its most bytes; None: nothing is kept
    folder: Path | None
    max_bytes: int
    # port at which peers ask, 0 for a free one; None: they cannot
    port: int | None
    host: str = "127.0.0.1"


def open_keeper(
    kv: KVCacheManager,
    backend: ModelBackend,
    settings: BlockSettings,
    files: tuple[Path, ...],
    environment: Mapping[str, str] = os.environ,
) -> BlockKeeper:
    """Return what keeps blocks of ``backend`` outside its pool.

    Args:
        files: the model's files.

    Raises:
        ConfigError: a model whose blocks cannot be copied, a folder that cannot be written, a port
            that is taken, or one without a key.
    """
    asked = "--kv-store" if settings.folder is not None else "--kv-port"
    layout = None
    if not isinstance(backend, BlockMemory) or (layout := backend.block_layout()) is None:
        raise ConfigError(
            f"{asked}: the backend {backend.info.name} cannot copy KV blocks of this model"
        )
    if not kv.config.enable_prefix_caching:
        raise ConfigError(
            f"{asked} keeps cached prefixes, and --no-enable-prefix-caching keeps none"
        )
    block_bytes, level = layout
    key = environment.get(KEY_VARIABLE, "").encode()
    if settings.port is not None and not key:
        raise ConfigError(
            f"--kv-port {settings.port} needs a key that peers share: set {KEY_VARIABLE}"
        )
    store = None
    try:
        if settings.folder is not None:
            make_private_folder(settings.folder)
        digests = file_digests(files, settings.folder)
    except OSError as error:
        raise ConfigError(f"{asked} {settings.folder or ''}: {error}") from None
    print_ = fingerprint(digests, _about(backend.info, level))
    if settings.folder is not None:
        store = DiskStore(settings.folder, print_, block_bytes, settings.max_bytes)
    keeper = BlockKeeper(kv, backend, print_, store)
    if key:
        keeper.peer = partial(_peer, print_, block_bytes, key)
    if settings.port is not None:
        try:
            is_v6 = ":" in settings.host
            listener = socket.create_server(
                (settings.host, settings.port),
                family=socket.AF_INET6 if is_v6 else socket.AF_INET,
                backlog=16,
                dualstack_ipv6=is_v6 and socket.has_dualstack_ipv6(),
            )
        except OSError as error:
            keeper.close()
            raise ConfigError(f"--kv-port {settings.port}: {error.strerror or error}") from None
        keeper.server = BlockServer(listener, keeper.ask, print_, block_bytes, key)
    return keeper


def model_files(path: Path) -> tuple[Path, ...]:
    """Return the files that a model's weights and shape are read from."""
    if path.is_dir():
        return tuple(sorted([*path.glob("*.safetensors"), path / "config.json"]))
    return tuple(weight_files(path))


def _about(info: BackendInfo, level: str) -> dict[str, object]:
    return {
        "backend": info.name, "dtype": info.dtype, "kv_dtype": info.kv_dtype, "level": level,
        "block_size": info.block_size, "vocab_size": info.vocab_size,
    }  # fmt: skip


def _peer(print_: bytes, block_bytes: int, key: bytes, source: KvSource) -> Peer | None:
    """Return the peer that a request names; None where its blocks are not like ours."""
    if source.fingerprint != print_.hex():
        return None
    return Peer(source.url, print_, block_bytes, key)
