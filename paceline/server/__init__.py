"""The OpenAI-compatible HTTP server. Knows engines by ``EngineClient`` and ``Tokenizer`` alone.

Names are imported on first use: a caller who wants only a socket need not wait for the web
framework.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from paceline.server.app import create_app
    from paceline.server.lifecycle import serve
    from paceline.server.settings.config import ServerConfig, sampling_defaults

__all__ = ["ServerConfig", "create_app", "sampling_defaults", "serve"]

_MODULES: Final = {
    "ServerConfig": "settings.config",
    "create_app": "app",
    "sampling_defaults": "settings.config",
    "serve": "lifecycle",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
