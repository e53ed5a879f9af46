"""Clients of other people's making, talking to a live server.

Each client gets an environment of its own (made once, under PACELINE_CLIENTS or the cache's
``clients`` folder; versions in ``requirements/`` and ``node/package.json``). One server runs the
default model with an API key; the clients hold their conversations with it one after another. A
client that cannot be installed is reported absent with the reason. "docs" is the client's example
in docs/use/clients.md. Ends with 1 if anything that was asked for did not work. The last line is
JSON.

    python -m tests.clients [CLIENT ...]
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.processes import Unavailable
from benchmarks.common.setup import make_venv, run_step
from paceline.checkpoints.hub.resolve import default_cache_dir
from tests.cli.servers import start_server
from tests.clients.page import run_example
from tests.clients.report import CAPABILITIES, Outcome, failures, table
from tests.clients.scripts import shared

HERE = Path(__file__).parent
MODEL = "smollm2-135m"
# of one client's whole conversation
SECONDS = 600.0
_NOT_ANTHROPIC = ("models", "logprobs", "completions", "responses")
_NOT_OLLAMA = ("tool stream", "logprobs", "responses")
_NOT_LLAMA = ("tools", "tool stream", "tool result", "responses")
_NOT_LLM = ("async", "tool stream", "tool result")


@dataclass(frozen=True, slots=True)
class Client:
    """One client: its package, its script and what it cannot show because it has no such thing."""

    name: str
    package: str
    script: str
    lacks: tuple[str, ...] = ()

    @property
    def wanted(self) -> tuple[str, ...]:
        return tuple(name for name in CAPABILITIES if name not in self.lacks)


CLIENTS = (
    Client("openai", "openai", "scripts/openai_sdk.py"),
    Client("npm-openai", "openai", "node/openai_npm.mjs"),
    Client("anthropic", "anthropic", "scripts/anthropic_sdk.py", _NOT_ANTHROPIC),
    Client("litellm", "litellm", "scripts/litellm_sdk.py", ("models",)),
    Client("langchain", "langchain-openai", "scripts/langchain_client.py", ("models",)),
    Client("ollama", "ollama", "scripts/ollama_client.py", _NOT_OLLAMA),
    Client("llama_server", "httpx", "scripts/llama_client.py", _NOT_LLAMA),
    Client("llm", "llm", "scripts/llm_command.py", _NOT_LLM),
)


def python_setup(client: Client, folder: Path) -> tuple[list[str], str]:
    """The command that runs a Python client's script, and its package's version."""
    lines = (HERE / "requirements" / f"{client.name}.txt").read_text().split()
    python = make_venv(folder, lines)
    (version,) = [line.split("==")[1] for line in lines if line.startswith(f"{client.package}==")]
    return [str(python), str(HERE / client.script)], version


def node_setup(client: Client, folder: Path) -> tuple[list[str], str]:
    """The same for npm's. The script is copied to where its packages are found."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            raise Unavailable(f"{program} is not on this machine")
    wanted = (HERE / "node/package.json").read_text()
    there, script = folder / "package.json", folder / Path(client.script).name
    shutil.copy(HERE / client.script, script)
    if not ((folder / "node_modules").is_dir() and there.exists() and there.read_text() == wanted):
        shutil.rmtree(folder / "node_modules", ignore_errors=True)
        there.write_text(wanted)
        argv = ["npm", "install", "--no-audit", "--no-fund", "--no-save", "--no-package-lock"]
        run_step(argv, log=folder / "setup.log", cwd=folder)
    return ["node", str(script)], json.loads(wanted)["dependencies"][client.package]


def converse(argv: Sequence[str], url: str, key: str, client: Client) -> dict[str, str | None]:
    """The lines of one script: capability -> what went wrong."""
    names = ("COUNTING", "MESSAGES", "ASK_WEATHER", "WEATHER", "PLACE")
    given = {name.lower(): getattr(shared, name) for name in names}
    extra = [json.dumps(given)] if argv[0] == "node" else []
    # nothing of this machine's own settings: no other key, no other server, no proxy
    odd = re.compile(r"(OPENAI|ANTHROPIC|LITELLM|LANGCHAIN|LANGSMITH|LLM)_|\w*_proxy$", re.I)
    env = {name: value for name, value in os.environ.items() if not odd.match(name)}
    try:
        done = subprocess.run(
            [*argv, url, key, MODEL, *extra],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            env=env,
        )
    except subprocess.TimeoutExpired as slow:
        said = slow.stdout.decode() if isinstance(slow.stdout, bytes) else slow.stdout or ""
        errors = f"took longer than {SECONDS:.0f} s"
    else:
        said, errors = done.stdout, done.stderr
    steps: dict[str, str | None] = {}
    for line in said.splitlines():
        try:
            told = json.loads(line)
            steps[told["capability"]] = told["error"]
        except (ValueError, KeyError, TypeError):
            print(f"  {client.name}: {line[:200]}", file=sys.stderr)
    if set(client.wanted) - set(steps) - {"docs"}:
        print(f"  {client.name}: {errors[-1000:]}", file=sys.stderr)
    return steps


def main(names: Sequence[str]) -> int:
    known = [client.name for client in CLIENTS]
    unknown = set(names) - set(known)
    if unknown:
        print(f"{', '.join(sorted(unknown))}: not among {', '.join(known)}", file=sys.stderr)
        return 2
    root = Path(os.environ.get("PACELINE_CLIENTS") or default_cache_dir() / "clients")
    outcomes: dict[str, Outcome] = {}
    ready: list[tuple[Client, list[str], str]] = []
    for client in CLIENTS:
        if names and client.name not in names:
            continue
        print(f"setting up {client.name}", file=sys.stderr)
        folder = root / client.name
        folder.mkdir(parents=True, exist_ok=True)
        setup = node_setup if client.script.endswith(".mjs") else python_setup
        try:
            ready.append((client, *setup(client, folder)))
        except Unavailable as error:
            outcomes[client.name] = Outcome(absent=str(error))
    key = secrets.token_urlsafe(24)
    os.environ["PACELINE_API_KEY"] = key
    with start_server(MODEL) as server:
        for client, argv, version in ready:
            print(f"talking: {client.name} {version}", file=sys.stderr)
            steps = converse(argv, server.address, key, client)
            steps["docs"] = run_example(client.name, root / client.name, server.address, key)
            outcomes[client.name] = Outcome(version, None, steps, client.wanted)
        code, _ = server.stop()
    print(table(outcomes))
    faults = failures(outcomes)
    if code:
        faults.append(f"the server ended with {code}: {''.join(server.errors)[-500:]}")
    for line in faults:
        print(f"FAIL {line}")
    shown = {
        name: outcome.absent or {step: step not in outcome.faults for step in outcome.steps}
        for name, outcome in outcomes.items()
    }
    print(json.dumps({"test": "clients", "failures": len(faults), "clients": shown}))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
