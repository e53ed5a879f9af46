"""What the benchmark of memory reads and writes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.memory import kinds_of, vocabulary, write_embedding_model, write_quantised_model
from benchmarks.peers.sizes import Shape
from paceline.backends.loading.memory_estimate import served_memory
from paceline.checkpoints.heads.pooling import pooling_of_folder
from paceline.checkpoints.hf.folder import read_folder
from paceline.checkpoints.open import open_checkpoint
from paceline.engine.text.tokenizer import load_tokenizer

TINY = Shape(2, 256, 256, 4, 2, 64, 2000)
SMAPS = """\
55d0-55e0 r-xp 00000000 08:01 131 /usr/lib/lib x.so
Rss:                  64 kB
Pss:                  40 kB
AnonHugePages:         0 kB
VmFlags: rd ex mr mw me
55e0-55f0 rw-p 00010000 08:01 131 /usr/lib/lib x.so
Pss:                   8 kB
55f0-56f0 rw-p 00000000 00:00 0 [heap]
Pss:                 100 kB
7f00-8f00 rw-p 00000000 00:00 0
Pss:                4196 kB
AnonHugePages:      4096 kB
8f00-9f00 rw-p 00000000 00:00 0 \n\
Pss:                   0 kB
"""


def test_kinds_of_mappings() -> None:
    found = kinds_of(SMAPS.splitlines())
    assert found == {
        "lib x.so": 48 << 10, "[heap]": 100 << 10, "huge pages": 4096 << 10, "anonymous": 100 << 10,
    }  # fmt: skip


def test_a_vocabulary_is_as_large_as_asked() -> None:
    for count in (2000, 40_000):
        tokens, merges = vocabulary(count)
        assert len(tokens) == len(set(tokens)) == count
        assert len(merges) == count - 256
        known = set(tokens)
        assert all(a in known and b in known and a + b in known for a, b in merges)


def test_models_are_read(tmp_path: Path) -> None:
    write_quantised_model(tmp_path / "m.gguf", TINY)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert checkpoint.config.stored_dtype == "Q4_0"
    table = checkpoint.tensor("model.embed_tokens.weight")
    assert np.isfinite(table).all() and 0.001 < table.std() < 1
    assert load_tokenizer(tmp_path / "m.gguf").vocab_size == TINY.vocab
    write_embedding_model(tmp_path / "e", TINY)
    assert pooling_of_folder(read_folder(tmp_path / "e")) is not None
    assert open_checkpoint(tmp_path / "e").config.stored_dtype == "bfloat16"
    assert load_tokenizer(tmp_path / "e").vocab_size == TINY.vocab
    assert served_memory(tmp_path / "e").dtype == "bfloat16"
