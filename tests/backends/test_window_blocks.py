"""Models whose window layers have blocks of their own, against transformers: through the scheduler,
in chunks, many at once, after preemption, with prefix hits and forks."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from paceline.backends.loading.load import WorkerBackend
from paceline.backends.loading.memory_estimate import served_memory
from paceline.backends.loading.plan import LoadPlan
from paceline.backends.loading.pool_sizes import choose_windows
from paceline.backends.loading.settings import BackendSettings, BatchLimits
from paceline.backends.native import unavailable_reason
from paceline.backends.native.step import NativeLoader, NativeStep
from paceline.backends.runner.interface import ModelLoader, PoolMemory
from paceline.checkpoints.open import open_checkpoint
from paceline.core.outputs import BlockSwap, RequestUpdate, WindowBlock
from paceline.core.request import Request
from paceline.errors import ConfigError
from paceline.sim.plan.memory import plan_memory
from tests.backends.conftest import load
from tests.backends.torch.models import VOCAB, save_model
from tests.driving import Driver, make_request
from tests.pooling.models import add_modules

NATIVE = pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))
# path -> tokens of a block, and a pool that two requests of 190 tokens do not fit into at once
PATHS = {"torch": (4, 70), "native": (16, 18)}
# what each path reads of a window of 7: the native kernels begin at pairs of tiles of 16
WINDOWS = {"torch": 7, "native": 7 + 31}
LENGTH = 208
CHUNK = 16
GREEDY = 64


def prompt(length: int, first: int = 11) -> list[int]:
    return [(i * 37 + first) % VOCAB for i in range(length)]


def ask(name: str, tokens: list[int], fork_of: str | None = None) -> Request:
    return make_request(name, tokens, GREEDY, fork_of=fork_of, temperature=0.0, logprobs=0)


class Told(Driver):
    """Keeps the log-probabilities too."""

    def __init__(self, backend: WorkerBackend, window: int, max_num_seqs: int) -> None:
        info = backend.info
        super().__init__(
            backend=backend,
            num_blocks=info.num_blocks,
            block_size=info.block_size,
            window=window,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=CHUNK,
            max_model_len=info.max_model_len,
            depth=2,
        )
        assert self.cache.window == info.window
        assert self.cache.num_window_blocks == info.num_window_blocks
        self.logprobs: dict[str, list[float]] = {}

    def _take(self, updates: Any) -> None:
        updates = tuple(updates)
        super()._take(updates)
        each: RequestUpdate
        for each in updates:
            found = self.logprobs.setdefault(each.request_id, [])
            found += [entry.logprob for entry in each.logprobs or ()]


def grouped(
    folder: Path, path: str, max_num_seqs: int, num_blocks: int, **settings: Any
) -> WorkerBackend:
    return load(
        folder,
        compute=path,
        block_size=PATHS[path][0],
        kv_cache_bytes=None,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=CHUNK,
        max_model_len=LENGTH,
        **settings,
    )


def check(model: Any, driver: Told, name: str, tokens: list[int]) -> None:
    """64 greedy ids, and log-probabilities within 1e-4."""
    output = driver.tokens[name]
    assert len(output) == GREEDY
    with torch.no_grad():
        logits = model(torch.tensor([tokens + output[:-1]])).logits[0, len(tokens) - 1 :].double()
    assert output == logits.argmax(dim=1).tolist()
    theirs = torch.log_softmax(logits, dim=1)[range(GREEDY), output].numpy()
    assert np.abs(np.array(driver.logprobs[name]) - theirs).max() < 1e-4


@pytest.mark.parametrize(
    ("name", "path"),
    [
        pytest.param("gemma3", "torch", marks=pytest.mark.thorough),
        pytest.param("gpt-oss", "torch", marks=pytest.mark.thorough),
        pytest.param("mistral-sliding", "torch", marks=pytest.mark.thorough),
        pytest.param("gemma3", "native", marks=NATIVE),
        pytest.param("mistral-sliding", "native", marks=NATIVE),
    ],
)
def test_tokens_are_those_of_transformers(name: str, path: str, tmp_path: Path) -> None:
    """Prompts around the window's edges at once, in chunks; again with their prefixes cached;
    forks; and two that preempt one another."""
    model = save_model(tmp_path, name, sliding_window=7)
    backend = grouped(tmp_path, path, 6, 400)
    driver, window = Told(backend, WINDOWS[path], 6), WINDOWS[path]
    lengths = sorted({1, 6, 7, 8, 10, window - 1, window, window + 3, 100, 133})
    for turn in range(2):
        for length in reversed(lengths) if turn else lengths:
            driver.add(ask(f"{length}/{turn}", prompt(length)))
        driver.run()
    for length in lengths:
        for turn in range(2):
            check(model, driver, f"{length}/{turn}", prompt(length))
    assert driver.finished["133/1"].num_cached_tokens >= 128
    for index in range(4):
        fork_of = "fork 0" if index else None
        driver.add(ask(f"fork {index}", prompt(50, first=5), fork_of))
    driver.run()
    for index in range(4):
        check(model, driver, f"fork {index}", prompt(50, first=5))
    assert any(given.source >= 0 for plan in driver.plans for given in plan.window_blocks)
    backend.close()
    backend = grouped(tmp_path, path, 2, PATHS[path][1])
    driver = Told(backend, WINDOWS[path], 2)
    for index in range(3):
        driver.add(ask(f"{index}", prompt(120 + index, first=index)))
    driver.run()
    for index in range(3):
        check(model, driver, f"{index}", prompt(120 + index, first=index))
    assert driver.scheduler.stats().num_preemptions > 0
    backend.close()


@pytest.mark.parametrize("path", ["torch", pytest.param("native", marks=NATIVE)])
def test_where_layers_keep_what_the_others_keep(path: str, tmp_path: Path) -> None:
    save_model(tmp_path, "gemma3")
    for num_blocks, settings, why in (
        (60, {"without_windows": "for a test"}, "of whole requests: for a test"),
        (60, {"swap_bytes": 1 << 20}, "host memory to swap to takes whole blocks (--swap-space)"),
        # no fewer than there are blocks
        (12, {}, "windows of --max-num-seqs 2 would take "),
    ):
        backend = grouped(tmp_path, path, 2, num_blocks, **settings)
        assert backend.info.num_window_blocks == backend.info.window == 0
        assert why in backend.info.choice
        backend.close()
    backend = grouped(tmp_path, path, 2, 60)
    assert backend.info.num_window_blocks > 0
    assert "sliding window" not in backend.info.choice, "what is as it should be is not told"
    backend.close()


@pytest.mark.parametrize("path", ["torch", pytest.param("native", marks=NATIVE)])
def test_beside_a_draft_model_they_keep_what_the_others_keep(path: str, tmp_path: Path) -> None:
    for name in ("served", "draft"):
        (tmp_path / name).mkdir()
        save_model(tmp_path / name, "gemma3")
    backend = grouped(tmp_path / "served", path, 2, 60, draft_path=str(tmp_path / "draft"))
    assert backend.info.num_window_blocks == 0
    assert "a draft model or head shares its blocks with the model" in backend.info.choice
    backend.close()


def test_a_pooled_model_has_none(tmp_path: Path) -> None:
    save_model(tmp_path, "gemma3")
    add_modules(tmp_path, "lasttoken", max_seq_length=LENGTH)
    backend = grouped(tmp_path, "torch", 2, 60)
    assert backend.info.pooling is not None and backend.info.num_window_blocks == 0
    assert "a pooled model has hidden states of whole prompts" in backend.info.choice
    backend.close()


@NATIVE
def test_the_native_model_refuses_what_window_blocks_do_not_go_with(tmp_path: Path) -> None:
    save_model(tmp_path, "gemma3")
    loader = NativeLoader(
        checkpoint=open_checkpoint(tmp_path), dtype="float32", kv_dtype="float32", block_size=16,
        max_model_len=64, threads=1,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="5 window blocks do not go with 2 host blocks"):
        loader.load(8, 2, 5)
    with pytest.raises(ConfigError, match="5 window blocks do not go with hidden states"):
        replace(loader, has_head=False).load(8, 0, 5)
    windowed, plain = loader.load(8, 0, 5).model, loader.load(8, 0).model
    assert isinstance(windowed, NativeStep) and isinstance(plain, NativeStep)
    with pytest.raises(ConfigError, match=r"destination blocks\[0\] is 8, must be 0 to 7"):
        windowed.swap_blocks([BlockSwap(0, 0, True)])
    for served, draft in ((windowed, plain), (plain, windowed)):
        with pytest.raises(AssertionError, match="a draft has no window blocks"):
            draft.mirror(served, np.array([0]))
    plain.mirror(plain, np.array([0]))
    with pytest.raises(AssertionError, match="it was loaded without window blocks"):
        plain.place([WindowBlock(0, 0, -1)])
    plain.place([])


@dataclass(frozen=True)
class Sizes:
    """The parts of a ``ModelLoader`` that window blocks depend on: Gemma 3 1B in bfloat16."""

    block_bytes: int = 26 * 16 * 1024
    window_block_bytes: int = 22 * 16 * 1024
    window: int = 512
    free_bytes: int = 0


@dataclass(frozen=True)
class Plan:
    """The parts of a ``LoadPlan`` that window blocks depend on."""

    settings: BackendSettings
    limits: BatchLimits
    max_model_len: int = 32768
    pooling: None = None


def choose(loader: Sizes, sizes: tuple[int, int], **settings: Any) -> tuple[int, int, int]:
    """Blocks without, window blocks, and blocks beside these."""
    asked = BackendSettings(**settings)
    size = asked.kv_cache_bytes or loader.free_bytes // 2
    without = asked.num_blocks or size // loader.block_bytes
    memory, plan = PoolMemory(loader.free_bytes, 0.5), Plan(asked, BatchLimits(*sizes))
    found = choose_windows(
        cast("LoadPlan", plan), cast("ModelLoader", loader), memory, without, drafted=False
    )
    assert (found.why == "") == (found.num_window_blocks > 0 or not loader.window)
    return without, found.num_window_blocks, found.num_blocks


def test_memory_is_divided_so_that_more_tokens_fit() -> None:
    loader = Sizes()
    without, windows, blocks = choose(loader, (32, 2048), kv_cache_bytes=4 << 30)
    # a window of 512, 32 guesses, a block's rest and one to begin with; a step of 2,048
    assert windows == 32 * 36 + 128
    of_others = loader.block_bytes - loader.window_block_bytes
    taken = windows * loader.window_block_bytes + blocks * of_others
    assert (4 << 30) - of_others < taken <= 4 << 30
    assert blocks > 5.5 * without


def test_what_is_measured_is_divided_likewise() -> None:
    assert choose(Sizes(), (32, 2048), kv_cache_bytes=4 << 30)[1:] == pytest.approx(
        choose(Sizes(free_bytes=8 << 30), (32, 2048))[1:], abs=1
    )


@NATIVE
def test_free_memory_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What blocks and window blocks are divided of is one reading; there is no second here."""
    save_model(tmp_path, "gemma3", sliding_window=40, max_position_embeddings=4096)
    readings = [256 << 20]
    monkeypatch.setattr("paceline.backends.native.step.available_memory", readings.pop)
    backend = load(
        tmp_path, compute="native", block_size=16, kv_cache_bytes=None, max_num_seqs=20,
        max_model_len=4096,
    )  # fmt: skip
    assert backend.info.num_window_blocks > 0 and not readings
    backend.close()


