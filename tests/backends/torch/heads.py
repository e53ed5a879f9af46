"""Heads that read hidden states, at work; tiny random EAGLE-3 heads in the hub's format, and what
one guesses, computed the plain way."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.backends.drafting import draft_head
from paceline.backends.drafting.draft_head import HeadDraft
from paceline.backends.loading.load import load_backend
from paceline.backends.loading.settings import BackendSettings
from paceline.backends.runner.drafting import DraftRow
from paceline.core.sampling_params import SamplingParams
from paceline.engine.llm import LLM
from paceline.engine.testing import ByteTokenizer, null_core
from paceline.engine.types import GenerationRequest
from paceline.speculation import draft_choice
from tests.backends.torch.models import VOCAB


@dataclass
class Guessed:
    """A row that a head was asked about."""

    known: list[int]
    guesses: list[int]
    # of each guess, [vocab]
    logits: list[torch.Tensor] = field(default_factory=list)


def play(
    folder: Path,
    config: dict[str, Any],
    prompts: Sequence[Sequence[int]],
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    **core: Any,
) -> list[Guessed]:
    """All that a head guessed while these prompts were answered."""
    monkeypatch.setattr(draft_choice, "_LIKELY", 0.0)
    monkeypatch.setattr(draft_choice, "_UNLIKELY", 0.0)
    seen: list[Guessed] = []
    asked: dict[int, Guessed] = {}
    plain, plain_draw = HeadDraft.propose, draft_head.draw

    def draw(*given: Any) -> list[int]:
        logits, rows, going = given[1], given[3], given[4]
        for place, r in enumerate(going):
            asked[id(rows[r])].logits.append(logits[place].clone())
        return plain_draw(*given)

    def propose(self: HeadDraft, rows: Sequence[DraftRow]) -> list[int]:
        asked.clear()
        for row in rows:
            asked[id(row)] = Guessed(row.tokens[: row.last + 1].tolist(), [])
        made = plain(self, rows)
        for row, number in zip(rows, made, strict=True):
            asked[id(row)].guesses = row.tokens[row.last + 1 : row.last + 1 + number].tolist()
            seen.append(asked[id(row)])
        return made

    monkeypatch.setattr(HeadDraft, "propose", propose)
    monkeypatch.setattr(draft_head, "draw", draw)
    chosen = {"device": "cpu", "dtype": "float32", "compute": "torch", "num_blocks": 64}
    backend = load_backend(folder, BackendSettings(**(chosen | {"threads": 1} | settings)))
    engine = null_core(backend, speculative_config=config, **core)
    engine.scheduler.step_time._min_observations = 10**9
    with LLM(engine, ByteTokenizer()) as llm:
        llm.generate(
            [
                GenerationRequest(
                    request_id=str(number),
                    prompt_token_ids=list(prompt),
                    sampling=SamplingParams(max_tokens=20, temperature=0.0),
                    arrival_time=0.0,
                )
                for number, prompt in enumerate(prompts)
            ]
        )
        engine.check_integrity()
    return seen


def prompts_of(*lengths: int) -> list[list[int]]:
    """Of tokens that end no output."""
    random = Random(3)
    return [[random.randrange(3, VOCAB) for _ in range(length)] for length in lengths]


def rewrite(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor | None]) -> None:
    """Change a stored config, and tensors; None: it has none of that name."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    # copies: the file that they may be mapped from is about to be replaced
    stored = {n: each.clone() for n, each in load_file(folder / "model.safetensors").items()}
    for name, tensor in tensors.items():
        stored.pop(name, None)
        if tensor is not None:
            stored[name] = tensor
    save_file(stored, folder / "model.safetensors")


