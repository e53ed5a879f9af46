"""Loading, sizing and the life of a backend."""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from paceline.backends.loading.load import WorkerBackend, load_backend
from paceline.backends.loading.pool_sizes import host_blocks
from paceline.backends.loading.settings import BackendSettings
from paceline.backends.native import unavailable_reason
from paceline.backends.runner.interface import ModelLoader
from paceline.backends.torch.attention import block_bytes
from paceline.backends.torch.linear import DenseLinear, Linear, PackedLinear, make_linear
from paceline.backends.torch.weights import load_weights
from paceline.checkpoints.gguf.checkpoint import GGUFCheckpoint
from paceline.checkpoints.model.checkpoint import Checkpoint
from paceline.checkpoints.model.config import ModelConfig
from paceline.checkpoints.open import open_checkpoint
from paceline.core.backend import ModelBackend
from paceline.errors import CheckpointError, ConfigError
from tests.backends.conftest import load
from tests.backends.plans import Plans
from tests.backends.torch.models import VOCAB, save_model
from tests.checkpoints.builders import write_gguf

PROMPT = [(i * 37 + 11) % VOCAB for i in range(45)]


def test_info(llama: WorkerBackend) -> None:
    assert isinstance(llama, ModelBackend)
    info = llama.info
    # 3 layers, keys and values, 4 positions, 2 heads of 16 floats
    assert info.block_bytes == 3 * 2 * 4 * 2 * 16 * 4
    assert info.num_blocks == (1 << 20) // info.block_bytes
    assert (info.name, info.dtype, info.device) == ("torch", "float32", "cpu")
    assert (info.vocab_size, info.block_size, info.max_model_len) == (VOCAB, 4, 256)


def test_two_backends_in_one_process(tmp_path: Path, llama: WorkerBackend) -> None:
    """Other model, other block size, other dtype, steps in turn and at the same time."""
    save_model(tmp_path, "qwen3", num_hidden_layers=2)
    other = load(tmp_path, block_size=7, threads=1)
    expected = [Plans(llama).generate(PROMPT, 10).output, Plans(other).generate(PROMPT, 10).output]
    assert expected[0] != expected[1]
    both = [Plans(llama), Plans(other)]
    for plans in both:
        plans.add("same id", PROMPT)
    for _ in range(10):
        steps = []
        for plans in both:
            sequence = plans.sequences["same id"]
            plan = plans.plan({"same id": len(sequence.tokens) - sequence.computed})
            steps.append((plans, plan, plans.backend.execute(plan)))
        for plans, plan, future in steps:
            plans.take(plan, future.result(60))
    assert [plans.release("same id").output for plans in both] == expected
    other.close()
    # closing one leaves the other alone
    assert both[0].generate(PROMPT, 10).output == expected[0]


@pytest.mark.skipif(unavailable_reason() is not None, reason="native kernels are lacking")
def test_four_bits_of_a_file_that_has_more_name_the_command(tmp_path: Path) -> None:
    # heads of 16 dimensions, rows of whole groups
    save_model(tmp_path / "m2.5", "llama", hidden_size=96, intermediate_size=128)
    said = {}
    for dtype in ("q4", "int8"):
        backend = load(
            tmp_path / "m2.5",
            compute="native",
            dtype=dtype,
            kv_dtype="int8",
            threads=1,
            block_size=16,
        )
        said[dtype] = backend.info.choice
        backend.close()
    assert "q4 rounds each weight of a file in float32 by itself" in said["q4"]
    assert "KL of 0.3 nats a token on a model of 135M" in said["q4"]
    assert f"paceline quantize {tmp_path / 'm2.5'} -o m2.5-q4.gguf" in said["q4"]
    assert "quantize" not in said["int8"]


@pytest.mark.skipif(unavailable_reason() is not None, reason="native kernels are lacking")
def test_what_takes_long_in_a_load_is_done_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path, "llama", hidden_size=96, intermediate_size=128)
    threads: dict[str, str] = {}

    def noted(name: str) -> None:
        from paceline.backends.native import step

        work = getattr(step, name)

        def do(*given: object) -> object:
            threads[name] = threading.current_thread().name
            return work(*given)

        monkeypatch.setattr(step, name, do)

    for name in ("choose_kinds", "rotary_tables"):
        noted(name)

    T = TypeVar("T")

    def beside(work: Callable[[], T], /) -> T:
        with ThreadPoolExecutor(1, thread_name_prefix="beside") as thread:
            return thread.submit(work).result()

    settings = BackendSettings(
        device="cpu", dtype="int8", compute="native", threads=1, kv_cache_bytes=1 << 20
    )
    backend = load_backend(tmp_path, settings, max_num_seqs=8, beside=beside)
    backend.close()
    assert threads == {"choose_kinds": "beside_0", "rotary_tables": "beside_0"}


