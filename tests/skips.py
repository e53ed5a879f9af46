"""Which skips are expected. With ``CI`` in the environment any other one fails.

A skip says that this machine lacks something; one that nobody expects may be a test that never runs
anywhere. Every reason a test may give is matched by a line here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Iterable
from typing import Any, Final

import pytest

__all__ = ["EXPECTED", "Skips", "unexpected"]

# (the whole of a reason as a pattern, what the machine lacks)
EXPECTED: Final = (
    # instructions and kernels
    (r"the native library was not built; .*", "the kernels are not compiled"),
    (r"there is no native library", "the kernels are not compiled"),
    (r"_lib\.so (has interface \d+|cannot be loaded).*", "the kernels are of another version"),
    (r"this machine has no AVX2|this machine has no AVX-VNNI", "x86 instructions"),
    (r"no x86 (processor|kernels here)", "an x86 processor"),
    (r"needs avx512bw, avx512vl and avx512dq: .*", "x86 instructions"),
    (r"nothing is rounded on this processor", "a level whose formats were judged good enough"),
    (r"needs a CUDA device", "an accelerator"),
    # the machine and its system
    (r"other C libraries do not trim", "glibc"),
    (r"needs two processors( to choose from)?", "processors"),
    (r"this system does not tell which processors may be used", "Linux"),
    (r"needs (limits on a process's memory|/proc/self/smaps)", "Linux"),
    (r"the kernel does not count", "a Linux that counts how long threads wait"),
    (r"\w+ \S+ has no slices to ask for", "Linux 6.12"),
    (r"the system refuses to change a slice here", "the right to change how a thread is scheduled"),
    (r"only root installs packages without sudo", "root"),
    # programs
    (r"there is no compiler|needs a C compiler", "a compiler"),
    (r"needs g\+\+-aarch64-linux-gnu, qemu-user and cmake", "a cross compiler"),
    (r"needs qemu-user, an emulator .*", "qemu-user"),
    (r"objdump is not installed", "binutils"),
    (r"there is no redis-server here .*", "redis-server"),
    (r"needs prometheus and promtool .*", "prometheus"),
    (r"there is no (axe-core|node)\b.*", "npm's package, which make test-ui installs, or node"),
    (r"this machine has no (node|curl|make)|node is older than 20|needs make", "such a program"),
    (r"this machine lacks one of .*", "such a program"),
    (r"TypeScript's compiler is not here: .*", "npm's package, which make test-clients installs"),
    (r"no (openssl|systemd) here", "such a program"),
    (
        r"could not import '(matplotlib|sentencepiece|setuptools\.command\.bdist_wheel)': .*",
        "a package for development",
    ),
    # parts that have a command of their own
    (r"make test-docs (runs them|builds the site first)", "make test-docs"),
    (r"takes seconds; make test-ui runs it", "make test-ui"),
    (r"it draws as if it were greedy", "a backend that draws at random"),
    # files
    (r"the default model is not here: run `make model`", "the default model"),
    (r"shared/traces is not here|no trace samples in .*", "traces, kept beside the project"),
    (r"needs the recorded run .*", "recorded runs, kept beside the project"),
    (r".* is no git checkout: the core of \w+ cannot be had", "git's history"),
    (r"git is not installed: the core of \w+ cannot be had", "git"),
    (r"the core of \w+ cannot be had: .*", "the commit: a shallow clone"),
)

_PATTERNS: Final = tuple(re.compile(pattern, re.DOTALL) for pattern, _ in EXPECTED)


def unexpected(reason: str, patterns: Iterable[re.Pattern[str]] = _PATTERNS) -> bool:
    """Whether no line matches all of a skip's ``reason``."""
    return not any(pattern.fullmatch(reason) for pattern in patterns)


class Skips:
    """A plugin of pytest. Where skips have to be expected, others become failures."""

    def __init__(self, *, strict: bool | None = None) -> None:
        self._strict = bool(os.environ.get("CI")) if strict is None else strict

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, Any, Any]:
        report = yield
        # an expected failure is reported as a skip too
        if not hasattr(report, "wasxfail"):
            self._judge(report)
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self) -> Generator[None, Any, Any]:
        report = yield
        self._judge(report)
        return report

    def _judge(self, report: Any) -> None:
        if not self._strict or report.outcome != "skipped":
            return
        path, line, told = report.longrepr
        reason = told.removeprefix("Skipped: ")
        if unexpected(reason):
            report.outcome = "failed"
            report.longrepr = (
                f"{path}:{line} skips, and its reason is not expected where CI is set: {reason!r}. "
                "Mend what it lacks, or add a line to EXPECTED in tests/skips.py"
            )
