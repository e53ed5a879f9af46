"""A real server process over the null backend, for tests.

    python -m tests.server.live '{"backend": {"step_time": 0.01}, "config": {"drain_timeout": 1}}'

Prints its port when ready. Further keys: ``core`` (arguments of null_core), ``die_on`` (a token id
whose appearance breaks the whole engine), ``process`` (true: the engine in a process of its own),
``metrics_port`` (serve /metrics there too), ``keys`` (arguments of ApiKey.of).
``what_if`` (true: the page may have what-ifs simulated).
``supervise`` (that process is replaced when it ends; arguments of SupervisedEngineClient.start).
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path
from typing import Any

from paceline.backends.reference.null import NullBackend
from paceline.cli.flags.settings import TRACE_PROCESS, EngineSettings
from paceline.cli.simulation.what_if import choices
from paceline.core.outputs import SchedulerOutput, StepResult
from paceline.engine.process.client import ProcessEngineClient
from paceline.engine.protocol import EngineClient
from paceline.engine.supervision.supervisor import SupervisedEngineClient
from paceline.engine.testing import ByteTokenizer, null_client
from paceline.http.bounds import Bounds
from paceline.http.keys import ApiKey
from paceline.http.rate_limits.rates import KeyLimits, parse_override
from paceline.server import ServerConfig, serve
from paceline.server.lifecycle import bind
from paceline.server.settings.config import BatchConfig, GivenSetting, WhatIfConfig
from paceline.web.routes import ui_router
from tests.engine.null_engine import ARGV
from tests.server.helpers import VOCAB

# what-ifs at the priority of other processes: those that run when nothing else does would not end
# on a busy machine
_WHAT_IF = (
    sys.executable,
    "-c",
    "import os, runpy; vars(os).pop('SCHED_IDLE', None); os.nice = lambda by: 0;"
    " runpy.run_module('paceline.cli.simulation.what_if', run_name='__main__')",
)


class _DyingBackend(NullBackend):
    def __init__(self, die_on: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._die_on = die_on

    def _run(self, plan: SchedulerOutput) -> StepResult:
        if any(self._die_on in new.token_ids for new in plan.new_requests):
            raise RuntimeError("the device at 0x7f00deadbeef is gone, see /var/lib/device/log")
        return super()._run(plan)


async def _client(settings: dict[str, Any]) -> EngineClient:
    backend = {"vocab_size": VOCAB} | settings.get("backend", {})
    core = settings.get("core", {})
    if "supervise" in settings:
        config = json.dumps({**backend, "core": core}).encode()

        async def start(before: ProcessEngineClient | None, number: int) -> ProcessEngineClient:
            client = await ProcessEngineClient.start(ARGV, config, ByteTokenizer)
            print(f"engine {client.pid}", flush=True)
            return client

        return await SupervisedEngineClient.start(start, **settings["supervise"])
    if settings.get("process"):
        config = json.dumps({**backend, "core": core}).encode()
        return await ProcessEngineClient.start(ARGV, config, ByteTokenizer)
    if "die_on" in settings:
        return null_client(_DyingBackend(settings["die_on"], **backend), **core)
    return null_client(NullBackend(**backend), **core)


async def main() -> int:
    settings = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    logging.basicConfig(level="INFO")
    config = settings.get("config", {})
    if "bounds" in config:
        config["bounds"] = Bounds(**config["bounds"])
    client = await _client(settings)
    if isinstance(client, ProcessEngineClient):
        print(f"engine {client.pid}", flush=True)
    metrics_listener = None
    if "metrics_port" in settings:
        metrics_listener = bind("127.0.0.1", settings["metrics_port"])
        print(f"metrics {metrics_listener.getsockname()[1]}", flush=True)
    if "batches" in config:
        folder = Path(config["batches"]["folder"])
        config["batches"] = BatchConfig(**config["batches"] | {"folder": folder})
    if "limits" in config:
        config["limits"] = KeyLimits(
            **dict(parse_override(f"{k}={v}") for k, v in config["limits"].items())
        )
    if "given" in config:
        config["given"] = tuple(GivenSetting(*words) for words in config["given"])
    if "keys" in settings:
        config["api_keys"] = tuple(ApiKey.of(**key) for key in settings["keys"])
    if settings.get("what_if"):
        config["what_if"] = WhatIfConfig(
            command=_WHAT_IF,
            check=TRACE_PROCESS,
            settings=EngineSettings.of().to_json().decode(),
            choices=choices,
        )
    return await serve(
        client,
        ServerConfig(**config),
        port=0,
        metrics_listener=metrics_listener,
        on_ready=lambda host, port: print(f"ready {host} {port}", flush=True),
        page=ui_router,
    )


if __name__ == "__main__":
    # as the command line does
    with asyncio.Runner() as runner:
        sys.exit(runner.run(main()))
