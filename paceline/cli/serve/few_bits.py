"""Four bits of a model in 16 that is served with ``--dtype q4`` and ``--packed-cache``.

Rounding each weight by itself while loading loses far more than ``paceline quantize`` does, which
takes minutes to hours. So the first start serves int8 at once, and the command runs next to it, in
a process of its own at the lowest priority, which ends with the server; its file is kept next to
the copies of packed weights, and later starts take their weights from there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

from paceline.cli.flags.settings import EngineSettings
from paceline.errors import ConfigError
from paceline.quantize.version import VERSION

if TYPE_CHECKING:
    from paceline.backends.native.packed import PackedCopies
    from paceline.checkpoints.model.checkpoint import Checkpoint

__all__ = ["FewBits", "Making", "end_with_server", "few_bits"]

_log = logging.getLogger("paceline.cli")

_SIXTEEN_BITS = ("float16", "bfloat16", "float32")
# lowest of the system's priorities
_LOWEST = 19
# seconds that a killed process may take to end
_PATIENCE = 5.0
# a process of its own that runs a command of ``paceline``
_BESIDE = """\
import sys, paceline.cli.main as program, paceline.cli.serve.few_bits as beside
beside.end_with_server()
sys.exit(program.main())
"""


def end_with_server() -> None:
    """Give this process the lowest priority, and end it when the server ends, however that ends: it
    holds the other end of standard input."""
    os.nice(_LOWEST)
    with contextlib.suppress(OSError):
        # when the machine runs out of memory, the kernel ends this process first
        Path("/proc/self/oom_score_adj").write_text("1000")

    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class Making:
    """``paceline quantize`` next to a server, which never waits for it; no command: nothing."""

    def __init__(self, command: Sequence[str] = ()) -> None:
        self.command = tuple(command)
        self._process: subprocess.Popen[str] | None = None
        self._readers: list[threading.Thread] = []
        self._stopped = False

    def start(self) -> None:
        """Start the process, whose lines and end by a signal are logged."""
        if not self.command:
            return
        pipe = subprocess.PIPE
        try:
            # a process group of its own keeps the terminal's Ctrl-C away from it
            self._process = subprocess.Popen(
                self.command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, errors="replace",
                process_group=0,
            )  # fmt: skip
        except OSError as error:
            _log.warning("quantize: it cannot be started: %s", error)
            return
        for stream, level in (
            (self._process.stdout, logging.INFO), (self._process.stderr, logging.WARNING),
        ):  # fmt: skip
            assert stream is not None
            reader = threading.Thread(target=self._log_lines, args=(stream, level), daemon=True)
            reader.start()
            self._readers.append(reader)

    def _log_lines(self, stream: IO[str], level: int) -> None:
        with stream:
            for line in stream:
                _log.log(level, "quantize: %s", line.strip())
        assert self._process is not None
        # after errors of its own it has said why
        if level == logging.INFO and (code := self._process.wait()) < 0 and not self._stopped:
            _log.warning("quantize: ended by signal %d; the next start goes on with it", -code)

    def wait(self, timeout: float | None = None) -> int:
        """Return the process's exit code."""
        assert self._process is not None, "wait() before start()"
        code = self._process.wait(timeout)
        assert self._process.stdin is not None
        self._process.stdin.close()
        for reader in self._readers:
            reader.join(timeout)
        return code

    def stop(self) -> None:
        """End the process if it runs; what it has done is kept, and the next start goes on."""
        if self._process is not None:
            self._stopped = True
            self._process.kill()
            # one that waits for a disk that does not answer must not keep the server
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.wait(_PATIENCE)


@dataclass(frozen=True, slots=True)
class FewBits:
    """How a model in 16 bits is served in four."""

    settings: EngineSettings
    # for the ready line; empty: nothing changed
    said: str = ""
    # the process that makes the file if none is there
    making: Making = field(default_factory=Making)


def few_bits(settings: EngineSettings, *, makes: bool = True) -> FewBits:
    """Return how to serve a model: from four bits that were made before, in int8 while they are
    made, or as it is asked for where nothing can or need be made.

    Args:
        makes: whether the server may make them next to itself; else it says how to.
    """
    load, path = settings.load, settings.model_path
    unchanged = FewBits(settings)
    if (
        load.dtype != "q4" or load.packed_cache_bytes is None or path is None
        or load.compute == "torch" or load.device not in ("auto", "cpu")
    ):  # fmt: skip
        return unchanged
    # imported here: no other model needs them in this process, and they take a sixth of a start
    from paceline.backends.native.packed import PackedCopies, fingerprint
    from paceline.checkpoints.hub.resolve import default_cache_dir
    from paceline.checkpoints.open import OpenedEncoder, open_model

    opened = open_model(Path(path), load.runner, load.convert)
    if (
        isinstance(opened, OpenedEncoder)
        or opened.pooling is not None
        or opened.checkpoint.config.stored_dtype not in _SIXTEEN_BITS
    ):
        return unchanged
    copies = PackedCopies(
        default_cache_dir() / "packed", load.packed_cache_bytes, fingerprint(Path(path))
    )
    # what an older version made is not served: it knew the model less well
    target = copies.few_bits(VERSION)
    name = Path(path).name
    if target.exists():
        with contextlib.suppress(OSError):
            # the time of change is that of the last use
            os.utime(target)
        said = f"weights are the four bits that paceline quantize made of {name} in {target}"
        return FewBits(replace(settings, weights_path=str(target)), said)
    words = ["quantize", path, "-o", str(target)]
    if load.threads is not None:
        words += ["--threads", str(load.threads)]
    if not makes:
        _log.warning(
            "quantize: weights of %s are rounded one by one while they are loaded: %s makes better "
            "ones, which later starts serve", name, shlex.join(["paceline", *words]),
        )  # fmt: skip
        return unchanged
    if reason := _why_not(opened.checkpoint, copies):
        _log.warning("quantize: %s", reason)
        return unchanged
    said = (
        f"int8 for now: paceline quantize makes four bits of {name} next to this server, the log "
        "says how long it takes, and the next start with --dtype q4 serves them"
    )
    making = Making([sys.executable, "-c", _BESIDE, *words])
    # a packed copy in int8 would be of use for this start alone
    return FewBits(settings.changed(dtype="int8", packed_cache_bytes=None), said, making)


def _why_not(checkpoint: Checkpoint, copies: PackedCopies) -> str:
    """Make room for four bits, and return why none can be made or kept; empty: they can."""
    from paceline.backends.machine.cpu import has_torch
    from paceline.checkpoints.gguf.shards import weight_files
    from paceline.checkpoints.hf.checkpoint import HFCheckpoint

    if not has_torch():
        return "four bits are made with PyTorch: pip install 'paceline[torch]'"
    if isinstance(checkpoint, HFCheckpoint):
        from paceline.quantize.folder import FolderSource

        try:
            FolderSource(checkpoint)
        except ConfigError as error:
            return str(error)
    # at most 8.5 bits of 16, and as much for what is done until the file is whole
    size = sum(path.stat().st_size for path in weight_files(checkpoint.path))
    return copies.make_room(size * 17 // 16, copies.few_bits(VERSION))
