"""The ``llm`` command line, with models of its ``extra-openai-models.yaml``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from conversation import (
    KEY,
    MODEL,
    UNKNOWN,
    URL,
    WRONG_KEY,
    check_logprobs,
    check_place,
    run,
    step,
)
from shared import COUNTING, PLACE, QUESTION

HOME = Path(tempfile.mkdtemp(prefix="llm-"))
LLM = Path(sys.executable).with_name("llm")
LIMITS = ("-o", "temperature", "0", "-o", "max_tokens", "24")
CALL = '<tool_call>\n{"name": "llm_version", "arguments": {}}\n</tool_call>'


def entry(name: str, model: str = MODEL, *lines: str) -> str:
    """One model of the YAML file."""
    rows = [f"- model_id: {name}", f"model_name: {model}", f"api_base: {URL}/v1", *lines]
    return "\n  ".join(rows) + "\n"


def setup() -> None:
    (HOME / "extra-openai-models.yaml").write_text(
        entry("own", MODEL, "api_key_name: own", "supports_schema: true", "supports_tools: true")
        + entry("own-text", MODEL, "api_key_name: own", "completion: true")
        + entry("own-responses", MODEL, "api_key_name: own", "responses: true")
        + entry("own-unknown", UNKNOWN, "api_key_name: own")
        + entry("own-stranger", MODEL, "api_key_name: wrong")
    )
    (HOME / "keys.json").write_text(json.dumps({"own": KEY, "wrong": WRONG_KEY}))


def started(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [LLM, *arguments],
        env={**os.environ, "LLM_USER_PATH": str(HOME)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=110,
    )


def llm(*arguments: str, fails: bool = False) -> str:
    """What the command prints; with ``fails`` what it complains of."""
    done = started(*arguments)
    assert bool(done.returncode) == fails, done.stderr[-400:]
    return done.stderr if fails else done.stdout


def ask(*arguments: str, model: str = "own", fails: bool = False) -> str:
    return llm("-m", model, *LIMITS, *arguments, fails=fails)


def logged(count: int) -> list[dict[str, Any]]:
    """The latest answers as the command logged them."""
    found: list[dict[str, Any]] = json.loads(llm("logs", "-n", str(count), "--json"))
    return found


@step("models")
def models() -> None:
    assert "own" in llm("models", "list")


@step("chat")
def whole() -> None:
    assert "Paris" in ask("--no-stream", QUESTION)
    assert ask("--no-stream", "-c", "And of Italy?").strip()


@step("stream")
def stream() -> None:
    assert ask(QUESTION) == ask("--no-stream", QUESTION)


@step("tools")
def tools() -> None:
    # the command cannot force a call, so the model is asked to repeat one; it goes on to do so
    # with the result before it, until the limit
    said = f"Repeat after me, exactly and without any other word:\n{CALL}"
    for flags in ((), ("--no-stream",)):
        limits = (*LIMITS, "--chain-limit", "2", *flags)
        done = started("-m", "own", *limits, "-T", "llm_version", "--td", said)
        assert "Tool call: llm_version({})" in done.stderr, done.stderr[-400:]
        assert done.returncode == 0 or "Chain limit" in done.stderr, done.stderr[-400:]


@step("schema")
def schema() -> None:
    for flags in ((), ("--no-stream",)):
        limits = ("-o", "max_tokens", "120", *flags)
        check_place(llm("-m", "own", *limits, "--schema", json.dumps(PLACE), QUESTION))


@step("logprobs")
def logprobs() -> None:
    ask("--no-stream", "-o", "logprobs", "2", COUNTING, model="own-text")
    whole = logged(1)[0]["response_json"]["choices"][0]["logprobs"]
    check_logprobs(whole["token_logprobs"])
    ask("-o", "logprobs", "2", COUNTING, model="own-text")
    parts = logged(1)[0]["response_json"]["logprobs"]
    # an event has all tokens of its step: several where what was answered before was guessed
    told = [entry for part in parts for entry in part["top_logprobs"]]
    assert told == whole["top_logprobs"]


@step("completions")
def completions() -> None:
    assert ask(COUNTING, model="own-text").strip()


@step("responses")
def responses() -> None:
    for flags in ((), ("--no-stream",)):
        assert llm("-m", "own-responses", *LIMITS, *flags, QUESTION).strip()


@step("errors")
def errors() -> None:
    assert UNKNOWN in ask(QUESTION, model="own-unknown", fails=True)
    assert "API key" in ask(QUESTION, model="own-stranger", fails=True)
    assert "stop" in ask("-o", "stop", "x" * 2000, QUESTION, fails=True)


if __name__ == "__main__":
    setup()
    run()
