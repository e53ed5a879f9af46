"""Which formats are chosen, what is refused, and what a choice changes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.backends.loading import formats, levels
from paceline.backends.loading.formats import Formats, choose_formats
from paceline.backends.loading.levels import Measured
from paceline.backends.loading.load import WorkerBackend
from paceline.backends.native import library, unavailable_reason, variants
from paceline.backends.native.single_kernels import traits
from paceline.backends.native.step import NativeStep
from paceline.checkpoints.model.config import ModelConfig
from paceline.errors import ConfigError
from tests.backends.conftest import load
from tests.backends.native.reference import tiny_config
from tests.backends.plans import Plans

PLAIN = tiny_config(head_dim=64)
QUANTISED = replace(PLAIN, stored_dtype="Q4_1")

native = pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))


# of the best level 4 bits are fastest; of the next one bytes, where 4 bits do not pass the gate
TABLE = {
    "avx512bf16": (
        Measured("float32", "float32", {"step": 9.0}, 0.0, True),
        Measured("bfloat16", "bfloat16", {"step": 3.0}, 0.0002, True),
        Measured("int8", "bfloat16", {"step": 2.0}, 0.003, True),
        Measured("int8", "int8", {"step": 1.99}, 0.004, True),
        Measured("q4", "bfloat16", {"step": 1.5}, 0.003, True),
        Measured("q4", "int8", {"step": 1.2}, 0.004, True),
    ),
    "avx2": (
        Measured("float32", "float32", {"step": 9.0}, 0.0, True),
        # slower than float32, and still half the bytes
        Measured("bfloat16", "bfloat16", {"step": 10.0}, 0.0002, True),
        Measured("int8", "bfloat16", {"step": 4.0}, 0.003, True),
        Measured("int8", "int8", {"step": 3.0}, 0.004, True),
        Measured("q4", "bfloat16", {"step": 1.5}, 0.02, False),
        Measured("q4", "int8", {"step": 1.2}, 0.02, False),
    ),
}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A CPU with AVX-512 BF16, whatever this one is, a native library, and figures of ours."""
    monkeypatch.setattr(formats, "unavailable_reason", lambda: None)
    monkeypatch.setattr(formats, "variants", lambda: ("avx512bf16", "avx2", "portable"))
    monkeypatch.setattr(levels, "_table", lambda: TABLE)
    monkeypatch.setattr(levels, "_machines", lambda: dict.fromkeys(TABLE, ("a CPU", "1.2.3", 2)))
    monkeypatch.delenv("PACELINE_ISA", raising=False)
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


def test_the_reason_says_what_is_a_default_and_how_to_have_less_rounding(
    machine: pytest.MonkeyPatch,
) -> None:
    told = {
        "Q4_1": ("q4", "bfloat16 or float32"),
        "Q8_0": ("int8", "bfloat16 or float32"),
        "bfloat16": ("bfloat16", "float32"),
    }
    for stored, (weights, finer) in told.items():
        words = f"{weights} weights by default for this file (--dtype {finer} rounds less),"
        assert words in choose(replace(PLAIN, stored_dtype=stored)).why
    # nothing rounds less than float32, and who named a format knows of the flag
    assert "float32 weights by default for this file, " in choose(PLAIN, isa="avx2").why
    assert "by default" not in choose(QUANTISED, dtype="int8").why


@pytest.mark.parametrize("stored", ["Q4_K", "Q6_K", "IQ4_XS", "MXFP4"])
def test_native_keeps_the_bits_of_a_file(machine: pytest.MonkeyPatch, stored: str) -> None:
    chosen = choose(replace(PLAIN, stored_dtype=stored), dtype="gguf")
    # a cache as beside q4
    assert names(chosen) == ("native", "gguf", "int8")
    assert "int8 in the KV cache because that is the fastest" in chosen.why
    for other in ("bfloat16", "Q8_0", "IQ3_S"):
        with pytest.raises(
            ConfigError, match=f"keeps blocks of Q4_0, .*, and this file is of {other}"
        ):
            choose(replace(PLAIN, stored_dtype=other), dtype="gguf")


@pytest.mark.parametrize(
    ("stored", "elsewhere"), [("FP8", "int8"), ("INT8", "int8"), ("Q8_0", "int8"), ("Q4_1", "q4")]
)
def test_what_the_documents_say_of_quantised_folders(
    monkeypatch: pytest.MonkeyPatch, stored: str, elsewhere: str
) -> None:
    """By the figures that were measured: docs/use/models.md names the portable level's choice."""
    monkeypatch.setattr(formats, "unavailable_reason", lambda: None)
    monkeypatch.delenv("PACELINE_ISA", raising=False)
    config = replace(PLAIN, stored_dtype=stored)
    for level, expected in (
        ("avx512bf16", elsewhere),
        ("avx2", elsewhere),
        ("portable", "bfloat16"),
    ):
        monkeypatch.setattr(formats, "variants", lambda level=level: (level,))
        assert choose(config).dtype == expected