def test_no_window_blocks_where_nothing_is_gained() -> None:
    without, windows, _ = choose(Sizes(), (256, 2048), kv_cache_bytes=2 << 30)
    assert (windows, without < 256 * 36 + 128) == (0, True)
    assert choose(Sizes(window=0), (2, 2048), kv_cache_bytes=4 << 30)[1] == 0
    # as many blocks as were asked for, and less memory for them
    assert choose(Sizes(), (2, 256), num_blocks=1000) == (1000, 2 * 36 + 16, 1000)
    # without layers beside them blocks are numbers: all that two requests can use
    all_windows = Sizes(window_block_bytes=Sizes.block_bytes)
    assert choose(all_windows, (2, 256), kv_cache_bytes=64 << 20)[1:] == (88, 2 * 2048)


@NATIVE
def test_memory_is_planned_as_it_is_served(tmp_path: Path) -> None:
    save_model(tmp_path, "gemma3", sliding_window=40, max_position_embeddings=4096)
    memory = served_memory(tmp_path)
    size = 64 << 20
    backend = load(
        tmp_path, compute="native", dtype=memory.dtype, kv_dtype=memory.kv_dtype, block_size=16,
        kv_cache_bytes=size, max_num_seqs=20, max_model_len=4096,
    )  # fmt: skip
    info = backend.info
    backend.close()
    plan = plan_memory(
        memory_bytes=size,
        weight_bytes=0,
        utilization=1.0,
        kv_bytes_per_token=memory.kv_bytes_per_token,
        max_len=4096,
        mean_len=1000,
        window=memory.window,
        window_bytes_per_token=memory.window_bytes_per_token,
        max_num_seqs=20,
    )
    assert (plan.num_blocks, plan.num_window_blocks) == (info.num_blocks, info.num_window_blocks)
    assert info.num_window_blocks > 0 and info.num_blocks > 4096 // 16
    assert plan.window_bytes == info.num_window_blocks * info.window_block_bytes
    alone = plan_memory(
        memory_bytes=size,
        weight_bytes=0,
        utilization=1.0,
        kv_bytes_per_token=memory.kv_bytes_per_token,
        max_len=4096,
        mean_len=1000,
    )
    assert plan.num_blocks > 2 * alone.num_blocks and plan.paged == min(20, plan.paged)
