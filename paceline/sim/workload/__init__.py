"""Workloads: public traces, our own recordings, synthetic arrivals; streamed, equal by seed."""

from __future__ import annotations

from paceline.sim.workload.arrivals import Client, client_arrivals, diurnal, draw_clients, renewal
from paceline.sim.workload.base import Workload, WorkloadError
from paceline.sim.workload.lengths import (
    Bimodal,
    Empirical,
    Fixed,
    Lengths,
    Lognormal,
    Scaled,
    Uniform,
)
from paceline.sim.workload.shaping import (
    SloMix,
    jitter,
    limit,
    scale,
    speed_up,
    with_classes,
    with_tenants,
)
from paceline.sim.workload.spec import open_workload, parse_classes, parse_lengths, parse_seconds
from paceline.sim.workload.traces import Trace, open_trace, read_lengths

__all__ = [
    "Bimodal",
    "Client",
    "Empirical",
    "Fixed",
    "Lengths",
    "Lognormal",
    "Scaled",
    "SloMix",
    "Trace",
    "Uniform",
    "Workload",
    "WorkloadError",
    "client_arrivals",
    "diurnal",
    "draw_clients",
    "jitter",
    "limit",
    "open_trace",
    "open_workload",
    "parse_classes",
    "parse_lengths",
    "parse_seconds",
    "read_lengths",
    "renewal",
    "scale",
    "speed_up",
    "with_classes",
    "with_tenants",
]
