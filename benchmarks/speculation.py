"""What guessing tokens brings: the same requests with --speculative-config and without, in turns.

Two engines of the same model in this process, on and off, take turns with each group of prompts,
so both see the machine in the same state. A ratio is the seconds without over the seconds with, the
median of the turns, with the lowest and the highest:

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
    goodput_min_ratio  requests of all groups that come by chance, at several rates: those that met
                       their targets with guesses over those without, at the worst rate
    identical          the share of answers whose tokens are the same; below 1 for formats whose
                       logits depend on how many rows are computed (docs/accuracy.md)

PROMPTS=FILE names a JSON file {"group": ["prompt", ...]} that replaces the prompts, MODEL=FOLDER
the model, DTYPE=NAME its format. TURNS=N is how many there are; QUICK=1 is one short turn. The last
line is JSON.

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

from paceline.backends.load import load_backend
from paceline.backends.settings import BackendSettings
from paceline.checkpoints.resolve import find_local
from paceline.cli.draft_model import draft_of
from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.sampling_params import SamplingParams
from paceline.core.slo import NO_SLO, Slo
from paceline.engine.core import EngineCore
from paceline.engine.fanout import add_to_core
from paceline.engine.llm import LLM
from paceline.engine.text.tokenizer import load_tokenizer
from paceline.engine.types import GenerationOutput, GenerationRequest

Entry = dict[str, Any]

QUICK = bool(os.environ.get("QUICK"))
TURNS = int(os.environ.get("TURNS") or (1 if QUICK else 3))
TOKENS = 48 if QUICK else 96
# requests that come by chance at each rate, by the rate that one stream at a time would serve
RATES = (0.3, 0.7, 1.5)
ARRIVALS = 8 if QUICK else 40
MODEL = os.environ.get("MODEL", "")
DTYPE = os.environ.get("DTYPE", "auto")
SPECULATION = {"method": "auto"}
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
        self.off, self.on = _open(path, {"method": "off"}, dtype), _open(path, config, dtype)
        self.same = self.total = 0
        self._num_ratios = 0

    def close(self) -> None:
        self.off.close()
        self.on.close()

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Prompts as the model's chat template has them."""
        chats = [self.tokenizer.render_chat([{"role": "user", "content": text}]) for text in texts]
        return [self.tokenizer.encode(chat, add_special_tokens=False) for chat in chats]

    def ratio(
        self,
        prompts: list[list[int]],
        count: int,
        temperature: float = 0.0,
        *,
        again: bool = False,
    ) -> Entry:
        """The seconds without over those with, in turns; with ``again`` of the second time that
        the prompts are played."""
        ratios = []
        self._num_ratios += 1
        before = self.on.core.stats()
        for turn in range(TURNS):
            order = (self.off, self.on) if turn % 2 == 0 else (self.on, self.off)
            played = {}
            # nothing that was answered before is of use here
            salt = f"{self._num_ratios} {turn}"
            for engine in order:
                for _ in range(1 + again):
                    found = _play(engine, prompts, count, turn, temperature, salt)
                played[engine is self.on] = found
            without, guessed = played[False], played[True]
            ratios.append(without[0] / guessed[0])
            pairs = list(zip(without[1], guessed[1], strict=True))
            self.same += sum(a == b for a, b in pairs)
            self.total += len(pairs)
        after = self.on.core.stats()
        return {
            "ratio": round(statistics.median(ratios), 3),
            "lowest": round(min(ratios), 3),
            "highest": round(max(ratios), 3),
            "guesses": after.num_draft_tokens - before.num_draft_tokens,
            "right": after.num_accepted_tokens - before.num_accepted_tokens,
        }


class Engine(NamedTuple):
    llm: LLM
    core: EngineCore

    def close(self) -> None:
        self.llm.close()


def _open(path: Path, speculative_config: dict[str, Any], dtype: str) -> Engine:
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
    return Engine(LLM(core, load_tokenizer(path)), core)


def _request(
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
        sampling=SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=turn),
        arrival_time=time.monotonic(),
        cache_salt=salt or str(turn),
        slo=slo,
    )


def _play(
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
        for batch in batches
        for output in engine.llm.generate(
            [
                _request(f"r{i}", prompt, turn, temperature, salt=salt)
                for i, prompt in enumerate(batch)
            ]
        )
    ]
    return time.perf_counter() - began, [output.choices[0].token_ids for output in outputs]


