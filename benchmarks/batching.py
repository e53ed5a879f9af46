"""Gain by batching: one request alone, 64 at once, transformers one by one; static, continuous.

Method. All sides run SmolLM2-135M-Instruct from the same GGUF file in the same dtype with the same
number of threads and the same PyTorch (``--compute torch``; the native kernels, which serve by
default on a CPU, are compared with other engines in ``bench-peers``), in this process, greedy, on
prompts of random token ids (no two share a prefix, and prefix caching is off, so that a repetition
computes everything again). Outputs have exactly the stated length: end-of-sequence does not end
them. Rates are output tokens per second of wall time from the first request's arrival to the last
request's end, prompts included. The sides take turns, A B C A B C, and the table gives medians over
the rounds: three for table 1, one for table 2, whose runs last minutes each. A short run of each
side comes first, untimed.

Table 1, prompts of 128 and outputs of 128 tokens:

* alone: one request in the engine at a time;
* 64 at once: 64 requests arrive together;
* transformers: ``generate()``, one prompt after the other, its key-value cache on.

Table 2, prompts of 32 tokens, and outputs of which a part is short (1 to 9 tokens) and the rest
long (501 to 519), in an order drawn with a fixed seed. The engine runs at most SLOTS at once:

* static: SLOTS requests start together and the next SLOTS when the longest of them has ended. A
  request that has ended keeps its slot and computes on, as in padded ``generate()``; only the
  tokens that it was asked for count;
* static, rows dropped: the same, but a request that has ended costs nothing more;
* continuous: all requests arrive at once; the scheduler fills a slot when it falls free.

If a step took equally long however many rows it has, static batching would take (mean over batches
of the longest output) / (mean output) times as long as slots that are never empty: ``bound``.
Continuous stays below it while the last requests run out with slots empty, and may exceed it
where a step with fewer rows is faster.

There is no lasting load: all requests are there at the start and none has a target.
``make bench NAME=overload`` has lasting loads.

QUICK=1: one round of everything, fewer requests. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.bench.machine import machine
from paceline.cli.flags.settings import EngineSettings
from paceline.cli.wiring import build_core
from paceline.core.request import Request, RequestSpec
from paceline.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from paceline.engine.core import EngineCore

MODEL = "smollm2-135m"
CONCURRENT = 64
PROMPT = 128
OUTPUT = 128
SLOTS = 16
MIXED_PROMPT = 32
SHORT = (1, 9)
LONG = (501, 519)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of rounds and requests."""

    rounds: int
    mixed_rounds: int
    # requests per round, one after the other
    alone: int
    transformers: int
    # requests of a mixed run; a multiple of SLOTS
    mixed: int


FULL = Sizes(rounds=3, mixed_rounds=1, alone=2, transformers=2, mixed=4 * SLOTS)
QUICK = Sizes(rounds=1, mixed_rounds=1, alone=1, transformers=1, mixed=2 * SLOTS)


class Engine:
    """A driver of one EngineCore: requests in, seconds out."""

    def __init__(self, core: EngineCore, vocab_size: int) -> None:
        self.core = core
        self._vocab_size = vocab_size
        self._rng = random.Random(1)
        self._count = 0

    def prompt(self, length: int) -> list[int]:
        """Return random ids; ids below 100 are left out, as special tokens are among them."""
        return [self._rng.randrange(100, self._vocab_size) for _ in range(length)]

    def add(self, prompt: list[int], max_tokens: int) -> str:
        """Queue a greedy request that ends after exactly ``max_tokens``."""
        request_id = str(self._count)
        self._count += 1
        self.core.add_request(
            Request(
                RequestSpec(
                    request_id=request_id,
                    prompt_token_ids=prompt,
                    sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
                    arrival_time=time.monotonic(),
                )
            )
        )
        return request_id

    def finish(self) -> int:
        """Step until nothing is left; return the number of output tokens."""
        tokens = 0
        while self.core.has_work:
            for update in self.core.step():
                if update.error is not None:
                    raise RuntimeError(f"request {update.request_id}: {update.error}")
                tokens += len(update.new_token_ids)
        return tokens

    def together(self, prompt_length: int, outputs: Sequence[int]) -> float:
        """Return the seconds for requests that arrive at once."""
        prompts = [self.prompt(prompt_length) for _ in outputs]
        started = time.perf_counter()
        for prompt, max_tokens in zip(prompts, outputs, strict=True):
            self.add(prompt, max_tokens)
        tokens = self.finish()
        elapsed = time.perf_counter() - started
        assert tokens == sum(outputs), f"asked for {sum(outputs)} tokens, got {tokens}"
        return elapsed


