"""The page's what-if: one simulation at a time, in a process of its own.

::

    page --POST--> WhatIf.start --> its caller's place: frames of the last minutes, or a trace
                        |                                      |
                        \\--> child (niced, bounded) <-- job ----/
                                  |-- lines of JSON --> state, which that caller asks for
                                  \\-- frames of each run, files in the place

The child is ended when it is cancelled, when it takes too long or too much, when its caller has not
asked for it for three minutes, when this server drains, and when this process is gone (its standard
input closes). A trace, a job and its runs are told to the caller who made them (``Owner``) and to
nobody else. Nothing that a caller sends becomes a path or an argument of a program. Imported when
the page is first asked for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from starlette.requests import Request

from paceline.core.errors import InvalidRequestError
from paceline.http.errors import HttpError
from paceline.server.config import WhatIfConfig
from paceline.server.service import Service
from paceline.server.ui.feed import Feed
from paceline.server.ui.what_if_child import (
    MOST_LINE,
    child_environment,
    end_of_log,
    kill,
    ran_out_of_memory,
)
from paceline.server.ui.what_if_job import MOST_RUNS, Job, parse_job
from paceline.server.ui.what_if_places import Owner, Place, Places
from paceline.server.ui.what_if_trace import check_declared, read_through, receive

__all__ = ["WhatIf"]

_log = logging.getLogger("paceline.server")

# requests of a run; those behind them are left out
_MOST_REQUESTS: Final = 20_000
# seconds after which a job that nobody asks for is ended, and between looks at that
_FORGOTTEN: Final = 180.0
_LOOK: Final = 1.0
# of whoever has nothing here
_IDLE: Final = {"status": "idle"}


class WhatIf:
    """Made once for an app. Used from the event loop's thread.

    Args:
        feed: None where the engine tells nothing of its steps.
    """

    def __init__(self, service: Service, feed: Feed | None, config: WhatIfConfig) -> None:
        self._service = service
        self._feed = feed
        self._config = config
        self._choices: Mapping[str, Any] | None = None
        self._places = Places()
        self._reading = asyncio.Semaphore(1)
        self._process: asyncio.subprocess.Process | None = None
        self._running: asyncio.Task[None] | None = None
        # whose job runs, or ran last
        self._of: Place | None = None
        # why the child was ended by this process; None: it was not
        self._ended_by: tuple[str, str] | None = None
        service.side_work.append(self.close)

    # ------------------------------------------------------------------ what the page asks

    async def tell(self, owner: Owner) -> dict[str, Any]:
        """What may be chosen, and how the caller's latest job is."""
        choices = await self._known()
        place = self._asked(owner)
        info, feed = self._service.client.info, self._feed
        return {
            "choices": choices,
            "server": {
                "policy": info.policy,
                "max_num_batched_tokens": info.max_num_batched_tokens,
                "max_num_seqs": info.max_num_seqs,
            },
            "minutes": None
            if feed is None
            else {"requests": feed.num_requests, "seconds": feed.seconds},
            "trace_bytes": None if place is None else place.trace_bytes,
            "most_runs": MOST_RUNS,
            # another caller's job runs: of it, nothing else is told
            "busy": self._is_running and self._of is not place,
            "job": _IDLE if place is None else place.state,
        }

    async def start(self, owner: Owner, values: Mapping[str, Any]) -> dict[str, Any]:
        """Begin a job; answers its state.

        Raises:
            InvalidRequestError: see ``parse_job``; or there is nothing to simulate, or the model
                generates nothing.
            HttpError: 409, another one is running; 503, too many callers have something here.
            EngineDrainingError: the server ends.
        """
        self._service.refuse_if_draining()
        self._service.check_generates()
        self._refuse_beside_another(owner)
        choices = await self._known()
        # others had their turn meanwhile
        self._service.refuse_if_draining()
        self._refuse_beside_another(owner)
        job = parse_job(values, choices, self._service.client.info.max_num_batched_tokens)
        if job.wants_frames and self._feed is None:
            raise InvalidRequestError(
                "this server keeps no timeline (--no-timeline), so it knows neither its last "
                "minutes nor how long its steps take: give a trace, and a hardware and a model",
                "workload" if job.workload == "minutes" else "hardware",
            )
        place = self._asked(owner)
        if job.workload == "trace" and (place is None or place.trace_bytes is None):
            raise InvalidRequestError("no trace was uploaded yet", "workload")
        place = self._places.make(owner)
        self._ended_by = None
        self._of = place
        place.asked_at = time.monotonic()
        place.uses += 1
        place.number += 1
        place.state = {
            "status": "running",
            "number": place.number,
            "doing": "starting",
            "job": asdict(job),
            "done": 0.0,
            "results": [],
        }
        self._running = asyncio.ensure_future(self._run(place, job))
        return place.state

    async def cancel(self, owner: Owner) -> dict[str, Any]:
        """End the caller's job, if it runs."""
        place = self._asked(owner)
        if place is None:
            return _IDLE
        if self._of is place:
            await self._end("cancelled", "")
        return place.state

    async def upload(self, owner: Owner, request: Request) -> dict[str, Any]:
        """Keep the request's body as the caller's trace, in place of an earlier one.

        Raises:
            HttpError: 413 for one that is too long, 409 while a job of the caller's runs or another
                trace of the caller's is being sent, 503 where too many callers have something here,
                500 if reading it failed by a fault of ours.
            InvalidRequestError: there is nothing in it, or it is no trace that can be simulated.
            ClientDisconnectedError: the caller hung up halfway.
            EngineDrainingError: the server ends.
        """
        self._service.refuse_if_draining()
        self._refuse_beside_own(owner)
        check_declared(request)
        place = self._places.make(owner)
        place.asked_at = time.monotonic()
        with place.receiving():
            file, name = tempfile.mkstemp(dir=place.folder, prefix="upload-")
            try:
                size = await receive(request, file)
                # one at a time: each may take a processor and much memory
                async with self._reading:
                    told = await read_through(self._config, Path(name), self._places.root)
                self._service.refuse_if_draining()
                self._refuse_beside_own(owner)
                os.replace(name, place.trace)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name)
        place.trace_bytes = size
        return {"trace_bytes": size, **told}

    async def frames(self, owner: Owner, run: int, job: int | None) -> bytes:
        """Of the timeline of a run of the caller's job that is done, of its latest unless that is
        to be ``job``. Raises HttpError 404 for another one."""
        place = self._asked(owner)
        known = [] if place is None else [each["run"] for each in place.state.get("results", ())]
        if place is None or run not in known or job not in (None, place.number):
            which = "" if job is None else f" of job {job}"
            raise HttpError(404, f"you have no run {run}{which} that is done; done are {known}")
        try:
            return await asyncio.to_thread((place.runs / f"{run}.frames").read_bytes)
        except FileNotFoundError:
            raise HttpError(404, f"run {run} was given up for the next job") from None

    async def close(self) -> None:
        """End what runs and forget everything. Another job would begin anew."""
        await self._end("cancelled", "the server is shutting down")
        await self._places.close()

    # ------------------------------------------------------------------ the child

    async def _run(self, place: Place, job: Job) -> None:
        """Until it is over, however it ends; what came of it is in the place's state."""
        began = time.monotonic()
        status, error = "failed", ""
        try:
            status, error = await self._carry_out(place, job, began)
        except OSError as failure:
            _log.warning("what_if_failed reason=%r", str(failure))
            error = f"it could not be started: {failure.strerror or type(failure).__name__}"
        except (ValueError, KeyError) as failure:
            _log.warning("what_if_failed reason=%r", str(failure))
            error = "what it said is no answer"
        finally:
            self._process = None
            place.uses -= 1
            place.state |= {"status": status, "error": error, "seconds": time.monotonic() - began}

    async def _carry_out(self, place: Place, job: Job, began: float) -> tuple[str, str]:
        """(how it ended, why). Raises OSError where nothing could be started or written."""
        folder = place.runs
        await asyncio.to_thread(place.make_runs)
        told = await self._spelt(place, job)
        with (folder / "log").open("wb") as log:
            process = self._process = await asyncio.create_subprocess_exec(
                *self._config.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=child_environment(),
                # a signal to this process's group is not for it: it is ended with the server
                start_new_session=True,
                limit=MOST_LINE,
            )
        assert process.stdin is not None and process.stdout is not None
        if self._ended_by is not None:
            # while it was being started
            kill(process)
        process.stdin.write(json.dumps(told).encode() + b"\n")
        reading = asyncio.ensure_future(_read(process.stdout, place.state))
        try:
            while not (await asyncio.wait((reading,), timeout=_LOOK))[0]:
                now = time.monotonic()
                if now - began > self._config.seconds:
                    self._ended_by = ("failed", f"it took more than {self._config.seconds:g} s")
                elif now - place.asked_at > _FORGOTTEN:
                    self._ended_by = ("cancelled", "no page asked for it for three minutes")
                else:
                    continue
                kill(process)
                break
            error = await reading
        finally:
            reading.cancel()
            code = await _end_of(process)
        if self._ended_by is not None:
            return self._ended_by
        if error:
            return "failed", error
        if code == -signal.SIGXCPU:
            return "failed", f"it took more than {self._config.cpu_seconds} s of processor time"
        # one that has told all is ended when it lingers
        if len(place.state["results"]) < job.num_runs:
            with (folder / "log").open("rb") as written:
                said = end_of_log(written)
            _log.warning("what_if_failed code=%d log=%r", code, said)
            if ran_out_of_memory(said):
                return "failed", f"it needs more than {self._config.memory // 2**20} MiB"
            return "failed", f"it ended by itself (code {code}); the server's log says more"
        return "done", ""

    async def _spelt(self, place: Place, job: Job) -> dict[str, Any]:
        """As the child wants it (``cli/what_if.py``). Writes the frames, if it wants any."""
        frames = None
        if job.wants_frames:
            assert self._feed is not None, "checked at the start"
            frames = place.runs / "minutes"
            history = self._feed.history(seconds=60.0 * job.minutes)
            await asyncio.to_thread(frames.write_bytes, history)
        info = self._service.client.info
        step_times: dict[str, Any] = {"kind": "server"}
        if job.hardware is not None:
            step_times = {"kind": "roofline", "hardware": job.hardware, "model": job.model}
        return {
            "settings": self._config.settings,
            "engine": {
                "max_model_len": info.max_model_len,
                "max_num_seqs": info.max_num_seqs,
                "max_num_batched_tokens": info.max_num_batched_tokens,
                "policy": info.policy,
                "block_size": info.block_size,
                "num_blocks": info.num_blocks,
                "enable_prefix_caching": info.enable_prefix_caching,
            },
            "workload": {"kind": job.workload, "path": str(place.trace)},
            "frames": None if frames is None else str(frames),
            "step_times": step_times,
            "policies": job.policies,
            "budgets": job.budgets,
            "loads": job.loads,
            "max_num_seqs": job.max_num_seqs,
            "targets": {
                "ttft": None if job.ttft_ms is None else job.ttft_ms / 1e3,
                "tpot": None if job.tpot_ms is None else job.tpot_ms / 1e3,
            },
            "most_requests": _MOST_REQUESTS,
            "folder": str(place.runs),
            # what it takes away when this process is gone
            "root": str(self._places.root),
            "memory": self._config.memory,
            "seconds": self._config.cpu_seconds,
        }

    async def _end(self, status: str, why: str) -> None:
        if self._running is None or self._running.done():
            return
        self._ended_by = self._ended_by or (status, why)
        if self._process is not None:
            kill(self._process)
        await asyncio.wait((self._running,))

    # ------------------------------------------------------------------ inside

    @property
    def _is_running(self) -> bool:
        return self._running is not None and not self._running.done()

    def _asked(self, owner: Owner) -> Place | None:
        """The caller's place, if it has one; it is there and asks."""
        place = self._places.find(owner)
        if place is not None:
            place.asked_at = time.monotonic()
        return place

    def _refuse_beside_another(self, owner: Owner) -> None:
        self._refuse_beside_own(owner)
        if self._is_running:
            raise HttpError(409, "another caller's simulation is running; wait for its end")

    def _refuse_beside_own(self, owner: Owner) -> None:
        if self._is_running and self._of is self._places.find(owner):
            raise HttpError(409, "a simulation of yours is running; cancel it, or wait for its end")

    async def _known(self) -> Mapping[str, Any]:
        if self._choices is None:
            self._choices = await asyncio.to_thread(self._config.choices)
        return self._choices


async def _read(lines: asyncio.StreamReader, state: dict[str, Any]) -> str:
    """Take in what the child says until it says no more; its error, or "" without one."""
    while line := await lines.readline():
        told: dict[str, Any] = json.loads(line)
        if "error" in told:
            return str(told["error"])
        if "doing" in told:
            state |= told
        elif "result" in told:
            state["results"].append({"run": told["run"], **told["result"]})
            state["done"] = len(state["results"]) / state["runs"]
        elif "done" in told:
            state["done"] = (told["run"] + told["done"]) / state["runs"]
    return ""


async def _end_of(process: asyncio.subprocess.Process) -> int:
    """The exit code of one that has nothing more to say. Most end by themselves: a signal to one
    that has just ended may hide what it ended with."""
    try:
        async with asyncio.timeout(_LOOK):
            return await process.wait()
    except TimeoutError:
        kill(process)
        return await process.wait()
    finally:
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
