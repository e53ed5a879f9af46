"""Names of adapters: what each stands for now, and where files may be loaded from.

A name stands for one load of one path. Loading a name again makes a new key, so that requests that
are under way end on the contents that they began with. Used from the event loop's thread.

This module does not know HTTP, or what an adapter holds.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from paceline.engine.protocol import AdapterClient
from paceline.engine.types import AdapterStatus
from paceline.errors import InvalidRequestError
from paceline.http.errors import HttpError
from paceline.http.fields import show
from paceline.server.protocol.rules import NamedAdapter
from paceline.server.settings.config import AdapterConfig

__all__ = ["AdapterNames", "check_places"]

_log = logging.getLogger("paceline.server")

_MAX_NAME_CHARS: Final = 256
# kernels take factors in float32
_MAX_SCALE: Final = 3.4e38


class AdapterNames:
    """Adapters of one server by name.

    Args:
        taken: names of the model.
        by_name: where the rules of requests find adapters; this object alone changes it.
    """

    def __init__(
        self,
        client: AdapterClient,
        config: AdapterConfig,
        taken: Collection[str],
        by_name: dict[str, NamedAdapter],
    ) -> None:
        self._client, self._config, self._taken = client, config, taken
        self._by_name = by_name
        # loads under way by name, with their path and whether they pin: two that agree are one load
        self._loading: dict[str, tuple[tuple[Path, bool], asyncio.Task[NamedAdapter]]] = {}
        self._num_loads = 0

    @property
    def by_name(self) -> Mapping[str, NamedAdapter]:
        return self._by_name

    def state_of(self, adapter: NamedAdapter) -> str:
        """Return what a request that comes now does with an adapter: it is ``resident``, or is
        ``loaded`` for the request."""
        status = self._client.adapters.get(adapter.key)
        return "resident" if status is not None and status.status == "resident" else "loaded"

    def status_of(self, name: str) -> AdapterStatus | None:
        """Return the latest news of an adapter; None: its engine is being replaced."""
        return self._client.adapters.get(self._by_name[name].key)

    async def load_given(self) -> None:
        """Load the adapters that the server was started with, or none. Raises as ``load`` does."""
        try:
            for given in self._config.modules:
                path = Path(given.path)
                self._check_name(given.name)
                # where on this machine it lies is of no use to callers
                await self._load(given.name, path, path.name, pinned=given.pinned)
        except BaseException:
            # who tries again begins with the same keys
            for name in tuple(self._by_name):
                self.unload(name)
            raise

    async def load(
        self, name: str, path: str, *, in_place: bool = False, pinned: bool = False
    ) -> None:
        """Load an adapter for requests, from one of the roots; ``pinned``: it stays in memory until
        it is unloaded.

        Raises:
            InvalidRequestError: the name is taken, or the file is refused.
            HttpError: 403, the path is outside the roots; 404, there is nothing; 507, no room.
            EngineError: the engine ended meanwhile.
        """
        self._check_name(name)
        found = await asyncio.to_thread(self._inside, path)
        wanted = found, pinned
        while (under_way := self._loading.get(name)) is not None and under_way[0] != wanted:
            if not in_place:
                raise InvalidRequestError(
                    f"The adapter {show(name)} is being loaded from another path, or pinned or "
                    "not; load_inplace=true replaces it",
                    "lora_name",
                )
            await asyncio.wait((under_way[1],))
        if name in self._by_name and not in_place and name not in self._loading:
            raise InvalidRequestError(
                f"The adapter {show(name)} is loaded; load_inplace=true replaces it", "lora_name"
            )
        await self._load(name, found, path, pinned=pinned)

    def apply(self, scales: Mapping[int, float]) -> None:
        """Use adapters for requests of llama-server's endpoints that name the model, by their place
        in the list; those left out are not used. Raises InvalidRequestError for an unknown place,
        or several at once."""
        names = list(self._by_name)
        check_places(scales, len(names))
        for place, name in enumerate(names):
            adapter = self._by_name[name]
            self._by_name[name] = replace(adapter, applied=scales.get(place, 0.0))

    def unload(self, name: str) -> None:
        """Forget a name; requests that use its adapter go on. Raises HttpError 404."""
        adapter = self._by_name.pop(name, None)
        if adapter is None:
            raise HttpError(404, f"The adapter {show(name)} is not loaded")
        self._client.unload_adapter(adapter.key)

    async def resolve(self, name: object) -> None:
        """Load the adapter of an unknown name from the folder for that, if it is there."""
        folder = self._config.resolve
        if (
            folder is None
            or not isinstance(name, str)
            or not 0 < len(name) <= _MAX_NAME_CHARS
            or name in self._by_name
            or name in self._taken
            # a plain name cannot leave the folder
            or name.startswith(".")
            or any(character in name for character in "/\\\0:")
        ):
            return
        path = folder / name
        if await asyncio.to_thread(_is_inside, path, folder):
            await self._load(name, path, name)

    def _check_name(self, name: str) -> None:
        if not 0 < len(name) <= _MAX_NAME_CHARS or any(ord(c) < 32 or c == "*" for c in name):
            raise InvalidRequestError(
                f"lora_name must have 1 to {_MAX_NAME_CHARS} characters, without control "
                f"characters and *, got {show(name)}",
                "lora_name",
            )
        if name in self._taken:
            raise InvalidRequestError(f"{show(name)} is a name of the model", "lora_name")

    def _inside(self, path: str) -> Path:
        """Return a path in one of the roots. Raises HttpError 403 before the disk is asked, or for
        a link that leads out of them."""
        for root in self._config.roots:
            whole = Path(os.path.normpath(root / path))
            if "\0" not in path and whole.is_relative_to(root):
                if not _exists(whole):
                    raise HttpError(404, f"There is no adapter at {show(path)}")
                if _stays_inside(whole, root):
                    return whole
        raise HttpError(
            403, f"lora_path {show(path)} is outside the folders that --lora-root names"
        )

    async def _load(
        self, name: str, path: Path, shown: str, *, pinned: bool = False
    ) -> NamedAdapter:
        """Load ``path`` under ``name``, once for all who ask meanwhile."""
        if name not in self._loading:
            task = asyncio.create_task(self._load_once(name, path, shown, pinned))
            self._loading[name] = (path, pinned), task
            task.add_done_callback(lambda _: self._loading.pop(name, None))
        return await asyncio.shield(self._loading[name][1])

    async def _load_once(self, name: str, path: Path, shown: str, pinned: bool) -> NamedAdapter:
        key = f"{name}#{self._num_loads}"
        self._num_loads += 1
        status = await self._client.load_adapter(key, str(path), pinned=pinned)
        if status.status == "failed":
            self._client.unload_adapter(key)
            # the engine's message begins with the whole path
            message = status.error.replace(str(path), shown)
            _log.warning("adapter=%s path=%s refused: %s", name, path, status.error)
            if status.kind == "AdapterRoomError":
                raise HttpError(507, f"The adapter {show(name)} has no room: {message}")
            raise InvalidRequestError(f"The adapter {show(name)}: {message}", "lora_path")
        before = self._by_name.get(name)
        applied = 0.0 if before is None else before.applied
        adapter = NamedAdapter(name, key, shown, status.rank, status.digest, applied=applied)
        self._by_name[name] = adapter
        if before is not None:
            self._client.unload_adapter(before.key)
        _log.info(
            "adapter=%s path=%s loaded: rank %d, %d KiB", name, path, status.rank,
            status.num_bytes >> 10,
        )  # fmt: skip
        return adapter


def check_places(scales: Mapping[int, float], count: int) -> None:
    """Raise InvalidRequestError unless ``scales`` name one of ``count`` adapters to use at most,
    with a factor that is finite in float32."""
    for place, scale in scales.items():
        if not 0 <= place < count:
            raise InvalidRequestError(
                f"lora: there is no adapter {place}; GET /lora-adapters lists {count}", "lora"
            )
        if not abs(scale) <= _MAX_SCALE:
            raise InvalidRequestError(f"lora: the scale {scale:g} is too large for float32", "lora")
    if sum(scale != 0 for scale in scales.values()) > 1:
        raise InvalidRequestError("lora: several adapters at once are not served", "lora")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        # one name of the path is longer than any file's
        return False


def _is_inside(path: Path, folder: Path) -> bool:
    return _exists(path) and _stays_inside(path, folder)


def _stays_inside(path: Path, folder: Path) -> bool:
    """Return whether no link leads out of ``folder``: of the path, or of a file right in it."""
    whole, held = folder.resolve(), path.iterdir() if path.is_dir() else ()
    return all(each.resolve().is_relative_to(whole) for each in (path, *held))
