"""Azure OpenAI: the model is a deployment in the path, the version is in the query, and the key has
a header of its own.

Source: https://learn.microsoft.com/azure/ai-services/openai/reference (data plane, inference).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote

from paceline.gateway.requests.body import Body
from paceline.gateway.upstreams.dialects.base import Dialect
from paceline.http.upstream import Headers

__all__ = ["AzureDialect"]

_OPERATIONS: Final = {
    "/v1/chat/completions": "chat/completions",
    "/v1/completions": "completions",
    "/v1/embeddings": "embeddings",
}
# fields of engines and of this gateway that Azure refuses with 400
_FOREIGN: Final = (
    "slo", "explain", "cache_salt", "priority", "resume_output_ids", "return_token_ids",
    "speculation",
)  # fmt: skip


class AzureDialect(Dialect):
    """Dialect of one version of the API, such as 2024-10-21."""

    def __init__(self, api_version: str) -> None:
        self._api_version = api_version

    def cannot(self, path: str, body: Body) -> str:
        return "" if path in _OPERATIONS else f"Azure's deployments have no {path}"

    def target(self, path: str, model: str) -> str:
        deployment = quote(model, safe="")
        operation = _OPERATIONS[path]
        version = quote(self._api_version, safe="")
        return f"/openai/deployments/{deployment}/{operation}?api-version={version}"

    def headers(self, key: str) -> Headers:
        return [(b"api-key", key.encode())] if key else []

    def body(self, path: str, body: Body, changes: Mapping[str, Any]) -> bytes:
        foreign: dict[str, Any] = dict.fromkeys(_FOREIGN)
        return body.encode({**changes, **foreign})

    def ignored(self, path: str, body: Body) -> str:
        return ",".join(name for name in _FOREIGN if name in body.fields)