def save_eagle3(
    folder: Path,
    *,
    served_hidden: int,
    hidden: int | None = None,
    draft_vocab: int = 90,
    layers: Sequence[int] | None = None,
    embeds: bool = False,
    prefix: str = "midlayer",
    vocab: int = VOCAB,
    seed: int = 0,
    **changes: Any,
) -> dict[str, torch.Tensor]:
    """Write a head and return its tensors by the names of the first heads."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    hidden = served_hidden if hidden is None else hidden
    heads, kv_heads, head_dim, inner = 4, 2, 8, 40

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns) * 0.25

    def norm() -> torch.Tensor:
        return 1.0 + 0.3 * torch.randn(hidden)

    chosen = torch.randperm(vocab)[:draft_vocab].sort().values
    tensors = {
        "fc.weight": matrix(hidden, served_hidden * len(layers or (0, 0, 0))),
        "midlayer.input_layernorm.weight": norm(),
        "midlayer.hidden_norm.weight": norm(),
        "midlayer.post_attention_layernorm.weight": norm(),
        "midlayer.self_attn.q_proj.weight": matrix(heads * head_dim, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": matrix(kv_heads * head_dim, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": matrix(kv_heads * head_dim, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": matrix(hidden, heads * head_dim),
        "midlayer.mlp.gate_proj.weight": matrix(inner, hidden),
        "midlayer.mlp.up_proj.weight": matrix(inner, hidden),
        "midlayer.mlp.down_proj.weight": matrix(hidden, inner),
        "norm.weight": norm(),
        "lm_head.weight": matrix(draft_vocab, hidden),
        "d2t": chosen - torch.arange(draft_vocab),
        "t2d": torch.zeros(vocab, dtype=torch.bool).index_fill_(0, chosen, True),
    }
    if embeds:
        tensors["embed_tokens.weight"] = matrix(vocab, hidden)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "vocab_size": vocab,
        "draft_vocab_size": draft_vocab,
        "eos_token_id": vocab - 1,
    }
    if layers is not None:
        config["eagle_aux_hidden_state_layer_ids"] = list(layers)
    (folder / "config.json").write_text(json.dumps(config | changes))
    stored = {name.replace("midlayer", prefix, 1): each for name, each in tensors.items()}
    save_file(
        {name: each.contiguous() for name, each in stored.items()}, folder / "model.safetensors"
    )
    return tensors


def reference_guesses(
    model: Any,
    tensors: dict[str, torch.Tensor],
    tokens: Sequence[int],
    count: int,
    *,
    layers: Sequence[int],
    norm_before_residual: bool = False,
    theta: float = 5000.0,
) -> list[int]:
    """The likeliest tokens behind ``tokens`` by the head, all computed anew for each."""
    heads, kv_heads, head_dim = 4, 2, 8
    with torch.no_grad():
        states = model(torch.tensor([list(tokens)]), output_hidden_states=True)
        # the last of these is normed by transformers; a hook would be needed for it
        known = torch.cat([states.hidden_states[layer][0] for layer in layers], dim=-1)[:-1]
        known = known @ tensors["fc.weight"].T
        embedding = tensors.get("embed_tokens.weight")
        if embedding is None:
            embedding = model.get_input_embeddings().weight
        behind = list(tokens[1:])
        found: list[int] = []
        for _ in range(count):
            last, token = _forward(
                tensors, known, embedding[behind], norm_before_residual, theta,
                heads, kv_heads, head_dim,
            )  # fmt: skip
            found.append(token)
            known = torch.cat((known, last[None]))
            behind.append(token)
    return found


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def _forward(
    tensors: dict[str, torch.Tensor],
    known: torch.Tensor,
    embedded: torch.Tensor,
    norm_before_residual: bool,
    theta: float,
    heads: int,
    kv_heads: int,
    head_dim: int,
) -> tuple[torch.Tensor, int]:
    """The last position's output, and the token that is likeliest there."""

    def of(name: str) -> torch.Tensor:
        return tensors[f"midlayer.{name}.weight"]

    normed = _norm(known, of("hidden_norm"))
    both = torch.cat((_norm(embedded, of("input_layernorm")), normed), dim=-1)
    count = len(both)
    angles = torch.arange(count)[:, None] * theta ** (-torch.arange(0, head_dim, 2) / head_dim)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]

    def rotated(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    query = rotated((both @ of("self_attn.q_proj").T).view(count, heads, head_dim))
    key = rotated((both @ of("self_attn.k_proj").T).view(count, kv_heads, head_dim))
    value = (both @ of("self_attn.v_proj").T).view(count, kv_heads, head_dim)
    key, value = (each.repeat_interleave(heads // kv_heads, dim=1) for each in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * head_dim**-0.5
    scores += torch.full((count, count), float("-inf")).triu(1)
    attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)
    x = (normed if norm_before_residual else known) + attended @ of("self_attn.o_proj").T
    inner = _norm(x, of("post_attention_layernorm"))
    gate = torch.nn.functional.silu(inner @ of("mlp.gate_proj").T)
    x = x + (gate * (inner @ of("mlp.up_proj").T)) @ of("mlp.down_proj").T
    logits = _norm(x[-1], tensors["norm.weight"]) @ tensors["lm_head.weight"].T
    chosen = int(logits.argmax())
    return x[-1], chosen + int(tensors["d2t"][chosen])
