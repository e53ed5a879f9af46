"""What guessing tokens brings: the same requests with --speculative-config and without, in turns.

Two engines of the same model in this process, on and off, take turns with each group of prompts,
so both see the machine in the same state. A ratio is the seconds without over the seconds with, the
median of the turns, with the lowest and the highest, and the 95 % interval of their geometric mean
(``low`` to ``high``, bootstrap over turns):

    single             one stream at a time, by group
    same_question_again
                       the same where each question was asked and answered just before, by the same
                       caller: what finished answers are kept for
    t07_extraction     one stream at temperature 0.7, of the group "extraction"
    eight_code_edit    8 streams at once of the group "code_edit"
    sixtyfour          64 streams at once, of all groups
    draft_bf16         one stream at a time of all groups, weights in bfloat16, with guesses by the
                       same weights in 4 bits and without; null where native kernels do not serve it
    tpot_attainment    streams of "code_edit", one at a time, with a target of 0.7 of a plain step:
                       the share that met it
    goodput            requests of all groups that come by chance, at several rates: those that met
                       their targets with guesses over those without, with the 95 % interval
                       (bootstrap over requests); ``goodput_min_ratio`` is that at the worst rate
    steps              no model: microseconds that the scheduler takes for a step of 1, 8 and 64
                       rows without and with guesses, of texts in which no token comes twice, and
                       of words that come as often as in a language, in no order
    identical          the share of answers whose tokens are the same; below 1 for formats whose
                       logits depend on how many rows are computed (docs/accuracy.md)

PROMPTS=FILE names a JSON file {"group": ["prompt", ...]} that replaces the prompts, MODEL=FOLDER
the model, DTYPE=NAME its format, TOKENS=N what an answer has at most: it ends where the model ends
it, as on a server. TURNS=N is how many turns there are; QUICK=1 is one short turn.
PARTS=NAME[:TURNS],... plays these parts alone (a group's name is its part of "single"), the others
are null. The last line is JSON. Whether "auto" loses anything where it can gain nothing:

    make bench-speculation PARTS=open_chat:80,sixtyfour:20,goodput:4,steps

    python -m benchmarks.speculation
"""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from msgspec import structs

from benchmarks.common.statistics import paired_ratio
from paceline.backends.load import load_backend
from paceline.backends.settings import BackendSettings
from paceline.checkpoints.resolve import find_local
from paceline.cli.draft_model import draft_of
from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.outputs import ScheduledRow, StepResult
from paceline.core.request import Request, RequestSpec
from paceline.core.sampling_params import SamplingParams
from paceline.core.scheduler import Scheduler
from paceline.core.slo import NO_SLO, Slo
from paceline.engine.core import EngineCore
from paceline.engine.fanout import add_to_core
from paceline.engine.llm import LLM
from paceline.engine.protocol import Tokenizer
from paceline.engine.text.tokenizer import load_tokenizer
from paceline.engine.types import GenerationOutput, GenerationRequest

Entry = dict[str, Any]

QUICK = bool(os.environ.get("QUICK"))
TURNS = int(os.environ.get("TURNS") or (1 if QUICK else 3))
TOKENS = int(os.environ.get("TOKENS") or (48 if QUICK else 96))
# requests that come by chance at each rate, by the rate that one stream at a time would serve; the
# last ones are more than a full batch serves, where targets are missed
RATES = (0.7, 2.0, 4.0, 8.0)
ARRIVALS = 8 if QUICK else 40
# of the scheduler alone: rows, steps of each that are timed, and seconds that one is said to take
ROWS = (1, 8, 64)
STEPS = 100 if QUICK else 400
STEP_SECONDS = 0.005
MODEL = os.environ.get("MODEL", "")
DTYPE = os.environ.get("DTYPE", "auto")
SPECULATION = {"method": "auto"}
# besides the groups of prompts
PARTS = (
    "t07_extraction", "eight_code_edit", "sixtyfour", "tpot_attainment", "goodput", "draft_bf16",
    "same_question_again", "steps",
)  # fmt: skip
_CODE = """def area(width, height):
    result = width * height
    return result

def volume(width, height, depth):
    result = width * height * depth
    return result
"""
_NOTE = (
    "Order 4417 from Lindholm Marine: 12 brass valves at 8.50 each, 3 hoses at 21.00 each, to be "
    "sent to Pier 9, Harbour Road, by Friday. Contact: Mara Olsen, 555-0142."
)
GROUPS: dict[str, list[str]] = {
    "code_edit": [
        f"Rename the variable result to total and print the whole file again.\n\n{_CODE}",
        f"Add a type hint int to each argument and print the whole file again.\n\n{_CODE}",
    ],
    "extraction": [
        f"List every item, price and address in this note, word for word.\n\n{_NOTE}",
        f"Copy the sentence that names the contact, then the order number.\n\n{_NOTE}",
    ],
    "rewrite": [
        f"Correct the style of this note and keep all facts.\n\n{_NOTE}",
        f"Write this note as a polite letter.\n\n{_NOTE}",
    ],
    "open_chat": [
        "Why is the sea salty?",
        "Tell me a short story about a lighthouse.",
    ],
}


