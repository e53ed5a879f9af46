"""What every client's script shares: its arguments, the tools and schemas it asks for, and how it
reports. Standard library only.

    python SCRIPT URL KEY MODEL

prints one JSON object a line, ``{"capability", "error", "seconds"}``; ``error`` is null where all
went well. The exit code is 0 even when some did not: the lines say it.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

URL, KEY, MODEL = sys.argv[1:4]
WRONG_KEY = "not-a-key-of-this-server"
UNKNOWN = "no-such-model"

_STEPS: list[tuple[str, Callable[[], Any]]] = []


def step(capability: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Mark a function, plain or async, as what shows a capability."""

    def mark(function: Callable[[], Any]) -> Callable[[], Any]:
        _STEPS.append((capability, function))
        return function

    return mark


def check_weather(arguments: Any) -> None:
    """Arguments of a call of get_weather, as text or parsed."""
    value = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert set(value) == {"city", "unit"}, value
    assert isinstance(value["city"], str) and value["unit"] in ("celsius", "fahrenheit"), value


def check_place(answer: Any) -> None:
    value = json.loads(answer) if isinstance(answer, str) else answer
    assert set(value) == {"city", "population", "kind"}, value
    assert isinstance(value["city"], str) and value["kind"] in ("capital", "town"), value
    assert isinstance(value["population"], int) and value["population"] >= 0, value


def check_logprobs(logprobs: list[float]) -> None:
    assert logprobs and all(-1e4 < value <= 0 for value in logprobs), logprobs


def raises(kind: type[BaseException], call: Callable[[], Any], says: str = "") -> Any:
    """The error of that kind which ``call`` must raise, with ``says`` in its text."""
    try:
        answer = call()
    except kind as error:
        assert says in str(error), f"{error} does not say {says!r}"
        return error
    raise AssertionError(f"no {kind.__name__} but {str(answer)[:200]}")


def run() -> None:
    """Every step, whatever became of the ones before."""
    for capability, function in _STEPS:
        started = time.monotonic()
        error = None
        try:
            if inspect.iscoroutinefunction(function):
                asyncio.run(function())
            else:
                function()
        except Exception as fault:
            at = traceback.extract_tb(fault.__traceback__)[-1]
            here = [f for f in traceback.extract_tb(fault.__traceback__) if f.filename == _main()]
            line = (here or [at])[-1].lineno
            error = f"line {line}: {type(fault).__name__}: {fault}"[:500]
        seconds = round(time.monotonic() - started, 2)
        print(
            json.dumps({"capability": capability, "error": error, "seconds": seconds}), flush=True
        )


def _main() -> str:
    return str(sys.modules["__main__"].__file__)
