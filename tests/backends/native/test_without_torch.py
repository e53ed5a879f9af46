"""Serving natively never loads PyTorch, whatever requests ask for, and needs none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.backends.loading import plan
from paceline.backends.native import unavailable_reason
from paceline.errors import ConfigError
from tests.backends.helpers import load_backend
from tests.cli.servers import start_server

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))

SCRIPT = """
import sys
from pathlib import Path

from tests.backends.helpers import load_backend
from paceline.core.grammar import Grammar
from paceline.engine.text.grammar import GrammarCompiler
from tests.backends.plans import Plans
from tests.contract.ascii import END, Ascii

# device, dtype and compute are the defaults of "paceline serve"
backend = load_backend(Path(sys.argv[1]), compute="auto", num_blocks=64, max_num_seqs=8)
assert backend.info.name == "native", backend.info
compiler = GrammarCompiler(Ascii)
backend.constrain(compiler)
grammar = Grammar("regex", "[a-z]{5,8}")
compiler.prepare(grammar).result(60)
plans = Plans(backend)
prompt = list(range(5, 45))
plans.add("greedy", prompt, logprobs=3)
plans.add("sampled", prompt, temperature=0.9, seed=7, top_p=0.9, top_k=20, min_p=0.01)
plans.add("plain", prompt, temperature=1.0, seed=8, logprobs=2)
plans.add("shaped", prompt, temperature=0.7, seed=9, repetition_penalty=1.2, min_tokens=9,
          presence_penalty=0.3, frequency_penalty=0.3, logit_bias=((5, 2.0),), bad_words=((9,),),
          stop_token_ids=frozenset({11}))
plans.add("listed", prompt, allowed_token_ids=(5, 6, 7))
plans.add("prompt", prompt, prompt_logprobs=2)
plans.add("grammar", prompt, grammar=grammar, eos_token_ids=frozenset({END}))
plans.run(until=5, chunk=16)
assert not plans.errors, plans.errors
assert [len(s.output) for s in plans.sequences.values()] == [5] * 7
assert bytes(plans.sequences["grammar"].output).isalpha()
assert set(plans.sequences["listed"].output) <= {5, 6, 7}
assert len(plans.sequences["greedy"].logprobs[0].top) == 3
((_, entries),) = plans.prompt_logprobs
assert len(entries) == len(prompt) - 1
backend.close()
compiler.close()
loaded = sorted(name for name in sys.modules if name.split(".")[0] == "torch")
assert not loaded, f"{len(loaded)} modules of torch, {loaded[:3]} among them"
"""


def test_torch_is_not_loaded(llama_folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(llama_folder)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr


# first on the path of every process: whoever asks for torch is written down, and gets none
HOOK = """
import os, sys, traceback
class Refused:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            with open(os.environ["ASKED_FOR_TORCH"], "a") as file:
                traceback.print_stack(file=file)
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, Refused)
"""


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where processes that start from here on write down that they asked for torch."""
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("ASKED_FOR_TORCH", str(tmp_path / "asked"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path / "asked"


def test_no_process_of_a_server_asks_for_torch(smollm2_path: Path, asked: Path) -> None:
    with start_server(str(smollm2_path)) as server:
        body = {"prompt": "One, two,", "max_tokens": 4, "temperature": 0}
        status, answer = server.request("/v1/completions", body)
        assert status == 200 and answer["usage"]["completion_tokens"] == 4
    assert not asked.exists(), asked.read_text()
    # the hook sees what there is to see
    refused = subprocess.run([sys.executable, "-c", "import torch"], capture_output=True)
    assert refused.returncode == 1 and asked.read_text()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"compute": "torch"}, "--compute torch was asked for, and PyTorch is not installed: pip"),
        ({"device": "cuda"}, r"--device cuda needs PyTorch, and PyTorch is not installed"),
        ({"compute": "auto", "block_size": 7}, "the native path .*, and PyTorch is not installed"),
    ],
)
def test_refusals_without_torch(
    llama_folder: Path, settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match=message):
        load_backend(llama_folder, **settings)


def test_a_gpu_that_nothing_can_use_is_left_alone(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "may_have_cuda", lambda: True)
    monkeypatch.setitem(sys.modules, "torch", None)
    backend = load_backend(llama_folder, device="auto", compute="auto", num_blocks=8)
    assert (backend.info.name, backend.info.device) == ("native", "cpu")
    backend.close()