class Pair:
    """The two engines, and what became of all answers so far."""

    def __init__(
        self, path: Path, config: dict[str, Any] = SPECULATION, dtype: str = DTYPE
    ) -> None:
        self.tokenizer = load_tokenizer(path)
        self.off, self.on = (
            open_engine(path, {"method": "off"}, dtype),
            open_engine(path, config, dtype),
        )
        self.same = self.total = 0
        self._num_ratios = 0

    def close(self) -> None:
        self.off.close()
        self.on.close()

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Prompts as the model's chat template has them."""
        return encode(self.tokenizer, texts)

    def ratio(
        self,
        prompts: list[list[int]],
        count: int,
        temperature: float = 0.0,
        turns: int = TURNS,
        *,
        again: bool = False,
    ) -> Entry:
        """The seconds without over those with, in turns; with ``again`` of the second time that
        the prompts are played."""
        off, on = [], []
        self._num_ratios += 1
        before = self.on.core.stats()
        for turn in range(turns):
            order = (self.off, self.on) if turn % 2 == 0 else (self.on, self.off)
            played = {}
            # nothing that was answered before is of use here
            salt = f"{self._num_ratios} {turn}"
            for engine in order:
                for _ in range(1 + again):
                    played[engine is self.on] = play_prompts(
                        engine, prompts, count, turn, temperature, salt
                    )
            without, guessed = played[False], played[True]
            off.append(without[0])
            on.append(guessed[0])
            pairs = list(zip(without[1], guessed[1], strict=True))
            self.same += sum(a == b for a, b in pairs)
            self.total += len(pairs)
        after = self.on.core.stats()
        found = paired_ratio(off, on)
        ratios = [a / b for a, b in zip(off, on, strict=True)]
        return {
            "ratio": round(found.median, 3),
            "low": round(found.low, 3),
            "high": round(found.high, 3),
            "lowest": round(min(ratios), 3),
            "highest": round(max(ratios), 3),
            "guesses": after.num_draft_tokens - before.num_draft_tokens,
            "right": after.num_accepted_tokens - before.num_accepted_tokens,
        }


class Engine(NamedTuple):
    llm: LLM
    core: EngineCore
    # an answer ends with one of these, as it does on a server
    ends: frozenset[int]

    def close(self) -> None:
        self.llm.close()


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Prompts as the model's chat template has them."""
    chats = [tokenizer.render_chat([{"role": "user", "content": text}]) for text in texts]
    return [tokenizer.encode(chat, add_special_tokens=False) for chat in chats]


def model_path() -> Path:
    """Raises SystemExit where there is none."""
    path = Path(MODEL) if MODEL else find_local("smollm2-135m")
    if path is None:
        raise SystemExit("no model: run make model, or set MODEL")
    return path


def prompt_groups() -> dict[str, list[str]]:
    """As ``PROMPTS`` has them."""
    file = os.environ.get("PROMPTS")
    groups: dict[str, list[str]] = json.loads(Path(file).read_text()) if file else GROUPS
    return groups


def open_engine(path: Path, speculative_config: dict[str, Any], dtype: str) -> Engine:
    draft = draft_of(speculative_config, str(path)) or (None, "auto")
    settings = BackendSettings(
        device="cpu", dtype=dtype, max_model_len=1024, draft_path=draft[0], draft_dtype=draft[1]
    )
    backend = load_backend(path, settings)
    info = backend.info
    core = EngineCore(
        backend,
        SchedulerConfig(max_model_len=1024, speculative_config=speculative_config, policy="fcfs"),
        CacheConfig(block_size=info.block_size, num_blocks=info.num_blocks),
    )
    tokenizer = load_tokenizer(path)
    return Engine(LLM(core, tokenizer), core, frozenset(tokenizer.eos_token_ids))