def _attainment(engine: Engine, prompts: list[list[int]], slo: Slo, turn: int) -> float:
    """The share of requests, one at a time, that met their targets."""
    met = 0
    for prompt in prompts:
        (output,) = engine.llm.generate([_request("r", prompt, turn, slo=slo)])
        met += _met(output, slo)
    return met / len(prompts)


def _met(output: GenerationOutput, slo: Slo) -> bool:
    times = output.times
    return times is not None and not slo.violations(
        times.arrival, times.first_token, times.last_token, output.num_output_tokens, 0.0
    )


def _goodput(engine: Engine, prompts: list[list[int]], rate: float, slo: Slo, turn: int) -> int:
    """Of requests that come by chance, those that met their targets."""
    random = Random(turn)
    due, at = [], time.monotonic()
    for index in range(ARRIVALS):
        at += random.expovariate(rate)
        due.append((at, index))
    met = 0
    times: dict[str, list[float]] = {}
    core = engine.core

    def arrive() -> None:
        while due and due[0][0] <= time.monotonic():
            arrival, index = due.pop(0)
            prompt = prompts[index % len(prompts)]
            request = _request(f"g{turn}-{index}", prompt, turn, slo=slo)
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
                met += not slo.violations(stamps[0], first, last, count, 0.0)
    return met


def main() -> int:
    from paceline.bench.machine import machine

    path = Path(MODEL) if MODEL else find_local("smollm2-135m")
    if path is None:
        raise SystemExit("no model: run make model, or set MODEL")
    groups = GROUPS
    if os.environ.get("PROMPTS"):
        groups = json.loads(Path(os.environ["PROMPTS"]).read_text())
    results: dict[str, Any] = {"single": {}, "same_question_again": {}, "draft_bf16": None}
    pair = Pair(path)
    prompts = {group: pair.encode(texts) for group, texts in groups.items()}
    everything = [prompt for group in prompts.values() for prompt in group]
    for engine in (pair.off, pair.on):
        _play(engine, everything, 1, -1, 0.0)

    def show(name: str, entry: Any) -> Any:
        print(f"{name:28} {entry}", flush=True)
        return entry

    for group in groups:
        results["single"][group] = show(f"single {group}", pair.ratio(prompts[group], 1))
    for group in groups:
        entry = pair.ratio(prompts[group], 1, again=True)
        results["same_question_again"][group] = show(f"again {group}", entry)
    # a file of other prompts may have other groups
    for name, group, count, temperature in (
        ("t07_extraction", "extraction", 1, 0.7),
        ("eight_code_edit", "code_edit", 8, 0.0),
    ):
        if group in prompts:
            results[name] = show(name, pair.ratio(prompts[group], count, temperature))
    results["sixtyfour"] = show("sixtyfour", pair.ratio(everything, 64))
    edits = prompts.get("code_edit", everything)
    seconds, answers = _play(pair.off, edits, 1, 97, 0.0)
    plain = seconds / sum(map(len, answers))
    results["tpot_attainment"] = show(
        "tpot_attainment",
        {
            name: _attainment(engine, edits, Slo(tpot=0.7 * plain), 98)
            for name, engine in (("off", pair.off), ("on", pair.on))
        },
    )
    # as many tokens a second as a reader wants, and a first one soon
    slo = Slo(ttft=40 * plain, tpot=3 * plain)
    ratios = []
    for number, share in enumerate(RATES):
        rate = share / (TOKENS * plain)
        counts = [_goodput(e, everything, rate, slo, number) for e in (pair.off, pair.on)]
        ratios.append(round(counts[1] / max(1, counts[0]), 3))
        show(f"goodput at {rate:.2f}/s", {"off": counts[0], "on": counts[1]})
    results["goodput_min_ratio"] = min(ratios)
    results["identical"] = round(pair.same / pair.total, 4)
    info = pair.on.core.info
    dtype = info.dtype
    pair.close()
    if info.name == "native":
        drafted = Pair(path, {"method": "self"}, "bfloat16")
        for engine in (drafted.off, drafted.on):
            _play(engine, everything, 1, -1, 0.0)
        entry = drafted.ratio(everything, 1)
        entry["identical"] = round(drafted.same / drafted.total, 4)
        results["draft_bf16"] = show("draft_bf16", entry)
        drafted.close()
    load = [round(value, 1) for value in os.getloadavg()]
    settings = {"dtype": dtype, "turns": TURNS, "tokens": TOKENS, "load": load}
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
