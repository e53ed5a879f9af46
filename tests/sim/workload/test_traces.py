"""Every format is recognised and read, and a bad row says where it is and what was expected."""

from __future__ import annotations

import gzip
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from paceline.sim.arrival import Arrival
from paceline.sim.recording import Recording
from paceline.sim.workload.base import WorkloadError
from paceline.sim.workload.traces import open_trace, read_lengths
from tests.engine.test_recorder import run as record

SAMPLES = Path(__file__).parents[4] / "shared/traces"
needs_samples = pytest.mark.skipif(not SAMPLES.is_dir(), reason=f"no trace samples in {SAMPLES}")


def write(folder: Path, *lines: str) -> Path:
    path = folder / "trace"
    path.write_text("\n".join(lines) + "\n")
    return path


def read(path: Path, **options: Any) -> list[Arrival]:
    return list(open_trace(path, **options).arrivals())


@pytest.mark.parametrize(
    "stamps",
    [
        # 2023: local times with seven digits; 2024: a zone
        ("2023-11-16 18:01:51.9216270", "2023-11-16 18:01:53.4216270"),
        ("2024-05-10 00:00:00.009930+00:00", "2024-05-10 00:00:01.509930+00:00"),
        ("17.25", "18.75"),
    ],
)
def test_azure(tmp_path: Path, stamps: tuple[str, str]) -> None:
    path = write(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        f"{stamps[0]},4808,10",
        f"{stamps[1]},7,1",
    )
    assert open_trace(path).format == "azure"
    first, second = read(path)
    assert (first.at, first.prompt_tokens, first.output_tokens) == (0.0, 4808, 10)
    assert second.at == pytest.approx(1.5)


def test_burstgpt_leaves_failed_requests_out(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
        "5,ChatGPT,472,18,490,Conversation log",
        "45,GPT-4,1087,0,1087,API log",
        "118,GPT-4,417,276,693,Conversation log",
    )
    assert open_trace(path).format == "burstgpt"
    assert read(path) == [
        Arrival(0.0, 472, 18, model="ChatGPT"),
        Arrival(113.0, 417, 276, model="GPT-4"),
    ]


def test_arena_clients_are_tenants(tmp_path: Path) -> None:
    path = write(tmp_path, "arrived_at_s,client,prompt_tokens,output_tokens", "0.5,7,13,199")
    assert read(path) == [Arrival(0.0, 13, 199, tenant="7")]


def test_lengths_have_no_times(tmp_path: Path) -> None:
    path = write(tmp_path, "num_prefill_tokens,num_decode_tokens,total", "3772,54,3826", "1,2,3")
    trace = open_trace(path)
    assert (trace.format, trace.timeless) == ("lengths", True)
    assert read_lengths(path) == [(3772, 54), (1, 2)]


def test_mooncake_hashes_are_the_prefix(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 3000, "input_length": 1030, "output_length": 6, "hash_ids": [4, 9, 11]},
        {"timestamp": 6000, "input_length": 512, "output_length": 1, "hash_ids": [4]},
    ]
    trace = open_trace(write(tmp_path, *map(json.dumps, rows)))
    assert (trace.format, trace.prefix_block) == ("mooncake", 512)
    assert list(trace.arrivals()) == [
        Arrival(0.0, 1030, 6, prefix=(4, 9, 11)),
        Arrival(3.0, 512, 1, prefix=(4,)),
    ]


# as the dataset's page shows its lines, but for the values
BAILIAN = {
    "chat_id": 7,
    "parent_chat_id": -1,
    "timestamp": 12.5,
    "input_length": 40,
    "output_length": 9,
    "type": "text",
    "turn": 1,
    "hash_ids": [3, 1, 4],
}


def lines(folder: Path, *stamps: float, **fields: object) -> Path:
    """A trace of JSON lines, as Mooncake has them unless ``fields`` say otherwise."""
    row = {"input_length": 40, "output_length": 9} | fields
    return write(folder, *(json.dumps(row | {"timestamp": stamp}) for stamp in stamps))


def test_bailian_is_in_seconds_and_small_blocks(tmp_path: Path) -> None:
    path = write(tmp_path, *(json.dumps(BAILIAN | {"timestamp": at}) for at in (12.5, 15, 21.25)))
    trace = open_trace(path)
    assert (trace.format, trace.prefix_block, trace.doubt()) == ("bailian", 16, "")
    assert list(trace.arrivals()) == [
        Arrival(at, 40, 9, prefix=(3, 1, 4)) for at in (0.0, 2.5, 8.75)
    ]
    assert read_lengths(path) == [(40, 9)] * 3
    # one that was converted
    assert read(path, unit="ms")[1].at == pytest.approx(0.0025)


