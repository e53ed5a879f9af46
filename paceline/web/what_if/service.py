"""The page's what-if: one simulation at a time, in a separate process.

::

    page --POST--> WhatIf.start --> its caller's place: frames of the last minutes, or a trace
                        |                                      |
                        \\--> child (niced, bounded) <-- job ----/
                                  |-- lines of JSON --> state, which that caller polls
                                  \\-- frames of each run, files in the place

The child is ended when it is cancelled, exceeds its time or memory, its caller has not polled it
for three minutes, this server drains, or this process is gone (its standard input closes). A trace,
a job and its runs are shown only to the caller who made them (``Owner``). Nothing that a caller
sends becomes a path or an argument of a program. Imported when the page first requests it.
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

from paceline.errors import InvalidRequestError
from paceline.http.errors import HttpError
from paceline.server.generation.service import Service
from paceline.server.settings.config import WhatIfConfig
from paceline.web.feed import Feed
from paceline.web.what_if.job import MOST_RUNS, Job, parse_job
from paceline.web.what_if.storage import Owner, Place, Places
from paceline.web.what_if.trace import (
    MOST_LINE,
    check_declared,
    child_environment,
    end_of_log,
    kill,
    ran_out_of_memory,
    read_through,
    receive,
)

__all__ = ["WhatIf"]

_log = logging.getLogger("paceline.server")

# maximum requests of a run; later ones are left out
_MOST_REQUESTS: Final = 20_000
# seconds without a poll after which a job is ended, and seconds between checks
_FORGOTTEN: Final = 180.0
_LOOK: Final = 1.0
# what the child is given of the engine's description, and of the job
_OF_ENGINE: Final = (
    "max_model_len", "max_num_seqs", "max_num_batched_tokens", "policy", "block_size", "num_blocks",
    "enable_prefix_caching",
)  # fmt: skip
_OF_JOB: Final = ("policies", "budgets", "loads", "max_num_seqs")
# the state of a caller without a job
_IDLE: Final = {"status": "idle"}


class WhatIf:
    """The what-if of an app, made once. Used from the event loop's thread.

    Args:
        feed: None if the engine sends no timeline.
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
        # the place whose job runs, or ran last
        self._of: Place | None = None
        # why this process ended the child; None: it did not
        self._ended_by: tuple[str, str] | None = None
        service.side_work.append(self.close)

    # ------------------------------------------------------------------ what the page asks

    async def tell(self, owner: Owner) -> dict[str, Any]:
        """Return the choices of a job, and the state of the caller's latest job."""
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
            # another caller's job runs; nothing else of it is shown
            "busy": self._is_running and self._of is not place,
            "job": _IDLE if place is None else place.state,
        }

    async def start(self, owner: Owner, values: Mapping[str, Any]) -> dict[str, Any]:
        """Start a job; return its state.

        Raises:
            InvalidRequestError: see ``parse_job``; or there is nothing to simulate, or the model
                generates no tokens.
            HttpError: 409, another job runs; 503, too many callers have a folder here.
            EngineDrainingError: the server ends.
        """
        self._service.refuse_if_draining()
        self._service.check_generates()
        self._refuse_beside_another(owner)
        choices = await self._known()
        # other tasks may have run in the meantime
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
        """Store the request's body as the caller's trace; it replaces an earlier one.

        Raises:
            HttpError: 413 if it is too long, 409 while the caller's job runs or another trace of
                theirs is uploaded, 503 if too many callers have a folder here, 500 if reading it
                failed by a bug here.
            InvalidRequestError: it is empty, or not a trace that can be simulated.
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
        """Return the timeline of a finished run of the caller's latest job, which must be ``job``
        if given. Raises HttpError 404 otherwise."""
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
        """End the running job and forget all data; a later job starts from nothing."""
        await self._end("cancelled", "the server is shutting down")
        await self._places.close()

    # ------------------------------------------------------------------ the child

    async def _run(self, place: Place, job: Job) -> None:
        """Run the job to its end; the result is in the place's state."""
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
        """Return (status, reason). Raises OSError if the child or a file could not be created."""
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
                # in a session of its own: signals to this process's group do not reach it; the
                # server ends it
                start_new_session=True,
                limit=MOST_LINE,
            )
        assert process.stdin is not None and process.stdout is not None
        if self._ended_by is not None:
            # ended during the start
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
        # a child that lingered after its last result was killed: its exit code says nothing
        if len(place.state["results"]) < job.num_runs:
            with (folder / "log").open("rb") as written:
                said = end_of_log(written)
            _log.warning("what_if_failed code=%d log=%r", code, said)
            if ran_out_of_memory(said):
                return "failed", f"it needs more than {self._config.memory // 2**20} MiB"
            return "failed", f"it ended by itself (code {code}); the server's log says more"
        return "done", ""

    async def _spelt(self, place: Place, job: Job) -> dict[str, Any]:
        """Return the job in the child's form (``cli/simulation/what_if.py``). Writes the frames it
        needs."""
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
            "engine": {name: getattr(info, name) for name in _OF_ENGINE},
            "workload": {"kind": job.workload, "path": str(place.trace)},
            "frames": None if frames is None else str(frames),
            "step_times": step_times,
            **{name: getattr(job, name) for name in _OF_JOB},
            "targets": {
                "ttft": None if job.ttft_ms is None else job.ttft_ms / 1e3,
                "tpot": None if job.tpot_ms is None else job.tpot_ms / 1e3,
            },
            "most_requests": _MOST_REQUESTS,
            "folder": str(place.runs),
            # the child removes it when this process is gone
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
        """Return the caller's place, if it has one, and note the poll."""
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
    """Read the child's lines to their end; return its error, or "" without one."""
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
    """Return the exit code of a child that has closed its output. Most end by themselves: a signal
    to one that has just ended may hide its own code."""
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
