"""schemathesis against a live server's OpenAPI document: valid requests and invalid ones.

No answer may have a status, header or body that the document does not promise, none may be the
server's own fault, and what the schemas forbid must be refused. That what they allow is always
accepted is not asked: they do not say how fields go together.

    python -m tests.server.schemathesis_run [EXAMPLES]

runs every phase against a server of the null backend, a fixed seed throughout.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.server.live_process import live_server

__all__ = ["check_document", "null_server_settings"]

SEED = 20261121
_LEFT_OUT = "positive_data_acceptance,missing_required_header"
# with random requests per operation, or chains of operations, as multiples of what is asked for:
# chains are quick, and few of them get as far as an id that is good for something
_RUNS = (("examples,coverage,fuzzing", 1), ("stateful", 12))


def null_server_settings(folder: Path) -> dict[str, object]:
    """What the server is started with: no step takes time, contexts are short, and files and
    batches go to ``folder``."""
    config = {"served_model_names": ["m"], "batches": {"folder": str(folder)}}
    return {"backend": {"max_model_len": 512}, "config": config}


def check_document(
    url: str, folder: Path, *, examples: int, phases: str, headers: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run it; ``examples`` bounds each operation's random requests. ``folder`` is for its files."""
    flags = ["--max-examples", str(examples), "--seed", str(SEED), "--phases", phases]
    flags += ["--exclude-checks", _LEFT_OUT, "--continue-on-failure", "--no-shrink", "--no-color"]
    for header in headers:
        flags += ["--header", header]
    return subprocess.run(
        [Path(sys.executable).with_name("schemathesis"), "run", *flags, f"{url}/openapi.json"],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )


def main() -> int:
    examples = int(sys.argv[1]) if len(sys.argv) > 1 else 25
    code = 0
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with live_server(log, **null_server_settings(Path(folder) / "batches")) as server:
            for phases, times in _RUNS:
                done = check_document(
                    server.url, Path(folder), examples=times * examples, phases=phases
                )
                print(done.stdout)
                print(done.stderr, file=sys.stderr)
                code = code or done.returncode
    return code


if __name__ == "__main__":
    sys.exit(main())
