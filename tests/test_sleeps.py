"""Tests wait for what happens, not for a time; where they cannot, it is listed here with why."""

from __future__ import annotations

from pathlib import Path

from tests.sleeps import Sleep, fixed_sleeps

TESTS = Path(__file__).parent
# sleeps that long stand for something that never ends; nobody waits for them
ENDLESS = 20.0

# by file, at most: sleeps, seconds of those that are written out, and why no condition would do
ALLOWED: dict[str, tuple[int, float, str]] = {
    "bench/fake_server.py": (3, 0.01, "a server whose times are the test"),
    "benchmarks/peers/fake_worker.py": (1, 0.0, "a worker that hangs"),
    "benchmarks/peers/test_process.py": (1, 0.05, "what was taken to be gone must not come back"),
    "checkpoints/test_pull.py": (2, 0.3, "a slow download, and a process that hangs"),
    "cli/test_startup.py": (1, 0.05, "the time that is measured"),
    "client/test_streams.py": (2, 0.5, "a reader slower than the longest gap; a loop held up"),
    "deploy/test_prometheus.py": (1, 0.5, "two scrapes by another program's clock"),
    "engine/null_engine.py": (2, 0.0, "an engine that hangs"),
    "engine/process/test_client.py": (1, 0.0, "a reader that is now quick and now slow"),
    "engine/process/test_process.py": (2, 2.4, "nothing must happen to an idle engine"),
    "engine/supervision/test_poison.py": (1, 0.1, "time for the engine to begin two of forty"),
    "engine/supervision/test_resume.py": (1, 0.0, "engines are killed at random times"),
    "engine/supervision/test_supervisor.py": (6, 1.76, "stops that are too short to be noticed"),
    "engine/supervision/test_watchdog.py": (1, 0.05, "an event loop that is held up"),
    "gateway/counting_engine.py": (1, 0.0, "an engine whose times are the test"),
    "gateway/fault_server.py": (2, 0.0, "a server whose times are the test"),
    "gateway/test_asking.py": (1, 0.0, "an event loop that is held up"),
    "gateway/test_complaints_faults.py": (1, 0.2, "a breaker's time"),
    "gateway/test_complaints_load.py": (1, 0.5, "probes must not forgive"),
    "gateway/test_model_lists.py": (1, 0.1, "polls at which nothing must be asked"),
    "gateway/test_statuses.py": (1, 0.0, "metrics that are late, which is the test"),
    "http/rate_limits/test_store.py": (1, 0.0, "a window on the clock of a Redis server"),
    "http/test_connections.py": (4, 0.4, "callers that are slower than the server's patience"),
    "http/test_idle_connections.py": (1, 0.0, "connections of every age, all at once"),
    "security/test_templates.py": (1, 0.1, "attacks get a start"),
    "server/batches/test_routes.py": (2, 0.02, "a body that comes slowly, and one that never ends"),
    "server/batches/test_shutdown.py": (1, 0.05, "a query is under way in a thread"),
    "server/bodies/test_structured.py": (1, 0.02, "a grammar gets a start"),
    "server/test_admission.py": (1, 0.05, "requests get into the queue"),
    "server/test_app.py": (1, 0.3, "a tokenizer that takes long"),
    "server/test_faults.py": (1, 1.0, "a reader must not be cut"),
    "server/test_limits_over_http.py": (1, 0.1, "requests get into the engine"),
    "server/test_metrics.py": (1, 0.1, "time that costs something"),
    "server/test_metrics_exporter.py": (1, 1.5, "a caller later than the system waits for"),
    "server/test_timeline.py": (1, 0.15, "a frame is made of what ran within a time"),
    "ui/pictures.py": (1, 0.1, "requests that come one after another"),
    "upstreams/__main__.py": (1, 0.3, "servers of others, which are asked whether they are there"),
    "upstreams/checks.py": (1, 0.2, "a server gets a start with an answer that says nothing yet"),
}


def test_what_waits_for_a_time_is_listed() -> None:
    wrong = []
    files = {p.relative_to(TESTS).as_posix(): p for p in sorted(TESTS.rglob("*.py"))}
    assert len(files) > 300
    for path, file in files.items():
        sleeps = fixed_sleeps(file.read_text())
        seconds = sum(s.seconds for s in sleeps if s.seconds is not None and s.seconds < ENDLESS)
        number, most, _ = ALLOWED.get(path, (0, 0.0, ""))
        if len(sleeps) > number or seconds > most + 1e-6:
            wrong.append(
                f"{path} waits {seconds:.2f} s in {len(sleeps)} places (lines "
                f"{', '.join(str(sleep.line) for sleep in sleeps)}), {most} s in {number} are "
                "listed: wait for what happens, or list it in tests/test_sleeps.py with the reason"
            )
    assert not wrong, "\n".join(wrong)
    assert all(why for _, _, why in ALLOWED.values())


def test_what_is_counted() -> None:
    source = """
time.sleep(1)
while not done():
    time.sleep(0.05)
    asyncio.sleep(0.1)
async for x in y:
    await asyncio.sleep(0.01)
    def f():
        time.sleep(0.01)
anyio.sleep(seconds)
await asyncio.sleep(0)
sleep(2.5)
backend.sleep(3)
"""
    assert fixed_sleeps(source) == [
        Sleep(2, 1.0),
        Sleep(5, 0.1),
        Sleep(9, 0.01),
        Sleep(10, None),
        Sleep(12, 2.5),
    ]