@pytest.mark.parametrize(
    ("stored", "best", "second"),
    [
        # as stored in both, so that nothing is rounded twice
        ("Q4_0", ("q4", "int8"), ("int8", "int8")),
        ("Q4_1", ("q4", "int8"), ("int8", "int8")),
        ("Q4_K", ("q4", "int8"), ("int8", "int8")),
        # 4 bits on another grid, or more of them; int8 KV is not 5 % faster on the best level
        ("IQ4_NL", ("int8", "bfloat16"), ("int8", "int8")),
        # in their own bits where products of bytes have an instruction
        ("MXFP4", ("gguf", "int8"), ("int8", "int8")),
        ("Q6_K", ("int8", "bfloat16"), ("int8", "int8")),
        ("Q8_0", ("int8", "bfloat16"), ("int8", "int8")),
        ("Q2_K", ("int8", "bfloat16"), ("int8", "int8")),
        # never twice the file's bytes, nor fewer bits than it has
        ("float16", ("bfloat16", "bfloat16"), ("bfloat16", "bfloat16")),
        ("bfloat16", ("bfloat16", "bfloat16"), ("bfloat16", "bfloat16")),
        ("float32", ("bfloat16", "bfloat16"), ("float32", "float32")),
        ("float64", ("bfloat16", "bfloat16"), ("float32", "float32")),
    ],
)
def test_auto_takes_the_fastest_that_passes_and_suits_the_file(
    machine: pytest.MonkeyPatch, stored: str, best: tuple[str, str], second: tuple[str, str]
) -> None:
    config = replace(PLAIN, stored_dtype=stored)
    for isa, expected in ((None, best), ("avx2", second)):
        chosen = choose(config, isa=isa)
        assert names(chosen) == ("native", *expected), isa
        level = isa or "avx512bf16"
        for words in (f"native kernels for {level}", f"fastest on {level} of what passes", stored):
            assert words in chosen.why
        assert ("q4 stands for these weights" in chosen.why) == (expected[0] == "gguf")


@pytest.mark.skipif(not variants(), reason="there is no native library")
def test_levels_that_multiply_bytes_are_those_of_the_kernels() -> None:
    """As far as they run here; plain C++ takes no 4 bits, whatever it multiplies."""
    for level in set(variants()) - {"portable"}:
        assert (level in formats._BYTE_PRODUCTS) == (not traits(level).narrow_sums), level


def test_auto_takes_nothing_that_changes_with_who_else_is_served(
    machine: pytest.MonkeyPatch,
) -> None:
    drifting = [
        replace(pair, drift=1e-2 if pair.weights == "q4" else 1e-3) for pair in TABLE["avx512bf16"]
    ]
    machine.setattr(levels, "_table", lambda: {"avx512bf16": tuple(drifting)})
    assert names(choose(QUANTISED)) == ("native", "int8", "bfloat16")
    assert names(choose(QUANTISED, dtype="q4")) == ("native", "q4", "int8")


def test_no_file_of_few_bits_becomes_float32(machine: pytest.MonkeyPatch) -> None:
    """However fast that is: it takes four to eight times the file's bytes."""
    costs = {"float32": 1.0, "bfloat16": 2.0, "int8": 3.0, "q4": 4.0}
    pairs = [replace(pair, steps_ms={"a": costs[pair.weights]}) for pair in TABLE["avx512bf16"]]
    machine.setattr(levels, "_table", lambda: {"avx512bf16": tuple(pairs)})
    for stored in ("Q2_K", "Q4_1", "Q8_0", "float16"):
        chosen = choose(replace(PLAIN, stored_dtype=stored))
        assert names(chosen) == ("native", "bfloat16", "bfloat16")
    assert names(choose(PLAIN)) == ("native", "float32", "float32")


def test_a_level_without_figures_orders_formats_as_the_next_one(
    machine: pytest.MonkeyPatch,
) -> None:
    machine.setattr(formats, "variants", lambda: ("avx10", "avx2", "portable"))
    chosen = choose(QUANTISED)
    assert names(chosen) == ("native", "int8", "int8")
    assert "fastest on avx2 (whose figures stand for avx10's)" in chosen.why
    machine.setattr(formats, "variants", lambda: ("portable",))
    with pytest.raises(ConfigError, match=r"nothing was measured of portable.*--dtype"):
        choose(QUANTISED)
    # timed, but judged in float32 alone
    machine.setattr(levels, "_table", lambda: {"portable": TABLE["avx2"][:1]})
    with pytest.raises(ConfigError, match=r"nothing that was measured on portable.*stored as Q4_1"):
        choose(QUANTISED)
    chosen = choose(QUANTISED, dtype="int8")
    assert names(chosen) == ("native", "int8", "bfloat16")
    assert "because portable was not measured with int8 weights" in chosen.why


