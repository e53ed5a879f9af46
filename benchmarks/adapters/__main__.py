"""Rows of one step that use LoRA adapters, and requests for them: what they cost.

Method. SmolLM2-135M's shape with random weights, and adapters of rank 16 on all seven matrices,
kept in bfloat16. The same step is computed with adapters and without, step by step in turns; a
figure is the median of the pairs' ratios, and next to it the 95 % interval of their mean. *N of M*
are N sequences at context 192 that decode a token each with M adapters between them;
``prompt_192`` is one prompt of 192 tokens.

* ``base_rows``: 8 sequences without an adapter while 64 are in memory, over those of another model
  that has none; ``base_rows_control`` is the same of the same two models before the 64 were loaded.
* ``big``: a quarter of the layers and of the vocabulary of SmolLM2-1.7B's shape, which leaves the
  ratios what they are.
* ``load_ms``: a folder of 10 MB read, checked and packed, as the engine does it, while nothing
  runs; ``load_step_ms_p99``: how much longer the slowest steps take while folders are loaded.
* ``identical``: rows of a mixed step are the same alone, bit for bit.
* ``flood``: a server of the default model under the policy ``fair``. Requests for eight adapters
  come at random, alone and with callers that ask for a ninth without a pause, in turns;
  ``flood_p99_ratio`` is the 99th percentile of the first token with the flood over that without;
  the lists are the 50th, 90th and 99th.
* ``vllm``: 64 callers at once, for 8 adapters of the default model in its default format, over the
  same of vLLM's CPU build in bfloat16 (a peer of ``make bench NAME=peers``, which makes it), in
  turns: output tokens a second. Where it does not serve them, what it answered.

PARTS=steps,big,flood,vllm chooses. FORMATS=int8/int8,... chooses weights and KV cache of steps, ISA
a level of the kernels, THREADS their number: of one thread the processor time is taken, which other
work on the machine affects less. LORA_DTYPE is the format of adapters of steps. QUICK=1 takes fewer
pairs and seconds, and of the parts only steps. The last line is JSON.
"""

from __future__ import annotations

import json
import os
from typing import Any, Final

from benchmarks.adapters import live, steps
from benchmarks.common.parts import chosen
from paceline.bench.machine import machine

PARTS: Final = chosen(("steps", "big", "flood", "vllm"), ("steps",) if steps.QUICK else None)


def main() -> int:
    isa = os.environ.get("ISA") or None
    results: dict[str, Any] = {"rank": steps.RANK, "threads": steps.THREADS}
    for kinds in steps.FORMATS if "steps" in PARTS else ():
        found = results[kinds] = steps.steps(kinds, isa)
        print(f"{kinds} on {steps.THREADS} threads, {found['isa']}, adapters of rank {steps.RANK}:")
        for name, value in found.items():
            print(f"  {name:24} {steps.shown(value)}")
    if "steps" in PARTS:
        results |= results[steps.FORMATS[0]]
    if "big" in PARTS:
        results["big"] = steps.big(steps.FORMATS[0], isa)
        print(f"1.7B's shape, {steps.FORMATS[0]}:")
        for name, value in results["big"].items():
            print(f"  {name:24} {steps.shown(value)}")
    if "flood" in PARTS:
        results |= live.flood()
    if "vllm" in PARTS:
        results["vllm"] = live.next_to_vllm()
    print(json.dumps({"machine": machine()}))
    print(json.dumps({"bench": "adapters", "results": results}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