def one_by_one(engine: Engine, count: int) -> float:
    """Return the output tokens per second of requests that run one after another."""
    seconds = sum(engine.together(PROMPT, [OUTPUT]) for _ in range(count))
    return count * OUTPUT / seconds


def at_once(engine: Engine) -> float:
    """Return the output tokens per second of CONCURRENT requests that arrive together."""
    return CONCURRENT * OUTPUT / engine.together(PROMPT, [OUTPUT] * CONCURRENT)


def load_transformers(path: Path, dtype: str) -> Any:
    """Load the same weights in transformers, by its own GGUF loader.

    ``from_pretrained(gguf_file=...)`` is not used, as it needs one more package.
    """
    import torch
    import transformers
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    loaded = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    missing, unexpected = model.load_state_dict(loaded["tensors"], strict=False)
    # the output head is the embedding
    assert set(missing) <= {"lm_head.weight"} and not unexpected, (missing, unexpected)
    model.tie_weights()
    return model.eval()


def transformers_one_by_one(model: Any, engine: Engine, count: int) -> float:
    """Return the output tokens per second of ``generate()``, one prompt after the other."""
    import torch

    prompts = [torch.tensor([engine.prompt(PROMPT)]) for _ in range(count)]
    started = time.perf_counter()
    for prompt in prompts:
        answer = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            min_new_tokens=OUTPUT,
            max_new_tokens=OUTPUT,
            pad_token_id=0,
        )
        assert answer.shape[1] == PROMPT + OUTPUT
    return count * OUTPUT / (time.perf_counter() - started)


def mixed_outputs(count: int, short_share: float) -> list[int]:
    """Return output lengths in order of arrival."""
    rng = random.Random(7)
    num_short = round(count * short_share)
    outputs = [rng.randint(*SHORT) for _ in range(num_short)]
    outputs += [rng.randint(*LONG) for _ in range(count - num_short)]
    rng.shuffle(outputs)
    return outputs


def batches(outputs: Sequence[int]) -> list[Sequence[int]]:
    """Split outputs into static batches, in order of arrival."""
    return [outputs[i : i + SLOTS] for i in range(0, len(outputs), SLOTS)]


def static_padded(engine: Engine, outputs: Sequence[int]) -> float:
    """Return seconds if finished rows compute on until the batch's longest ends."""
    return sum(engine.together(MIXED_PROMPT, [max(b)] * len(b)) for b in batches(outputs))


def static_dropped(engine: Engine, outputs: Sequence[int]) -> float:
    """Return seconds if finished rows cost nothing, with empty slots until the longest ends."""
    return sum(engine.together(MIXED_PROMPT, b) for b in batches(outputs))


def continuous(engine: Engine, outputs: Sequence[int]) -> float:
    """Return seconds if all requests are queued at once and the scheduler fills SLOTS."""
    return engine.together(MIXED_PROMPT, outputs)


