"""Whatever a file or a description says: arrivals in order, or a WorkloadError. Nothing else."""

from __future__ import annotations

import tempfile
from itertools import islice
from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.sim.workload.spec import open_workload
from paceline.sim.workload.traces import open_trace

CELL = st.one_of(
    st.integers(-5, 10**20).map(str),
    st.floats(allow_nan=True).map(str),
    st.text(max_size=4),
    st.sampled_from(["2024-05-10 00:00:00+00:00", "1e999", '"', "0"]),
)
HEADER = st.sampled_from(
    [
        "arrived_at_s,prompt_tokens,output_tokens",
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "arrived_at_s,client,prompt_tokens,output_tokens",
        "num_prefill_tokens,num_decode_tokens",
    ]
)
ROWS = st.lists(st.lists(CELL, min_size=1, max_size=5).map(",".join), max_size=6)
VALUE = st.one_of(CELL, st.just("[1, 2]"), st.just("null"), st.just("[[" * 9), st.just('{"a": 1}'))
OBJECT = st.dictionaries(
    st.sampled_from(["timestamp", "input_length", "output_length", "hash_ids", "x"]), VALUE
).map(lambda d: "{" + ", ".join(f'"{k}": {v}' for k, v in d.items()) + "}")


def check(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        try:
            arrivals = list(open_trace(path).arrivals())
        except ConfigError as error:
            assert str(path) in str(error)
            return
    assert all(a.prompt_tokens >= 1 and a.output_tokens >= 1 for a in arrivals)
    times = [a.at for a in arrivals]
    assert times == sorted(times) and all(0 <= at < 1e16 for at in times)


@given(HEADER, ROWS)
@example("arrived_at_s,prompt_tokens,output_tokens", ["0,1,\x00"])
@example("arrived_at_s,prompt_tokens,output_tokens", ["0," + "9" * 200_000 + ",1"])
def test_csv(header: str, rows: list[str]) -> None:
    check("\n".join([header, *rows]))


@given(st.lists(OBJECT, min_size=1, max_size=4))
@example(['{"timestamp": 1e999, "input_length": 1, "output_length": 1}'])
@example(['{"timestamp": NaN, "input_length": 1, "output_length": 1}'])
@example(['{"timestamp": 1' + "0" * 400 + ', "input_length": 1, "output_length": 1}'])
def test_json_lines(lines: list[str]) -> None:
    check("\n".join(lines))


@given(st.text(max_size=60))
def test_text(text: str) -> None:
    check(text)


PART = st.sampled_from(
    ["rate=", "cv=", "n=", "prompt=", "output=", "classes=", "tenants=", "swing=", "seconds=", "x="]
)
OPTION = st.tuples(
    PART,
    st.one_of(
        CELL,
        st.sampled_from(
            [
                "fixed(3)",
                "uniform(1,2)",
                "lognormal(9,1)",
                "a(1)",
                "a(1,ttft=1)",
                "a(1)+b(2)",
                "((",
                "5",
            ]
        ),
    ),
).map("".join)


@given(st.sampled_from(["synthetic:", "clients:", ""]), st.lists(OPTION, max_size=6))
@example("synthetic:", ["rate=1", "prompt=5", "output=5", "n=3", "classes=a(1,priority=nan)"])
def test_descriptions(kind: str, options: list[str]) -> None:
    try:
        workload = open_workload(kind + ",".join(options))
    except ConfigError:
        return
    times = [a.at for a in islice(workload, 20)]
    assert times == sorted(times)
