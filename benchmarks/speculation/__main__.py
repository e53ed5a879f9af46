"""Gain by draft tokens: the same requests with --speculative-config and without, in turns.

Two engines of the same model in this process, on and off, take turns with each group of prompts,
so both see the machine in the same state. A ratio is the seconds without over the seconds with, the
median of the turns, with the lowest and the highest, and the 95 % interval of their geometric mean
(``low`` to ``high``, bootstrap over turns):

    single             one stream at a time, by group
    same_question_again
                       the same if each question was asked and answered just before, by the same
                       caller: the gain by finished answers
    t07_extraction     one stream at temperature 0.7, of the group "extraction"
    eight_code_edit    8 streams at once of the group "code_edit"
    sixtyfour          64 streams at once, of all groups
    draft_bf16         one stream at a time of all groups, weights in bfloat16, with drafts by the
                       same weights in 4 bits and without; null if native kernels cannot serve it
    tpot_attainment    streams of "code_edit", one at a time, with a target of 0.7 of a plain step:
                       the share that met it
    goodput            requests of all groups in Poisson arrivals, at several rates: those that met
                       their targets with drafts over those without, with the 95 % interval
                       (bootstrap over requests); ``goodput_min_ratio`` is that at the worst rate.
                       No long row: both sides have the same queue, and it ends with the requests;
                       lasting loads are in ``make bench NAME=overload``
    steps              no model: microseconds of the scheduler for a step of 1, 8 and 64 rows
                       without and with drafts, and function calls in it, for texts without a
                       repeated token, for words as frequent as in a language, in random order,
                       and for a passage that is repeated with small edits
    identical          the share of answers whose tokens are the same; below 1 for formats whose
                       logits depend on how many rows are computed (docs/understand/accuracy.md)

PROMPTS=FILE names a JSON file {"group": ["prompt", ...]} that replaces the prompts, MODEL=FOLDER
the model, DTYPE=NAME its format, TOKENS=N the most tokens of an answer: it ends where the model
ends it, as on a server. TURNS=N is the number of turns; QUICK=1 is one short turn.
PARTS=NAME[:TURNS],... plays these parts alone (a group's name is its part of "single"), the others
are null. The last line is JSON. To see whether "auto" loses anything where it can gain nothing:

    make bench NAME=speculation PARTS=open_chat:80,sixtyfour:20,goodput:4,steps

    python -m benchmarks.speculation
"""

from __future__ import annotations

import json
import os
from typing import Any

from benchmarks.speculation.asked import TOKENS, TURNS, model_path, prompt_groups
from benchmarks.speculation.engines import Pair, play_prompts
from benchmarks.speculation.steps import measure_steps
from benchmarks.speculation.targets import RATES, attainment, goodput, goodput_ratio
from paceline.core.slo import Slo

# parts in addition to the groups of prompts
PARTS = (
    "t07_extraction", "eight_code_edit", "sixtyfour", "tpot_attainment", "goodput", "draft_bf16",
    "same_question_again", "steps",
)  # fmt: skip


def chosen_parts(groups: dict[str, list[str]]) -> dict[str, int]:
    """Return the parts to play, with their turns."""
    known = [*groups, *PARTS]
    found: dict[str, int] = {}
    for entry in filter(None, os.environ.get("PARTS", "").split(",")):
        name, _, turns = entry.partition(":")
        if name not in ("single", *known) or (turns and not turns.isdigit()):
            raise SystemExit(f"PARTS: {entry!r} is none of single, {', '.join(known)}")
        for part in groups if name == "single" else (name,):
            found[part] = max(1, int(turns or TURNS))
    return found or dict.fromkeys(known, TURNS)


