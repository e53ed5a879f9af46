"""Gateways: told what a pool has, again and again, and asked what they see of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec

from paceline.fleet.controller import Members, Seen
from paceline.http.small import fetch
from paceline.http.upstream import ConnectError, Origin, Pool

__all__ = ["Gateways", "SupersededError"]

_log = logging.getLogger("paceline.fleet")

# interval of a word, its timeout, and the age from which an answer no longer counts, s
_SECONDS: Final = 0.25
_TIMEOUT: Final = 2.0
_STALE: Final = 2.5


class SupersededError(Exception):
    """A gateway knows a later controller."""


class _Engine(msgspec.Struct):
    up: bool = False
    requests: int = 0
    trouble: str = ""
    wait: float | None = None
    kv: float | None = None
    slots: float | None = None


class _Answer(msgspec.Struct):
    version: int | None = None
    engines: dict[str, _Engine] = {}


@dataclass
class _Link:
    """One pool at one gateway."""

    url: str
    pool: str
    answer: _Answer = field(default_factory=_Answer)
    answered_at: float = -math.inf
    # why it does not answer, as logged last
    trouble: str = ""


class Gateways:
    """All gateways of a fleet.

    Args:
        epoch: start of the controller; the gateways obey the latest.
        now: clock, monotonic seconds.
    """

    def __init__(
        self, urls: tuple[str, ...], key: str, epoch: int, now: Callable[[], float]
    ) -> None:
        self._pools = {
            url: Pool(Origin.of(url), connect_timeout=_TIMEOUT, idle=1.0) for url in urls
        }
        self._headers = [(b"authorization", f"Bearer {key}".encode())]
        self._epoch = epoch
        self._now = now
        # pool -> its version, and the word
        self._words: dict[str, tuple[int, Members]] = {}
        self._links: list[_Link] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._changed: dict[str, asyncio.Event] = {}

    def tell(self, pool: str, members: Members) -> None:
        """Say from now on what a pool has."""
        version, before = self._words.get(pool, (0, None))
        if members == before:
            return
        self._words[pool] = version + 1, members
        if before is None:
            self._changed[pool] = asyncio.Event()
            for url in self._pools:
                link = _Link(url, pool)
                self._links.append(link)
                self._tasks.append(asyncio.create_task(self._keep_telling(link)))
        self._changed[pool].set()

    def check(self) -> None:
        """Raise SupersededError if a gateway knows a later controller, and errors of ours."""
        for task in self._tasks:
            if task.done():
                task.result()

    def seen(self, pool: str, name: str, seen: Seen) -> Seen:
        """Return ``seen`` with what the gateways see of a replica."""
        links = [link for link in self._links if link.pool == pool]
        heard = [link for link in links if self._now() - link.answered_at < _STALE]
        if not heard:
            return seen
        engines = [link.answer.engines.get(name, _Engine()) for link in heard]
        trouble = next((each.trouble for each in engines if each.trouble), "")
        requests = sum(each.requests for each in engines)
        # a gateway that does not know the newest list of members may still send requests
        version = self._words[pool][0]
        are_new = len(heard) == len(links) and all(e.answer.version == version for e in heard)
        return replace(
            seen,
            up=all(each.up for each in engines),
            requests=requests if are_new else None,
            trouble=seen.trouble or trouble,
            wait=max((e.wait for e in engines if e.wait is not None), default=None),
            kv=max((e.kv for e in engines if e.kv is not None), default=None),
            slots=min((e.slots for e in engines if e.slots is not None), default=None),
        )

    def troubles(self) -> Mapping[str, str]:
        """Return why gateways do not answer, by URL."""
        return {link.url: link.trouble for link in self._links if link.trouble}

    async def told(self, pool: str, seconds: float) -> bool:
        """Wait until every gateway has taken in the last word; whether they did in time."""
        version = self._words[pool][0]
        until = self._now() + seconds
        links = [link for link in self._links if link.pool == pool]
        while any(link.answer.version != version for link in links) and self._now() < until:
            await asyncio.sleep(0.02)
        return all(link.answer.version == version for link in links)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for pool in self._pools.values():
            pool.close()

    async def _keep_telling(self, link: _Link) -> None:
        changed = self._changed[link.pool]
        while True:
            changed.clear()
            trouble = await self._say(link)
            if trouble and trouble != link.trouble:
                _log.warning("gateway_silent url=%s reason=%r", link.url, trouble)
            elif link.trouble and not trouble:
                _log.info("gateway_back url=%s", link.url)
            link.trouble = trouble
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), _SECONDS)

    async def _say(self, link: _Link) -> str:
        """Say the last word once; return what is wrong with the answer."""
        version, members = self._words[link.pool]
        word: Mapping[str, Any] = {
            "epoch": self._epoch,
            "version": version,
            "engines": [
                {"name": name, "url": url, "role": members.role}
                for name, url in members.engines.items()
            ],
            "draining": members.draining,
            "move": members.move,
        }
        body, path = msgspec.json.encode(word), f"/admin/pools/{link.pool}"
        try:
            status, told = await fetch(
                self._pools[link.url], "PUT", path, self._headers, _TIMEOUT, body
            )
        except ConnectError as error:
            return str(error)
        shown = told[:300].decode("utf-8", "replace")
        if status == 409:
            raise SupersededError(f"another controller has taken over at {link.url}: {shown}")
        if status != 200:
            return f"status {status}: {shown}"
        try:
            link.answer = msgspec.json.decode(told, type=_Answer)
        except msgspec.MsgspecError as error:
            return f"its answer is no pool: {error}"
        link.answered_at = self._now()
        return ""
