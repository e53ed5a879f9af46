"""What the small JSON files of a Hugging Face folder say, each read once.

This module does not know what the values mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from paceline.checkpoints.model.json_file import read_json_list, read_json_object
from paceline.errors import CheckpointError

__all__ = ["HFFolder", "Module", "read_folder"]


class Module(NamedTuple):
    """A module of sentence-transformers' pipeline."""

    path: Path
    # its config.json; {}: there is none
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class HFFolder:
    """A folder; {} stands for a file that is missing."""

    path: Path
    # config.json; None: there is none
    config: Mapping[str, Any] | None
    # generation_config.json
    generation: Mapping[str, Any]
    # config_sentence_transformers.json and sentence_bert_config.json
    sentence_transformers: Mapping[str, Any]
    sentence_bert: Mapping[str, Any]
    # the modules behind the transformer, by kind and in order: "Pooling", "Dense", "Dense 2",
    # "Normalize" or "LogitScore"
    modules: Mapping[str, Module]

    def chat_template(self) -> str | None:
        """Return the source of the tokenizer's chat template; None: it has none, or several."""
        path = self.path / "chat_template.jinja"
        if path.is_file():
            try:
                return path.read_text(encoding="utf-8-sig")
            except (OSError, UnicodeDecodeError) as error:
                raise CheckpointError(f"cannot read {path}: {error}") from None
        config = read_json_object(self.path / "tokenizer_config.json") or {}
        source = config.get("chat_template")
        return source if isinstance(source, str) else None


def read_folder(path: Path) -> HFFolder:
    """Read the small files of a folder.

    Raises:
        CheckpointError: a malformed file, or a module that is not supported.
    """
    names = "config", "generation_config", "config_sentence_transformers", "sentence_bert_config"
    config, generation, wrapped, bert = (read_json_object(path / f"{name}.json") for name in names)
    return HFFolder(
        path=path,
        config=config,
        generation=generation or {},
        sentence_transformers=wrapped or {},
        sentence_bert=bert or {},
        modules=_modules(path),
    )


def _modules(folder: Path) -> dict[str, Module]:
    """Return ``HFFolder.modules``. Raises CheckpointError for a module of another kind."""
    listed = read_json_list(folder / "modules.json")
    found: dict[str, Module] = {}
    for number, module in enumerate(listed or ()):
        kind, where = (
            (str(module.get("type", "")).rpartition(".")[2], module.get("path"))
            if isinstance(module, dict)
            else ("", None)
        )
        if not isinstance(where, str) or where.startswith("/") or ".." in where.split("/"):
            raise CheckpointError(
                f"{folder / 'modules.json'}: module {number} has path {where!r:.80}, which is not "
                "a folder inside this one"
            )
        if kind == "Transformer" and not number:
            if where:
                raise CheckpointError(
                    f"{folder / 'modules.json'}: the transformer lies in {where!r:.80}; only "
                    "folders with their weights beside modules.json are read"
                )
            continue
        if kind not in ("Pooling", "Dense", "Normalize", "LogitScore"):
            raise CheckpointError(
                f"{folder / 'modules.json'}: module {number} is a {kind or 'nameless'!r:.80}; "
                "supported are Transformer first, then Pooling, Dense, Normalize and LogitScore"
            )
        name = kind if kind not in found else f"{kind} {number}"
        path = folder / where
        found[name] = Module(path, read_json_object(path / "config.json") or {})
    return found
