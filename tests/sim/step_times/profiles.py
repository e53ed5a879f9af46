"""A made-up operator profile whose step times can be computed by hand."""

from __future__ import annotations

import itertools
from pathlib import Path

from paceline.sim.step_times.models import ModelShape

MODEL = ModelShape(
    name="toy/Toy-1B",
    num_layers=2,
    hidden_size=1000,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=64,
    vocab_size=100,
)


def write_profile(folder: Path, prefix: str = "GPU-Toy-1B-bf16-tp1") -> None:
    """One layer: attention chunk + 2 * rows + rows * keys / 10 us, dense 10 us + 1 per token,
    layernorm 5 us, twice; embedding 7 us and head 100 us once."""
    attention = ["prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"]
    chunks, histories, counts, keys = (0, 10, 100, 1000), (0, 100, 1000), (0, 1, 8, 64), (10, 1000)
    for chunk, history, count in itertools.product(chunks, histories, counts):
        if (chunk == 0 and history) or (chunk == count == 0):
            continue
        for key in keys if count else (0,):
            time = chunk + chunk * history / 1000 + 2 * count + count * key / 10
            attention.append(f"{chunk},{history},{count},{key},{time}")
    dense = ["layer,tokens,time_us"]
    for tokens in (1, 500, 2000):
        dense += [f"mlp,{tokens},{10 + tokens}", f"layernorm,{tokens},5", f"embedding,{tokens},7"]
    heads = ["layer,sequences,time_us", "lm_head,1,100", "lm_head,64,100"]
    skew = [
        "pc,n_label,skew_rate_label,kv_big_label,kp_label,alpha,n_samples",
        "0,n<=64,sr<=40%,kvB<=1k,kp=0,0.5,1",
    ]
    for name, lines in (
        ("attention", attention),
        ("dense", dense),
        ("per_sequence", heads),
        ("skew_fit", skew),
    ):
        (folder / f"{prefix}-{name}.csv").write_text("\n".join(lines) + "\n")
    (folder / "GPU-Toy-1B-bf16-meta.yaml").write_text("gpu: toy\nmodel: Qwen/Qwen3-0.6B\n")
