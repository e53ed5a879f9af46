"""``paceline serve`` as a process: its one line, its flags, its end."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from paceline.backends.reference.null import expected_tokens
from paceline.cli.flags.settings import EngineSettings
from paceline.cli.serve.command import _api_keys, successor
from paceline.cli.serve.ready import ready_line, told_of_model
from paceline.engine.testing import ByteTokenizer
from paceline.engine.types import EngineInfo
from paceline.errors import ConfigError
from paceline.timeline.codec import Decoder
from paceline.timeline.model import Model, Seen
from tests.cli.conftest import Command
from tests.cli.servers import ServerProcess, start_server
from tests.server.helpers import metric

NULL = ("--backend", "null")
INFO = EngineInfo(
    model="m",
    backend="null",
    device="cpu",
    dtype="int64",
    max_model_len=100,
    vocab_size=10,
    block_size=16,
    num_blocks=8,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    policy="fcfs",
    enable_prefix_caching=True,
    kv_dtype="int64",
    block_bytes=1 << 17,
)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    flags = ("--served-model-name", "one", "two", "--max-body-size", "5KB", "--log-format", "json")
    with start_server(*NULL, *flags, "--metrics-port", "0", "--timeline-history", "1MiB") as made:
        yield made


def log_of(server: ServerProcess) -> dict[str, dict[str, Any]]:
    """The fields of each event that it has logged."""
    lines = [json.loads(line) for line in server.errors]
    return {line["message"].split()[0]: line.get("fields", {}) for line in lines}


def complete(server: ServerProcess, **fields: Any) -> tuple[int, Any]:
    return server.request("/v1/completions", {"model": "null", "prompt": "hi"} | fields)


def children(pid: int) -> list[int]:
    """Process ids whose parent is ``pid``."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
        if parent == pid:
            found.append(int(stat.parent.name))
    return found


def test_the_ready_line_works_as_printed(server: ServerProcess) -> None:
    assert "one, int64 on cpu" in server.description
    command = shlex.split(server.ready_line.partition("try: ")[2])
    assert command[:2] == ["curl", f"{server.address}/v1/chat/completions"]
    status, answer = server.request("/v1/models")
    assert status == 200
    assert [model["id"] for model in answer["data"]] == ["one", "two"]
    body = json.loads(command[command.index("-d") + 1])
    status, answer = server.request("/v1/chat/completions", body | {"max_tokens": 3})
    assert (status, answer["usage"]["completion_tokens"]) == (200, 3)


def test_answers_come_from_the_engine(server: ServerProcess) -> None:
    status, answer = complete(server, model="two", max_tokens=6)
    tokenizer = ByteTokenizer()
    tokens = expected_tokens(tokenizer.encode("hi"), 6, tokenizer.vocab_size)
    assert status == 200
    assert answer["choices"][0]["text"] == tokenizer.decode(tokens)


def test_flags_reach_the_server(server: ServerProcess) -> None:
    assert complete(server)[0] == 404  # the name the engine has, not one it is served under
    status, answer = complete(server, model="one", prompt="x" * 6000)
    assert status == 413, answer
    assert server.request("/health")[0] == 200
    port = log_of(server)["metrics_listening"]["port"]
    assert metric(httpx.get(f"http://127.0.0.1:{port}/metrics").text, "paceline:ready") == 1


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "http://127.0.0.1:80/v1"),
        ("0.0.0.0", "http://127.0.0.1:80/v1"),
        ("::", "http://[::1]:80/v1"),
        ("10.1.2.3", "http://10.1.2.3:80/v1"),
    ],
)
def test_the_address_is_one_to_try(host: str, address: str) -> None:
    line = ready_line(INFO, "it's", host, 80)
    assert line.startswith(f"paceline ready: {address} (it's, ")
    assert "\n" not in line
    # a quote in a name does not end the shell's string
    assert "it's" in shlex.split(line.partition("try: ")[2])[-1]


def test_the_ready_line_counts_window_blocks() -> None:
    info = msgspec.structs.replace(INFO, num_window_blocks=5, window_bytes=3 << 20)
    assert "8 KV blocks of 16 tokens in int64, 1 MiB when full" in ready_line(INFO, "m", "h", 80)
    line = ready_line(info, "m", "h", 80)
    assert "8 KV blocks of 16 tokens and 5 for sliding-window layers in int64, 4 MiB when" in line


