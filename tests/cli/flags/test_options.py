"""Flags, their errors, and the settings they become."""

import argparse
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from paceline.backends.loading.settings import BackendSettings
from paceline.cli.flags.arguments import (
    Parser,
    bounded_float,
    bounded_int,
    byte_count,
    memory_size,
    shown_bytes,
    size_with_unit,
    weights_by_name,
)
from paceline.cli.flags.options import (
    add_admission_options,
    add_engine_options,
    add_model_argument,
    engine_settings,
)
from paceline.cli.flags.scheduling_options import ignored_flags
from paceline.cli.flags.server_options import slo_class
from paceline.cli.flags.settings import EngineSettings
from paceline.cli.main import build_parser
from paceline.cli.serve.command import _server_config
from paceline.core.config import SchedulerConfig
from paceline.core.slo import Slo
from paceline.errors import ConfigError

# flag -> a command that has it
UNIT_FLAGS = {"--kv-per-token": ("plan", "memory")} | dict.fromkeys(
    ("--max-body-size", "--max-header-size", "--timeline-history", "--max-file-size",
     "--batch-storage", "--packed-cache"),
    ("serve",),
)  # fmt: skip


def parser() -> Parser:
    made = Parser(prog="paceline test")
    add_model_argument(made)
    add_engine_options(made)
    add_admission_options(made)
    return made


def settings(*flags: str) -> EngineSettings:
    return engine_settings(parser().parse_args(["--backend", "null", *flags]))


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1073741824B", 2**30),
        ("1", 2**30),
        ("0.25", 2**28),
        ("2GiB", 2**31),
        ("1.5 gib", 3 * 2**29),
        ("512MiB", 2**29),
        ("100MB", 10**8),
        ("7b", 7),
    ],
)
def test_byte_count(text: str, count: int) -> None:
    assert byte_count(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "2 apples", "-1", "0", "0.1B", "1e9", "nan", "2GiB2"])
