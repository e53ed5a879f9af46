"""The OpenAPI document: every route with its requests and possible answers."""

from __future__ import annotations

from paceline.server.openapi.document import openapi_document

__all__ = ["openapi_document"]
