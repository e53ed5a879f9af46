"""What guessing tokens brings: the same requests with --speculative-config and without, in turns.

Two engines of the same model in this process, on and off, take turns with each group of prompts,
so both see the machine in the same state. "single" is one stream at a time, "eight" and "many" are
8 and 64 at once; a group's prompts are repeated where it has fewer. A ratio is the seconds without
over the seconds with, the median of the turns, with the lowest and the highest. "identical" is the
share of answers whose tokens are the same; below 1 for formats whose logits depend on how many rows
are computed (docs/accuracy.md).

PROMPTS=FILE names a JSON file {"group": ["prompt", ...]} that replaces the prompts, MODEL=FOLDER
the model, DTYPE=NAME its format. QUICK=1 is one short turn. The last line is JSON.

    python -m benchmarks.speculation
"""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from paceline.backends.load import load_backend
from paceline.backends.settings import BackendSettings
from paceline.checkpoints.resolve import find_local
from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.sampling_params import SamplingParams
from paceline.engine.core import EngineCore
from paceline.engine.llm import LLM
from paceline.engine.text.tokenizer import load_tokenizer
from paceline.engine.types import GenerationRequest

QUICK = bool(os.environ.get("QUICK"))
TURNS = 1 if QUICK else 3
TOKENS = 48 if QUICK else 96
MODEL = os.environ.get("MODEL", "")
DTYPE = os.environ.get("DTYPE", "auto")
SIZES = {"single": 1, "eight": 8, "many": 64}
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


def _open(path: Path, speculative_config: dict[str, Any] | None) -> tuple[LLM, EngineCore]:
    backend = load_backend(path, BackendSettings(device="cpu", dtype=DTYPE, max_model_len=1024))
    info = backend.info
    core = EngineCore(
        backend,
        SchedulerConfig(max_model_len=1024, speculative_config=speculative_config),
        CacheConfig(block_size=info.block_size, num_blocks=info.num_blocks),
    )
    return LLM(core, load_tokenizer(path)), core


def _requests(prompts: list[list[int]], count: int, turn: int) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            request_id=f"r{index}",
            prompt_token_ids=prompts[index % len(prompts)],
            sampling=SamplingParams(max_tokens=TOKENS, temperature=0.0),
            arrival_time=0.0,
            cache_salt=str(turn),
        )
        for index in range(count)
    ]


def _play(llm: LLM, prompts: list[list[int]], size: int, turn: int) -> tuple[float, list[Any]]:
    """Seconds, and the tokens of each answer."""
    batches = [_requests(prompts, size, turn)]
    if size == 1:
        batches = [_requests([prompt], 1, turn) for prompt in prompts]
    began = time.perf_counter()
    outputs = [output for batch in batches for output in llm.generate(batch)]
    seconds = time.perf_counter() - began
    return seconds, [output.choices[0].token_ids for output in outputs]


def main() -> int:
    from paceline.bench.machine import machine

    path = Path(MODEL) if MODEL else find_local("smollm2-135m")
    if path is None:
        raise SystemExit("no model: run make model, or set MODEL")
    groups = GROUPS
    if os.environ.get("PROMPTS"):
        groups = json.loads(Path(os.environ["PROMPTS"]).read_text())
    tokenizer = load_tokenizer(path)
    results: dict[str, dict[str, Any]] = {size: {} for size in SIZES}
    same = total = 0
    (off, _), (on, core) = _open(path, None), _open(path, SPECULATION)
    with off, on:
        for group, texts in groups.items():
            chats = [
                f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in texts
            ]
            prompts = [tokenizer.encode(chat) for chat in chats]
            for llm in (off, on):
                _play(llm, prompts, 1, -1)
            for size, count in SIZES.items():
                ratios = []
                before = core.stats()
                for turn in range(TURNS):
                    first, second = (off, on) if turn % 2 == 0 else (on, off)
                    played = {id(llm): _play(llm, prompts, count, turn) for llm in (first, second)}
                    without, guessed = played[id(off)], played[id(on)]
                    ratios.append(without[0] / guessed[0])
                    same += sum(a == b for a, b in zip(without[1], guessed[1], strict=True))
                    total += len(without[1])
                after = core.stats()
                entry = {
                    "ratio": round(statistics.median(ratios), 3),
                    "lowest": round(min(ratios), 3),
                    "highest": round(max(ratios), 3),
                    "guesses": after.num_draft_tokens - before.num_draft_tokens,
                    "right": after.num_accepted_tokens - before.num_accepted_tokens,
                }
                results[size][group] = entry
                print(f"{size:7} {group:11} {entry}", flush=True)
        dtype = core.info.dtype
    identical = round(same / total, 4)
    load = [round(value, 1) for value in os.getloadavg()]
    settings = {"dtype": dtype, "turns": TURNS, "tokens": TOKENS, "load": load}
    print(
        json.dumps(
            {
                "bench": "speculation",
                "machine": machine(),
                "settings": settings,
                "results": {**results, "identical": identical},
            }
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
