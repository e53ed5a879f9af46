"""Parts of ``make bench NAME=goodput`` by turns, so that changes of the machine's speed cancel out.

::

    python -m benchmarks.goodput.turns flood now= longer="--best-effort-step-ms 50"
    python -m benchmarks.goodput.turns tenants now= longer="--best-effort-step-ms 50"
    python -m benchmarks.goodput.turns rates --rates 11.1,13.6,22

``flood`` and ``tenants``: TTFT of a light stream alone and next to a heavy one, of our server with
each set of flags (``NAME=FLAGS``; none: its defaults). ``rates``: the share served in time at each
of these rates.
"""

from __future__ import annotations

import argparse
import sys
from itertools import product

from benchmarks.common.client import Timing
from benchmarks.common.ours import Ours, our_places
from benchmarks.common.processes import free_port
from benchmarks.common.server import Server
from benchmarks.goodput.__main__ import CV, SECONDS, at_rate, ratios
from benchmarks.goodput.engines import class_flags
from benchmarks.goodput.loads import beside, flood, loop_ms, tenants


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("flood", "tenants", "rates"))
    parser.add_argument("variants", nargs="*", metavar="NAME=FLAGS", default=["now="])
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--unit", type=float, default=6.0, help="requests/s of a burst worked off")
    parser.add_argument("--rates", default="6,12", help="requests/s")
    parser.add_argument("--kind", choices=tuple(CV), default="poisson")
    args = parser.parse_args()
    places, vocab = our_places()
    servers: dict[str, Server] = {}
    try:
        for name, _, flags in (variant.partition("=") for variant in args.variants):
            if name in servers:
                parser.error(f"two variants are called {name!r}")
            extra = ("--scheduling-policy", "fair") if args.what == "tenants" else ()
            ours = Ours(name, places, (*class_flags(), *extra, *flags.split()))
            log = places.folder("logs") / f"turns-{name}.log"
            servers[name] = Server(ours, free_port(), log, vocab)
            servers[name].freeze()
        if args.what == "rates":
            for turn, rate in product(range(args.turns), map(float, args.rates.split(","))):
                for name, server in servers.items():
                    run = at_rate(server, args.kind, rate, vocab, 100 + turn, classes=True)
                    print(f"{args.kind} {rate:6.2f}/s {name} {run}", flush=True)
        else:
            make = flood if args.what == "flood" else tenants
            found: dict[str, tuple[list[Timing], list[Timing]]] = {}
            for turn in range(args.turns):
                pair = make(args.unit, SECONDS, vocab, turn)
                # alternate which of two comes first
                for name, server in list(servers.items())[:: -1 if turn % 2 else 1]:
                    answers = beside(server, pair, f"{turn} {name}")
                    ratios(f"turn {turn}, {name}: loop {loop_ms()} ms,", *answers)
                    alone, crowded = found.setdefault(name, ([], []))
                    alone += answers[0]
                    crowded += answers[1]
            for name, answers in found.items():
                ratios(f"all turns, {name}:", *answers)
    finally:
        for server in servers.values():
            server.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
