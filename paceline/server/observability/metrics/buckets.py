"""Bucket boundaries: vLLM's, prometheus-fastapi-instrumentator's for HTTP, and our own for
quantities that neither has."""

from __future__ import annotations

from typing import Final

__all__ = [
    "CHUNK_BUCKETS",
    "HTTP_BUCKETS",
    "HTTP_FINE_BUCKETS",
    "ITERATION_TOKEN_BUCKETS",
    "LATENCY_BUCKETS",
    "N_BUCKETS",
    "PREEMPTION_BUCKETS",
    "QUEUE_BUCKETS",
    "TOKEN_TIME_BUCKETS",
    "TTFT_BUCKETS",
    "series_1_2_5",
]

# fmt: off
TTFT_BUCKETS: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)
TOKEN_TIME_BUCKETS: Final = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)
LATENCY_BUCKETS: Final = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)
# most requests wait a step or two; vLLM's buckets begin where a server is overloaded
QUEUE_BUCKETS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, *LATENCY_BUCKETS)
ITERATION_TOKEN_BUCKETS: Final = (
    1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0,
)
CHUNK_BUCKETS: Final = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0, 128.0)
N_BUCKETS: Final = (1.0, 2.0, 5.0, 10.0, 20.0)
PREEMPTION_BUCKETS: Final = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
HTTP_BUCKETS: Final = (0.1, 0.5, 1.0)
HTTP_FINE_BUCKETS: Final = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0,
    7.5, 10.0, 30.0, 60.0,
)
# fmt: on


def series_1_2_5(largest: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, 20, 50, ... up to and including ``largest``."""
    series: list[float] = []
    decade = 1
    while decade <= largest:
        series += [float(m * decade) for m in (1, 2, 5) if m * decade <= largest]
        decade *= 10
    return tuple(series)
