"""The OpenAI-compatible HTTP server. Knows engines by ``EngineClient`` and ``Tokenizer`` alone."""

from paceline.server.app import create_app
from paceline.server.config import ServerConfig, sampling_defaults
from paceline.server.lifecycle import serve

__all__ = ["ServerConfig", "create_app", "sampling_defaults", "serve"]
