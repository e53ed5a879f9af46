"""Which formats are chosen, what is refused, and what a choice changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.backends import formats
from paceline.backends.formats import Formats, choose_formats
from paceline.backends.native import library, unavailable_reason
from paceline.backends.worker import WorkerBackend
from paceline.checkpoints.config import ModelConfig
from paceline.core.errors import ConfigError
from tests.backends.conftest import load
from tests.backends.native.reference import tiny_config
from tests.backends.plans import Plans

PLAIN = tiny_config(head_dim=64)
QUANTISED = replace(PLAIN, stored_dtype="Q4_1")

native = pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A CPU with AVX-512 BF16, whatever this one is, and a native library."""
    monkeypatch.setattr(formats, "unavailable_reason", lambda: None)
    monkeypatch.setattr(formats, "variants", lambda: ("avx512bf16", "avx2", "portable"))
    return monkeypatch


def torch_dtype(name: str) -> str:
    """As PyTorch chooses on a processor with AVX-512 BF16."""
    if name not in ("auto", "float32", "bfloat16"):
        raise ConfigError(f"dtype {name!r} is not supported")
    return "bfloat16" if name == "auto" else name


def choose(config: ModelConfig = PLAIN, **settings: Any) -> Formats:
    defaults: dict[str, Any] = {
        "compute": "auto",
        "dtype": "auto",
        "kv_dtype": "auto",
        "block_size": 16,
        "device": "cpu",
        "torch_dtype": torch_dtype,
    }
    return choose_formats(config, **(defaults | settings))


def names(chosen: Formats) -> tuple[str, str, str]:
    return chosen.compute, chosen.dtype, chosen.kv_dtype


def test_auto_takes_int8_for_a_file_of_few_bits(machine: pytest.MonkeyPatch) -> None:
    chosen = choose(QUANTISED)
    assert names(chosen) == ("native", "int8", "bfloat16")
    for words in ("avx512bf16", "accuracy gate", "Q4_1", "bfloat16 in the KV cache because int8"):
        assert words in chosen.why
    # no more rounding than the file's own
    assert names(choose(replace(PLAIN, stored_dtype="bfloat16"))) == ("native", *["bfloat16"] * 2)
    # nothing left to choose, nothing to explain
    assert choose(QUANTISED, compute="native", dtype="q4", kv_dtype="int8").why == ""
    plain = choose(PLAIN, compute="native", dtype="float32")
    assert plain.why == "float32 in the KV cache as in the weights"


def test_auto_needs_fast_byte_products(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(formats, "variants", lambda: ("portable",))
    assert names(choose(QUANTISED)) == ("native", "float32", "float32")
    machine.setattr(formats, "variants", lambda: ("avx2", "portable"))
    assert names(choose(QUANTISED)) == ("native", "int8", "bfloat16")
    machine.setattr(formats, "variants", lambda: ("avx512", "avx2", "portable"))
    assert names(choose(QUANTISED)) == ("native", "int8", "bfloat16")
    # bfloat16 is only worth it where it is multiplied
    chosen = choose(PLAIN)
    assert names(chosen) == ("native", "float32", "float32")
    assert "does not multiply bfloat16" in chosen.why


def test_without_the_library_pytorch_computes(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(formats, "unavailable_reason", lambda: "no compiler was found")
    chosen = choose(QUANTISED)
    assert names(chosen) == ("torch", "bfloat16", "bfloat16")
    assert "no compiler was found" in chosen.why
    for settings in ({"dtype": "int8"}, {"kv_dtype": "int8"}):
        with pytest.raises(
            ConfigError, match=r"int8 needs --compute native.*no compiler was found"
        ):
            choose(QUANTISED, **settings)


def test_a_model_is_served_without_the_library(
    llama_folder: Path, llama: WorkerBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No compiler was there when the package was installed: PyTorch computes, and says why."""
    monkeypatch.setattr(library, "_PATH", tmp_path / "_lib.so")
    library._load.cache_clear()
    try:
        backend = load(llama_folder, compute="auto", block_size=16)
    finally:
        library._load.cache_clear()
    assert backend.info.name == "torch"
    assert "the native library was not built; install a C++ compiler" in backend.info.choice
    prompt = list(range(5, 45))
    expected = Plans(llama).generate(prompt, 8).output
    assert Plans(backend).generate(prompt, 8).output == expected
    backend.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"compute": "gpu"}, "compute must be auto, torch or native, got 'gpu'"),
        ({"kv_dtype": "fp8"}, "kv_dtype 'fp8' is not supported: use auto, float32"),
        ({"dtype": "int3"}, "native computes in float32, bfloat16, int8, q4, not int3"),
        ({"dtype": "int3", "compute": "torch"}, "dtype 'int3' is not supported"),
        ({"dtype": "q4", "compute": "torch"}, "--dtype q4 needs --compute native"),
        (
            {"dtype": "float32", "kv_dtype": "bfloat16", "compute": "torch"},
            "--kv-dtype bfloat16 needs --compute native.*in the weights' float32",
        ),
        ({"compute": "native", "block_size": 4}, "native cannot serve this: block_size=4"),
        ({"compute": "native", "device": "cuda:0"}, "on the CPU, not on cuda:0"),
    ],
)
def test_refusals(machine: pytest.MonkeyPatch, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose(**settings)


def test_torch_takes_the_cache_format_that_it_would_use_anyway() -> None:
    chosen = choose(compute="torch", dtype="bfloat16", kv_dtype="bfloat16")
    assert names(chosen) == ("torch", "bfloat16", "bfloat16")


@native
def test_kv_dtype_sets_how_many_tokens_fit(llama_folder: Path) -> None:
    """The same memory holds twice the blocks in bfloat16, and in int8 nearly twice again: 3 layers,
    2 heads, keys and values of 16 a token, and for int8 a float32 scale for each of them."""
    prompt = list(range(5, 45))
    found: dict[str, dict[int, float]] = {}
    for kv_dtype, per_head in (("float32", 64), ("bfloat16", 32), ("int8", 16 + 4)):
        backend = load(llama_folder, compute="native", block_size=16, kv_dtype=kv_dtype)
        info = backend.info
        assert info.block_bytes == 3 * 16 * 2 * 2 * per_head
        assert info.num_blocks == (1 << 20) // info.block_bytes
        assert (info.dtype, info.kv_dtype) == ("float32", kv_dtype)
        (first,) = Plans(backend).generate(prompt, 1, logprobs=20).logprobs
        found[kv_dtype] = dict(first.top)
        backend.close()
    for kv_dtype in ("bfloat16", "int8"):
        shared = set(found[kv_dtype]) & set(found["float32"])
        gaps = [abs(found[kv_dtype][token] - found["float32"][token]) for token in shared]
        assert len(shared) > 10
        # another cache, nearly the same answer
        assert 0 < max(gaps) < 0.2


@native
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
def test_sizing_counts_what_the_library_takes(kv_dtype: str) -> None:
    from paceline.backends.native import NativeModel
    from paceline.backends.native.step import native_block_bytes
    from tests.backends.native.reference import random_weights, rope_tables

    weights = random_weights(PLAIN, 0)
    for block_size in (16, 48):
        model = NativeModel(
            PLAIN,
            weights.items(),
            rope_tables(PLAIN, 64),
            dtype="int8",
            kv_dtype=kv_dtype,
            num_blocks=2,
            block_size=block_size,
            threads=1,
        )
        assert native_block_bytes(PLAIN, block_size, kv_dtype) == model.kv_bytes_per_block
        model.close()