@pytest.mark.parametrize(
    ("changes", "sampling", "told"),
    [
        (
            {"model_name": "smollm2-135m"},
            {"temperature": 0.2},
            ["the model's card", "smollm2-360m"],
        ),
        (
            {"model_name": "smollm2-135m", "override_generation_config": {"top_k": 5}},
            {"top_k": 5},
            ["top_k=5 where a request names none (by flags)", "follows 41 % of instructions for"],
        ),
        ({"model_name": "mine"}, {"min_p": 0.1}, ["min_p=0.1 where a request names none (the"]),
        ({"model_name": "mine"}, {}, []),
    ],
)
def test_the_ready_line_tells_of_sampling_and_of_a_better_model(
    changes: dict[str, Any], sampling: dict[str, float], told: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("paceline.backends.machine.cpu.available_memory", lambda: 8 << 30)
    found = told_of_model(EngineSettings.of(**changes), sampling)
    assert len(found) == len(told) and all(map(str.__contains__, found, told)), found
    line = ready_line(INFO, "m", "h", 80, taken_over=found)
    assert all(each in line for each in told)


def test_the_log_says_where_the_time_of_the_start_went(server: ServerProcess) -> None:
    started, built = log_of(server)["started"], log_of(server)["engine_built"]
    assert list(started) == ["total", "start", "web", "engine", "listen"]
    assert list(built) == ["total", "import", "build"]
    # two decimals each, and clocks that tick in hundredths
    for parts in (started, built):
        assert parts["total"] == pytest.approx(sum(parts.values()) / 2, abs=0.01)
        assert min(parts.values()) >= 0
    assert built["import"] > 0.01
    # the engine's process is started by then, and ready before anybody listens
    assert built["total"] <= started["total"] <= server.seconds_to_ready + 0.03


def test_what_was_chosen_is_said_and_why() -> None:
    chosen = msgspec.structs.replace(INFO, dtype="int8", kv_dtype="bfloat16", choice="fast")
    line = ready_line(chosen, "m", "127.0.0.1", 80)
    assert "(m, int8 on cpu, 8 KV blocks of 16 tokens in bfloat16, 1 MiB when full, " in line
    assert "; auto: fast) - try:" in line
    assert ";" not in ready_line(INFO, "m", "127.0.0.1", 80).partition(" - try:")[0]


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.thorough)]
)
def test_a_signal_drains_what_runs(number: signal.Signals) -> None:
    with start_server(*NULL, "--null-step-time", "0.02") as server:
        answers: list[tuple[int, Any]] = []
        thread = threading.Thread(target=lambda: answers.append(complete(server, max_tokens=50)))
        thread.start()
        wait_until_running(server, 1)
        code, rest = server.stop(number)
        thread.join(20)
        assert (code, rest) == (0, "")
        ((status, answer),) = answers
        assert status == 200 and answer["usage"]["completion_tokens"] == 50
        assert not any("Traceback" in line for line in server.errors)


def test_drain_timeout_ends_what_does_not_end() -> None:
    with start_server(*NULL, "--null-step-time", "0.05", "--drain-timeout", "0.3") as server:
        thread = threading.Thread(target=lambda: complete(server, max_tokens=4000))
        thread.start()
        wait_until_running(server, 1)
        started = time.monotonic()
        code, _ = server.stop()
        thread.join(20)
        # 4000 steps would take 200 s
        assert (code, time.monotonic() - started < 15) == (0, True)


@pytest.mark.parametrize("restarts", [pytest.param(0, marks=pytest.mark.thorough), 1])
def test_max_engine_restarts(restarts: int) -> None:
    flags = ("--null-step-time", "0.01", "--max-engine-restarts", str(restarts))
    with start_server(*NULL, *flags) as server:
        for left in reversed(range(restarts + 1)):
            answers: list[tuple[int, Any]] = []
            thread = threading.Thread(
                target=lambda: answers.append(complete(server, max_tokens=80))  # noqa: B023
            )
            thread.start()
            wait_until_running(server, 1)
            (engine,) = children(server.process.pid)
            os.kill(engine, signal.SIGKILL)
            thread.join(20)
            ((status, answer),) = answers
            assert status == (200 if left else 503), answer
        assert "killed by SIGKILL" in answer["error"]["message"]
        assert server.process.wait(20) == 1


