"""The example of each client in docs/use/clients.md."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

__all__ = ["ADDRESS", "example", "run_example"]

ADDRESS = "http://127.0.0.1:8000"
_PAGE = Path(__file__).parents[2] / "docs" / "use" / "clients.md"
_BLOCK = re.compile(r"```(python|javascript|bash)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def example(client: str) -> tuple[str, str]:
    """Language and code of the client's section."""
    section = _PAGE.read_text().split(f"\n## {client}\n", 1)[1].split("\n## ", 1)[0]
    ((language, code),) = _BLOCK.findall(section)
    return language, code


def run_example(client: str, folder: Path, url: str, key: str) -> str | None:
    """Run it in the environment in ``folder`` as ``tests.clients`` made it; what went wrong."""
    language, code = example(client)
    code = code.replace(ADDRESS, url).replace('"none"', f'"{key}"')
    binaries = folder / "venv" / "bin"
    if language == "javascript":
        script = folder / "example.mjs"
        script.write_text(code)
        argv = ["node", str(script)]
    elif language == "python":
        argv = [str(binaries / "python"), "-c", code]
    else:
        argv = ["bash", "-euc", code]
    home = folder / "home"
    home.mkdir(exist_ok=True)
    env = os.environ | {
        "LLM_USER_PATH": str(home),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "PATH": f"{binaries}:{os.environ['PATH']}",
    }
    try:
        done = subprocess.run(
            argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
        )
    except subprocess.TimeoutExpired:
        return "took longer than 120 s"
    if done.returncode or not done.stdout.strip():
        return f"ended with {done.returncode}: {done.stderr[-400:]}"
    return None
