"""Flags and variables of other servers, and what they become here."""

from __future__ import annotations

from paceline.cli.flags.elsewhere.llama_server import LLAMA_SERVER
from paceline.cli.flags.elsewhere.ollama import RUN
from paceline.cli.flags.elsewhere.rows import Rows
from paceline.cli.flags.elsewhere.vllm import VLLM

__all__ = ["ASK", "SERVE"]

# of paceline serve, and of paceline run
SERVE = Rows((*LLAMA_SERVER, *VLLM))
ASK = Rows(RUN)