class _Lender:
    """A turn whose owner lends it in each step, for 50 ms."""

    def __init__(self) -> None:
        self.wanted, self.lent = ctypes.c_int64(1), 0.0

    def offer(self) -> None:
        time.sleep(0.05)
        self.lent, self.wanted.value = 0.05, 0

    def __enter__(self) -> Callable[[], float]:
        return lambda: self.lent

    def __exit__(self, *_: object) -> None: ...


@pytest.mark.skipif(unavailable_reason() is not None, reason="native kernels are lacking")
@pytest.mark.parametrize("compute", ["native", "torch"])
def test_seconds_that_a_step_lends_are_not_its_own(tmp_path: Path, compute: str) -> None:
    save_model(tmp_path, "llama", hidden_size=96, intermediate_size=128)
    backend, lender = load(tmp_path, compute=compute, block_size=16), _Lender()
    expected = Plans(backend).generate(PROMPT, 4).output
    address = ctypes.addressof(lender.wanted)
    slices = backend.hand_over(address, lender.offer, 0.0)
    assert slices == (3 if compute == "native" else 1)
    backend.take_turns(lender)
    plans = Plans(backend)
    plans.add("r", PROMPT)
    began = time.monotonic()
    plan = plans.plan({"r": len(PROMPT)})
    result = backend.execute(plan).result(60)
    whole = time.monotonic() - began
    # by the torch path nothing is lent
    assert lender.lent == (0.05 if compute == "native" else 0.0)
    assert 0 < result.elapsed <= whole - lender.lent
    plans.take(plan, result)
    assert plans.sequences["r"].tokens[len(PROMPT)] == expected[0]
    backend.close()


def test_close(llama_folder: Path) -> None:
    backend = load(llama_folder)
    plans = Plans(backend)
    plans.add("a", PROMPT)
    future = backend.execute(plans.plan({"a": 45}))
    before = {thread.name for thread in threading.enumerate()}
    backend.close()
    assert future.done()
    assert len(future.result().sampled[0]) == 1
    backend.close()
    assert any(name.startswith("paceline-model") for name in before)
    with pytest.raises(RuntimeError, match="closed"):
        backend.execute(plans.plan({}))


def test_a_broken_plan_fails_its_future_only(llama: WorkerBackend) -> None:
    plans = Plans(llama)
    plans.add("a", PROMPT).sent = True  # never announced
    with pytest.raises(KeyError):
        llama.execute(plans.plan({"a": 3})).result(60)
    assert len(Plans(llama).generate(PROMPT, 2).output) == 2


def test_bfloat16_agrees_with_float32(llama_folder: Path, llama: WorkerBackend) -> None:
    backend = load(llama_folder, dtype="bfloat16")
    assert backend.info.dtype == "bfloat16"
    assert backend.info.block_bytes * 2 == llama.info.block_bytes
    for prompt in (PROMPT, PROMPT[:3]):
        exact = Plans(llama).generate(prompt, 1, logprobs=20).logprobs[0]
        rough = dict(Plans(backend).generate(prompt, 1, logprobs=20).logprobs[0].top)
        for token, value in exact.top[:5]:
            assert rough[token] == pytest.approx(value, abs=0.15)
    backend.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 257}, r"max_model_len=257 is not in 1 to 256"),
        ({"max_model_len": 0}, r"max_model_len=0"),
        ({"block_size": 0}, r"block_size must be at least 1, got 0"),
        ({"max_num_seqs": 0}, r"max_num_seqs must be at least 1, got 0"),
        ({"kv_cache_bytes": 100}, r"takes 3072 bytes, and there are kv_cache_bytes=100"),
        ({"dtype": "int3"}, r"dtype 'int3' is not supported"),
        ({"device": "tpu"}, r"device 'tpu' is not supported"),
        ({"device": "cuda:77"}, r"cuda:77.*sees \d+ CUDA devices"),
        ({"threads": 0}, r"threads must be at least 1"),
        (
            {"packed_cache_bytes": 2**30, "compute": "torch"},
            r"--packed-cache changes nothing with torch compute",
        ),
    ],
)
def test_settings_that_cannot_be(
    settings: dict[str, object], message: str, llama_folder: Path
) -> None:
    before = threading.active_count()
    with pytest.raises(ConfigError, match=message):
        load(llama_folder, **settings)
    assert threading.active_count() == before


