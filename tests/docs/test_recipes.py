"""docs/use/recipes.md: what it shows works with a server, where its program is here."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from tests.server.live_process import LiveServer, live_server

PAGE = (Path(__file__).parents[2] / "docs" / "use" / "recipes.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8000"


def block(language: str, holds: str) -> str:
    found = re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    (code,) = (each for each in found if holds in each)
    return str(code)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("recipes") / "log"
    named = {"served_model_names": ["smollm2-135m"]}
    with live_server(log, config=named, backend={"step_time": 0.02}) as server:
        yield server


def test_continue_finds_a_model_that_answers(server: LiveServer) -> None:
    (model,) = yaml.safe_load(block("yaml", "Paceline"))["models"]
    base = model["apiBase"].replace(ADDRESS, server.url)
    key = {"Authorization": f"Bearer {model['apiKey']}"}
    body = {"model": model["model"], "messages": [{"role": "user", "content": "hi"}]}
    answer = httpx.post(f"{base}/chat/completions", json=body | {"max_tokens": 2}, headers=key)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 2


def test_the_variables_of_claude_code_reach_the_server(server: LiveServer) -> None:
    """Anthropic's SDK reads the first two of them."""
    code = (
        "import os, anthropic; client = anthropic.Anthropic();"
        "model = os.environ['ANTHROPIC_MODEL'];"
        "said = [{'role': 'user', 'content': 'hi'}];"
        "print(client.messages.count_tokens(model=model, messages=said).input_tokens > 0,"
        "client.messages.create(model=model, messages=said, max_tokens=2).usage.output_tokens)"
    )
    exports = block("sh", "ANTHROPIC_BASE_URL").replace(ADDRESS, server.url)
    done = subprocess.run(
        ["bash", "-euc", f'{exports}\n"$0" -c "$1"', sys.executable, code],
        env={k: v for k, v in os.environ.items() if not k.startswith("ANTHROPIC_")},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.split() == ["True", "2"], done.stderr


@pytest.mark.services
def test_nginx_passes_page_and_streams_on(server: LiveServer, tmp_path: Path) -> None:
    nginx = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if nginx is None:
        pytest.skip("there is no nginx (scripts/test-services nginx:nginx-light)")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shown = block("nginx", "proxy_pass").replace(ADDRESS, server.url)
    site = shown.replace("listen 8080", f"listen 127.0.0.1:{port}")
    paths = " ".join(
        f"{name}_temp_path {tmp_path}/{name};"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = tmp_path / "nginx.conf"
    config.write_text(
        f"daemon off; pid {tmp_path}/pid; error_log {tmp_path}/errors; events {{}}\n"
        f"http {{ access_log off; {paths}\n{site}}}\n"
    )
    process = subprocess.Popen([nginx, "-c", str(config)], stderr=subprocess.DEVNULL)
    try:
        base = f"http://127.0.0.1:{port}/llm"
        for _ in range(100):
            try:
                assert httpx.get(f"{base}/health").status_code == 200
                break
            except httpx.ConnectError:
                # nginx says nowhere that it listens
                time.sleep(0.05)
        assert "Paceline" in httpx.get(f"{base}/ui/").text
        body = {"prompt": "x", "max_tokens": 40, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{base}/v1/completions", json=body) as stream:
            first, *others = list(stream.iter_raw())
        assert first.startswith(b"data: ") and others, "events came one after another"
    finally:
        process.terminate()
        process.wait(10)
