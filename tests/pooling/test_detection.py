"""What a model is taken for, by its files and by flags; and what is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.checkpoints.gguf.checkpoint import open_gguf
from paceline.checkpoints.heads.pooling import pooling_of_folder, pooling_of_gguf
from paceline.checkpoints.hf.folder import read_folder
from paceline.cli.flags.settings import EngineSettings
from paceline.cli.serve.command import ready_line
from paceline.cli.wiring import build_core
from paceline.engine.fanout import add_to_core
from paceline.errors import CheckpointError, ConfigError
from tests.checkpoints.builders import write_gguf
from tests.pooling.models import (
    add_modules,
    assert_close,
    change_config,
    hidden_states,
    make_bert,
    make_decoder,
    open_llm,
    pool,
    pooled_request,
)


def write(folder: Path, **files: Any) -> Path:
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


@pytest.mark.parametrize(
    ("name", "model_type", "task", "pooling"),
    [
        ("Qwen3ForCausalLM", "qwen3", None, None),
        ("Qwen3Model", "qwen3", "embed", "last"),
        ("LlamaForSequenceClassification", "llama", "classify", "last"),
        ("BertModel", "bert", "embed", "cls"),
        ("BertForSequenceClassification", "bert", "classify", "cls"),
        ("XLMRobertaForSequenceClassification", "xlm-roberta", "classify", "cls"),
    ],
)
def test_by_the_class(
    tmp_path: Path, name: str, model_type: str, task: str | None, pooling: str | None
) -> None:
    write(tmp_path, config={"architectures": [name], "model_type": model_type})
    found = pooling_of_folder(read_folder(tmp_path))
    assert (task, pooling) == (None, None) if found is None else (found.task, found.pooling)
    if task is None:
        asked = pooling_of_folder(read_folder(tmp_path), "pooling")
        assert asked is not None and (asked.task, asked.pooling) == ("embed", "last")
        assert pooling_of_folder(read_folder(tmp_path), "generate") is None


def test_a_decoder_with_modules_is_pooled_unless_it_is_to_generate(tmp_path: Path) -> None:
    write(tmp_path, config={"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"})
    add_modules(tmp_path, "lasttoken", normalize=False)
    found = pooling_of_folder(read_folder(tmp_path))
    assert found is not None and (found.pooling, found.activation) == ("last", "identity")
    assert pooling_of_folder(read_folder(tmp_path), "generate") is None


@pytest.mark.parametrize(
    ("runner", "convert", "config", "said"),
    [
        ("pool", "auto", {}, "auto, generate, pooling"),
        ("auto", "reward", {}, "auto, embed, classify"),
        ("generate", "embed", {}, "leave one out"),
        ("generate", "auto", {"architectures": ["BertModel"], "model_type": "bert"}, "no head"),
        ("auto", "embed", {"architectures": ["BertForSequenceClassification"],
                           "model_type": "bert"}, "trained to classify"),
        ("auto", "classify", {"architectures": ["LlamaForCausalLM"],
                              "model_type": "llama"}, "classifier_from_token"),
    ],
)  # fmt: skip
def test_what_cannot_be_done(
    tmp_path: Path, runner: str, convert: str, config: dict[str, Any], said: str
) -> None:
    write(tmp_path, config=config)
    with pytest.raises(ConfigError, match=said):
        pooling_of_folder(read_folder(tmp_path), runner, convert)


@pytest.mark.parametrize(
    ("modules", "pooling", "said"),
    [
        ([{"type": "a.Transformer", "path": "0_Transformer"}], {}, "beside modules.json"),
        ([{"type": "a.Transformer", "path": ""}, {"type": "a.CNN", "path": "1"}], {}, "CNN"),
        ([{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": "../x"}], {},
         "not a folder inside"),
        ({}, {}, "must be a list"),
        (None, {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens"),
        (None, {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "one of"),
        (None, {"pooling_mode": "weightedmean"}, "weightedmean"),
        (None, {"pooling_mode": "mean", "include_prompt": False}, "include_prompt"),
    ],
)  # fmt: skip
def test_modules_that_are_not_supported(
    tmp_path: Path, modules: Any, pooling: dict[str, Any], said: str
) -> None:
    write(tmp_path, config={"architectures": ["BertModel"], "model_type": "bert"})
    if modules is None:
        add_modules(tmp_path, "cls_token")
        write(tmp_path / "1_Pooling", config=pooling)
    else:
        write(tmp_path, modules=modules)
    with pytest.raises(CheckpointError, match=said):
        pooling_of_folder(read_folder(tmp_path))


def test_gguf_says_how_it_is_pooled(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")

    def find(kind: int | None, *asked: str) -> Any:
        metadata = dict(open_gguf(path).metadata)
        return pooling_of_gguf(path, metadata | {"llama.pooling_type": kind}, *asked)

    assert find(None) is None and find(0) is None and find(4) is None
    for kind, pooling in ((1, "mean"), (2, "cls"), (3, "last")):
        assert (find(kind).task, find(kind).pooling) == ("embed", pooling)
        assert find(kind, "generate") is None
        with pytest.raises(ConfigError, match="Hugging Face folder"):
            find(kind, "auto", "classify")
    assert find(None, "pooling").pooling == "last"


def core_of(folder: Path, **settings: Any) -> Any:
    asked = {"model_path": str(folder), "dtype": "float32", "threads": 1}
    return build_core(EngineSettings.of(model_name="tiny", **{**asked, **settings}))


def test_whole_prompts_are_bound_by_a_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_bert(tmp_path / "bert")
    with caplog.at_level(logging.WARNING):
        core, info = core_of(folder, max_num_batched_tokens=40, max_num_seqs=4)
    core.close()
    said = ready_line(info, "tiny", "127.0.0.1", 8000)
    assert "(tiny, float32 on cpu, no KV cache, up to 40 tokens" in said
    assert "curl http://127.0.0.1:8000/v1/embeddings" in said
    assert info.max_model_len == 40 and "--max-num-batched-tokens 66" in caplog.text
    assert "embeddings by cls pooling" in info.choice and not info.enable_prefix_caching
    with pytest.raises(ConfigError, match="--max-model-len 50 exceeds --max-num"):
        core_of(folder, max_num_batched_tokens=40, max_num_seqs=4, max_model_len=50)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"compute": "native"}, "is an encoder"),
        ({"kv_dtype": "int8"}, "is an encoder"),
        ({"kv_cache_bytes": 1 << 20}, "--kv-cache-memory"),
        ({"isa": "avx2"}, "--isa avx2 is for decoders"),
        ({"packed_cache_bytes": 1 << 30}, "--packed-cache"),
        ({"swap_bytes": 1 << 20}, "--swap-space"),
        ({"matryoshka_dimensions": (64,)}, "dimension 64"),
    ],
)
def test_flags_that_an_encoder_has_no_use_for(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        core_of(make_bert(tmp_path / "bert"), **settings)


@pytest.mark.parametrize(("pooling", "caches"), [("lasttoken", True), ("mean_tokens", False)])
def test_only_the_last_token_shares_prefixes(tmp_path: Path, pooling: str, caches: bool) -> None:
    folder = make_decoder(tmp_path / "model")
    add_modules(folder, pooling)
    prompts = [[7] * 40 + [n] for n in range(3)]
    states = [hidden_states(folder, prompt) for prompt in prompts]
    expected = [s[-1] if caches else s.mean(0) for s in states]
    with open_llm(folder) as llm:
        for prompt, vector in zip(prompts, expected, strict=True):
            # one after the other, so that each could find the one before
            assert_close(pool(llm, [prompt])[0], vector / np.linalg.norm(vector))
        core = llm._core
        assert (core.stats().prefix_cache_hits > 0) is caches


@pytest.mark.parametrize("pooling", ["mean_tokens", "cls_token", "lasttoken"])
def test_preempted_prompts_are_pooled_whole(tmp_path: Path, pooling: str) -> None:
    folder = make_decoder(tmp_path / "model")
    add_modules(folder, pooling)
    prompts = [[n + 1, *[n + 2] * 89] for n in range(2)]
    places = {"mean_tokens": slice(None), "cls_token": slice(0, 1), "lasttoken": slice(-1, None)}
    expected = [hidden_states(folder, p)[places[pooling]].mean(0) for p in prompts]
    core, _ = core_of(
        folder, num_blocks=8, max_num_batched_tokens=16, max_num_seqs=2, policy="priority"
    )
    for number, prompt in enumerate(prompts):
        # the second is in more of a hurry, and there is no memory for both
        add_to_core(core, pooled_request(f"r{number}", prompt, priority=-number))
        core.step()
        core.step()
    while core.has_work:
        core.step()
    assert core.stats().num_preemptions == 1
    found: dict[str, NDArray[np.float32]] = {
        name: np.frombuffer(vector, dtype="<f4") for name, vector in core.pooled
    }
    core.close()
    for number, wanted in enumerate(expected):
        assert_close(found[f"r{number}/0"], wanted / np.linalg.norm(wanted))


def test_more_labels_than_the_head_has(tmp_path: Path) -> None:
    folder = make_bert(tmp_path / "model", "ForSequenceClassification", num_labels=2)
    change_config(folder, id2label={"0": "a", "1": "b", "2": "c"})
    with pytest.raises(CheckpointError, match=r"gives 2 numbers, .* 3 labels"):
        core_of(folder)