def test_a_successor_is_like_the_engine_before() -> None:
    settings = EngineSettings.of(
        model_name="m", model_path=None, backend="null", kv_cache_bytes=10**6, record="steps.jsonl"
    )
    made = successor(settings, INFO, 2)
    # what was admitted must fit, however much memory is free now
    assert (made.load.num_blocks, made.load.kv_cache_bytes, made.load.max_model_len) == (
        8,
        None,
        100,
    )
    assert made.record == "steps.jsonl.2"
    # and lie where it lay, wherever most memory is free now; one bound to no node chooses anew
    assert (made.load.numa, made.load.numa_fallback) == ("auto", True)
    on_two = successor(settings, msgspec.structs.replace(INFO, numa_nodes="0-1"), 2)
    assert on_two == made.changed(numa="0-1")
    # the nodes asked for are tried again when the engine before had to do without
    assert successor(settings.changed(numa="1"), INFO, 2) == made.changed(numa="1")
    assert EngineSettings.from_json(made.to_json()) == made
    # adapters that were resident must fit too
    with_adapters = successor(settings, msgspec.structs.replace(INFO, adapter_bytes=77), 2)
    assert with_adapters == made.changed(lora_bytes=77)


def test_a_successor_does_without_four_bits_that_are_gone(tmp_path: Path) -> None:
    weights = tmp_path / "made.q4.gguf"
    weights.touch()
    settings = EngineSettings.of(
        model_name="m", model_path="m.gguf", dtype="q4", weights_path=str(weights)
    )
    assert successor(settings, INFO, 1).weights_path == str(weights)
    # another server has made room in the cache that both share
    weights.unlink()
    assert successor(settings, INFO, 1).weights_path is None


def test_an_engine_does_not_outlive_its_server() -> None:
    with start_server(*NULL) as server:
        (engine,) = children(server.process.pid)
        server.process.kill()
        server.process.wait(20)
        deadline = time.monotonic() + 20
        while Path(f"/proc/{engine}").exists():
            assert time.monotonic() < deadline, "the engine still runs"
            time.sleep(0.05)


def test_stall_timeout_is_what_health_goes_by() -> None:
    # restarts enough for a machine on which an engine is not heard of for a while now and then
    flags = ("--null-step-time", "3", "--stall-timeout", "0.5", "--max-engine-restarts", "50")
    with start_server(*NULL, *flags) as server:
        wait_for_health(server, "/health", 200)
        thread = threading.Thread(target=lambda: complete(server, max_tokens=2), daemon=True)
        thread.start()
        wait_for_health(server, "/health", 503, "limit 0.5 s")
        assert server.request("/health/live")[0] == 200
        # the engine is replaced
        wait_for_health(server, "/health/ready", 200)
        thread.join(60)
        assert not thread.is_alive(), "the request has no answer"


def wait_for_health(server: ServerProcess, path: str, status: int, words: str = "") -> None:
    deadline = time.monotonic() + 60
    while (answer := server.request(path))[0] != status or words not in str(answer[1]):
        assert time.monotonic() < deadline, (path, status, answer)
        time.sleep(0.05)