def main() -> int:
    from paceline.bench.machine import machine

    path, groups = model_path(), prompt_groups()
    turns = chosen_parts(groups)
    results: dict[str, Any] = {"single": dict.fromkeys(groups), **dict.fromkeys(PARTS)}

    def show(name: str, entry: Any) -> Any:
        print(f"{name:28} {entry}", flush=True)
        return entry

    if "steps" in turns:
        results["steps"] = measure_steps(turns["steps"])
        for name, entry in results["steps"].items():
            show(f"step, {name} rows, us", entry)
    pair = Pair(path)
    prompts = {group: pair.encode(texts) for group, texts in groups.items()}
    everything = [prompt for group in prompts.values() for prompt in group]
    for engine in (pair.off, pair.on):
        play_prompts(engine, everything, 1, -1, 0.0)
    for group in [name for name in groups if name in turns]:
        entry = pair.ratio(prompts[group], 1, turns=turns[group])
        results["single"][group] = show(f"single {group}", entry)
    if "same_question_again" in turns:
        results["same_question_again"] = {}
        for group in groups:
            entry = pair.ratio(prompts[group], 1, turns=turns["same_question_again"], again=True)
            results["same_question_again"][group] = show(f"again {group}", entry)
    # a file of other prompts may have other groups
    for name, group, count, temperature in (
        ("t07_extraction", "extraction", 1, 0.7),
        ("eight_code_edit", "code_edit", 8, 0.0),
    ):
        if group in prompts and name in turns:
            entry = pair.ratio(prompts[group], count, temperature, turns[name])
            results[name] = show(name, entry)
    if "sixtyfour" in turns:
        results["sixtyfour"] = show(
            "sixtyfour", pair.ratio(everything, 64, turns=turns["sixtyfour"])
        )
    edits = prompts.get("code_edit", everything)
    seconds, answers = play_prompts(pair.off, edits, 1, 97, 0.0)
    plain = seconds / sum(map(len, answers))
    if "tpot_attainment" in turns:
        results["tpot_attainment"] = show(
            "tpot_attainment",
            {
                name: attainment(engine, edits, Slo(tpot=0.7 * plain), 98)
                for name, engine in (("off", pair.off), ("on", pair.on))
            },
        )
    results["goodput_min_ratio"] = None
    if "goodput" in turns:
        # targets: a reader's pace, and a first token soon
        slo = Slo(ttft=40 * plain, tpot=3 * plain)
        results["goodput"] = {}
        for number, share in enumerate(RATES, 1):
            rate = share / (TOKENS * plain)
            sides: tuple[list[bool], list[bool]] = [], []
            for turn in range(turns["goodput"]):
                for side in (0, 1) if turn % 2 == 0 else (1, 0):
                    engine = (pair.off, pair.on)[side]
                    # a salt of its own, as computed prefixes would be found in the cache
                    named = 1_000 * number + turn
                    sides[side].extend(goodput(engine, everything, rate, slo, named))
            entry = show(f"goodput at {rate:.2f}/s", goodput_ratio(*sides))
            results["goodput"][f"{share}"] = entry
        results["goodput_min_ratio"] = min(e["ratio"] for e in results["goodput"].values())
    results["identical"] = round(pair.same / pair.total, 4) if pair.total else None
    info = pair.on.core.info
    dtype = info.dtype
    pair.close()
    if info.name == "native" and "draft_bf16" in turns:
        drafted = Pair(path, {"method": "self"}, "bfloat16")
        for engine in (drafted.off, drafted.on):
            play_prompts(engine, everything, 1, -1, 0.0)
        entry = drafted.ratio(everything, 1, turns=turns["draft_bf16"])
        entry["identical"] = round(drafted.same / drafted.total, 4)
        results["draft_bf16"] = show("draft_bf16", entry)
        drafted.close()
    load = [round(value, 1) for value in os.getloadavg()]
    settings = {"dtype": dtype, "turns": turns, "tokens": TOKENS, "load": load}
    print(
        json.dumps(
            {
                "bench": "speculation",
                "machine": machine(),
                "settings": settings,
                "results": results,
            }
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
