"""What is built from settings, and what is refused before a model is loaded."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.cli.flags.settings import EngineSettings
from paceline.cli.serve.engine_process import build
from paceline.cli.wiring import (
    build_backend,
    build_core,
    build_tokenizer,
    choose_max_model_len,
    default_sampling,
    idle_blocks,
)
from paceline.core.backend import BackendInfo
from paceline.core.request import Request, RequestSpec
from paceline.core.sampling_params import SamplingParams
from paceline.errors import ConfigError, NeverFitsError
from paceline.server.settings.config import ServerConfig
from tests.backends.torch.models import save_model
from tests.checkpoints.builders import write_gguf

NULL = EngineSettings.of(model_name="null", model_path=None, backend="null", num_blocks=8)


def info(**changes: object) -> BackendInfo:
    values = BackendInfo(
        name="test",
        vocab_size=10,
        max_model_len=1000,
        block_size=16,
        num_blocks=8,
        block_bytes=2**20,
        dtype="float32",
        device="cpu",
    )
    return replace(values, **changes)  # type: ignore[arg-type]


def test_idle_prefixes_hold_as_much_as_the_model_and_256_mib_beside_a_small_one(
    tmp_path: Path,
) -> None:
    small, large = tmp_path / "small.gguf", tmp_path / "large"
    small.write_bytes(b"x")
    large.mkdir()
    for name in ("model-1.safetensors", "model-2.safetensors", "notes.txt"):
        with (large / name).open("wb") as file:
            # sparse: nothing is written
            file.truncate(200 * 2**20)
    model = NULL.changed(backend="torch", model_path=str(small))
    # blocks of 1 MiB
    assert idle_blocks(model, info()) == 256
    assert idle_blocks(model.changed(model_path=str(large)), info()) == 400
    assert idle_blocks(model.changed(prefix_cache_bytes=5 * 2**20), info()) == 5
    # memory of a GPU is taken at once, the null backend's never
    assert idle_blocks(model, info(device="cuda:0")) is None
    assert idle_blocks(NULL, info()) is None


@pytest.mark.parametrize(("limit", "found"), [(None, 8), (2 * 4 * 8, 0)])
def test_the_limit_on_idle_prefixes_reaches_the_pool(limit: int | None, found: int) -> None:
    # room for two blocks of the null backend's 8 bytes a token: two of a prompt's three are cached
    core, _ = build(NULL.changed(block_size=4, prefix_cache_bytes=limit).to_json())
    try:
        for number, first in enumerate((0, 20, 40, 0)):
            prompt = list(range(first, first + 9))
            core.add_request(
                Request(
                    RequestSpec(
                        request_id=f"{number}",
                        prompt_token_ids=prompt,
                        sampling=SamplingParams(max_tokens=1),
                        arrival_time=0.0,
                    )
                )
            )
            while core.has_work:
                core.step()
        # the first prompt came again after two others
        assert core.scheduler.stats().prefix_cache_hits == found
    finally:
        core.close()


def test_auto_length_is_the_model_or_the_pool() -> None:
    # 8 blocks of 16 hold 128 tokens; the 129th is sampled and never stored
    assert choose_max_model_len(None, info()) == 129
    assert choose_max_model_len(None, info(num_blocks=1000)) == 1000


def test_an_explicit_length_must_fit() -> None:
    assert choose_max_model_len(129, info()) == 129
    with pytest.raises(ConfigError, match=r"--max-model-len 130 needs 9 KV blocks.*pool has 8"):
        choose_max_model_len(130, info())
    with pytest.raises(ConfigError, match="exceeds the model's 1000 positions"):
        choose_max_model_len(1001, info(num_blocks=1000))


def test_start_up_and_admission_agree() -> None:
    """The longest length that start-up chooses is admitted and runs to its end; one more is not."""
    core, engine = build_core(NULL)
    try:

        def request(name: str, max_tokens: int) -> Request:
            return Request(
                RequestSpec(
                    request_id=name,
                    prompt_token_ids=[1],
                    sampling=SamplingParams(max_tokens=max_tokens),
                    arrival_time=0.0,
                )
            )

        with pytest.raises(NeverFitsError):
            core.add_request(request("long", engine.max_model_len))
        core.add_request(request("fits", engine.max_model_len - 1))
        tokens = 0
        while core.has_work:
            tokens += sum(len(update.new_token_ids) for update in core.step())
        assert tokens == engine.max_model_len - 1
        core.check_integrity()
    finally:
        core.close()


@pytest.mark.parametrize("config", [None, {"method": "off"}])
def test_tokens_are_guessed_unless_that_is_turned_off(config: dict[str, str] | None) -> None:
    settings = NULL if config is None else NULL.changed(speculative_config=config)
    core, _ = build_core(settings)
    # the null model says 0 for ever after 0
    sampling = SamplingParams(max_tokens=60)
    spec = RequestSpec(request_id="r", prompt_token_ids=[0], sampling=sampling, arrival_time=0.0)
    core.add_request(Request(spec))
    while core.has_work:
        core.step()
    stats = core.stats()
    core.close()
    assert bool(stats.num_accepted_tokens) is (config is None)


def test_settings_reach_the_engine() -> None:
    settings = NULL.changed(
        block_size=4,
        max_num_seqs=3,
        max_num_batched_tokens=7,
        policy="priority",
        enable_prefix_caching=False,
        max_model_len=20,
        watermark=0.25,
        priority_ageing_s=9.0,
        max_skip_ahead=2,
        max_skips=5,
        adaptive_token_budget=False,
        coalesce_window_s=0.7,
        coalesce_size=11,
        best_effort_share=0.13,
    )
    core, engine = build(settings.to_json())
    try:
        scheduler, cache = core.scheduler.config, core.scheduler.cache
        assert (cache.block_size, cache.num_blocks, cache.watermark) == (4, 8, 0.25)
        assert not cache.enable_prefix_caching
        assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == (3, 7)
        assert (scheduler.policy, scheduler.priority_ageing_s) == ("priority", 9.0)
        assert (scheduler.max_skip_ahead, scheduler.max_skips) == (2, 5)
        assert not scheduler.adaptive_token_budget
        assert (scheduler.coalesce_window_s, scheduler.coalesce_size) == (0.7, 11)
        assert scheduler.best_effort_share == 0.13
        assert scheduler.max_model_len == engine.max_model_len == 20
        assert engine.model == "null"
    finally:
        core.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_num_batched_tokens": 8, "max_num_seqs": 9}, "max_num_batched_tokens=8"),
        ({"max_model_len": 9000}, "8192 positions"),
        ({"max_model_len": 500}, "pool has 8"),
        ({"policy": "shortest"}, "shortest"),
        ({"device": "cuda"}, "--device cuda"),
        ({"dtype": "float32"}, "--dtype float32"),
        ({"kv_dtype": "int8"}, "--kv-dtype int8 has no effect"),
        ({"threads": 2}, "--threads 2"),
        ({"isa": "avx2"}, "--isa avx2 has no effect"),
        ({"numa": "off"}, "--numa off has no effect"),
        ({"num_blocks": None, "kv_cache_bytes": 100}, "100B is too small for a block"),
        ({"pipeline_depth": 0}, "pipeline_depth"),
        ({"backend": "tensor"}, "tensor"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_core(NULL.changed(**changes))


def test_what_is_said_of_guesses_is_checked_with_the_settings() -> None:
    with pytest.raises(ConfigError, match=r"speculative_config: method must be one of .*'oracle'"):
        NULL.changed(speculative_config={"method": "oracle"})


def test_contradictions_are_found_before_the_model_is_loaded() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens=1"):
        EngineSettings.of(
            model_name="m", model_path="/no/such/model", max_num_batched_tokens=1, max_num_seqs=2
        )


def test_memory_in_bytes_sizes_the_pool() -> None:
    backend = build_backend(NULL.changed(num_blocks=None, kv_cache_bytes=1280))
    # 8 bytes a token, 16 tokens a block
    assert backend.info.num_blocks == 10
    backend.close()


def test_null_speaks_bytes() -> None:
    tokenizer = build_tokenizer(NULL)
    assert tokenizer.encode("hi", add_special_tokens=False) == [104, 105]
    backend = build_backend(NULL)
    assert backend.info.vocab_size == tokenizer.vocab_size
    backend.close()


def test_only_the_engine_process_loads_torch() -> None:
    """What `serve` imports in the API process, and what `--help` imports."""
    code = """
