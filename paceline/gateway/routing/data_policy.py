"""Data policy: which requests never go to a cloud, decided before anything else is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec

from paceline.gateway.requests.body import Body
from paceline.gateway.requests.incoming import IncomingRequest
from paceline.gateway.settings.config import GatewayConfig

__all__ = ["NO_POLICY", "DataPolicy", "data_policy", "policy_lacks"]

_TAGS: Final = b"x-paceline-tags"


class DataPolicy:
    """Policy of one configuration; this one keeps nothing back."""

    def is_local(self, incoming: IncomingRequest, body: Body) -> bool:
        """Whether a request may go to local engines alone."""
        return False

    def is_local_head(self, incoming: IncomingRequest) -> bool:
        """Whether a request without a body may go to local engines alone."""
        return False

    def is_local_upload(self, incoming: IncomingRequest, upload: bytes) -> bool:
        """Whether a file may go to local engines alone."""
        return False


NO_POLICY: Final = DataPolicy()


def data_policy(config: GatewayConfig) -> DataPolicy:
    """Return the policy of a configuration."""
    keys = {key.name: key.local_only for key in config.keys}
    if any(keys.values()) or config.local_only_tags or config.local_only_patterns:
        return _Rules(keys, config.local_only_tags, config.local_only_patterns)
    return NO_POLICY


def policy_lacks(config: GatewayConfig) -> list[str]:
    """Return a sentence for ``paceline gateway --check`` where rules keep nothing back."""
    has_rules = data_policy(config) is not NO_POLICY or any(m.local_only for m in config.models)
    if not has_rules or any(engine.cloud for engine in config.engines):
        return []
    return ["local_only keeps nothing back: none of the engines has cloud = true"]


class _Rules(DataPolicy):
    def __init__(self, keys: dict[str, bool], tags: Iterable[str], patterns: Iterable[str]) -> None:
        self._keys = keys
        self._tags = {tag.strip().lower() for tag in tags}
        self._patterns = [re.compile(pattern) for pattern in patterns]

    def is_local(self, incoming: IncomingRequest, body: Body) -> bool:
        # every field, as an engine may render one that this gateway does not know
        return self.is_local_head(incoming) or self._finds(_texts(body.fields.values()))

    def is_local_upload(self, incoming: IncomingRequest, upload: bytes) -> bool:
        return self.is_local_head(incoming) or self._finds(_texts(upload.splitlines()))

    def is_local_head(self, incoming: IncomingRequest) -> bool:
        if self._keys.get(incoming.tenant, self._keys.get("*", False)):
            return True
        if not self._tags:
            return False
        # a header may be there twice, and each of them counts
        found = [value for name, value in incoming.scope["headers"] if name == _TAGS]
        told = b",".join(found).decode("latin-1").lower()
        return not self._tags.isdisjoint(tag.strip() for tag in told.split(","))

    def _finds(self, texts: Iterator[str]) -> bool:
        if not self._patterns:
            return False
        return any(pattern.search(text) for text in texts for pattern in self._patterns)


def _texts(values: Iterable[bytes]) -> Iterator[str]:
    """Yield the texts in values of JSON, without their escapes; of anything else all of it."""
    for value in values:
        try:
            yield from _strings(msgspec.json.decode(value))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            yield value.decode("utf-8", "replace")


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _strings(each)
    elif isinstance(value, dict):
        for name, each in value.items():
            yield name
            yield from _strings(each)
