"""A made-up folder of a vLLM run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# arrival, queued, scheduled, first token, last token; prompt and output tokens. The engine's clock
# is 1000 s behind; the second request waits 0.5 s to be read
REQUESTS = (
    (2000.0, 1000.0, 1000.1, 1001.0, 1003.0, 100, 5),
    (2001.0, 1001.5, 1001.6, 1002.0, 1004.0, 50, 9),
)


def write_run(
    folder: Path,
    *,
    name: str = "GPU-Llama-3.1-8B",
    model: str = "meta-llama/Llama-3.1-8B",
    requests: Sequence[tuple[float, float, float, float, float, int, int]] = REQUESTS,
    engine: dict[str, Any] | None = None,
    **meta: Any,
) -> Path:
    """Writes the folder anew and returns its path.

    Args:
        engine: engine arguments beside those of a small server.
        meta: what vLLM resolved, as further entries of meta.json.
    """
    path = folder / name
    path.mkdir(exist_ok=True)
    arguments = {"tensor_parallel_size": 1, "max_num_seqs": 4, "max_num_batched_tokens": 512}
    head = {"model": model, "engine_kwargs": {**arguments, **(engine or {})}, **meta}
    instance = {"hardware": "GPU", "npu_mem": {"mem_size": 24, "mem_util": 0.9}}
    config = {"link_bw": 16, "link_latency": 20000, "nodes": [{"instances": [instance]}]}
    names = (
        "arrival_time",
        "queued_ts",
        "scheduled_ts",
        "first_token_ts",
        "last_token_ts",
        "input_toks",
        "output_toks",
    )
    lines = [json.dumps(dict(zip(names, row, strict=True))) for row in requests]
    (path / "meta.json").write_text(json.dumps(head))
    (path / "config.json").write_text(json.dumps(config))
    (path / "requests.jsonl").write_text("\n".join(lines))
    return path