def test_a_level_that_was_measured_to_be_slower_than_a_lesser_one_is_not_taken(
    machine: pytest.MonkeyPatch,
) -> None:
    """By what may be taken for the file: here all of the better level but float32 is slower."""
    slow = tuple(
        replace(pair, steps_ms={"step": 1.0 if pair.weights == "float32" else 3.2})
        for pair in TABLE["avx2"]
    )
    machine.setattr(levels, "_table", lambda: {"avx512bf16": slow, "avx2": TABLE["avx2"]})
    chosen = choose(QUANTISED)
    assert (chosen.isa, names(chosen)) == ("avx2", ("native", "int8", "int8"))
    assert "native kernels for avx2 (measured to be faster than avx512bf16)" in chosen.why
    assert "fastest on avx2 of what passes" in chosen.why
    assert choose(QUANTISED, dtype="int8").isa == "avx2"
    for kept in (choose(PLAIN), choose(QUANTISED, isa="avx512bf16")):
        assert kept.isa == "avx512bf16"
        assert "measured to be faster" not in kept.why
    # who names a level gets it
    machine.setenv("PACELINE_ISA", "avx512bf16")
    assert choose(QUANTISED).isa == "avx512bf16"


def test_a_lesser_level_does_not_count_by_what_it_may_not_take(machine: pytest.MonkeyPatch) -> None:
    """Its 4 bits are the fastest there are, and do not suit a table's file on this level."""
    fast = tuple(
        replace(pair, passes=True, steps_ms={"step": 0.5}) if pair.weights == "q4" else pair
        for pair in TABLE["avx2"]
    )
    machine.setattr(levels, "_table", lambda: TABLE | {"avx2": fast})
    chosen = choose(replace(PLAIN, stored_dtype="MXFP4"))
    assert (chosen.isa, names(chosen)) == ("avx512bf16", ("native", "gguf", "int8"))
    # where they suit, they decide
    assert choose(QUANTISED).isa == "avx2"


def test_one_of_two_is_chosen_beside_what_was_asked_for(machine: pytest.MonkeyPatch) -> None:
    chosen = choose(QUANTISED, dtype="int8", isa="avx2")
    assert names(chosen) == ("native", "int8", "int8")
    assert "; int8 in the KV cache because that is the fastest on avx2" in chosen.why
    chosen = choose(QUANTISED, kv_dtype="bfloat16")
    assert names(chosen) == ("native", "q4", "bfloat16")
    assert "; q4 weights by default for this file" in chosen.why
    assert "rounds less), because that is the fastest on avx512bf16" in chosen.why
    plain = choose(PLAIN, compute="native", dtype="float32")
    assert plain.why == "float32 in the KV cache as in the weights"
    # nothing left to choose, nothing to explain
    assert choose(QUANTISED, compute="native", dtype="q4", kv_dtype="int8").why == ""
    # whoever asks for what does not pass, or is not steady, gets it
    assert names(choose(QUANTISED, dtype="q4", isa="avx2")) == ("native", "q4", "int8")


def test_a_level_is_of_the_native_kernels_that_run_here(machine: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--isa avx10 does not run here; these do: avx512bf16, a"):
        choose(isa="avx10")
    with pytest.raises(ConfigError, match=r"--isa avx2 chooses native kernels.*PyTorch computes"):
        choose(isa="avx2", compute="torch")
    with pytest.raises(ConfigError, match="PyTorch computes: the native path runs on the CPU, not"):
        choose(isa="avx2", device="cuda:0")


@native
@pytest.mark.parametrize("isa", variants())
def test_a_model_is_computed_on_the_level_asked_for(llama_folder: Path, isa: str) -> None:
    backend = load(llama_folder, compute="auto", dtype="auto", block_size=16, isa=isa)
    assert f"native kernels for {isa}; " in backend.info.choice
    assert backend._runner is not None and isinstance(backend._runner.model, NativeStep)
    assert backend._runner.model.isa == isa
    backend.close()


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
        ({"dtype": "native"}, "--dtype native is now gguf"),
        ({"dtype": "int3"}, "native computes in float32, bfloat16, int8, q4, gguf, not int3"),
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
    from paceline.backends.native import NativeModel, NativeSettings
    from paceline.backends.native.step import native_block_bytes
    from tests.backends.native.reference import random_weights, rope_tables

    weights = random_weights(PLAIN, 0)
    for block_size in (16, 48):
        model = NativeModel(
            PLAIN,
            weights.items(),
            rope_tables(PLAIN, 64),
            NativeSettings(
                dtype="int8", kv_dtype=kv_dtype, num_blocks=2, block_size=block_size, threads=1
            ),
        )
        assert native_block_bytes(PLAIN, block_size, kv_dtype) == model.kv_bytes_per_block
        model.close()
