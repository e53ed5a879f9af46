"""Which draft models are loaded, and what they take."""

from pathlib import Path
from typing import Any

import pytest

from paceline.backends.loading.memory_estimate import served_memory
from paceline.backends.machine.cpu import CPU_SHARE
from paceline.backends.native import unavailable_reason
from paceline.backends.reference.null import NullBackend
from paceline.engine.testing import null_core
from paceline.errors import ConfigError
from tests.backends.helpers import load_backend
from tests.backends.torch.models import save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("served")
    save_model(made, "llama")
    return made


def _load(folder: Path, draft: Path, **settings: Any) -> Any:
    asked = {"device": "cpu", "dtype": "float32", "num_blocks": 8, "threads": 1} | settings
    return load_backend(folder, draft_path=str(draft), **asked)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"vocab_size": 1185},
            r"has 1185 tokens and the served one 160, which is more than padding \(1024 at most\)",
        ),
        ({"max_position_embeddings": 100}, "has 100 positions and a request may have 256"),
    ],
)
def test_a_model_that_does_not_go_with_it_is_refused_with_the_numbers(
    folder: Path, tmp_path: Path, changes: dict[str, int], said: str
) -> None:
    save_model(tmp_path, "qwen2", **changes)
    with pytest.raises(ConfigError, match=said):
        _load(folder, tmp_path)


def test_a_model_in_the_same_weights_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="each would cost what a token does"):
        _load(folder, folder, draft_dtype="float32")
    with pytest.raises(ConfigError, match=r"the draft model .*: --dtype q4 needs --compute native"):
        _load(folder, folder, draft_dtype="q4")


@pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))
@pytest.mark.parametrize(
    ("served", "draft"), [("int8", "bfloat16"), ("int8", "int8"), ("q4", "int8")]
)
def test_a_model_in_no_fewer_bits_is_refused_with_the_numbers(
    folder: Path, served: str, draft: str
) -> None:
    said = rf"is served in {served} \(\d+\.\d MB .* be made in {draft} \(\d+\.\d MB\), which is not"
    with pytest.raises(ConfigError, match=said):
        _load(folder, folder, compute="native", dtype=served, draft_dtype=draft)
    # what takes less is served
    _load(folder, folder, compute="native", dtype="bfloat16", draft_dtype="int8").close()


@pytest.mark.parametrize("compute", ["torch", "native"])
def test_its_weights_are_counted(
    folder: Path, tmp_path: Path, compute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compute == "native" and unavailable_reason() is not None:
        pytest.skip(str(unavailable_reason()))
    save_model(tmp_path, "qwen2", num_hidden_layers=1)
    place = "torch.load" if compute == "torch" else "native.step"
    free = 12_000_000
    monkeypatch.setattr(f"paceline.backends.{place}.available_memory", lambda: free)
    backend = _load(folder, tmp_path, compute=compute, num_blocks=None, draft_dtype="float32")
    info = backend.info
    backend.close()
    weights = served_memory(tmp_path, dtype="float32").weight_bytes
    # as if it had a block less
    assert weights * CPU_SHARE > info.block_bytes
    assert info.num_blocks == int((free - weights) * CPU_SHARE) // info.block_bytes - 1


@pytest.mark.parametrize("compute", ["torch", "native"])
def test_its_cache_is_counted(folder: Path, tmp_path: Path, compute: str) -> None:
    if compute == "native" and unavailable_reason() is not None:
        pytest.skip(str(unavailable_reason()))
    save_model(tmp_path, "qwen2", num_hidden_layers=1)
    alone = {}
    for path in (folder, tmp_path):
        backend = load_backend(
            path, device="cpu", dtype="float32", num_blocks=8, threads=1, compute=compute
        )
        assert backend.info.drafter == ""
        alone[path] = backend.info.block_bytes
        backend.close()
    both = sum(alone.values())
    backend = _load(
        folder, tmp_path, compute=compute, num_blocks=None, kv_cache_bytes=10 * both,
        draft_dtype="float32",
    )  # fmt: skip
    info = backend.info
    backend.close()
    assert (info.block_bytes, info.num_blocks) == (both, 10)
    assert tmp_path.name in info.drafter and "float32" in info.choice


def test_a_backend_without_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="the backend null has none"):
        null_core(NullBackend(), speculative_config={"method": "self"})
    null_core(NullBackend(draft_wrong=()), speculative_config={"method": "self"}).close()
