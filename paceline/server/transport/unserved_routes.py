"""Routes that other servers have and this one does not: the 404 says why."""

from __future__ import annotations

from typing import Final

__all__ = ["UNSERVED_METHODS", "UNSERVED_ROUTES", "why_unserved"]

_TEXT: Final = "text models only"
_SEVERAL: Final = "several requests, n, or /v1/completions with several prompts"
_RENDERED: Final = "/tokenize renders and tokenises"
_DEVELOPMENT: Final = "vLLM's own are for development"
_ADAPTERS: Final = "no adapters yet"

# by path: the method, and why it is missing or what replaces it
UNSERVED_ROUTES: Final[dict[str, tuple[str, str]]] = {
    **dict.fromkeys(
        (
            "/v2/embed",
            "/embedding",
            "/embeddings",
        ),
        ("POST", "/v1/embeddings gives embeddings"),
    ),
    **dict.fromkeys(("/reranking", "/v1/reranking"), ("POST", "/v1/rerank ranks documents")),
    **dict.fromkeys(
        (
            "/v1/audio/transcriptions",
            "/v1/audio/translations",
            "/v1/moderations",
            "/v1/images/generations",
        ),
        ("POST", _TEXT),
    ),
    "/v1/realtime": ("GET", _TEXT),
    **dict.fromkeys(
        ("/v1/chat/completions/batch", "/v1/decisions", "/generative_scoring"), ("POST", _SEVERAL)
    ),
    **dict.fromkeys(("/v1/completions/render", "/v1/chat/completions/render"), ("POST", _RENDERED)),
    **dict.fromkeys(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), ("POST", _ADAPTERS)),
    **dict.fromkeys(
        (
            "/sleep",
            "/wake_up",
            "/pause",
            "/resume",
            "/reset_prefix_cache",
            "/collective_rpc",
            "/start_profile",
            "/stop_profile",
        ),
        ("POST", _DEVELOPMENT),
    ),
    **dict.fromkeys(("/is_sleeping", "/is_paused", "/server_info"), ("GET", _DEVELOPMENT)),
}
# methods that llama-server has on paths that this server serves with other methods
UNSERVED_METHODS: Final[dict[tuple[str, str], str]] = {
    ("POST", "/props"): "the flags of paceline serve say how the server is",
    ("POST", "/lora-adapters"): _ADAPTERS,
}


def why_unserved(path: str, method: str) -> str | None:
    """Return the message of a 404 or 405; None for a path that no known server has."""
    method, why = UNSERVED_ROUTES.get(path, (method, UNSERVED_METHODS.get((method, path), "")))
    if path.startswith("/slots/"):
        why = "there are no slots whose cache could be saved: all requests share the prefix cache"
    return f"{method} {path[:80]} is not served here: {why}" if why else None
