"""Clients of other people's making that read vectors, talking to a live server.

As ``tests.clients``, with a tiny random model that is pooled, because none that is trained comes
with the project: what a client reads is compared with what the server says to plain HTTP.

    python -m tests.clients.vectors [CLIENT ...]
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.common.processes import Unavailable
from paceline.checkpoints.hub.resolve import default_cache_dir
from tests.cli.servers import start_server
from tests.clients.__main__ import Client, converse, python_setup
from tests.clients.report import CAPABILITIES as CHAT_CAPABILITIES
from tests.pooling.models import add_modules, make_bert

CAPABILITIES: Final = ("embeddings", "async", "rerank", "errors")
# of those that ``converse`` expects of clients that chat
_NO_CHAT: Final = tuple(set(CHAT_CAPABILITIES) - {"async", "errors"})
CLIENTS: Final = (
    Client("openai", "openai", "scripts/vectors_openai.py", (*_NO_CHAT, "rerank")),
    Client("langchain", "langchain-openai", "scripts/vectors_langchain.py", (*_NO_CHAT, "rerank")),
    Client("ollama", "ollama", "scripts/vectors_ollama.py", (*_NO_CHAT, "rerank")),
    Client("cohere", "cohere", "scripts/vectors_cohere.py", (*_NO_CHAT, "embeddings", "async")),
)


def main(names: Sequence[str]) -> int:
    root = Path(os.environ.get("PACELINE_CLIENTS") or default_cache_dir() / "clients")
    ready: list[tuple[Client, list[str], str]] = []
    for client in CLIENTS:
        if names and client.name not in names:
            continue
        folder = root / client.name
        folder.mkdir(parents=True, exist_ok=True)
        try:
            ready.append((client, *python_setup(client, folder)))
        except Unavailable as error:
            print(f"{client.name}: absent: {error}")
    faults = 0
    key = secrets.token_urlsafe(24)
    os.environ["PACELINE_API_KEY"] = key
    shown: dict[str, dict[str, bool]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        model = make_bert(Path(scratch) / "model")
        add_modules(model, "mean_tokens")
        with start_server(str(model), "--served-model-name", "smollm2-135m") as server:
            for client, argv, version in ready:
                steps = converse(argv, server.address, key, client)
                told = {
                    name: steps.get(name, "the script ended before it") for name in CAPABILITIES
                }
                wanted = [name for name in CAPABILITIES if name not in client.lacks]
                shown[client.name] = {name: told[name] is None for name in wanted}
                for name in wanted:
                    faults += told[name] is not None
                    print(f"{client.name} {version} {name}: {told[name] or 'ok'}")
            server.stop()
    print(json.dumps({"test": "vectors", "failures": faults, "clients": shown}))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
