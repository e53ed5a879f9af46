"""Flags and variables of other servers, and what they become here."""

from __future__ import annotations

from paceline.cli.elsewhere.llama_server import LLAMA_SERVER
from paceline.cli.elsewhere.ollama import RUN
from paceline.cli.elsewhere.rows import Rows
from paceline.cli.elsewhere.vllm import VLLM

__all__ = ["ASK", "SERVE"]

# of paceline serve, and of paceline run
SERVE = Rows((*LLAMA_SERVER, *VLLM))
ASK = Rows(RUN)
