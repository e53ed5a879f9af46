"""A caller of what-if, the app behind it, and children that do something else with their job."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from paceline.cli.flags.settings import WHAT_IF_PROCESS, EngineSettings
from paceline.cli.simulation.what_if import choices
from paceline.engine.local import LocalEngineClient
from paceline.server import ServerConfig, create_app
from paceline.server.app import service_of
from paceline.server.settings.config import WhatIfConfig
from paceline.timeline.codec import headers
from paceline.timeline.events import FrameType
from paceline.web.routes import ui_router
from paceline.web.what_if.service import WhatIf

PATH = "/ui/api/what-if"
SETTINGS = EngineSettings.of(pipeline_depth=1).to_json().decode()
CARD = {"hardware": "H100-SXM", "model": "meta-llama/Llama-3.1-8B"}
TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:00:{i // 4:02d}.{25 * (i % 4):02d},{400 + 37 * (i % 11)},{40 + i % 9}\n"
    for i in range(120)
)
# it takes the simulator many seconds
MANY = "arrived_at_s,prompt_tokens,output_tokens\n" + "".join(
    f"{i / 50:.2f},900,400\n" for i in range(20_500)
)


def configured(command: tuple[str, ...] = WHAT_IF_PROCESS, **values: Any) -> WhatIfConfig:
    return WhatIfConfig(command=command, settings=SETTINGS, choices=choices, **values)


def script(text: str) -> tuple[str, ...]:
    """A child that does something else with its job."""
    return (sys.executable, "-c", "import json, os, sys, time\n" + text)


SLEEPS = script(
    "sys.stdin.readline(); print(json.dumps({'doing': 'simulating', 'runs': 1}), flush=True)\n"
    "time.sleep(60)"
)


class Asker:
    """A page's caller, and the app behind it."""

    def __init__(self, engine: LocalEngineClient, config: WhatIfConfig | None, **more: Any) -> None:
        app = create_app(engine, ServerConfig(what_if=config, **more), page=ui_router)
        self.service = service_of(app)
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1", timeout=60
        )

    @property
    def what_if(self) -> WhatIf:
        found = self.service.side_work[0].__self__  # type: ignore[attr-defined]
        assert isinstance(found, WhatIf)
        return found

    @property
    def root(self) -> Path:
        """Of the places of all callers."""
        found = self.what_if._places.root
        assert found is not None
        return found

    async def send(self, text: str = TRACE, **headers: str) -> httpx.Response:
        """Upload a trace."""
        return await self.http.put(f"{PATH}/trace", content=text, headers=headers)

    async def start(self, **body: Any) -> httpx.Response:
        return await self.http.post(PATH, json={"policies": ["fcfs"]} | body)

    async def tell(self) -> Any:
        return (await self.http.get(PATH)).json()

    async def ended(self) -> Any:
        for _ in range(1200):
            job = (await self.tell())["job"]
            if job["status"] != "running":
                return job
            await asyncio.sleep(0.05)
        raise AssertionError("it goes on")

    async def told_of(self, requests: int) -> None:
        """Until the engine has told of the end of so many."""
        for _ in range(400):
            frames = (await self.http.get("/ui/api/timeline")).content
            if sum(kind == FrameType.END for kind, _, _ in headers(frames)) == requests:
                return
            await asyncio.sleep(0.02)
        raise AssertionError("they go on")

    async def refusal(self, **body: Any) -> dict[str, Any]:
        answer = await self.start(**body)
        assert answer.status_code == 400, answer.text
        error: dict[str, Any] = answer.json()["error"]
        return error


Ask = Callable[..., Asker]


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(400):
        if holds():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("not so")


async def pid_of(asker: Asker) -> int:
    """Of the process that simulates, once it is there."""
    await until(lambda: asker.what_if._process is not None)
    process = asker.what_if._process
    assert process is not None
    return process.pid


async def begun(asker: Asker) -> int:
    await asker.send()
    assert (await asker.start(workload="trace", **CARD)).status_code == 200
    return await pid_of(asker)


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False
