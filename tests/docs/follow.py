"""Follows a page as a reader does: its blocks one after another, in one shell.

    python -m tests.docs.follow docs/start/gateway-in-ten-minutes.md   with the default model, timed

Ports of the page are exchanged for free ones. Everything that it started is ended with it.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.docs.pages import ROOT, Block, blocks

__all__ = ["Step", "follow", "main"]

_PORT = re.compile(r"(?<=127\.0\.0\.1:)\d{4}\b|(?<=--port )\d{4}\b")
_MARK = "=== end of block"
# the port that a gateway takes unless it is told another one
_GATEWAY_PORT = "8080"


@dataclass(frozen=True, slots=True)
class Step:
    """One block that was run."""

    block: Block
    seconds: float
    # what it printed, on both streams
    printed: str


def follow(page: Path, folder: Path, path: str, seconds: float) -> list[Step]:
    """Run the shell's blocks of ``page`` that are marked as run, in ``folder``.

    Args:
        path: ``PATH`` of the shell, with ``paceline`` on it.
        seconds: after which it is given up.

    Raises:
        AssertionError: a block failed, with what it printed.
    """
    wanted = [
        b
        for b in blocks(page)
        if b.mark and b.mark.word != "not-run" and b.language in ("sh", "bash")
    ]
    with ExitStack() as stack:
        ports = _free_ports(stack, sorted({p for b in wanted for p in _PORT.findall(b.code)}))
    script = ["set -eo pipefail"]
    for number, block in enumerate(wanted):
        code = _PORT.sub(lambda match: ports[match[0]], block.code)
        if _GATEWAY_PORT in ports:
            flag = f"paceline gateway --port {ports[_GATEWAY_PORT]} "
            code = re.sub(r"^paceline gateway ", flag, code, flags=re.MULTILINE)
        # what was printed may end without a newline
        script += [code, f"printf '\\n%s\\n' {shlex.quote(f'{_MARK} {number}')}"]
    shell = subprocess.Popen(
        ["bash", "-c", "\n".join(script)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=os.environ | {"PATH": path, "XDG_STATE_HOME": str(folder / "state")},
        # so that all of it can be ended
        start_new_session=True,
    )
    late = threading.Timer(seconds, _end, (shell.pid,))
    late.start()
    try:
        return _read(shell, wanted)
    finally:
        late.cancel()
        _end(shell.pid)
        shell.wait(10)
        assert shell.stdout is not None
        shell.stdout.close()


def _read(shell: subprocess.Popen[str], wanted: Sequence[Block]) -> list[Step]:
    """Until the last block has ended, or the shell."""
    assert shell.stdout is not None
    steps: list[Step] = []
    printed: list[str] = []
    last = time.monotonic()
    for line in shell.stdout:
        if not line.startswith(_MARK):
            printed.append(line)
            continue
        now = time.monotonic()
        steps.append(Step(wanted[len(steps)], now - last, "".join(printed)))
        printed, last = [], now
        if len(steps) == len(wanted):
            return steps
    code = shell.wait(10)
    why = "was not done in time" if code == -signal.SIGKILL else f"failed ({code})"
    raise AssertionError(f"{wanted[len(steps)]} {why}: {''.join(printed)[-2000:]}")


def _end(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _free_ports(stack: ExitStack, names: Sequence[str]) -> Mapping[str, str]:
    """A free port for each that the page has."""
    taken = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in names]
    return {name: str(free.getsockname()[1]) for name, free in zip(names, taken, strict=True)}


def main(arguments: Sequence[str]) -> int:
    (page,) = arguments
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / ".venv").symlink_to(Path(sys.executable).parent.parent)
        try:
            steps = follow(ROOT / page, Path(folder), os.environ["PATH"], 600.0)
        except AssertionError as error:
            print(error, file=sys.stderr)
            return 1
    print("| step | seconds |\n|---|---|")
    for step in steps:
        first = step.block.code.strip().splitlines()[0]
        print(f"| line {step.block.line}: `{first[:60]}` | {step.seconds:.1f} |")
    print(f"| all | {sum(step.seconds for step in steps):.1f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