def wait_until_running(server: ServerProcess, count: int) -> None:
    deadline = time.monotonic() + 20
    while True:
        _, metrics = server.request("/metrics")
        for line in str(metrics).splitlines():
            if line.startswith("vllm:num_requests_running{") and float(line.split()[-1]) >= count:
                return
        assert time.monotonic() < deadline, metrics
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([*NULL, "--max-model-len", "9999"], "9999 exceeds the model's 8192 positions"),
        ([*NULL, "--num-blocks", "4", "--max-model-len", "100"], "the pool has 4"),
        ([*NULL, "--max-num-batched-tokens", "4"], "--max-num-batched-tokens 4"),
        ([*NULL, "--num-blocks", "4", "--kv-cache-memory", "1MiB"], "both size the KV cache"),
        (["no-such-model"], "no model 'no-such-model'"),
        (["../escape"], "'..'"),
        (["{tmp}/empty.gguf"], "empty.gguf"),
        (["{tmp}"], " has no "),
        ([*NULL, "--port", "70000"], "between 0 and 65535"),
        ([*NULL, "--host", "no.such.host.invalid"], "no.such.host.invalid"),
        ([*NULL, "--drain-timeout", "nan"], "must be finite and at least 0, got nan"),
        ([*NULL, "--max-predicted-ttft", "inf"], "must be finite and at least 0, got inf"),
        ([*NULL, "--max-predicted-ttft", "-1"], "must be at least 0, got -1"),
        ([*NULL, *["--served-model-name", "a"] * 2], "--served-model-name a was given 2 times"),
        ([*NULL, "--served-model-name", *"baba"], "--served-model-name a was given 2 times"),
        ([*NULL, *["--slo-class", "chat=ttft:5"] * 2], "--slo-class chat was given 2 times"),
        ([*NULL, "--metrics-host", "0.0.0.0"], "--metrics-host 0.0.0.0 needs --metrics-port"),
        # found while the engine starts
        ([*NULL, "--otlp-endpoint", "nonsense"], "nonsense"),
    ],
)
def test_what_cannot_start_says_so_in_one_line(
    command: Command, tmp_path: Path, flags: list[str], words: str
) -> None:
    (tmp_path / "empty.gguf").write_bytes(b"")
    done = command("serve", "--port", "0", *(flag.format(tmp=tmp_path) for flag in flags))
    assert done.returncode == 2
    assert done.stdout == ""
    # logs of the engine process may come before
    last = done.stderr.splitlines()[-1]
    assert last.startswith("paceline serve: ") and words in last
    assert "Traceback" not in done.stderr


def test_a_key_that_came_out_empty_opens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_API_KEY", "")
    with pytest.raises(ConfigError, match="8 to 512 characters, got 0"):
        _api_keys(None)
    monkeypatch.delenv("PACELINE_API_KEY")
    assert _api_keys(None) == ()


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["hush-hush"] * 2, "the same key twice"),
        (["hush-hush,hush-more"], "key 1 of --api-key has a comma"),
        (["hush-hush", ""], "api-key-2 must have 8 to 512 characters, got 0"),
    ],
)
def test_a_bad_key_is_refused_and_not_repeated(keys: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        _api_keys(None, keys)
    assert "hush" not in str(refused.value)


def test_a_model_is_not_taken_for_a_key_or_a_name(command: Command) -> None:
    for flag in ("--api-key", "--served-model-name"):
        done = command("serve", flag, "hush-hush", "no/model.gguf")
        assert done.returncode == 2 and "hush" not in done.stderr
        assert f"the last value of {flag} is a file or folder" in done.stderr


def test_a_step_that_is_too_small_for_whole_prompts_is_refused(command: Command) -> None:
    whole = ("serve", *NULL, "--port", "0", "--no-enable-chunked-prefill")
    done = command(*whole, "--max-model-len", "4096", "--max-num-batched-tokens", "512")
    assert done.returncode == 2
    assert "--max-model-len 4096 needs as large a --max-num-batched-tokens" in done.stderr


def test_a_taken_port_is_found_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        program = [sys.executable, "-m", "paceline.cli.main", "serve", "no-such-model"]
        done = subprocess.run(
            [*program, "--port", str(port)], capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 2
    assert done.stderr.startswith(f"paceline serve: cannot listen on 127.0.0.1:{port}")
    assert "--port" in done.stderr


def test_the_timeline_comes_from_the_engines_process(server: ServerProcess) -> None:
    assert complete(server, model="one", max_tokens=5)[0] == 200
    deadline = time.monotonic() + 10
    ended: list[Seen] = []
    while not ended and time.monotonic() < deadline:
        model = Model(on_ended=ended.append)
        for frame in Decoder().feed(httpx.get(f"{server.address}/ui/api/timeline").content):
            model.take(frame)
        time.sleep(0.05)
    assert {seen.end for seen in ended} == {"length"}


@pytest.mark.parametrize(
    "flag", ["--no-timeline", pytest.param("--no-ui", marks=pytest.mark.thorough)]
)
def test_no_engine_tells_a_timeline_that_its_server_does_not_show(flag: str) -> None:
    with start_server(*NULL, flag) as server:
        assert complete(server, max_tokens=5)[0] == 200
        assert httpx.get(f"{server.address}/ui/api/timeline").status_code == 404
