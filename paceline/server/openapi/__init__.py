"""The OpenAPI document: every route, what it takes, and every answer it may give."""

from __future__ import annotations

from paceline.server.openapi.document import openapi_document

__all__ = ["openapi_document"]
