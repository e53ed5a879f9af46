"""A byte order mark, which some editors put before a text, is passed over in every file that people
write."""

from __future__ import annotations

import hashlib
import io
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from paceline.backends.pooling.load import score_token_ids
from paceline.bench.plan import PromptFile
from paceline.checkpoints.heads.pooling import PoolingFiles
from paceline.checkpoints.model.json_file import read_json_list, read_json_object
from paceline.cli.offline.chat import _read as read_chat
from paceline.engine.text.tokenizer import load_tokenizer
from paceline.gateway.settings.config import read_config
from paceline.http.keys import parse_key_file
from paceline.sim.recording import Recording
from paceline.sim.step_times.models import ModelShape
from paceline.sim.step_times.profile import _model_of
from paceline.sim.workload.traces import open_trace
from tests.engine.test_recorder import run as record
from tests.sim.step_times.profiles import MODEL

MARK = "\ufeff"


def marked(path: Path, text: str) -> Path:
    path.write_text(MARK + text, encoding="utf-8")
    return path


def test_a_gateway_s_configuration(tmp_path: Path) -> None:
    path = marked(
        tmp_path / "gateway.toml", '[[engines]]\nname = "a"\nurl = "http://127.0.0.1:9"\n'
    )
    assert read_config(path).engines[0].url == "http://127.0.0.1:9"


@pytest.mark.parametrize("first", ["", "# of this house\n"])
def test_keys(first: str) -> None:
    text = f"{MARK}{first}ann user {hashlib.sha256(b'key').hexdigest()}\n"
    assert [key.name for key in parse_key_file(text, "keys")] == ["ann"]


def test_prompts(tmp_path: Path) -> None:
    assert PromptFile(marked(tmp_path / "p.jsonl", '"Hi"\n'))[0].text == "Hi"


def test_lines_that_are_read_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    data = io.BytesIO(f"{MARK}/help\n".encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(data))
    assert read_chat(interactive=False) == "/help"


def test_a_checkpoint_s_files(tmp_path: Path) -> None:
    assert read_json_object(marked(tmp_path / "a", '{"a": 1}')) == {"a": 1}
    assert read_json_list(marked(tmp_path / "b", "[1]")) == [1]
    words = tokenizers.models.WordLevel({"<u>": 0, "yes": 1}, unk_token="<u>")
    marked(tmp_path / "tokenizer.json", tokenizers.Tokenizer(words).to_str())
    marked(tmp_path / "config.json", '{"eos_token_id": 0}')
    marked(tmp_path / "chat_template.jinja", "{{ messages[0].content }}!")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("yes") == [1]
    assert tokenizer._template.source(has_tools=False) == "{{ messages[0].content }}!"
    files = PoolingFiles(
        task="classify", pooling="last", activation="sigmoid", why="", score_tokens=("yes",)
    )
    assert score_token_ids(tmp_path, files) == (1,)


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (ModelShape.read, json.dumps(asdict(MODEL))),
        (
            lambda path: list(open_trace(path).arrivals()),
            "arrived_at_s,prompt_tokens,output_tokens\n0,3,4\n",
        ),
        (
            lambda path: list(open_trace(path).arrivals()),
            '{"timestamp": 0, "input_length": 3, "output_length": 4}\n',
        ),
    ],
    ids=["shapes", "csv", "jsonl"],
)
def test_what_simulations_read(
    tmp_path: Path, read: Callable[[Path], list[Any]], text: str
) -> None:
    plain = tmp_path / "plain"
    plain.write_text(text)
    assert read(marked(tmp_path / "marked", text)) == read(plain)


def test_recordings_and_profiles(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record(path)
    found = Recording.read(path)
    assert Recording.read(marked(path, path.read_text())).steps == found.steps
    marked(tmp_path / "GPU-Toy-1B-bf16-meta.yaml", "model: Qwen/Qwen3-0.6B\n")
    assert _model_of(tmp_path, "GPU-Toy-1B-bf16-tp1", ()).name == "Qwen/Qwen3-0.6B"
