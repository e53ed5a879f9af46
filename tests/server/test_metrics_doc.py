"""docs/operate/metrics.md lists what is served, and what of vLLM's is not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from paceline.backends.reference.null import NullBackend
from paceline.engine.local import LocalEngineClient
from paceline.engine.process.loop import engine_info
from paceline.engine.testing import ByteTokenizer, null_core
from paceline.http.rate_limits.rates import KeyLimits
from paceline.http.rate_limits.store import RateStore
from paceline.server import ServerConfig, create_app
from paceline.server.app import service_of
from tests.server.helpers import VOCAB, scrape

DOC = (Path(__file__).parents[2] / "docs" / "operate" / "metrics.md").read_text()
# made once by hand from vLLM's own exposition: what its dashboards may ask for
VLLM = re.findall(
    r"\w+",
    """
num_requests_running num_requests_waiting num_requests_waiting_by_reason kv_cache_usage_perc
engine_sleep_state lora_requests_info cache_config_info num_preemptions prompt_tokens
generation_tokens request_success prefix_cache_queries prefix_cache_hits
external_prefix_cache_queries external_prefix_cache_hits mm_cache_queries mm_cache_hits
prompt_tokens_by_source prompt_tokens_cached corrupted_requests spec_decode_num_drafts
spec_decode_num_draft_tokens spec_decode_num_accepted_tokens
spec_decode_num_accepted_tokens_per_pos estimated_flops_per_gpu estimated_read_bytes_per_gpu
estimated_write_bytes_per_gpu time_to_first_token_seconds inter_token_latency_seconds
request_time_per_output_token_seconds time_per_output_token_seconds e2e_request_latency_seconds
request_queue_time_seconds request_inference_time_seconds request_prefill_time_seconds
request_decode_time_seconds iteration_tokens_total request_prompt_tokens
request_generation_tokens request_max_num_generation_tokens request_params_n
request_params_max_tokens request_prefill_kv_computed_tokens request_num_preemptions
kv_block_lifetime_seconds kv_block_idle_before_evict_seconds kv_block_reuse_gap_seconds
""",
)


def rows(heading: str) -> Iterator[list[str]]:
    """Cells of the tables under a heading, code marks taken off, up to the next heading."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", DOC, re.MULTILINE | re.DOTALL)
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            yield cells


async def test_every_family_is_listed_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    core = null_core(NullBackend(vocab_size=VOCAB))
    info = replace(engine_info(core, "null"), adapter_bytes=1)
    client = LocalEngineClient(core, info, ByteTokenizer())
    # everything that has metrics of its own
    monkeypatch.setattr(RateStore, "shared", True)
    limits = KeyLimits(concurrent=3)
    app = create_app(client, ServerConfig(price_per_hour=1.0, limits=limits, metrics_tenants=1))
    served = {
        f"`{family.name}`": [
            family.kind,
            ", ".join(
                f"`{label}`" for label in family.labels if label not in ("model_name", "engine")
            ),
            family.text,
        ]
        for family in service_of(app).metrics.families
    }
    await client.close()
    listed = {cells[0]: cells[1:] for cells in rows("Families")}
    assert listed == served


async def test_all_of_vllms_are_served_or_explained(http: httpx.AsyncClient) -> None:
    # the parser gives a counter's name without its _total, as the list above has it
    families = {f.name for f in text_string_to_metric_families(await scrape(http))}
    missing = {name for name in VLLM if f"vllm:{name}" not in families}
    explained = [name for cells in rows("Not served") for name in re.findall(r"`(\w+)`", cells[0])]
    assert missing == set(explained)
    assert all(cells[1] for cells in rows("Not served"))


async def test_the_text_is_what_prometheus_reads(http: httpx.AsyncClient) -> None:
    """With another library's parser: families whole, in one piece, each with help and type."""
    await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3})
    text = await scrape(http)
    heads = re.findall(r"^# TYPE (\S+) (\w+)$", text, flags=re.MULTILINE)
    assert len(heads) == len(set(heads)) == text.count("# HELP ")
    for family in text_string_to_metric_families(text):
        assert family.documentation
        assert family.type in ("counter", "gauge", "histogram", "summary")
        if family.type == "histogram":
            counts = {
                tuple(sorted(s.labels.items())): s.value
                for s in family.samples
                if s.name.endswith("_count")
            }
            infinite = {
                tuple(sorted((k, v) for k, v in s.labels.items() if k != "le")): s.value
                for s in family.samples
                if s.labels.get("le") == "+Inf"
            }
            assert counts == infinite