def medians(sides: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Run the sides in turn, ``rounds`` times, and return the median of each."""
    seen: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name, side in sides.items():
            value = side()
            seen[name].append(value)
            print(f"  round {number + 1}/{rounds}  {name:24} {value:8.1f}", file=sys.stderr)
    return {name: statistics.median(values) for name, values in seen.items()}


def settings(
    args: argparse.Namespace, path: Path, max_num_seqs: int, length: int
) -> EngineSettings:
    """Return the settings of an engine with memory for all requests at once."""
    blocks_each = -(-length // 16)
    return EngineSettings.of(
        model_name=MODEL,
        model_path=str(path),
        device="cpu",
        dtype=args.dtype,
        compute="torch",
        max_model_len=length,
        block_size=16,
        num_blocks=max_num_seqs * blocks_each + max_num_seqs,
        enable_prefix_caching=False,
        max_num_seqs=max_num_seqs,
        threads=args.threads,
    )


def run_first_table(args: argparse.Namespace, path: Path, sizes: Sizes) -> dict[str, Any]:
    """Measure table 1: alone, 64 at once, transformers."""
    import torch

    core, info = build_core(settings(args, path, CONCURRENT, PROMPT + OUTPUT))
    try:
        engine = Engine(core, info.vocab_size)
        model = load_transformers(path, info.dtype)
        engine.together(PROMPT, [8] * CONCURRENT)
        model.generate(torch.tensor([engine.prompt(PROMPT)]), max_new_tokens=8, pad_token_id=0)
        rates = medians(
            {
                "alone": lambda: one_by_one(engine, sizes.alone),
                "concurrent_64": lambda: at_once(engine),
                "transformers": lambda: transformers_one_by_one(model, engine, sizes.transformers),
            },
            sizes.rounds,
        )
    finally:
        core.close()
    print(f"\n{PROMPT} prompt + {OUTPUT} output tokens, {info.dtype}, median of {sizes.rounds}\n")
    print(f"{'':26}{'output tokens/s':>16}{'64 at once is':>16}")
    for name, label in (
        ("alone", "one request alone"),
        ("transformers", "transformers, one by one"),
        ("concurrent_64", "64 at once"),
    ):
        ratio = rates["concurrent_64"] / rates[name]
        print(f"{label:26}{rates[name]:16.1f}" + (f"{ratio:15.1f}x" if ratio != 1 else ""))
    return {f"{name}_tps": round(rate, 1) for name, rate in rates.items()} | {"dtype": info.dtype}


def run_mixed(args: argparse.Namespace, path: Path, sizes: Sizes) -> dict[str, Any]:
    """Measure table 2: static against continuous batching."""
    core, info = build_core(settings(args, path, SLOTS, MIXED_PROMPT + LONG[1]))
    results: dict[str, Any] = {}
    try:
        engine = Engine(core, info.vocab_size)
        engine.together(MIXED_PROMPT, [8] * SLOTS)
        for label, share in (("50_50", 0.5), ("90_10", 0.9)):
            outputs = mixed_outputs(sizes.mixed, share)
            seconds = medians(
                {
                    "static": partial(static_padded, engine, outputs),
                    "static, rows dropped": partial(static_dropped, engine, outputs),
                    "continuous": partial(continuous, engine, outputs),
                },
                sizes.mixed_rounds,
            )
            total = sum(outputs)
            mean = total / len(outputs)
            bound = statistics.mean(max(batch) for batch in batches(outputs)) / mean
            print(
                f"\noutputs {label.replace('_', '/')} short/long, {len(outputs)} requests, {SLOTS} "
                f"slots, mean {mean:.0f} tokens, longest {max(outputs)}, bound {bound:.2f}x\n"
            )
            print(f"{'':26}{'output tokens/s':>16}{'continuous is':>16}")
            for name, elapsed in seconds.items():
                ratio = elapsed / seconds["continuous"]
                gain = "" if name == "continuous" else f"{ratio:15.2f}x"
                print(f"{name:26}{total / elapsed:16.1f}{gain}")
            results[f"mixed_{label}"] = {
                "static_tps": round(total / seconds["static"], 1),
                "static_dropped_tps": round(total / seconds["static, rows dropped"], 1),
                "continuous_tps": round(total / seconds["continuous"], 1),
                "bound": round(bound, 2),
            }
    finally:
        core.close()
    return results


def main() -> None:
    from paceline.checkpoints.hub.resolve import find_local

    parser = argparse.ArgumentParser(
        prog="benchmarks.batching", description=__doc__.split("\n")[0] if __doc__ else None
    )
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", choices=("first", "mixed"), help="one of the two tables")
    args = parser.parse_args()
    path = find_local(MODEL)
    if path is None:
        sys.exit(f"{MODEL} is not here yet: run 'make model' first")
    import torch

    # transformers uses this process's setting; the engine is given the same number
    torch.set_num_threads(args.threads)
    about = machine()
    sizes = QUICK if os.environ.get("QUICK") else FULL
    results: dict[str, Any] = {}
    if args.only != "mixed":
        results |= run_first_table(args, path, sizes)
    if args.only != "first":
        results |= run_mixed(args, path, sizes)
    dtype = results.pop("dtype", args.dtype)
    report = {
        "bench": "batching",
        "machine": about | {"threads": args.threads, "dtype": dtype, "torch": torch.__version__},
        "results": results,
    }
    print()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
