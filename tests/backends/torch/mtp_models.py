"""Tiny random models with MTP layers, and what these guess, computed the plain way:
transformers' own layers over whole sequences, all anew for each guess."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

from tests.backends.torch.models import make_model, save_model

_FILE: Final = "model.safetensors"
# name -> the transformers model that its layers are of
MODELS: Final = {"mimo": "qwen2", "qwen3": "qwen3", "qwen3-moe": "qwen3-moe"}


@dataclass(frozen=True)
class MTPModel:
    name: str
    served: Any
    # as many layers, whose own embeddings and head are not used
    layers: Any
    # of each layer: norms of the token and of what is known, projection, last norm
    around: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]

    def logits(self, tokens: Sequence[int], guesses: Sequence[int]) -> torch.Tensor:
        """[vocab], of what follows ``tokens`` and the guesses behind them."""
        with torch.no_grad():
            known = self._known(tokens)
            every, count = [*tokens, *guesses], len(known)
            last = min(len(guesses), len(self.around) - 1)
            out = self._layer(0, known, every[1:])
            for number in range(1, last + 1):
                known = torch.cat((torch.zeros(1, known.shape[1]), out))
                assert len(known) == count + number
                out = self._layer(number, known, every[1:])
            # no more layers: the last one again, from what it gave itself
            for _ in range(len(guesses) - last):
                known = torch.cat((known, out[-1:]))
                out = self._layer(last, known, every[1:])
            return self.served.lm_head(out[-1])

    def _known(self, tokens: Sequence[int]) -> torch.Tensor:
        """Hidden states of all tokens but the last, whose own is not computed yet."""
        found: list[torch.Tensor] = []
        norm = self.served.model.norm
        hook = norm.register_forward_hook(
            lambda _, given, out: found.append(given[0][0] if self.name == "mimo" else out[0])
        )
        self.served(torch.tensor([list(tokens)]))
        hook.remove()
        return found[0][:-1]

    def _layer(self, number: int, known: torch.Tensor, behind: Sequence[int]) -> torch.Tensor:
        count = len(known)
        token_norm, hidden_norm, projection, last_norm = self.around[number]
        embedded = self.served.get_input_embeddings()(torch.tensor(behind[:count]))
        if self.name == "mimo":
            embedded[0] = 0.0
        both = [_norm(embedded, token_norm), _norm(known, hidden_norm)]
        if self.name == "mimo":
            both = both[::-1]
        x = (torch.cat(both, dim=-1) @ projection.T)[None]
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        out = self.layers.model.layers[number](
            x,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=self.layers.model.rotary_emb(x, positions),
        )
        out = out[0] if isinstance(out, tuple) else out
        return _norm(out[0], last_norm)


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def save_mtp_model(folder: Path, name: str, *, count: int = 1, **changes: Any) -> MTPModel:
    """Write a model with so many MTP layers."""
    served = save_model(folder, MODELS[name], **changes)
    layers = make_model(MODELS[name], **(changes | {"num_hidden_layers": count}))
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    with TemporaryDirectory() as other:
        layers.save_pretrained(other)
        stored = {key: value.clone() for key, value in load_file(Path(other, _FILE)).items()}
    tensors = {key: value.clone() for key, value in load_file(folder / _FILE).items()}
    prefix = "model.mtp_layers." if name == "mimo" else "mtp.layers."
    for key, value in stored.items():
        if key.startswith("model.layers."):
            tensors[key.replace("model.layers.", prefix, 1)] = value
    hidden = served.config.hidden_size

    def around() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        norms = [1.0 + 0.3 * torch.randn(hidden) for _ in range(3)]
        return norms[0], norms[1], torch.randn(hidden, 2 * hidden) * 0.2, norms[2]

    config = json.loads((folder / "config.json").read_text())
    if name == "mimo":
        config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
        config |= {"num_nextn_predict_layers": count, "auto_map": {"AutoConfig": "x.MiMoConfig"}}
        every = [around() for _ in range(count)]
        names = "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"
        for number, parts in enumerate(every):
            for part, tensor in zip(names, parts, strict=True):
                tensors[f"model.mtp_layers.{number}.{part}.weight"] = tensor
    else:
        every = [around()] * count
        names = "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"
        for part, tensor in zip(names, every[0], strict=True):
            tensors[f"mtp.{part}.weight"] = tensor
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / _FILE)
    return MTPModel(name, served, layers, every)