import sys
{imports}
assert "torch" not in sys.modules, "torch was loaded"
{more}
"""
    for imports, more in (
        (
            "import paceline.cli.serve.command, paceline.cli.wiring\n"
            "import paceline.engine.process.client",
            "",
        ),
        (
            "from paceline.cli.main import build_parser; build_parser().format_help()",
            "heavy = {'numpy', 'msgspec', 'zmq', 'fastapi', 'asyncio', 'tqdm'} & set(sys.modules)\n"
            "assert not heavy, heavy",
        ),
    ):
        subprocess.run([sys.executable, "-c", code.format(imports=imports, more=more)], check=True)


def test_the_default_model_is_sampled_as_the_catalogue_says(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf")
    known = EngineSettings.of(model_name="smollm2-135m", model_path=str(file))
    assert default_sampling(known) == {
        "temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.05,
    }  # fmt: skip
    assert default_sampling(known.changed(model_name=str(file))) == {}
    assert default_sampling(NULL) == {}
    # it is a valid default of a server
    ServerConfig(default_sampling=default_sampling(known))


def test_a_model_with_windows_has_window_blocks_unless_requests_are_swapped(tmp_path: Path) -> None:
    save_model(tmp_path, "gemma3", sliding_window=40)
    settings = EngineSettings.of(
        model_name="m", model_path=str(tmp_path), backend="torch", kv_cache_bytes=8 << 20,
        max_num_seqs=4, max_num_batched_tokens=64, threads=1,
    )  # fmt: skip
    core, engine = build_core(settings)
    cache, windows, num_blocks = core.scheduler.cache, engine.num_window_blocks, engine.num_blocks
    assert cache.num_window_blocks == windows > 0 == cache.num_host_blocks
    assert cache.window == core.info.window >= 40
    # six of seven layers have them
    assert engine.window_bytes == windows * core.info.block_bytes * 6
    size = engine.num_blocks * engine.block_bytes + engine.window_bytes
    assert (8 << 20) - engine.block_bytes < size <= 8 << 20
    core.close()
    core, engine = build_core(settings.changed(preemption="swap"))
    assert engine.num_window_blocks == engine.window_bytes == core.scheduler.cache.window == 0
    assert core.scheduler.cache.num_host_blocks > 0
    assert "of whole requests: --preemption swap moves whole blocks" in engine.choice
    assert 3 * engine.num_blocks < num_blocks, "fewer tokens fit"
    core.close()


def test_a_timeline_is_told_where_it_was_asked_for_and_is_absent_otherwise(tmp_path: Path) -> None:
    silent, _ = build_core(NULL.changed(speculative_config={"method": "off"}))
    assert silent.timeline is None and silent._recorder is None
    silent.close()
    told, _ = build_core(NULL.changed(timeline=True, speculative_config={"method": "off"}))
    assert told.timeline is not None and told._recorder is told.timeline
    told.close()
    # beside a recording, which goes on as it did
    path = tmp_path / "r.jsonl"
    both, _ = build_core(NULL.changed(timeline=True, record=str(path)))
    both.add_request(
        Request(
            RequestSpec(
                request_id="r/0",
                prompt_token_ids=[1, 2, 3],
                sampling=SamplingParams(max_tokens=2),
                arrival_time=0.0,
            )
        )
    )
    while both.has_work:
        both.step()
    assert both.timeline is not None and both.timeline.take(0.0, idle=True)
    both.close()
    assert '"request": "r/0"' in path.read_text() or '"request":"r/0"' in path.read_text()
