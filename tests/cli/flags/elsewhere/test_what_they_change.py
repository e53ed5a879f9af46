"""What flags change that Paceline has for the sake of other servers' users."""

import json
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.front_door.stand_in import write_model
from paceline.backends.loading.pool_sizes import bounded_memory
from paceline.backends.runner.interface import PoolMemory
from paceline.cli.flags.options import chat_template
from paceline.cli.flags.settings import EngineSettings
from paceline.cli.wiring import build_core, build_tokenizer, default_sampling
from paceline.errors import ConfigError
from paceline.server.generation.service import _seeds
from paceline.server.protocol.requests import parse_chat
from tests.checkpoints.builders import write_gguf
from tests.cli.servers import start_server
from tests.driving import Driver, make_request
from tests.server.helpers import chat_body
from tests.server.protocol.test_requests import RULES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("stand-in") / "model")


def of(folder: Path, **changes: Any) -> EngineSettings:
    return EngineSettings.of(model_name="m", model_path=str(folder), **changes)


def test_a_template_and_a_tokenizer_replace_the_models(folder: Path, tmp_path: Path) -> None:
    said = [{"role": "user", "content": "hi"}]
    assert build_tokenizer(of(folder)).render_chat(said) == "user: hi\nassistant: "
    own = of(folder, chat_template="<{{ messages[0].content }}>")
    assert build_tokenizer(own).render_chat(said) == "<hi>"
    other = write_model(tmp_path / "other")
    config = other / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": "</s>", "chat_template": "other"}))
    assert build_tokenizer(of(folder, tokenizer=str(other))).render_chat(said) == "other"


def test_where_a_template_is_from(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{{ 1 }}")
    assert chat_template(str(file)) == "{{ 1 }}"
    assert chat_template("{% if x %}") == "{% if x %}"
    assert "<|im_start|>" in (chat_template("chatml") or "")
    with pytest.raises(ConfigError, match="--chat-template llama3 is no file"):
        chat_template("llama3")


def test_sampling_defaults_are_the_checkpoints_unless_told(folder: Path, tmp_path: Path) -> None:
    assert default_sampling(of(folder)) == {}
    own = {"temperature": 0.6, "top_p": 0.9, "eos_token_id": 3}
    (tmp_path / "generation_config.json").write_text(json.dumps(own))
    there = of(folder, generation_config=str(tmp_path))
    assert default_sampling(there) == {"temperature": 0.6, "top_p": 0.9}
    assert default_sampling(there.changed(override_generation_config={"top_p": 0.5})) == {
        "temperature": 0.6, "top_p": 0.5,
    }  # fmt: skip
    alias = EngineSettings.of(model_name="smollm2-135m", model_path=str(tmp_path / "m.gguf"))
    assert default_sampling(alias.changed(generation_config="vllm")) == {}
    with pytest.raises(ConfigError, match="does not know temprature; it sets temperature, top_p"):
        default_sampling(there.changed(override_generation_config={"temprature": 1}))
    with pytest.raises(ConfigError, match=r"no generation_config\.json is there"):
        default_sampling(of(folder, generation_config=str(folder)))


def test_sampling_defaults_of_a_gguf_file_are_its_own(tmp_path: Path) -> None:
    keys = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20}
    file = write_gguf(tmp_path / "m.gguf", change=keys)
    assert default_sampling(of(file)) == {"temperature": 0.6, "top_k": 20}
    assert default_sampling(of(write_gguf(tmp_path / "plain.gguf"))) == {}


def test_a_share_of_memory_holds_weights_and_pool(folder: Path) -> None:
    size = (folder / "model.safetensors").stat().st_size
    memory = PoolMemory(10 * size, 0.25)

    def left(share: float | None) -> PoolMemory:
        settings = SimpleNamespace(gpu_memory_utilization=share)
        plan: Any = SimpleNamespace(settings=settings, path=folder)
        return bounded_memory(plan, memory)

    assert left(None) == memory
    assert left(0.5) == PoolMemory(4 * size, 1.0)
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization=0\.05 of .* is less than"):
        left(0.05)


@pytest.mark.parametrize("chunked", [True, False])
def test_without_chunks_a_prompt_is_one_row(chunked: bool) -> None:
    driver = Driver(
        max_num_batched_tokens=40, max_num_seqs=4, max_model_len=40, num_blocks=256,
        adaptive_token_budget=False, enable_chunked_prefill=chunked,
    )  # fmt: skip
    driver.add(*(make_request(f"r{n}", range(n, n + 30), 4) for n in range(3)))
    driver.run()
    widths = [row.num_tokens for plan in driver.plans for row in plan.rows if row.num_tokens > 1]
    assert (widths == [30, 30, 30]) is not chunked, widths
    settings = EngineSettings.of(max_num_batched_tokens=40, max_num_seqs=4)
    settings = settings.changed(enable_chunked_prefill=chunked)
    core, info = build_core(settings)
    core.close()
    assert info.max_model_len == (8192 if chunked else 40)
    if not chunked:
        with pytest.raises(ConfigError, match="50 exceeds --max-num-batched-tokens 40"):
            build_core(settings.changed(max_model_len=50))


def test_draws_follow_the_seed_and_template_arguments_are_defaults() -> None:
    first, second = _seeds(3), _seeds(3)
    assert [first() for _ in range(5)] == [second() for _ in range(5)]
    assert _seeds(None)() != _seeds(None)()
    rules = replace(RULES, draw_seed=lambda: 77, template_kwargs={"a": 1, "b": 2})
    asked = chat_body(chat_template_kwargs={"b": 3})
    parsed = parse_chat(asked, rules)
    assert parsed.options.sampling.seed == 77
    assert parsed.template.template_kwargs == {"a": 1, "b": 3}
    assert parse_chat(asked | {"seed": 5}, rules).options.sampling.seed == 5


def test_a_server_with_flags_of_others(folder: Path) -> None:
    flags = (str(folder), "--api-key", "key-one-1", "key-two-2", "--disable-log-requests",
             "--temp", "0.3",
             "--dtype", "half", "--trust-remote-code", "-ngl", "99")  # fmt: skip
    with start_server(*flags) as server:
        assert "--dtype half is served as bfloat16" in server.ready_line

        def ask(key: str, path: str, body: dict[str, Any] | None = None) -> Any:
            request = urllib.request.Request(
                f"{server.address}{path}",
                None if body is None else json.dumps(body).encode(),
                {"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
            )
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.load(answer)

        (card,) = ask("key-one-1", "/v1/models")["data"]
        assert card["default_sampling"] == {"temperature": 0.3}
        assert ask("key-two-2", "/v1/chat/completions", chat_body(max_tokens=2))["usage"]
        with pytest.raises(urllib.error.HTTPError, match="401"):
            ask("key-six-6", "/v1/models")
        server.stop()
        told = "".join(server.errors)
    assert "flag given=--trust-remote-code here=accepted, and no code" in told
    assert "flag given=-ngl 99 here=always the case" in told
    assert "request id=" not in told and "key-one-1" not in told