def test_byte_count_refuses(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        byte_count(text)


@pytest.mark.parametrize("text", ["1073741824", "2147483648"])
def test_a_number_that_looks_like_bytes_is_refused_with_both_sizes(text: str) -> None:
    """vLLM's ``--swap-space 4`` are 4 GiB; a script may have bytes."""
    with pytest.raises(argparse.ArgumentTypeError) as refused:
        memory_size(text)
    assert re.search(
        rf"{text} GiB is more than the [0-9.]+ GiB of this machine", str(refused.value)
    )
    assert f"write {text}B for bytes" in str(refused.value)
    assert memory_size(f"{text}GiB") == 2**30 * int(text) == byte_count(text)


@pytest.mark.parametrize("text", ["8", "0.5", " 64 "])
def test_a_size_that_is_not_of_memory_needs_a_unit(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"give a unit, .* {text.strip()}KiB"):
        size_with_unit(text)
    assert size_with_unit(f"{text}KiB") == byte_count(f"{text}KiB")


@pytest.mark.parametrize("flag", UNIT_FLAGS)
def test_flags_that_need_a_unit(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args([*UNIT_FLAGS[flag], flag, "8"])
    assert f"argument {flag}: give a unit" in capsys.readouterr().err


@pytest.mark.parametrize("count", [1, 1023, 2**10, 3 * 2**20, 5 * 2**30, 2**40, 10**9])
def test_shown_bytes_are_read_as_they_were(count: int) -> None:
    assert byte_count(shown_bytes(count)) == count


@pytest.mark.parametrize("text", ["0", "-3", "9", "1.5", "", "x"])
def test_bounded_int_refuses(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        bounded_int(1, 8)(text)


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "2.1", "x"])
def test_bounded_float_refuses(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        bounded_float(0.0, 2.0)(text)


@pytest.mark.parametrize("text", ["a", "a=", "=2", "a=0", "a=-1", "a=nan", "a=inf", "a=1,a=2"])
def test_weights_refuse(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        weights_by_name(text)
    assert weights_by_name("") == {}


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        (["--device", "cpu"], "device", "cpu"),
        (["--dtype", "float32"], "dtype", "float32"),
        (["--compute", "native"], "compute", "native"),
        (["--isa", "avx2"], "isa", "avx2"),
        (["--runner", "pooling"], "runner", "pooling"),
        (["--convert", "embed"], "convert", "embed"),
        (["--matryoshka-dimensions", "64,32"], "matryoshka_dimensions", (64, 32)),
        (["--packed-cache", "1GiB"], "packed_cache_bytes", 2**30),
        (["--kv-dtype", "int8"], "kv_dtype", "int8"),
        (["--max-model-len", "100"], "max_model_len", 100),
        (["--threads", "3"], "threads", 3),
        (["--numa", "off"], "numa", "off"),
        (["--numa", "01"], "numa", "1"),
        (["--numa", "4,1,0"], "numa", "0-1,4"),
        (["--null-step-time", "0.5"], "null_step_time", 0.5),
        (["--block-size", "32"], "block_size", 32),
        (["--num-blocks", "77"], "num_blocks", 77),
        (["--kv-cache-memory", "1MiB"], "kv_cache_bytes", 2**20),
        (["--no-enable-prefix-caching"], "enable_prefix_caching", False),
        (["--prefix-cache-memory", "1MiB"], "prefix_cache_bytes", 2**20),
        (["--watermark", "0.1"], "watermark", 0.1),
        (["--max-num-seqs", "4"], "max_num_seqs", 4),
        (["--max-num-batched-tokens", "512"], "max_num_batched_tokens", 512),
        (["--scheduling-policy", "priority"], "policy", "priority"),
        (["--priority-ageing", "5"], "priority_ageing_s", 5.0),
        (["--tenant-weights", "gold=3,b=c=0.5"], "tenant_weights", {"gold": 3.0, "b=c": 0.5}),
        (["--max-skip-ahead", "0"], "max_skip_ahead", 0),
        (["--max-skips", "2"], "max_skips", 2),
        (["--pipeline-depth", "1"], "pipeline_depth", 1),
        (
            ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}'],
            "speculative_config",
            {"method": "ngram", "num_speculative_tokens": 3},
        ),
        (["--best-effort-step-ms", "20"], "best_effort_step_s", 0.02),
        (["--max-token-gap-ms", "100"], "max_token_gap_s", 0.1),
        (["--max-token-gap-ms", "0"], "max_token_gap_s", None),
        (["--schedule-ahead-ms", "20"], "schedule_ahead_s", 0.02),
        (["--best-effort-share", "0.3"], "best_effort_share", 0.3),
        (["--best-effort-share", "0"], "best_effort_share", 0.0),
        (["--no-future-memory-check"], "future_memory_check", False),
        (["--no-pace-admission"], "pace_admission", False),
        (["--no-demote-late"], "demote_late", False),
        (["--preemption", "swap"], "preemption", "swap"),
        (["--swap-space", "1MiB"], "swap_bytes", 2**20),
        (["--swap-space", "1"], "swap_bytes", 2**30),
        (["--default-ttft-ms", "500"], "default_ttft_s", 0.5),
        (["--default-ttft-ms", "0"], "default_ttft_s", None),
        (["--default-tpot-ms", "50"], "default_tpot_s", 0.05),
        (["--max-num-waiting", "7"], "max_num_waiting", 7),
        (["--max-num-waiting", "0"], "max_num_waiting", None),
        (["--max-predicted-ttft", "7.5"], "max_predicted_ttft_s", 7.5),
        (["--queue-timeout", "70"], "queue_timeout_s", 70.0),
        (["--pressure-threshold", "0.5"], "pressure_threshold", 0.5),
    ],
)
def test_a_flag_sets_its_field_and_no_other(flags: list[str], field: str, value: object) -> None:
    plain = settings()
    changed = settings(*flags)
    assert changed.value(field) == value
    assert changed != plain
    assert changed.changed(**{field: plain.value(field)}) == plain


@pytest.mark.parametrize("text", ["on", "-1", "1.5", "0,", "1-0", "0-1,auto", "0-123456", "", " "])
def test_what_are_no_numa_nodes_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--numa", text])
    assert f"{text!r} must be auto, off or NUMA nodes such as 0 or 0-1,4" in capsys.readouterr().err


def test_what_a_server_does_unless_told_otherwise() -> None:
    plain = settings().scheduler
    assert plain.pressure_threshold == 1.0
    assert (plain.default_ttft_s, plain.default_tpot_s) == (1.0, 0.1)
    assert plain.policy == "deadline"
    assert plain.max_num_waiting == 2048
    assert plain.adaptive_token_budget and plain.demote_late
    assert plain.pace_admission and plain.future_memory_check
    assert plain.preemption == "auto"


