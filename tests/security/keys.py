"""Who the tests of this folder are."""

from __future__ import annotations

from paceline.http.keys import ApiKey

USER, OTHER, ADMIN = "user-key-0123456789", "other-key-0123456789", "admin-key-0123456789"
KEYS = (
    ApiKey.of("alice", "user", USER),
    ApiKey.of("bob", "user", OTHER),
    ApiKey.of("root", "admin", ADMIN),
)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}
