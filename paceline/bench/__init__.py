"""``paceline bench``: load for any OpenAI-compatible server, and its results.

::

    plan.py      options -> arrivals, prompts, bodies       no clock, no sockets
    answers.py   bytes and their times -> Outcome            no clock, no sockets
    account.py   Outcomes -> Report                         no clock, no sockets
    drive.py     sends at the planned times                 asyncio, the clock
    page.py      Report -> one HTML file
    machine.py   the machine that ran a benchmark
"""

from __future__ import annotations

from paceline.bench.account import Report, make_report
from paceline.bench.answers import Answer, Outcome
from paceline.bench.drive import Server, drive
from paceline.bench.plan import Bodies, Plan, PromptFile, Words

__all__ = [
    "Answer",
    "Bodies",
    "Outcome",
    "Plan",
    "PromptFile",
    "Report",
    "Server",
    "Words",
    "drive",
    "make_report",
]
