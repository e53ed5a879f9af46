"""API keys, and what each may do. Only digests are kept, here and in files.

A key file has a line per key, ``NAME SCOPE SHA256``, blank lines and ``#`` comments; the digest is
of the key's bytes, in hex (``printf %s "$KEY" | sha256sum``). Keys must be random: a digest
protects them from readers of the file, not from guessing. A line may continue with limits for that
key: ``requests=60/minute tokens=unlimited concurrent=4``.

::

    /health... /ping         no key needed
    / /ui /ui/...            no key needed: the page's files, which are public code
    /ui/api/...              scope admin
    /metrics, /status, /slots  scope admin
    /admin/...               scope admin; always refused if the server has no keys
    everything else          scope user or admin

Without any keys every caller may do everything but what is under ``/admin/``: changes of the server
never become open because a file was forgotten.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from paceline.errors import ConfigError
from paceline.http.errors import HttpError
from paceline.http.rate_limits.rates import parse_override

__all__ = [
    "ADMIN_PATHS",
    "ADMIN_PREFIX",
    "OPEN_PATHS",
    "ApiKey",
    "KeyRing",
    "credentials",
    "is_page",
    "parse_key_file",
]

OPEN_PATHS: Final = frozenset({"/health", "/health/live", "/health/ready", "/ping"})
# these paths show all callers' requests, or change what all callers find
ADMIN_PATHS: Final = frozenset(
    {"/metrics", "/slots", "/status", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
)
# paths below it change the server
ADMIN_PREFIX: Final = "/admin/"
# requests of the page about all callers' requests
_PAGE_API_PREFIX: Final = "/ui/api/"
# headers that hold a key
_BEARER: Final = "authorization"
_PLAIN: Final = "x-api-key"
_SCOPES: Final = ("user", "admin")
_NAME: Final = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
_DIGEST: Final = re.compile(r"[0-9a-fA-F]{64}")
_MAX_KEYS: Final = 10_000
_MAX_KEY_CHARS: Final = 512


def is_page(path: str) -> bool:
    """Whether a path belongs to the page at ``/ui`` or leads there, and so needs no key."""
    if path.startswith("/ui/"):
        # includes "/ui/api" itself: anything served there later is not the page
        return not f"{path}/".startswith(_PAGE_API_PREFIX)
    return path in ("/", "/ui")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key. Raises ConfigError for a bad name, scope or digest."""

    # identity: in logs, and the tenant of its requests
    name: str
    # "user" or "admin", which may do all that "user" may
    scope: str
    # SHA-256, 32 bytes
    digest: bytes
    # fields of KeyLimits in which it differs from the server's
    limits: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                "the name of an API key has 1 to 64 letters, digits and _.@-, got "
                f"{self.name[:80]!r}"
            )
        if self.scope not in _SCOPES:
            raise ConfigError(
                f"the scope of API key {self.name} must be user or admin, got {self.scope[:40]!r}"
            )
        if len(self.digest) != 32:
            raise ConfigError(f"the digest of API key {self.name} has {len(self.digest)} bytes")

    @classmethod
    def of(cls, name: str, scope: str, key: str) -> ApiKey:
        """Make one from the key itself, which is not kept."""
        if not 8 <= len(key) <= _MAX_KEY_CHARS:
            raise ConfigError(
                f"API key {name} must have 8 to {_MAX_KEY_CHARS} characters, got {len(key)}"
            )
        return cls(name, scope, hashlib.sha256(key.encode()).digest())


def parse_key_file(text: str, name: str) -> list[ApiKey]:
    """Return the keys of a file; ``name`` is for errors, which never quote a digest."""
    keys = []
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), 1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        if len(words) < 3 or not _DIGEST.fullmatch(words[2]):
            raise ConfigError(
                f"{name}, line {number}: expected NAME SCOPE SHA256 (64 hex digits), and limits "
                f"if any, got {len(words)} words"
            )
        try:
            limits = dict(map(parse_override, words[3:]))
        except ConfigError as error:
            raise ConfigError(f"{name}, line {number}: {error}") from None
        keys.append(ApiKey(words[0], words[1], bytes.fromhex(words[2]), limits))
    return keys


class KeyRing:
    """The keys of a server; without any, ``check`` lets all callers do nearly everything.

    Raises:
        ConfigError: two keys of one name, or too many.
    """

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._keys: Sequence[ApiKey] = tuple(keys)
        self.is_empty = not self._keys
        names = [key.name for key in self._keys]
        if len(set(names)) < len(names) or len(names) > _MAX_KEYS:
            twice = next((name for name in names if names.count(name) > 1), "")
            raise ConfigError(
                f"{len(names)} API keys: at most {_MAX_KEYS} are allowed, with different names"
                + (f", and {twice} occurs twice" if twice else "")
            )

    def __len__(self) -> int:
        return len(self._keys)

    def named(self) -> list[tuple[str, str]]:
        """Return the name and scope of each key, in the order given."""
        return [(key.name, key.scope) for key in self._keys]

    def limits(self) -> Mapping[str, Mapping[str, Any]]:
        """Return, by name, the limits of keys that have their own: fields of KeyLimits."""
        return {key.name: key.limits for key in self._keys if key.limits}

    def check(self, path: str, headers: Mapping[str, str]) -> ApiKey | None:
        """Return the key of a request; None if it needs none.

        Raises HttpError: 401 without a known key, 403 if its scope is not enough.
        """
        if not self._keys and path.startswith(ADMIN_PREFIX):
            raise HttpError(
                403,
                f"{ADMIN_PREFIX} requires a key of scope admin, and this server was started "
                "without keys",
            )
        if not self._keys or path in OPEN_PATHS or is_page(path):
            return None
        key = self._find(_presented(headers))
        if key is None:
            raise HttpError(
                401, "this server requires an API key: Authorization: Bearer KEY, or x-api-key: KEY"
            )
        wants_admin = path in ADMIN_PATHS or path.startswith((ADMIN_PREFIX, _PAGE_API_PREFIX))
        if wants_admin and key.scope != "admin":
            raise HttpError(403, f"{path} requires a key of scope admin; this one has {key.scope}")
        return key

    def _find(self, presented: str) -> ApiKey | None:
        """Find a key in constant time: every digest is compared completely."""
        digest = hashlib.sha256(presented[:_MAX_KEY_CHARS].encode("utf-8", "replace")).digest()
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found if len(presented) <= _MAX_KEY_CHARS else None


def _presented(headers: Mapping[str, str]) -> str:
    scheme, _, token = headers.get(_BEARER, "").partition(" ")
    if scheme.lower() == "bearer":
        return token.strip()
    return headers.get(_PLAIN, "")


def credentials(headers: Mapping[bytes, bytes]) -> Mapping[str, str]:
    """Return the headers that hold a key; ``headers`` has lower-case names."""
    return {
        name: found.decode("latin-1")
        for name in (_BEARER, _PLAIN)
        if (found := headers.get(name.encode())) is not None
    }
