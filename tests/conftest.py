"""Fixtures that every folder may use."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import ssl
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# `make test` runs as many test processes as it is told: a thread team of each, in which everybody
# waits for a thread that has no core, would take ten times as long. Before anything loads OpenMP
SIDE_BY_SIDE = "PYTEST_XDIST_WORKER" in os.environ
if SIDE_BY_SIDE:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# from a file each ``httpx.get`` reads the certificates of all authorities, which takes 60 ms; those
# of a folder are read when a server shows one
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = ssl.get_default_verify_paths().openssl_capath

# how long something takes on a machine that others use too says nothing about it; `make
# test-thorough` asks for the second one
for name, examples in (("daily", 40), ("thorough", 300)):
    checks = [HealthCheck.too_slow]
    settings.register_profile(
        name, deadline=None, max_examples=examples, suppress_health_check=checks
    )
settings.load_profile("daily")


# a process that has all tests has a million objects: to look through them for garbage as often as
# Python does by itself takes a tenth of its time
gc.set_threshold(10_000, 20, 20)

SECOND = os.environ.get("PYTEST_XDIST_WORKER") == "gw1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="a test that skips fails")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    # an expected failure is reported as a skip too
    if item.config.option.no_skips and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"--no-skips, but {item.nodeid} skips: {report.longrepr[2]}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, Any, Any]:
    """Import the tests from the last to the first in the second process: without cached bytecode,
    the rewriting of their assertions takes a process longer than all else until the first test."""
    for folder in session.config.args if SECOND else ():
        for path in sorted(Path(folder).glob("**/test_*.py"), reverse=True):
            # collection reports it
            with contextlib.suppress(Exception, pytest.skip.Exception):
                name = ".".join(path.resolve().relative_to(session.path).with_suffix("").parts)
                importlib.import_module(name)
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if {"browser", "tsc"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("ui")


def pytest_configure(config: pytest.Config) -> None:
    # what a shell starts in the background ignores interrupts, and so would every program that
    # tests start and interrupt; a handler is not inherited, so they begin with the default
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """What runs the coroutines among tests and fixtures, which need no marker."""
    return "asyncio"


@pytest.fixture(scope="session")
def threads() -> int | None:
    """For models large enough to use several: None, as many as there are cores, or one."""
    return 1 if SIDE_BY_SIDE else None


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's GGUF file; skips where it was not pulled (``make model`` pulls it)."""
    from paceline.checkpoints.hub.resolve import find_local

    path = find_local("smollm2-135m")
    if path is None:
        pytest.skip("the default model is not here: run `make model`")
    return path