def test_offline_work_is_never_refused() -> None:
    offline = Parser(prog="paceline test")
    add_model_argument(offline)
    add_engine_options(offline)
    made = engine_settings(offline.parse_args(["--backend", "null"])).scheduler
    assert made.max_num_waiting is made.max_predicted_ttft_s is made.queue_timeout_s is None
    assert made.pressure_threshold == 1.0
    assert made.default_ttft_s is made.default_tpot_s is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("chat=ttft:500,tpot:50", Slo(slo_class="chat", ttft=0.5, tpot=0.05)),
        ("nightly=best-effort", Slo(slo_class="nightly", best_effort=True)),
        ("a=deadline:1e4,queue_ttl:2000", Slo(slo_class="a", deadline=10.0, queue_ttl=2.0)),
        ("plain", Slo(slo_class="plain")),
    ],
)
def test_slo_classes(text: str, expected: Slo) -> None:
    assert slo_class(text) == expected


@pytest.mark.parametrize(
    "text", ["=ttft:5", "a=ttft", "a=soon:5", "a=ttft:x", "a=ttft:1e12", "a=ttft:5,ttft:6"]
)
def test_bad_slo_classes_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        slo_class(text)


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        (["--price-per-hour", "2.5"], "price_per_hour", 2.5),
        (
            ["--slo-class", "chat=ttft:500", "--slo-class", "night=best-effort"],
            "slo_classes",
            {
                "chat": Slo(slo_class="chat", ttft=0.5),
                "night": Slo(slo_class="night", best_effort=True),
            },
        ),
        (["--drain-timeout", "7"], "drain_timeout", 7.0),
        (["--sse-keep-alive", "7"], "sse_keep_alive", 7.0),
        (["--slow-reader-timeout", "7"], "slow_reader_timeout", 7.0),
        (["--max-body-size", "1MiB"], "max_body_bytes", 2**20),
        (["--served-model-name", "a", "b"], "served_model_names", ("a", "b")),
        (
            ["--served-model-name", "a", "--served-model-name", "b"],
            "served_model_names",
            ("a", "b"),
        ),
        (["--trust-request-chat-template"], "trust_request_chat_template", True),
        (["--tool-call-parser", "mistral"], "tool_call_parser", "mistral"),
        (["--otlp-endpoint", "http://here:4318"], "otlp_endpoint", "http://here:4318"),
    ],
)
def test_a_flag_of_the_server_sets_its_field_and_no_other(
    flags: list[str], field: str, value: object, tmp_path: Path
) -> None:
    made = []
    for each in ([], flags):
        base = ["serve", "--backend", "null", "--batch-dir", str(tmp_path)]
        args = build_parser().parse_args([*base, *each])
        made.append(_server_config(args, engine_settings(args), (), 1234))
    plain, changed = made
    assert getattr(changed, field) == value
    assert changed != plain
    assert replace(changed, **{field: getattr(plain, field)}) == plain


def test_every_setting_survives_json() -> None:
    changed = settings("--block-size", "8", "--num-blocks", "5", "--watermark", "0.5")
    assert EngineSettings.from_json(changed.to_json()) == changed


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"model_name": "x"}', b"\xff"])
def test_other_json_is_refused(data: bytes) -> None:
    with pytest.raises(ConfigError, match="engine settings"):
        EngineSettings.from_json(data)


def test_unknown_fields_are_refused() -> None:
    data = settings().to_json()
    assert EngineSettings.from_json(data)
    with pytest.raises(ConfigError, match="surprise"):
        EngineSettings.from_json(data[:-1] + b', "surprise": 1}')


def test_contradictions_name_both_sides() -> None:
    with pytest.raises(ConfigError, match=r"--num-blocks 5 and --kv-cache-memory 1MiB"):
        settings("--num-blocks", "5", "--kv-cache-memory", "1MiB")
    with pytest.raises(ConfigError, match="some-model"):
        settings("some-model")


def test_an_unknown_flag_is_one_line_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        parser().parse_args(["--max-model-length", "5"])
    assert raised.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "did you mean --max-model-len?" in error
    assert "paceline test --help" in error


