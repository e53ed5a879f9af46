"""MiMo: Qwen2 with MTP layers, which ``checkpoints.heads.mtp`` reads."""

from __future__ import annotations

from dataclasses import replace

from paceline.checkpoints.architectures.qwen2 import ARCHITECTURE as QWEN2

__all__ = ["ARCHITECTURE"]

# its class has Qwen2's biases, and ignores the config's; its GGUF files are not read
ARCHITECTURE = replace(
    QWEN2, model_type="mimo", class_name="MiMoForCausalLM", title="MiMo", gguf=None
)