def test_positions_that_memory_has_no_room_for(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 of them, cosine and sine of 8 angles each; a file may claim two thousand million."""
    monkeypatch.setattr("paceline.backends.loading.plan.available_memory", lambda: 16_383)
    with pytest.raises(ConfigError, match=r"tables of 256 positions take 0 MiB.*smaller max_model"):
        load(llama_folder)
    load(llama_folder, max_model_len=255).close()


def test_no_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing"):
        load(tmp_path / "nothing")


def test_an_engine_keeps_no_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[GGUFCheckpoint] = []
    monkeypatch.setattr(GGUFCheckpoint, "forget_vocabulary", lambda self: forgotten.append(self))
    load(write_gguf(tmp_path / "m.gguf")).close()
    assert len(forgotten) == 1


class Tampered:
    """A checkpoint whose tensor ``name`` is something else when it is read."""

    def __init__(self, inner: Checkpoint, name: str, shape: tuple[int, ...]) -> None:
        self._inner, self._name, self._shape = inner, name, shape
        self.num_released = 0

    @property
    def path(self) -> Path:
        return self._inner.path

    @property
    def config(self) -> ModelConfig:
        return self._inner.config

    def tensor(self, name: str) -> NDArray[np.float32]:
        if name == self._name:
            return np.zeros(self._shape, dtype=np.float32)
        return self._inner.tensor(name)

    def release(self) -> None:
        self.num_released += 1
        self._inner.release()


def test_shapes_are_checked_when_read(llama_folder: Path) -> None:
    inner = open_checkpoint(llama_folder)
    cpu = torch.device("cpu")
    source = Tampered(inner, "model.norm.weight", (48,))
    good = load_weights(source, dtype=torch.float32, device=cpu)
    assert len(good.layers) == 3
    # each tensor before the next one is read
    assert source.num_released == len(inner.tensor_names())
    name = "model.layers.1.self_attn.k_proj.weight"
    with pytest.raises(
        CheckpointError, match=rf"{name} has shape \[48, 32\], its config implies \[32, 48\]"
    ):
        load_weights(Tampered(inner, name, (48, 32)), dtype=torch.float32, device=cpu)


# as ``make_linear`` asks; on other processors packing raises
PACKS_BFLOAT16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()


@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (PackedLinear, torch.float32),
        pytest.param(
            PackedLinear,
            torch.bfloat16,
            marks=pytest.mark.skipif(
                not PACKS_BFLOAT16,
                reason="needs avx512bw, avx512vl and avx512dq: oneDNN packs no bfloat16 without",
            ),
        ),
        (DenseLinear, torch.float32),
        (DenseLinear, torch.bfloat16),
        (make_linear, torch.float32),
        (make_linear, torch.bfloat16),
    ],
)
def test_every_linear_is_linear(make: Callable[..., Linear], dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(50, 33), torch.randn(50), torch.randn(rows, 33)
    weight, bias, x = weight.to(dtype), bias.to(dtype), x.to(dtype)
    exact = x.double() @ weight.double().T
    tolerance = 1e-4 if dtype is torch.float32 else 0.15
    with torch.inference_mode():
        for linear, expected in (
            (make(weight), exact),
            (make(weight, bias), exact + bias.double()),
        ):
            torch.testing.assert_close(linear(x).double(), expected, atol=tolerance, rtol=0)


def test_weights_are_packed_where_the_processor_can() -> None:
    weight = torch.randn(50, 33)
    assert isinstance(make_linear(weight), PackedLinear)
    expected = PackedLinear if PACKS_BFLOAT16 else DenseLinear
    assert isinstance(make_linear(weight.bfloat16()), expected)
    assert isinstance(make_linear(weight.double()), DenseLinear)


def test_block_bytes_counts_every_layer(llama_folder: Path) -> None:
    config = open_checkpoint(llama_folder).config
    assert block_bytes(config, 16, torch.bfloat16) == 3 * 2 * 16 * 2 * 16 * 2


@dataclass(frozen=True)
class Sizes:
    """The parts of a ``ModelLoader`` that sizes depend on."""

    block_bytes: int
    max_host_bytes: float


@pytest.mark.parametrize(
    ("max_host_bytes", "swap_bytes", "expected"),
    [
        # half of 11 blocks
        (math.inf, None, 5),
        (10_000.0, None, 5),
        # no more than the loader takes unasked
        (4_999.0, None, 4),
        (999.0, None, 0),
        # what is asked for is taken
        (4_999.0, 7_999, 7),
        (math.inf, 20_000, 20),
        (math.inf, 0, 0),
    ],
)
def test_blocks_to_swap_to(max_host_bytes: float, swap_bytes: int | None, expected: int) -> None:
    loader = cast("ModelLoader", Sizes(1000, max_host_bytes))
    settings = BackendSettings(num_blocks=11, swap_bytes=swap_bytes)
    assert host_blocks(settings, loader, 11) == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_agrees_with_the_processor(llama_folder: Path, llama: WorkerBackend) -> None:
    backend = load(llama_folder, device="cuda")
    expected = Plans(llama).generate(PROMPT, 12).output
    assert Plans(backend).generate(PROMPT, 12).output == expected
    plans = Plans(backend)
    for index in range(5):
        plans.add(f"{index}", PROMPT[: 45 - index], temperature=float(index % 2), seed=index)
    plans.run(until=12, chunk=13)
    assert plans.sequences["0"].output == expected
    backend.close()
