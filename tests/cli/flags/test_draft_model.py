"""Which model ``--speculative-config`` names, and whether it goes with the one that is served."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from paceline.cli.flags.draft_model import check_vocabulary, draft_of, drafts_by_mtp
from paceline.errors import CheckpointError, ConfigError


def _folder(path: Path, tokens: dict[str, int]) -> Path:
    path.mkdir()
    Tokenizer(models.WordLevel(tokens, unk_token="a")).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "a"}))
    (path / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    return path


def test_heads_are_told_from_models(tmp_path: Path) -> None:
    served = str(_folder(tmp_path / "served", {"a": 0, "b": 1}))
    head = tmp_path / "head"
    head.mkdir()
    config = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 2}
    (head / "config.json").write_text(json.dumps(config))
    for method in ("eagle3", "auto"):
        assert draft_of({"method": method, "model": str(head)}, served) == (str(head), "auto")
    with pytest.raises(ConfigError, match="leave quantization out"):
        draft_of({"method": "auto", "model": str(head), "quantization": "q4"}, served)
    with pytest.raises(ConfigError, match=r'EAGLE-3 head, .* give "method": "eagle3"'):
        draft_of({"model": str(head)}, served)
    with pytest.raises(ConfigError, match=r'not an EAGLE-3 head.* with "method": "draft_model"'):
        draft_of({"method": "eagle3", "model": served}, served)


def test_own_layers_are_no_model() -> None:
    for config, own in (({"method": "mtp"}, True), ({"method": "self"}, False), (None, False)):
        assert drafts_by_mtp(config) == own
    assert draft_of({"method": "mtp"}, "served") is None


def test_what_is_named(tmp_path: Path) -> None:
    served = str(_folder(tmp_path / "served", {"a": 0, "b": 1}))
    other = str(_folder(tmp_path / "other", {"a": 0, "b": 1}))

    def found(config: dict[str, Any] | None) -> tuple[str, str] | None:
        return draft_of(config, served)

    assert found(None) is None
    assert found({"method": "auto"}) is None
    assert found({"method": "off"}) is None
    assert found({"method": "self"}) == (served, "q4")
    assert found({"method": "self", "quantization": "int8"}) == (served, "int8")
    assert found({"method": "auto", "model": "self"}) == (served, "q4")
    assert found({"model": other}) == (other, "auto")
    assert found({"model": other, "quantization": "q4"}) == (other, "q4")
    with pytest.raises(ConfigError, match="model must be a name, got 3"):
        found({"model": 3})
    with pytest.raises(ConfigError, match="quantization must be a name, got ''"):
        found({"method": "self", "quantization": ""})
    with pytest.raises(CheckpointError, match="no model"):
        found({"model": "no such model"})


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ({"a": 0, "b": 1, "c": 2}, r"3 tokens, the served one 2; 1 of them differ, such as 'c'"),
        ({"a": 1, "b": 0}, r"2 of them differ, such as 'a' \(id 1 and 0\)"),
        ({"a": 0, "d": 1}, r"2 of them differ, such as 'b' \(id None and 1\)"),
    ],
)
def test_another_vocabulary_is_refused_with_the_numbers(
    tmp_path: Path, tokens: dict[str, int], said: str
) -> None:
    served = _folder(tmp_path / "served", {"a": 0, "b": 1})
    other = _folder(tmp_path / "other", tokens)
    check_vocabulary(served, served)
    with pytest.raises(ConfigError, match=said):
        check_vocabulary(served, other)
    with pytest.raises(ConfigError, match=said):
        draft_of({"model": str(other)}, str(served))
