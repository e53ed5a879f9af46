"""Serving natively never loads PyTorch, whatever requests ask for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.backends.native import unavailable_reason

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))

SCRIPT = """
import sys
from pathlib import Path

from tests.backends.loading import load_backend
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