@pytest.mark.parametrize(("unit", "of_a_second"), [("s", 1), ("ms", 1e3), ("us", 1e6), ("ns", 1e9)])
def test_units_and_blocks_that_are_named(tmp_path: Path, unit: str, of_a_second: float) -> None:
    moments = (1.7e9, 1.7e9 + 2.5)
    path = lines(tmp_path, *(at * of_a_second for at in moments), hash_ids=[1, 2, 3, 4, 5])
    trace = open_trace(path, unit=unit, block=8)
    assert trace.prefix_block == 8 and trace.doubt() == ""
    assert [arrival.at for arrival in trace.arrivals()] == pytest.approx([0, 2.5], abs=1e-6)
    table = write(tmp_path, AZURE, *(f"{at * of_a_second:.0f},4,5" for at in (1.7e9, 1.7e9 + 3)))
    assert [arrival.at for arrival in read(table, unit=unit)] == pytest.approx([0, 3], abs=1e-6)


def test_stamps_of_another_unit_are_no_load_of_a_thousand_times(tmp_path: Path) -> None:
    """Refused where they can be of no other, and else told with the numbers."""
    refused = [
        (lambda: lines(tmp_path, 0, 10.5, 20.5), r"trace:2: timestamp is 10.5.* say unit=s"),
        (lambda: lines(tmp_path, 1700000000, 1700000010), "moment of our time in seconds.*unit=s"),
        (lambda: lines(tmp_path, 17 * 10**14), "in microseconds, not in milliseconds: say unit=us"),
        (lambda: write(tmp_path, AZURE, "1700000000000,1,1"), "in milliseconds.* say unit=ms"),
        (lambda: write(tmp_path, AZURE, "1.7e18,1,1"), "in nanoseconds, not in seconds"),
        (
            lambda: write(tmp_path, *[json.dumps(BAILIAN | {"timestamp": 1.7e12})]),
            "in milliseconds, not in seconds: say unit=ms",
        ),
        (lambda: lines(tmp_path, 0, hash_ids=[1, 2, 3]), "40 tokens are at most 1 .*say block=16"),
    ]
    for path, said in refused:
        with pytest.raises(WorkloadError, match=said):
            read(path())
    # a moment of our time in the format's own unit, or one that was named
    assert len(read(lines(tmp_path, 1700000000000, 1700000009000))) == 2
    assert len(read(lines(tmp_path, 0, 10.5, 20.5), unit="ms")) == 3
    assert open_trace(lines(tmp_path, *range(0, 900, 60))).doubt() == (
        "15 requests come in 0.84 s, 16.6667 a second, if stamps are milliseconds; they may be "
        "seconds"
    )
    table = write(tmp_path, AZURE, *(f"{400 * n},1,1" for n in range(5)))
    assert "5 requests come in 1600 s, 0.0025 a second" in open_trace(table).doubt()
    assert open_trace(lines(tmp_path, *range(0, 900, 60)), unit="ms").doubt() == ""
    # times that nothing is said against, dates, and none at all
    for text in (
        lambda: lines(tmp_path, 0, 800, 3000),
        lambda: lines(tmp_path, 0, 0, 0),
        lambda: write(tmp_path, AZURE, "0,1,1", "3,1,1"),
        lambda: write(tmp_path, AZURE, "2024-05-10 00:00:00,1,1", "2024-05-11 00:00:00,1,1"),
        lambda: write(tmp_path, "prompt_tokens,output_tokens", "1,1", "2,2"),
    ):
        assert open_trace(text()).doubt() == ""


def test_units_and_blocks_of_what_has_none_are_refused(tmp_path: Path) -> None:
    record(tmp_path / "run.jsonl")
    dates = write(tmp_path, AZURE, "2024-05-10 00:00:00,1,1")
    for path, options, said in (
        (dates, {"unit": "ms"}, "unit= is of numbers, and this trace has dates"),
        (dates, {"block": 16}, "block= is of hash_ids, and azure has none"),
        (dates, {"unit": "h"}, "unit is 'h'; known are s, ms, us, ns"),
        (tmp_path / "run.jsonl", {"unit": "s"}, "a recording says itself"),
    ):
        with pytest.raises(WorkloadError, match=said):
            open_trace(path, **options)


