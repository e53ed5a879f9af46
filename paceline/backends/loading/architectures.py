"""Table for docs/use/models.md: which architectures load, by file format and compute path.

``python -m paceline.backends.loading.architectures`` prints it.
"""

from __future__ import annotations

from paceline.backends.native import unsupported_reason
from paceline.checkpoints.architectures import ARCHITECTURES, Architecture
from paceline.checkpoints.hf.config import config_from

__all__ = ["main", "support_table"]

# head_dim and block_size that the native path takes, so that only the architecture decides
_SIZES = {
    "vocab_size": 1 << 18,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
}
_BLOCK_SIZE = 16


def support_table() -> str:
    """Return a Markdown table with a row for each architecture."""
    head = ("architecture", "`model_type`", "Hugging Face folder", "GGUF", "torch", "native")
    rows = [head, ("---",) * len(head)]
    rows += [_row(architecture) for architecture in ARCHITECTURES.values()]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _row(architecture: Architecture) -> tuple[str, ...]:
    config = config_from({"architectures": [architecture.class_name], **_SIZES}, {}).model
    reason = unsupported_reason(config, _BLOCK_SIZE)
    return (
        architecture.title,
        f"`{architecture.model_type}`",
        f"`{architecture.class_name}`",
        "no" if architecture.gguf is None else f"`{architecture.gguf}`",
        "yes",
        "yes" if reason is None else f"no: {reason}",
    )


def main() -> None:
    print(support_table(), end="")


if __name__ == "__main__":
    main()
