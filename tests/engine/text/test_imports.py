"""What the two processes of a server import, which is memory that both hold as long as they run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.backends.native import unavailable_reason

ROOT = Path(__file__).parents[3]
TEXT = """
from paceline.engine.text.tokenizer import load_tokenizer
assert load_tokenizer(Path(sys.argv[1])).encode("One")
"""
ENGINE = """
from paceline.cli.flags.settings import EngineSettings
from paceline.cli.wiring import build_core
settings = EngineSettings.of(model_name="m", model_path=sys.argv[1], num_blocks=64)
build_core(settings)[0].close()
"""


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        (TEXT, {"numpy", "gguf", "torch"}),
        pytest.param(
            ENGINE,
            # gguf brings the last three
            {"gguf", "tokenizers", "llguidance", "jinja2", "sentencepiece", "yaml", "tqdm"},
            marks=pytest.mark.skipif(
                unavailable_reason() is not None, reason=str(unavailable_reason())
            ),
        ),
    ],
    ids=["text", "engine"],
)
def test_nothing_is_imported_that_nobody_asked_for(
    smollm2_path: Path, code: str, absent: set[str]
) -> None:
    told = "import sys\nfrom pathlib import Path\n" + code + "print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", told, str(smollm2_path)],
        capture_output=True, text=True, cwd=ROOT, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not absent & set(done.stdout.split())