def _request(
    engine: Engine,
    name: str,
    prompt: list[int],
    turn: int,
    temperature: float = 0.0,
    slo: Slo = NO_SLO,
    salt: str = "",
) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        prompt_token_ids=prompt,
        sampling=SamplingParams(
            max_tokens=TOKENS, temperature=temperature, seed=turn, eos_token_ids=engine.ends
        ),
        arrival_time=time.monotonic(),
        cache_salt=salt or str(turn),
        slo=slo,
    )


def play_prompts(
    engine: Engine,
    prompts: list[list[int]],
    size: int,
    turn: int,
    temperature: float,
    salt: str = "",
) -> tuple[float, list[Any]]:
    """Seconds, and the tokens of each answer."""
    batches = [[prompt] for prompt in prompts]
    if size > 1:
        batches = [[prompts[index % len(prompts)] for index in range(size)]]
    began = time.perf_counter()
    outputs = [
        output
        # of salts of their own, as answers of the same are guessed from
        for number, batch in enumerate(batches)
        for output in engine.llm.generate(
            [
                _request(engine, f"r{i}", prompt, turn, temperature, salt=f"{salt} {number} {i}")
                for i, prompt in enumerate(batch)
            ]
        )
    ]
    return time.perf_counter() - began, [output.choices[0].token_ids for output in outputs]


def _attainment(engine: Engine, prompts: list[list[int]], slo: Slo, turn: int) -> float:
    """The share of requests, one at a time, that met their targets."""
    met = 0
    for prompt in prompts:
        (output,) = engine.llm.generate([_request(engine, "r", prompt, turn, slo=slo)])
        met += _met(output, slo)
    return met / len(prompts)


def _met(output: GenerationOutput, slo: Slo) -> bool:
    times = output.times
    return times is not None and not slo.violations(
        times.arrival, times.first_token, times.last_token, output.num_output_tokens, 0.0
    )


def _goodput(
    engine: Engine, prompts: list[list[int]], rate: float, slo: Slo, turn: int
) -> list[bool]:
    """Of requests that come by chance, whether each met its targets."""
    random = Random(turn)
    due, at = [], time.monotonic()
    for index in range(ARRIVALS):
        at += random.expovariate(rate)
        due.append((at, index))
    met: dict[str, bool] = {}
    times: dict[str, list[float]] = {}
    core = engine.core

    def arrive() -> None:
        while due and due[0][0] <= time.monotonic():
            arrival, index = due.pop(0)
            prompt = prompts[index % len(prompts)]
            # of salts of their own, as the same question comes again
            name = f"g{turn}-{index}"
            request = _request(engine, name, prompt, turn, slo=slo, salt=name)
            add_to_core(core, structs.replace(request, arrival_time=arrival))
            times[f"g{turn}-{index}/0"] = [arrival]

    while due or core.has_work:
        arrive()
        if not core.has_work:
            time.sleep(max(0.0, due[0][0] - time.monotonic()))
            continue
        for update in core.step(arrive):
            stamps = times[update.request_id]
            stamps += [time.monotonic()] * len(update.new_token_ids)
            if update.finish_reason is not None:
                first, last, count = stamps[1], stamps[-1], len(stamps) - 1
                missed = slo.violations(stamps[0], first, last, count, 0.0)
                met[update.request_id] = not missed
    return [met[f"g{turn}-{index}/0"] for index in range(ARRIVALS)]


def _goodput_ratio(off: list[bool], on: list[bool]) -> Entry:
    """Of the same requests without and with, how many more met their targets."""
    random, pairs = Random(0), list(zip(off, on, strict=True))
    ratios = []
    for _ in range(2_000):
        drawn = random.choices(pairs, k=len(pairs))
        ratios.append(sum(b for _, b in drawn) / max(1, sum(a for a, _ in drawn)))
    ratios.sort()
    return {
        "off": sum(off),
        "on": sum(on),
        "of": len(pairs),
        "ratio": round(sum(on) / max(1, sum(off)), 3),
        "low": round(ratios[50], 3),
        "high": round(ratios[-51], 3),
    }


def _texts(kind: str, count: int, length: int, turn: int) -> list[list[int]]:
    """Texts without a model."""
    random = Random(turn)
    if kind == "distinct":
        return [list(range(i * length, (i + 1) * length)) for i in range(count)]
    # the n-th word comes 1 / n as often as the first
    weights = [1.0 / rank for rank in range(1, 20_001)]
    return [random.choices(range(20_000), weights, k=length) for _ in range(count)]


