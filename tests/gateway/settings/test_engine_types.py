"""What engines tell of themselves: names as data, and what is missing is unknown."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.gateway.settings.engine_types import KINDS, kind_of_metrics, read_pressure, scan

VLLM = b"""# HELP vllm:num_requests_running Number of requests
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a b"} 3.0
vllm:num_requests_running{engine="1",model_name="a b"} 4.0
vllm:num_requests_waiting{engine="0"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:gpu_cache_usage_perc{engine="0"} 0.5
vllm:gpu_cache_usage_perc{engine="1"} 0.7
vllm:num_preemptions_total{engine="0"} 5.0 1395066363000
vllm:cache_config_info{block_size="16",num_gpu_blocks="100",x="}"} 1.0
"""
SGLANG = b'sglang:num_queue_reqs{m="x"} 7.0\nsglang:token_usage{m="x"} 0.25\n'
LLAMA = b"llamacpp:requests_deferred 1\nllamacpp:requests_processing 4\n"


def test_vllm_old_names_and_several_ranks() -> None:
    pressure = read_pressure(VLLM, KINDS["vllm"], 5.0)
    assert (pressure.running, pressure.waiting) == (7.0, 2.0)
    assert pressure.kv == pytest.approx(0.6)
    assert pressure.preemptions == 5.0 and pressure.capacity_tokens == 1600.0
    assert pressure.level is None and pressure.at == 5.0


def test_what_an_engine_does_not_say_is_unknown() -> None:
    pressure = read_pressure(LLAMA, KINDS["llama.cpp"], 0.0)
    assert (pressure.waiting, pressure.running) == (1.0, 4.0)
    assert pressure.kv is None and pressure.capacity_tokens is None
    removed = VLLM.replace(b"gpu_cache_usage_perc", b"renamed")
    assert read_pressure(removed, KINDS["vllm"], 0.0).kv is None


@pytest.mark.parametrize(
    ("text", "kind"),
    [(VLLM, "vllm"), (b"paceline:ready 1\n" + VLLM, "paceline"), (SGLANG, "sglang"),
     (LLAMA, "llama.cpp"), (b"up 1\n", None)],
)  # fmt: skip
def test_kinds_are_told_apart(text: bytes, kind: str | None) -> None:
    assert kind_of_metrics(text) == kind


@pytest.mark.parametrize("text", [VLLM, SGLANG, LLAMA])
def test_scanning_reads_what_parsing_does(text: bytes) -> None:
    # without a TYPE line each series is a family of its own to the parser
    families = text_string_to_metric_families(text.decode())
    samples = [sample for family in families for sample in family.samples]
    for name in {sample.name for sample in samples}:
        total = sum(sample.value for sample in samples if sample.name == name)
        assert scan(text, name) == pytest.approx(total)


def test_nonsense_is_no_number() -> None:
    assert scan(b"x{} oops\nx{} NaN\nx{} +Inf\nx\nxy 3\n", "x") is None
    assert scan(b"x 1", "x") == 1.0
