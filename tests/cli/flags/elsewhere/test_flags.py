"""Flags of vLLM and llama-server, and Ollama's variables, on the command line of ``serve``."""

import importlib.util
import shlex
from pathlib import Path
from typing import Any

import pytest

from benchmarks.front_door.commands import commands
from paceline.cli.flags.elsewhere import ASK, SERVE
from paceline.cli.flags.elsewhere.ollama import VARIABLES
from paceline.cli.flags.explicit_flags import given_flags
from paceline.cli.main import build_parser

ROOT = Path(__file__).parents[4]
# refused by name: formats, parsers and devices that are not here
REFUSED = 7


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def parsed(line: str) -> Any:
    return build_parser(("serve",)).parse_args(["serve", *shlex.split(line)])


def refusal(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        parsed(line)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    return told


@pytest.mark.parametrize(
    ("line", "settings"),
    [
        ("--dtype half", {"dtype": "bfloat16"}),
        ("--kv-cache-dtype fp8", {"kv_dtype": "int8"}),
        ("--quantization fp8", {"dtype": "int8"}),
        ("--max_model_len 32k", {"max_model_len": 32_000}),
        ("--max-model-len 4K --max_num_seqs=8", {"max_model_len": 4096, "max_num_seqs": 8}),
        ("--scheduling-policy fifo", {"scheduling_policy": "fcfs"}),
        ("--scheduling-policy static", {"scheduling_policy": "static"}),
        ("-nocb", {"scheduling_policy": "static"}),
        ("--no-cont-batching", {"scheduling_policy": "static"}),
        ("--cont-batching -cb", {"scheduling_policy": "deadline"}),
        ("--swap-space 4", {"swap_space": 4 * 2**30}),
        ("--kv-cache-memory-bytes 1000000", {"kv_cache_memory": 1_000_000}),
        ("--task embed", {"runner": "pooling", "convert": "embed"}),
        ("--enable-chunked-prefill=False", {"enable_chunked_prefill": False}),
        ("--enable-prefix-caching", {"enable_prefix_caching": True}),
        ("--no-enable-prefix-caching", {"enable_prefix_caching": False}),
        ("--disable-log-requests", {"enable_log_requests": False}),
        ("--uvicorn-log-level warning", {"enable_log_requests": False}),
        ("""--allowed-origins '["https://a.org", "*"]'""", {"cors_origin": ["https://a.org", "*"]}),
        ("--no-async-scheduling", {"pipeline_depth": 1}),
        ("-m m.gguf -c 0 -np 4 -t 3", {"model_flag": "m.gguf", "max_num_seqs": 4, "threads": 3}),
        ("-c 0", {"max_model_len": None}),
        ("-ngl 0", {"device": "cpu"}),
        ("-ctk q8_0 -ctv q8_0", {"kv_dtype": "int8"}),
        ("-a one,two", {"served_model_name": ["one", "two"]}),
        ("--api-key a b", {"api_key": ["a", "b"]}),
        ("-s 7", {"seed": 7}),
        ("--no-webui -v", {"ui": False, "log_level": "debug"}),
        ("--numa distribute", {"numa": "off"}),
        ("--temp 0.6 --top-k 20 -n 64", {
            "override_generation_config": {"temperature": 0.6, "top_k": 20, "max_new_tokens": 64}
        }),
        # ours wins over theirs, whatever comes first
        ("""--override-generation-config '{"top_p": 1}' --top-p 0.5""",
         {"override_generation_config": {"top_p": 1}}),
        ("--temp 0.5 -- m.gguf", {
            "model": "m.gguf", "override_generation_config": {"temperature": 0.5}
        }),
        ("--quantization fp8 --dtype half", {"dtype": "int8"}),
        ("-a one m.gguf", {"model": "m.gguf", "served_model_name": ["one"]}),
        ("m.gguf --offline", {"offline": True}),
        ("--no-context-shift", {}),
        ("-md d.gguf", {"speculative_config": {"model": "d.gguf"}}),
        ("-fa on --jinja --mlock --keep 0 -ot a=CPU", {}),
    ],
)  # fmt: skip
def test_a_flag_becomes_one_of_ours(line: str, settings: dict[str, Any]) -> None:
    args = parsed(line)
    assert {name: getattr(args, name) for name in settings} == settings


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--dtype half", ("--dtype half", "served as bfloat16")),
        ("--trust-remote-code", ("--trust-remote-code", "no code of a checkpoint is run")),
        ("--enforce-eager", ("--enforce-eager", "always the case: there are no CUDA graphs")),
        ("--pipeline-parallel-size 1", ("--pipeline-parallel-size 1", "1 is the only value here")),
        ("-ngl 99", ("-ngl 99", "always the case: the whole model is on one device")),
        ("--load-format auto", ("--load-format auto", "always the case: the files say")),
    ],
)
def test_what_is_so_already_is_in_the_start_log(line: str, said: tuple[str, str]) -> None:
    (note,) = parsed(line).elsewhere
    assert note.given == said[0] and said[1] in note.here
    assert parsed("--dtype bfloat16 -c 5").elsewhere == ()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--quantization modelopt", "leave it out for the format of the model's files"),
        ("-pp 2", "start one server for each device"),
        ("--mmproj x.gguf", "pictures are not taken"),
        ("-ctk q4_0", "q8_0 (--kv-dtype int8) is the smallest"),
        ("--no-jinja", "cannot be turned off here"),
        ("--context-shift", "--context-shift: a context that is full ends the answer"),
        ("-ctk q8_0 -ctv f16", "-ctk and -ctv differ, and are one setting here"),
        ("--enable-prefix-caching=flase", "'flase' is not true or false"),
        (
            "--chat-template-content-format openai",
            "'openai' is not served here: templates get text",
        ),
        ("-ngl many", "-ngl: 'many' is not a number of layers, auto or all"),
        ("--swap-space 4294967296", "write 4294967296B for bytes or 4294967296GiB"),
        ("--response-role bot", "'bot' is not served here"),
        ("--port", "expected one argument"),
        ("-c", "-c needs a value"),
        ("--sed 5", "unrecognized arguments: --sed (did you mean --seed?)"),
        ("--lookahead 5", "unrecognized arguments: --lookahead - see"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refusal(line, capsys)


@pytest.mark.parametrize(
    ("variable", "settings"),
    [
        ("OLLAMA_HOST=0.0.0.0", {"host": "0.0.0.0", "port": 11434}),
        ("OLLAMA_HOST=http://[::1]:5000", {"host": "::1", "port": 5000}),
        ("OLLAMA_HOST=:8080", {"host": "127.0.0.1", "port": 8080}),
        ("OLLAMA_CONTEXT_LENGTH=4096", {"max_model_len": 4096}),
        ("OLLAMA_NUM_PARALLEL=3", {"max_num_seqs": 3}),
        ("OLLAMA_NUM_PARALLEL=0", {"max_num_seqs": 256}),
        ("OLLAMA_MAX_QUEUE=9", {"max_num_waiting": 9}),
        ("OLLAMA_ORIGINS=app://*,https://a.org", {"cors_origin": ["app://*", "https://a.org"]}),
        ("OLLAMA_KV_CACHE_TYPE=q8_0", {"kv_dtype": "int8"}),
        ("OLLAMA_DEBUG=1", {"log_level": "debug"}),
        ("OLLAMA_LLM_LIBRARY=cpu_avx2", {"device": "cpu", "isa": "avx2"}),
    ],
)
def test_a_variable_is_a_default(
    variable: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(*variable.split("=", 1))
    args = parsed("")
    assert {name: getattr(args, name) for name in settings} == settings
    assert all(variable in note.given for note in args.elsewhere)
    # flags win
    assert parsed("--port 1 --max-num-seqs 5").port == 1


def test_a_flag_leaves_its_variable_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_ORIGINS", "*")
    monkeypatch.setenv("OLLAMA_NUM_PARALLEL", "3")
    args = parsed("--allowed-origins https://a.org -np 5")
    assert (args.cors_origin, args.max_num_seqs) == (["https://a.org"], 5)
    assert not args.elsewhere


def test_a_variable_that_cannot_be_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OLLAMA_HOST", "https://0.0.0.0")
    assert "OLLAMA_HOST in the environment" in refusal("", capsys)


def test_the_commands_of_the_list_are_read_or_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """What reading alone can tell; ``make bench NAME=front_door`` starts them."""
    refused = []
    for command in commands():
        with monkeypatch.context() as patch:
            for name, value in command.environment.items():
                patch.setenv(name, value)
            words = command.arguments("m.gguf", str(tmp_path))
            try:
                build_parser((words[0],)).parse_args(words)
            except SystemExit:
                refused.append(capsys.readouterr().err)
    assert len(refused) == REFUSED, refused
    assert not any("unrecognized" in told for told in refused)


def test_run_takes_flags_between_model_and_prompt() -> None:
    line = ["run", "m.gguf", "--think=false", "--keepalive", "5m", "Why", "--temperature", "0"]
    args = build_parser(("run",)).parse_args(line)
    assert (args.model, args.prompt, args.think, args.temperature) == (
        "m.gguf", ["Why"], "false", 0.0,
    )  # fmt: skip
    assert build_parser(("run",)).parse_args(["run", "--verbose"]).stats
    args = build_parser(("run",)).parse_args(["run", "m.gguf", "--think", "Why is it blue?"])
    assert (args.prompt, args.think) == (["Why is it blue?"], "true")


def test_a_key_is_not_shown_on_the_page() -> None:
    parser = build_parser(("serve",))
    serve = parser._command("serve")
    (shown,) = given_flags(serve, parsed("--api-key hush"))
    assert shown.flag == "--api-key" and "hush" not in shown.value


def test_a_token_is_not_repeated_where_it_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    told = refusal("--hf-token=hf_hush", capsys)
    assert "set HF_TOKEN in the environment" in told and "hush" not in told


def test_a_key_is_not_repeated_where_its_flag_is_unknown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for line in ("--api-keys=hush", "m.gguf --api-keys hush"):
        told = refusal(line, capsys)
        assert "unrecognized arguments: --api-keys" in told and "hush" not in told


def test_help_begins_with_what_people_use(capsys: pytest.CaptureFixture[str]) -> None:
    def told(word: str) -> str:
        with pytest.raises(SystemExit) as ended:
            build_parser(("serve",)).parse_args(["serve", word])
        assert ended.value.code == 0
        return capsys.readouterr().out

    first, everything = told("--help"), told("--help=all")
    assert len(first.splitlines()) < 120 < len(everything.splitlines())
    assert "--max-model-len" in first and "--stall-timeout" not in first
    assert "--stall-timeout" in everything
    assert "--max-model-len" in told("--help=context")
    assert "--block-size" in told("--help=kv-cache") and "--host" not in told("--help=kv-cache")
    assert "no flag and no group has 'zz'" in told("--help=zz")


def test_the_page_lists_every_row() -> None:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "scripts" / "flag_tables.py")
    assert spec is not None and spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    page = tables.PAGE.read_text(encoding="utf-8")
    assert tables.page_of(page) == page, "make api-tables renews them"
    for name in SERVE.names | ASK.names:
        assert f"`{name}`" in page or name.startswith("--no-"), name