def _step_seconds(config: dict[str, Any], texts: list[list[int]]) -> float:
    """Mean seconds of the scheduler for a step of all texts, whose prompts are 64 tokens."""
    scheduler = Scheduler(
        SchedulerConfig(max_model_len=8192, policy="fcfs", speculative_config=config),
        CacheConfig(block_size=16, num_blocks=64 * 512),
    )
    for index, text in enumerate(texts):
        sampling = SamplingParams(max_tokens=len(text))
        prompt = text[:64]
        scheduler.add_request(
            Request(
                RequestSpec(
                    request_id=str(index),
                    prompt_token_ids=prompt,
                    sampling=sampling,
                    arrival_time=0.0,
                )
            )
        )
    random, now, taken, timed = Random(5), 0.0, 0.0, 0

    def says(row: ScheduledRow, guesses: tuple[int, ...]) -> tuple[int, ...]:
        if not row.samples:
            return ()
        text, known = texts[int(row.request_id)], row.start + row.num_tokens - len(guesses)
        right = 0
        while right < len(guesses) and guesses[right] == text[known + right]:
            right += 1
        return tuple(text[known : known + right + 1])

    # the first steps learn, and compute prompts
    for step in range(100 + STEPS):
        began = time.perf_counter()
        plan = scheduler.schedule(now)
        spent = time.perf_counter() - began
        guessed = {draft.row: draft.token_ids for draft in plan.drafts}
        seconds = STEP_SECONDS + plan.num_tokens * 2e-5 + random.gauss(0.0, 1e-4)
        result = StepResult(
            step_id=plan.step_id,
            sampled=tuple(says(row, guessed.get(r, ())) for r, row in enumerate(plan.rows)),
            elapsed=seconds,
        )
        now += seconds
        began = time.perf_counter()
        scheduler.update(plan, result, now)
        spent += time.perf_counter() - began
        if step >= 100:
            taken, timed = taken + spent, timed + 1
    return taken / timed


def _steps(turns: int) -> Entry:
    """Microseconds of a step without and with, by kind of text and rows, in turns."""
    found: Entry = {}
    for kind in ("distinct", "words"):
        for rows in ROWS:
            sides: dict[str, list[float]] = {"off": [], "on": []}
            for turn in range(turns):
                texts = _texts(kind, rows, 2_048, turn)
                order = ("off", "on") if turn % 2 == 0 else ("on", "off")
                for side in order:
                    config = {"method": "off"} if side == "off" else SPECULATION
                    sides[side].append(1e6 * _step_seconds(config, texts))
            more = [b - a for a, b in zip(sides["off"], sides["on"], strict=True)]
            found[f"{kind} {rows}"] = {
                "off": round(statistics.median(sides["off"]), 1),
                "on": round(statistics.median(sides["on"]), 1),
                "more": round(statistics.median(more), 1),
            }
    return found


def _chosen(groups: dict[str, list[str]]) -> dict[str, int]:
    """Parts that are played, with their turns."""
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
    turns = _chosen(groups)
    results: dict[str, Any] = {"single": dict.fromkeys(groups), **dict.fromkeys(PARTS)}

    def show(name: str, entry: Any) -> Any:
        print(f"{name:28} {entry}", flush=True)
        return entry

    if "steps" in turns:
        results["steps"] = _steps(turns["steps"])
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
                name: _attainment(engine, edits, Slo(tpot=0.7 * plain), 98)
                for name, engine in (("off", pair.off), ("on", pair.on))
            },
        )
    results["goodput_min_ratio"] = None
    if "goodput" in turns:
        # as many tokens a second as a reader wants, and a first one soon
        slo = Slo(ttft=40 * plain, tpot=3 * plain)
        results["goodput"] = {}
        for number, share in enumerate(RATES, 1):
            rate = share / (TOKENS * plain)
            sides: tuple[list[bool], list[bool]] = [], []
            for turn in range(turns["goodput"]):
                for side in (0, 1) if turn % 2 == 0 else (1, 0):
                    engine = (pair.off, pair.on)[side]
                    # of its own salt, as what was computed before is found again
                    named = 1_000 * number + turn
                    sides[side].extend(_goodput(engine, everything, rate, slo, named))
            entry = show(f"goodput at {rate:.2f}/s", _goodput_ratio(*sides))
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
