"""The command behind the table that formats are chosen by, on kernels that take no time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kernels import levels
from benchmarks.kernels.levels import FORMATS, STEPS, renewed, verdicts
from paceline.backends.loading.levels import fastest, parse
from paceline.backends.native import DTYPES, KV_DTYPES, unavailable_reason

KEPT = {
    "cpu": "new",
    "model": "1.2.3",
    "cores": 2,
    "clock_ghz": 3.0,
    "read_gb_s": 30.0,
    "load": 1.0,
}
ABOUT = KEPT | {"level": "x", "python": "3"}
TIMED = {"steps_ms": {"a": 1.0}, "drift": 0.0}
JUDGED = {"kl": 0.002, "passes": True}


def test_what_is_measured_anew_replaces_what_was_known() -> None:
    first = renewed({}, about=ABOUT, measured={"q4/int8": TIMED, "float32/float32": TIMED})
    assert first["machine"] == KEPT
    # float32 is what the gate compares with
    assert [pair.weights for pair in parse({"x": first})["x"]] == ["float32"]
    both = renewed(first, judged={"q4/int8": JUDGED})
    assert both["machine"] == first["machine"], "verdicts do not depend on the machine"
    assert {pair.weights for pair in parse({"x": both})["x"]} == {"float32", "q4"}
    again = renewed(both, about={**ABOUT, "cpu": "other"}, measured={
        "q4/int8": {"steps_ms": {"a": 0.5}, "drift": 0.1}, "float32/float32": TIMED,
    })  # fmt: skip
    (entry,) = (pair for pair in parse({"x": again})["x"] if pair.weights == "q4")
    assert (entry.cost, entry.drift, entry.kl, entry.passes) == (0.5, 0.1, 0.002, True)
    assert first["formats"]["q4/int8"] == TIMED, "a value: nothing was changed in place"


def test_the_worse_way_of_reading_counts() -> None:
    figures = {"steps": {"kl": 0.1}, "prompts": {"kl": 0.2}, "passes": False}
    assert verdicts({"q4/int8": figures}) == {"q4/int8": {"kl": 0.2, "passes": False}}


def test_every_format_there_is_is_measured() -> None:
    assert {name.split("/")[0] for name in FORMATS} == set(DTYPES)
    assert {name.split("/")[1] for name in FORMATS} == set(KV_DTYPES)


def test_the_command_renews_what_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "levels.json"
    old = renewed({}, about=ABOUT, measured={"float32/float32": TIMED})
    path.write_text(json.dumps({"elsewhere": old, "avx2": old}))
    monkeypatch.setattr(levels, "PATH", path)
    monkeypatch.setattr(levels, "unavailable_reason", lambda: None)
    monkeypatch.setattr(levels, "variants", lambda: ("avx512", "avx2", "portable"))
    monkeypatch.setattr(levels, "machine", lambda: ABOUT)
    seen: list[str] = []

    def measure(level: str, threads: int, turns: int) -> dict[str, Any]:
        seen.append(f"steps {level}")
        return {name: {"steps_ms": dict.fromkeys(STEPS, 2.0), "drift": 0.0} for name in FORMATS}

    def gate(level: str) -> dict[str, Any]:
        seen.append(f"gate {level}")
        return {name: {"kl": 0.003, "passes": not name.startswith("q4")} for name in FORMATS[1:]}

    monkeypatch.setattr(levels, "measure", measure)
    monkeypatch.setattr(levels, "gate", gate)
    before = path.read_text()
    assert levels.main([]) == 0
    # the gate takes hours on the portable level
    assert seen == [
        "steps avx512", "gate avx512", "steps avx2", "gate avx2", "steps portable",
    ]  # fmt: skip
    assert path.read_text() == before, "not asked to write"
    out = capsys.readouterr().out
    assert "FAILS" in out and "<- auto, 4 bits" in out
    answer = json.loads(out.splitlines()[-1])
    of_portable, of_avx2 = (answer["results"][level]["formats"] for level in ("portable", "avx2"))
    for name in FORMATS:
        assert of_portable[name]["passes"] == of_avx2[name]["passes"], "the next level's"
    assert answer["bench"] == "levels" and answer["machine"] == ABOUT
    seen.clear()
    assert levels.main(["--levels", "portable", "--gate"]) == 0
    assert seen == ["steps portable"]
    seen.clear()
    assert levels.main(["--levels", "avx2", "--write"]) == 0
    assert seen == ["steps avx2", "gate avx2"]
    table = parse(json.loads(path.read_text()))
    assert set(table) == {"avx2", "elsewhere"}, "levels of other machines stay"
    assert len(table["avx2"]) == len(FORMATS) and len(table["elsewhere"]) == 1
    assert fastest(pair for pair in table["avx2"] if pair.passes).weights == "float32", "KL 0"


@pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))
def test_steps_are_timed_and_drift_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a model of one layer and a small vocabulary, with the plainest kernels."""
    from dataclasses import replace

    small = replace(
        levels.CONFIG, num_hidden_layers=1, vocab_size=96, hidden_size=128, intermediate_size=128,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    monkeypatch.setattr(levels, "PART", small)
    monkeypatch.setattr(levels, "SECONDS", 0.0)
    monkeypatch.setattr(levels, "FORMATS", ("float32/float32", "int8/int8"))
    found = levels.measure("portable", 1, 2)
    assert set(found) == {"float32/float32", "int8/int8"}
    for figures in found.values():
        assert set(figures["steps_ms"]) == set(STEPS)
        assert min(figures["steps_ms"].values()) > 0
        assert figures["steps_ms"]["decode 64"] > figures["steps_ms"]["decode 1"]
        assert 0 <= figures["drift"] < 1e-5