@pytest.mark.parametrize("columns", ["80", "60"])
def test_help_fits_in_a_terminal(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    prose = "a paragraph that is as long as this one, and goes on in a second line\nwithout end"
    example = "  paceline top --json | jq .running      what " + "it is for " * 5
    command = "  paceline top " + "http://127.0.0.1:8000 " * 4
    made = Parser(prog="paceline", description=prose, epilog=f"examples:\n{example}\n{command}")
    lines = made.format_help().splitlines()
    assert [line for line in lines if len(line) > int(columns)] == [command]
    assert prose.replace("\n", " ") in " ".join(" ".join(lines).split())
    below = lines.index("  paceline top --json | jq .running") + 1
    assert lines[below].startswith("      what it is for") and "examples:" in lines


def test_help_that_fits_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = "one\ntwo, a line of its own\n\n  paceline top     watch it\n\nend"
    assert text in Parser(prog="paceline", epilog=text).format_help()


def test_a_mistyped_choice_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--scheduling-policy", "priorty"])
    assert "did you mean priority?" in capsys.readouterr().err


def test_a_prefix_of_a_flag_is_not_the_flag() -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--max-num-s", "5"])


def test_every_flag_is_explained() -> None:
    for action in parser()._actions:
        assert action.help, action.option_strings


def test_every_setting_can_be_set_or_comes_from_the_model() -> None:
    flags = vars(parser().parse_args([]))
    renamed = {"policy": "scheduling_policy", "priority_ageing_s": "priority_ageing"}
    renamed |= {
        "kv_cache_bytes": "kv_cache_memory",
        "packed_cache_bytes": "packed_cache",
        "coalesce_window_s": "coalesce_window_ms",
        "max_token_gap_s": "max_token_gap_ms",
        "default_ttft_s": "default_ttft_ms",
        "default_tpot_s": "default_tpot_ms",
    }
    renamed |= {
        "best_effort_share": "best_effort_share",
        "best_effort_step_s": "best_effort_step_ms",
        "schedule_ahead_s": "schedule_ahead_ms",
        "max_num_waiting": "max_num_waiting",
        "max_predicted_ttft_s": "max_predicted_ttft",
        "queue_timeout_s": "queue_timeout",
        "swap_bytes": "swap_space",
        "prefix_cache_bytes": "prefix_cache_memory",
    }
    # what the page shows is a matter of the server's flags
    elsewhere = {"model_name", "model_path", "log_level", "log_format", "record", "timeline"}
    # follows from the format and the cache
    elsewhere.add("weights_path")
    # set for an engine that replaces one
    elsewhere.add("numa_fallback")
    elsewhere |= {"load", "scheduler"}
    # follows from the model
    elsewhere.add("enable_chunked_prefill")
    # follows from --speculative-config
    elsewhere |= {"draft_path", "draft_dtype", "draft_mtp"}
    # follows from --preemption
    elsewhere.add("without_windows")
    # flags of serve alone, see test_adapter_options.py
    elsewhere |= {"enable_lora", "lora_bytes", "max_cpu_loras", "max_lora_rank", "lora_dtype"}
    elsewhere |= {"adapter_bytes", "max_adapters"}
    # the same, see tests/cli/serve/test_blocks.py
    elsewhere |= {"kv_store", "kv_store_bytes", "kv_port", "kv_host"}
    # of a server of several models, see serve/test_several.py
    elsewhere |= {"turn", "turn_weight", "cpus"}
    for part in (EngineSettings, BackendSettings, SchedulerConfig):
        for field in fields(part):
            if field.name not in elsewhere:
                assert renamed.get(field.name, field.name) in flags, field.name


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("", []),
        ("--priority-ageing 5", ["--priority-ageing has no effect with"]),
        ("--priority-ageing 5 --scheduling-policy priority", []),
        ("--tenant-weights a=2", ["--tenant-weights has no effect with"]),
        ("--tenant-weights a=2 --scheduling-policy fair", []),
        ("--max-token-gap-ms 100", []),
        ("--default-ttft-ms 500", []),
        ("--default-ttft-ms 500 --scheduling-policy fair", ["--default-ttft-ms has no effect"]),
        ("--max-token-gap-ms 100 --scheduling-policy fcfs", ["--max-token-gap-ms has no effect"]),
        ("--max-token-gap-ms 100 --no-adaptive-token-budget", ["with --no-adaptive-token-budget"]),
        ("--coalesce-size 3 --coalesce-window-ms 9", ["--coalesce-window-ms", "--coalesce-size"]),
    ],
)
def test_a_flag_that_changes_nothing_is_named(flags: str, said: list[str]) -> None:
    found = ignored_flags(settings(*flags.split()))
    assert len(found) == len(said)
    assert all(part in message for part, message in zip(said, found, strict=True))