def test_lengths_need_no_unit_and_no_block(tmp_path: Path) -> None:
    path = lines(tmp_path, 0, 10.5, hash_ids=[1, 2, 3])
    assert read_lengths(path) == [(40, 9)] * 2
    assert [a.at for a in open_trace(path, timed=False, block=16).arrivals()] == [0, 0]


def test_our_own_recordings(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record(path)
    trace = open_trace(path)
    assert trace.format == "recording"
    assert [(a.prompt_tokens, a.output_tokens) for a in trace.arrivals()] == [
        (a.prompt_tokens, a.output_tokens) for a in Recording.read(path).workload()
    ]
    assert read_lengths(path)


AZURE = "arrived_at_s,prompt_tokens,output_tokens"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ((AZURE, "0,1,1", "1,two,3"), "trace:3: prompt_tokens is 'two', expected a whole number"),
        ((AZURE, "0,1,1", "1,2.5,3"), "trace:3: prompt_tokens is '2.5', expected a whole number"),
        ((AZURE, "0,1,-4"), "trace:2: output_tokens is '-4', expected a whole number"),
        ((AZURE, "0,nan,4"), "trace:2: prompt_tokens is 'nan'"),
        ((AZURE, "0,1,1", "1,2"), "trace:3: has 2 columns, expected 3"),
        ((AZURE, "0,1,1,", "1,1,024,7"), "trace:3: has 4 columns, expected 3"),
        ((AZURE, "noon,1,1"), "trace:2: arrived_at_s is 'noon', expected seconds or a date"),
        ((AZURE, "inf,1,1"), "trace:2: arrived_at_s is 'inf', expected finite seconds"),
        ((AZURE, "5,1,1", "4,1,1"), "trace:3: -1.000000 s after the first row"),
        (("a,b",), "trace:1: not a known trace: the columns are a, b"),
        (('{"a": 1}',), "trace:1: not a known trace: the fields are a"),
        (
            ('{"timestamp": 0, "input_length": 9, "output_length": 1}', "{"),
            "trace:2: not JSON",
        ),
        (('{"timestamp": 0, "input_length": 9}',), "output_length is None"),
        (
            ('{"timestamp": "x", "input_length": 9, "output_length": 1}',),
            "timestamp is 'x', expected milliseconds",
        ),
        (
            ('{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1, 2]}',),
            "2 hash_ids, but 9 tokens are at most 1 pieces of 512",
        ),
        (
            ('{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": ["a"]}',),
            "expected a list of whole numbers",
        ),
    ],
)
def test_malformed_rows_say_where(tmp_path: Path, lines: tuple[str, ...], said: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        read(write(tmp_path, *lines))
    assert said in str(caught.value)


def test_missing_and_binary_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="cannot be read"):
        open_trace(tmp_path / "none.csv")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x9f")
    with pytest.raises(WorkloadError, match="cannot be read"):
        open_trace(tmp_path / "binary")


def test_compressed_files_are_named_as_that(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress(f"{AZURE}\n0,1,1\n".encode()))
    with pytest.raises(WorkloadError, match=r"trace\.csv\.gz: is compressed; unpack it first"):
        open_trace(path)


@needs_samples
def test_public_samples() -> None:
    """Row counts, medians and burstiness about as published for the whole traces."""
    code = read(SAMPLES / "azure2023_code_20min.csv")
    conv = read(SAMPLES / "azure2023_conv_20min.csv")
    assert (len(code), len(conv)) == (3628, 5000)
    assert statistics.median(a.prompt_tokens for a in conv) == pytest.approx(1020, rel=0.03)
    assert statistics.median(a.output_tokens for a in code) == 13
    gaps = [b.at - a.at for a, b in itertools.pairwise(code)]
    assert statistics.pstdev(gaps) / statistics.mean(gaps) > 10
    arena = read(SAMPLES / "vtc_arena_27clients_10min.csv")
    assert len({a.tenant for a in arena}) == 27
    assert len(read_lengths(SAMPLES / "vidur_arxiv_lengths_5000.csv")) == 5000


@needs_samples
def test_mooncake_sample_has_its_published_reuse() -> None:
    seen: set[int] = set()
    pieces = hits = 0
    for arrival in read(SAMPLES / "mooncake_synthetic_trace_20min.jsonl"):
        pieces += len(arrival.prefix)
        hits += sum(piece in seen for piece in arrival.prefix)
        seen.update(arrival.prefix)
    assert hits / pieces == pytest.approx(0.640, abs=0.01)
