"""docs/use/recipes/: what the pages show works with a server, where the program is here.

openai-sdk.md, open-webui.md and cursor.md are run by ``test_blocks``; what is deployed, by
``tests/deploy/test_recipes``.
"""

from __future__ import annotations

import os
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

from benchmarks.common.processes import Unavailable
from benchmarks.common.setup import make_venv
from paceline.checkpoints.hub.resolve import default_cache_dir
from tests.cli.servers import start_server
from tests.docs.pages import DOCS, ROOT, blocks
from tests.server.live_process import LiveServer, live_server

ADDRESS = "http://127.0.0.1:8000"
CLIENTS = Path(os.environ.get("PACELINE_CLIENTS") or default_cache_dir() / "clients")


def shown(page: str) -> str:
    """The page's only block of code."""
    (block,) = blocks(DOCS / "use" / "recipes" / page)
    return block.code


def environment(name: str, packages: list[str]) -> Path:
    """The interpreter of an environment of its own, made once."""
    (CLIENTS / name).mkdir(parents=True, exist_ok=True)
    try:
        return make_venv(CLIENTS / name, packages)
    except Unavailable as absent:
        pytest.skip(str(absent))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("recipes") / "log"
    named = {"served_model_names": ["smollm2-135m"]}
    with live_server(log, config=named, backend={"step_time": 0.02}) as server:
        yield server


def test_continue_finds_a_model_that_answers(server: LiveServer) -> None:
    (model,) = yaml.safe_load(shown("continue.md"))["models"]
    base = model["apiBase"].replace(ADDRESS, server.url)
    headers = {"Authorization": f"Bearer {model['apiKey']}"} | model["requestOptions"]["headers"]
    body = {"model": model["model"], "messages": [{"role": "user", "content": "hi"}]}
    answer = httpx.post(f"{base}/chat/completions", json=body | {"max_tokens": 2}, headers=headers)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 2
    # the header of the page is one that is read
    (name,) = model["requestOptions"]["headers"]
    answer = httpx.post(f"{base}/chat/completions", json=body, headers={name: "soon"})
    assert answer.status_code == 400 and name in answer.text


def test_the_variables_of_claude_code_reach_the_server(server: LiveServer) -> None:
    """Anthropic's SDK reads the first two of claude-code.md."""
    code = (
        "import os, anthropic; client = anthropic.Anthropic();"
        "model = os.environ['ANTHROPIC_MODEL'];"
        "assert model == os.environ['ANTHROPIC_DEFAULT_HAIKU_MODEL'];"
        "said = [{'role': 'user', 'content': 'hi'}];"
        "print(client.messages.count_tokens(model=model, messages=said).input_tokens > 0,"
        "client.messages.create(model=model, messages=said, max_tokens=2).usage.output_tokens)"
    )
    exports = shown("claude-code.md").replace(ADDRESS, server.url)
    done = subprocess.run(
        ["bash", "-euc", f'{exports}\n"$0" -c "$1"', sys.executable, code],
        env={k: v for k, v in os.environ.items() if not k.startswith("ANTHROPIC_")},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.split() == ["True", "2"], done.stderr


# its environment is made the first time
@pytest.mark.timeout(600)
@pytest.mark.docs
def test_langchain_streams_and_is_held_to_a_schema() -> None:
    """langchain.md, with the packages of `make test-clients` and the default model."""
    packages = (ROOT / "tests/clients/requirements/langchain.txt").read_text().split()
    python = environment("langchain", packages)
    with start_server("smollm2-135m") as live:
        code = shown("langchain.md").replace(ADDRESS, live.address)
        done = subprocess.run(
            [python, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120
        )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "is_capital=" in done.stdout, done.stdout


# its environment is made the first time
@pytest.mark.timeout(600)
@pytest.mark.docs
def test_manifests_are_what_kubernetes_takes() -> None:
    python = environment("kubernetes", ["kubernetes-validate==1.37.0"])
    files = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))
    program = python.with_name("kubernetes-validate")
    done = subprocess.run(
        [program, "--strict", *files], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.services
def test_nginx_passes_page_and_streams_on(server: LiveServer, tmp_path: Path) -> None:
    nginx = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if nginx is None:
        pytest.skip("there is no nginx (scripts/test-services nginx:nginx-light)")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    site = shown("nginx.md").replace(ADDRESS, server.url)
    site = site.replace("listen 8080", f"listen 127.0.0.1:{port}")
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
