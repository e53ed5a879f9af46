"""A streaming client for any OpenAI-compatible server, blocking or asyncio (docs/use/client.md)."""

from paceline.client.async_stream import AsyncStream
from paceline.client.client import AsyncClient, Client
from paceline.client.errors import (
    ClientError,
    NoAnswerError,
    NotParsedError,
    RefusedError,
    StreamInterruptedError,
)
from paceline.client.events import (
    Event,
    FellBack,
    Finished,
    ReasoningDelta,
    Restarted,
    Resumed,
    Retrying,
    Started,
    TextDelta,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from paceline.client.policy import Policy, RetryBudget, Target
from paceline.client.stream import Stream

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Client",
    "ClientError",
    "Event",
    "FellBack",
    "Finished",
    "NoAnswerError",
    "NotParsedError",
    "Policy",
    "ReasoningDelta",
    "RefusedError",
    "Restarted",
    "Resumed",
    "RetryBudget",
    "Retrying",
    "Started",
    "Stream",
    "StreamInterruptedError",
    "Target",
    "TextDelta",
    "ToolCall",
    "ToolCallDelta",
    "Usage",
]
