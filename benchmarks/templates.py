"""Cost of rendering chat templates in a separate process, and the effect of attacks on a server.

Method: ``PromptMaker.chat`` as the server calls it, on an event loop, over the default model's
tokenizer: a conversation of three messages, SAMPLES times one after the other in each of ROUNDS
rounds, in turns (A B A B) with its template known to the package, which renders it in place, and
with the same template and one more space, which the process renders. The added time is the
difference of the medians. Then a real ``paceline serve --trust-request-chat-template`` on the
default model gets a request to /health/live every 5 ms, before and while two callers send attack
templates one after the other; every attack must end in 400, and plain chats meanwhile in 200.

Prints a table and, last, one JSON line. QUICK=1 shortens it.

    python -m benchmarks.templates
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from benchmarks.common.server import PacelineServer
from benchmarks.common.statistics import percentile
from paceline.checkpoints.gguf.container import read_gguf
from paceline.checkpoints.gguf.tokenizer import build_tokenizer
from paceline.checkpoints.hub.resolve import default_cache_dir, find_local
from paceline.engine.text.chat_template import ChatTemplate
from paceline.engine.text.template_process import TemplateProcess
from paceline.engine.text.tokenizer import HFTokenizer
from paceline.server.generation.prompts import PromptMaker
from paceline.server.protocol.requests import TemplateOptions

QUICK = bool(os.environ.get("QUICK"))
SAMPLES = 200 if QUICK else 1000
ROUNDS = 3 if QUICK else 7
ATTACK_SECONDS = 4.0 if QUICK else 12.0
TARGET_MS = 1.0
CHAT = "/v1/chat/completions"
ATTACKS = (
    "{{ ('f' * 4000000) | int(base=16) // (('e' * 2000000) | int(base=16)) > 0 }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
)
_TEXT = "The quick brown fox jumps over the lazy dog. " * 8
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": _TEXT},
    {"role": "assistant", "content": _TEXT},
    {"role": "user", "content": "And then?"},
]


def tokenizer(backend: Backend, template: str) -> HFTokenizer:
    process = TemplateProcess()
    return HFTokenizer(
        backend,
        frozenset(),
        ChatTemplate({"default": template}, {}, renderer=process, callers=process),
    )


async def timed(maker: PromptMaker) -> list[float]:
    """Return milliseconds of each of SAMPLES conversations."""
    options = TemplateOptions(
        messages=MESSAGES,
        tools=None,
        add_generation_prompt=True,
        continue_final_message=False,
        chat_template=None,
        template_kwargs={},
    )
    times = []
    for _ in range(SAMPLES):
        began = time.perf_counter()
        await maker.chat(options, add_special_tokens=False)
        times.append(1e3 * (time.perf_counter() - began))
    return times


async def added() -> dict[str, float]:
    path = find_local("smollm2-135m", default_cache_dir())
    if path is None:
        raise SystemExit("the default model is not here: run make model")
    metadata = read_gguf(path).metadata
    source: str = metadata["tokenizer.chat_template"]
    backend = build_tokenizer(metadata)
    kinds = {"here": source, "process": source + " "}
    makers = {kind: PromptMaker(tokenizer(backend, text)) for kind, text in kinds.items()}
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for maker in makers.values():
        await timed(maker)
    for _ in range(ROUNDS):
        for kind, maker in makers.items():
            times[kind] += await timed(maker)
    for maker in makers.values():
        maker.close()
    found: dict[str, float] = {}
    for kind, each in times.items():
        found[f"{kind}_p50_ms"] = statistics.median(each)
        found[f"{kind}_p99_ms"] = percentile(each, 0.99)
    return found


def ask(port: int, method: str, path: str, body: Any = None) -> tuple[int, float]:
    """Send a request; return the status, and milliseconds on a new connection."""
    began = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    data = None if body is None else json.dumps(body)
    connection.request(method, path, data, {"Content-Type": "application/json"})
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status, 1e3 * (time.perf_counter() - began)


def probe(port: int, seconds: float) -> list[float]:
    times, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        status, took = ask(port, "GET", "/health/live")
        assert status == 200, status
        times.append(took)
        time.sleep(0.005)
    return times


def attacked() -> dict[str, float]:
    flags = ("--trust-request-chat-template", "--log-level", "error")
    with (
        tempfile.TemporaryDirectory() as folder,
        PacelineServer(*flags, log=Path(folder) / "log") as server,
    ):
        port = server.port
        idle = probe(port, ATTACK_SECONDS / 2)
        statuses: list[int] = []
        plain: list[float] = []
        stop = threading.Event()
        small = {"messages": MESSAGES[-1:], "max_tokens": 1}

        def attack(template: str) -> None:
            while not stop.is_set():
                body = {**small, "chat_template": template}
                statuses.append(ask(port, "POST", CHAT, body)[0])

        def chat() -> None:
            while not stop.is_set():
                status, took = ask(port, "POST", CHAT, small)
                assert status == 200, status
                plain.append(took)
                time.sleep(0.1)

        threads = [threading.Thread(target=attack, args=(each,)) for each in ATTACKS]
        threads.append(threading.Thread(target=chat))
        for thread in threads:
            thread.start()
        busy = probe(port, ATTACK_SECONDS)
        stop.set()
        for thread in threads:
            thread.join()
    assert statuses and set(statuses) == {400}, statuses
    return {
        "attacks": len(statuses),
        "idle_live_p50_ms": statistics.median(idle),
        "idle_live_max_ms": max(idle),
        "attacked_live_p50_ms": statistics.median(busy),
        "attacked_live_max_ms": max(busy),
        "attacked_chat_p50_ms": statistics.median(plain),
        "attacked_chat_max_ms": max(plain),
    }


def main() -> int:
    found = asyncio.run(added())
    more = found["process_p50_ms"] - found["here_p50_ms"]
    found |= {"added_p50_ms": more, **attacked()}
    for name, value in found.items():
        print(f"{name:24} {value:10.3f}")
    verdict = "met" if more <= TARGET_MS else "NOT MET"
    print(f"added p50 {more:.3f} ms, target {TARGET_MS:g} ms: {verdict}")
    print(json.dumps({name: round(value, 4) for name, value in found.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
