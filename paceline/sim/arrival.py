"""Input and output of a simulation, one request at a time.

A workload is any `Iterable[Arrival]` in order of `at`; it is streamed, so a million of them need no
memory. The outcome of a request is one `Served`.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Arrival", "Served"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a workload."""

    # seconds from the start of the workload
    at: float
    # >= 1
    prompt_tokens: int
    # >= 1
    output_tokens: int
    # identities of the prompt's leading prefix_block-token pieces: equal leading identities stand
    # for equal tokens
    prefix: tuple[int, ...] = ()
    slo_class: str = "standard"
    # targets, s: time to first token, time per output token, and from arrival to the end
    ttft: float | None = None
    tpot: float | None = None
    deadline: float | None = None
    tenant: str = ""
    # name of its LoRA adapter; "": none
    adapter: str = ""
    model: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Served:
    """Outcome of one finished (or refused) request, from which reports are made."""

    arrival: Arrival
    # the replica that answered
    replica: int
    # seconds on the workload's clock; None: it did not happen
    first_scheduled: float | None
    first_token: float | None
    last_token: float | None
    output_tokens: int
    # prompt tokens that were found in the prefix cache
    cached_tokens: int
    preemptions: int
    refused: bool = False
    # reason of a refusal, for users; "" where nothing was refused
    reason: str = ""
    # seconds from arrival to first token, predicted on arrival; None: nothing was measured yet
    predicted_ttft: float | None = None
    # seconds that a refusal advises to wait; None: the request would be refused again
    retry_after: float | None = None

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token; None without one."""
        return None if self.first_token is None else self.first_token - self.arrival.at

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None with fewer than two tokens."""
        if self.first_token is None or self.last_token is None or self.output_tokens < 2:
            return None
        return (self.last_token - self.first_token) / (self.output_tokens - 1)

    @property
    def e2e(self) -> float | None:
        """Seconds from arrival to the last token; None without one."""
        return None if self.last_token is None else self.last_token - self.arrival.at
