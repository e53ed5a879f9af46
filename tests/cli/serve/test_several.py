"""``paceline serve`` with several models: which they are, their flags, a server of null ones."""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from paceline.backends.native.packed import PackedCopies, fingerprint
from paceline.checkpoints.open import open_checkpoint
from paceline.cli.flags.arguments import Parser
from paceline.cli.flags.model_options import GivenModel, given_models, model_arguments
from paceline.cli.flags.options import chosen_model
from paceline.cli.flags.settings import EngineSettings
from paceline.cli.main import build_parser
from paceline.cli.serve import engine_process
from paceline.cli.serve.several import Several, prepare
from paceline.engine.models.page import Page, Slot, make_page
from paceline.errors import CheckpointError, ConfigError
from paceline.quantize.version import VERSION
from tests.backends.torch.models import save_model
from tests.checkpoints.adapters import random_pairs, write_peft
from tests.checkpoints.builders import llama_tensors, write_gguf
from tests.cli.servers import start_server
from tests.server.helpers import chat_body, metric


def _parsed(*flags: str) -> argparse.Namespace:
    return build_parser().parse_args(["serve", *flags])


def _serve_parser() -> Parser:
    return build_parser()._command("serve")


def test_one_model_is_what_it_was() -> None:
    args = _parsed()
    assert given_models(args) == () and args.model == "smollm2-135m"
    args = _parsed("a/b")
    assert given_models(args) == () and args.model == "a/b"
    args = _parsed("--model", "a/b")
    assert given_models(args) == () and chosen_model(args) == "a/b"
    args = _parsed("A", "--model", "B")
    assert given_models(args) == ()
    with pytest.raises(ConfigError, match="two models are given"):
        chosen_model(args)


def test_a_model_with_processors_of_its_own_takes_no_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})

    def turns(*models: str) -> list[tuple[bool, tuple[int, ...] | None]]:
        args = _parsed(*(each for model in models for each in ("--model", model)))
        given = given_models(args)
        several = prepare(_serve_parser(), args, given, timeline=False, turns=tmp_path / "turns")
        return [(each.turn is not None, each.cpus) for each in several.settings.values()]

    assert turns(r"a=null,cpus=0-1\,3", "b=null,cpus=2") == [(False, (0, 1, 3)), (False, (2,))]
    assert turns("a=null,cpus=0-1", "b=null,cpus=1-2") == [(True, (0, 1)), (True, (1, 2))]
    # one that may use all shares with each
    assert turns("a=null,cpus=0", "b=null,cpus=1", "c=null") == [
        (True, (0,)), (True, (1,)), (True, None),
    ]  # fmt: skip
    for wrong in ("cpus=4", "cpus=", "cpus=2-1", "cpus=x"):
        with pytest.raises(ConfigError, match="--model a: cpus"):
            turns(f"a=null,{wrong}", "b=null")


def test_an_engine_runs_on_its_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[object] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda *given: bound.append(given))
    for cpus in (None, (0, 2)):
        core, _ = engine_process.build(
            EngineSettings(backend="null", model_name="m", model_path=None, cpus=cpus).to_json()
        )
        core.close()
    assert bound == [(0, [0, 2])]


def test_a_path_with_an_equals_sign_is_a_path(tmp_path: Path) -> None:
    path = tmp_path / "a=b.gguf"
    path.touch()
    args = _parsed("--model", str(path))
    assert given_models(args) == () and chosen_model(args) == str(path)


def test_several_are_given_as_arguments_by_name_and_by_folder(tmp_path: Path) -> None:
    for name in ("z.gguf", "big-00001-of-00002.gguf", "big-00002-of-00002.gguf", "notes.txt"):
        (tmp_path / name).touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").touch()
    (tmp_path / "empty").mkdir()
    models = given_models(
        _parsed(
            "A", "B", "--model", r"n=x.gguf,keep-alive=5m,pin,weight=2,alias=m,dtype=q4,a=1\,2",
            "--models-dir", str(tmp_path),
        )
    )  # fmt: skip
    assert models[:3] == (
        GivenModel(model="A"),
        GivenModel(model="B"),
        GivenModel(
            model="x.gguf", name="n", aliases=("m",), keep_alive=300.0, pinned=True, weight=2.0,
            flags=("--dtype=q4", "--a=1,2"),
        ),
    )  # fmt: skip
    found = [each.name for each in models[3:]]
    assert found == ["big-00001-of-00002", "folder", "z"]
    assert all(each.found for each in models[3:])


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--memory", "4GiB"), "--memory is for several models"),
        (("a", "--keep-alive", "5m"), "--keep-alive is for several models"),
        (("--model", "=x"), "give NAME=MODEL"),
        (("--model", "n="), "give NAME=MODEL"),
        (("--model", "n*=x"), "has no *"),
        (("--model", "n=x,keep-alive=soon"), "n: keep-alive: 'soon' must be a duration"),
        (("--model", "n=x,weight=0"), "n: weight: "),
        (("a", "b", "--served-model-name", "c"), "--served-model-name is for one model"),
        (("a", "b", "--enable-lora"), "adapters are those of one of several models"),
        (("a", "b", "--kv-port", "0"), "--kv-port is for one model"),
        (("--model", "n=x,alias=*"), "n: alias: '*' must be a name"),
        (("--model", "n=x,alias="), "n: alias: '' must be a name"),
        (("--models-dir", "/nowhere"), "--models-dir /nowhere cannot be read"),
    ],
)
def test_bad_models_are_refused(flags: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        given_models(_parsed(*flags))
    assert says in str(refused.value)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no \.gguf file and no model folder"):
        given_models(_parsed("--models-dir", str(tmp_path)))


def test_a_models_flags_are_its_own() -> None:
    args = _parsed("--model", "a=null,null-step-time=0.5", "--max-num-seqs", "7")
    (given,) = given_models(args)
    own = model_arguments(_serve_parser(), args, given)
    assert own.null_step_time == 0.5 and own.backend == "null" and own.max_num_seqs == 7
    assert args.null_step_time == 0.0
    for flag, says in (("port=1", "--port is the server's"), ("nothing=1", "no flag --nothing")):
        with pytest.raises(ConfigError, match=says):
            model_arguments(
                _serve_parser(), args, GivenModel(model="m", name="a", flags=(f"--{flag}",))
            )


def _prepared(tmp_path: Path, *flags: str, memory: str = "1GiB") -> Any:
    args = _parsed(*flags, "--memory", memory)
    models = given_models(args)
    turns = tmp_path / "turns"
    return prepare(_serve_parser(), args, models, timeline=True, turns=turns)


def test_what_is_broken_in_the_folder_stops_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "bad.gguf").write_bytes(b"GGUF")
    several = _prepared(tmp_path, "--model", "a=null", "--models-dir", str(folder))
    assert [spec.name for spec in several.specs] == ["a", "bad"]
    assert several.specs[1].broken and list(several.settings) == ["a"]
    assert several.named == ("a",)
    with pytest.raises(ConfigError, match="no model can be served"):
        _prepared(tmp_path, "--models-dir", str(folder))


def test_two_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="x names 2 models"):
        _prepared(tmp_path, "--model", "x=null", "--model", "y=null,alias=x")


def test_pinned_models_that_do_not_fit_together_are_refused_with_the_numbers(
    tmp_path: Path,
) -> None:
    three = [flag for name in "xyz" for flag in ("--model", f"{name}=null,pin")]
    _prepared(tmp_path, *three)
    with pytest.raises(ConfigError, match=r"3 models are pinned.* 192 MiB: there are 136 MiB"):
        _prepared(tmp_path, *three, memory="200MiB")
    with pytest.raises(ConfigError, match=r"--memory must be more than 64 MiB.* it is 10 MiB"):
        _prepared(tmp_path, *three, memory="10MiB")
    with pytest.raises(ConfigError, match=r"3 models are pinned.* --models-max is 2"):
        _prepared(tmp_path, *three, "--models-max", "2")


def test_what_a_model_may_take_is_within_its_part(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "model.gguf", tensors=llama_tensors())
    models = [flag for name in "xy" for flag in ("--model", f"{name}={model}")]
    for flags, swaps in (((), True), (("--preemption", "recompute"), False)):
        several = _prepared(tmp_path, *models, *flags)
        accounts = [spec.account for spec in several.specs]
        for account, made in zip(accounts, several.settings.values(), strict=True):
            assert account.kv == made.load.kv_cache_bytes
            assert account.swap == (account.kv // 2 if swaps else 0)
            assert account.kv + account.swap <= several.memory // 4
        assert sum(account.total for account in accounts) <= several.memory
    several = _prepared(tmp_path, *models, "--swap-space", "16MiB", "--kv-cache-memory", "8MiB")
    assert (several.specs[0].account.kv, several.specs[0].account.swap) == (8 << 20, 16 << 20)


def test_four_bits_that_were_made_are_served_and_none_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    tensors = {
        name: values.astype(np.float16) if values.ndim == 2 else values
        for name, values in llama_tensors().items()
    }
    model = write_gguf(tmp_path / "model.gguf", tensors=tensors)
    given = ("--model", f"x={model},dtype=q4,packed-cache=1GiB", "--model", "y=null")
    several = _prepared(tmp_path, *given)
    assert several.settings["x"].load.dtype == "q4"
    assert several.settings["x"].weights_path is None
    assert f"quantize {model} -o" in caplog.text
    copies = PackedCopies(tmp_path / "cache" / "packed", 1 << 30, fingerprint(model))
    target = copies.few_bits(VERSION)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(b"four bits")
    several = _prepared(tmp_path, *given)
    assert several.settings["x"].weights_path == str(target)


def test_all_show_their_steps_and_share_the_turns(tmp_path: Path) -> None:
    several = _prepared(tmp_path, "--model", "x=null", "--model", "y=null,weight=3")
    assert [each.timeline for each in several.settings.values()] == [True, True]
    assert {each.turn for each in several.settings.values()} == {str(tmp_path / "turns")}
    assert several.settings["y"].turn_weight == 3.0


def test_an_engine_ends_in_order_where_its_server_and_the_turns_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lowered: list[bool] = []
    monkeypatch.setattr(engine_process, "lower_all", lambda: lowered.append(True))
    models = _prepared(tmp_path, "--model", "a=null", "--model", "b=null")
    config = models.settings["a"].to_json()
    engine_process.ending(config)
    # there are turns, and then another engine that computes; this one's own do not count
    make_page(tmp_path / "turns")
    active = time.monotonic()
    Page(tmp_path / "turns", Slot(os.getpid(), active=active))
    engine_process.ending(config)
    assert not lowered
    Page(tmp_path / "turns", Slot(os.getppid(), active=active))
    engine_process.ending(config)
    assert lowered == [True]


def test_blocks_of_several_models_are_not_given_away(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--kv-port is for one model"):
        _prepared(tmp_path, "--model", "x=null", "--model", "y=null", "--kv-port", "0")


def test_each_model_keeps_blocks_in_a_folder_of_its_own(tmp_path: Path) -> None:
    save_model(tmp_path / "m", "llama")
    flags = ("--kv-store", str(tmp_path / "kv"), "--kv-store-size", "4GiB")
    models = (f"x/1={tmp_path}/m,weight=3", f"y={tmp_path}/m", "z=null")
    several = _prepared(tmp_path, *(each for m in models for each in ("--model", m)), *flags)
    found = {name: (s.kv_store, s.kv_store_bytes) for name, s in several.settings.items()}
    assert found["x/1"] == (str(tmp_path / "kv" / "x%2F1"), int(0.6 * (4 << 30)))
    assert found["y"] == (str(tmp_path / "kv" / "y"), int(0.2 * (4 << 30)))
    # the null backend's blocks are numbers
    assert found["z"][0] is None


def test_a_model_has_adapters_of_its_own(tmp_path: Path) -> None:
    save_model(tmp_path / "m", "llama")
    pairs = random_pairs(open_checkpoint(tmp_path / "m").config)
    sql, chat = (str(write_peft(tmp_path / name, pairs)) for name in ("sql", "chat"))
    one = f"x={tmp_path}/m,enable-lora,lora-modules=sql={sql},lora-modules=chat={chat},max-loras=3"

    def prepared(*flags: str) -> Several:
        return _prepared(tmp_path, "--memory", "4GiB", *flags)

    several = prepared("--model", one, "--model", f"y={tmp_path}/m")
    assert several.adapters == {"sql": "x", "chat": "x"}
    x, y = several.settings["x"], several.settings["y"]
    assert (x.enable_lora, x.scheduler.max_adapters, y.enable_lora) == (True, 3, False)
    accounts = {spec.name: spec.account.adapters for spec in several.specs}
    assert accounts == {"x": (1 << 30) // 2 // 10, "y": 0}
    assert x.lora_bytes == accounts["x"]
    several = prepared("--model", f"{one},lora-memory=9MiB", "--model", f"y={tmp_path}/m")
    assert several.settings["x"].lora_bytes == 9 << 20
    for flags, said in (
        (("--model", one, "--model", "y=null", "--enable-lora"), "give their flags to that one"),
        (("--model", one, "--model", "sql=null"), "sql names 2 models"),
        (("--model", f"x={tmp_path}/m,lora-modules=sql={sql}", "--model", "y=null"),
         "--lora-modules has no effect without --enable-lora"),
        (("--model", f"{one},lora-root=/a", "--model", "y=null"), "--lora-root is the server's"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            prepared(*flags)
    with pytest.raises(CheckpointError, match="no such file or folder"):
        prepared("--model", f"x={tmp_path}/m,enable-lora,lora-modules=sql={tmp_path}/none",
                 "--model", "y=null")  # fmt: skip


def _pids(server: Any) -> list[int]:
    """The processes of a server's engines, and of the one that forks them."""
    found = [server.process.pid]
    for pid in found:
        children = Path(f"/proc/{pid}/task/{pid}/children")
        found += [int(each) for each in children.read_text().split()]
    return found[1:]


def test_a_server_of_two_models_loads_on_demand_and_outlives_one_of_its_engines() -> None:
    models = ("--model", "a=null", "--model", "b=null,null-step-time=0.001", "--models-max", "1")
    with start_server(*models, "--memory", "1GiB", "--no-ui") as server:
        assert "one of 2 models" in server.ready_line
        with httpx.Client(base_url=server.address, timeout=60) as http:
            for name in ("a", "b", "a"):
                answer = http.post("/v1/chat/completions", json=chat_body(model=name, max_tokens=3))
                assert answer.status_code == 200 and answer.json()["model"] == name
            cards = {card["id"]: card for card in http.get("/v1/models").json()["data"]}
            assert cards["a"]["status"]["value"] == "ready"
            assert cards["b"]["status"]["value"] == "unloaded"
            assert cards["a"]["status"]["bytes"]["weights"] > 2**20
            unknown = http.post("/v1/chat/completions", json=chat_body(model="c"))
            assert unknown.status_code == 404
            text = http.get("/metrics").text
            assert metric(text, "paceline:model_evictions_total", reason="room") == 2
            assert metric(text, "paceline:model_loads_total", outcome="ready") == 3
            # an engine that is killed takes no other model and is replaced
            (pid,) = (each for each in _pids(server) if _is_engine(each))
            os.kill(pid, signal.SIGKILL)
            answer = http.post("/v1/chat/completions", json=chat_body(model="a", max_tokens=3))
            assert answer.status_code == 200
        pids = _pids(server)
        code, _ = server.stop()
        assert code == 0
    _await_end(pids)


def _lives(pid: int) -> bool:
    """Whether a process runs; one that has ended may stay until its parent takes note."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _await_end(pids: list[int]) -> None:
    deadline = time.monotonic() + 30
    while any(map(_lives, pids)):
        assert time.monotonic() < deadline, "an engine outlived its server"
        time.sleep(0.05)


def test_a_server_that_is_killed_leaves_no_engine_and_no_folder(tmp_path: Path) -> None:
    models = ("--model", "a=null", "--model", "b=null", "--memory", "1GiB", "--no-ui")
    with start_server(*models, env={"TMPDIR": str(tmp_path)}) as server:
        assert server.request("/models/load", {"model": "b"})[0] == 200
        pids = _pids(server)
        assert len(pids) >= 2 and list(tmp_path.iterdir())
        server.process.kill()
        server.process.wait()
        _await_end(pids)
        assert list(tmp_path.iterdir()) == []


def test_a_server_of_one_model_imports_nothing_of_several() -> None:
    with start_server("--backend", "null", env={"PYTHONPROFILEIMPORTTIME": "1"}) as server:
        assert server.request("/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200
        assert server.request("/metrics")[0] == server.request("/v1/models")[0] == 200
        server.stop()
    imported = {line.rpartition("|")[2].strip() for line in server.errors}
    assert "paceline.server.app" in imported
    rooms = ("paceline.engine.models", "paceline.server.models", "paceline.cli.serve.several")
    assert not [name for name in imported if name.startswith(rooms)]


def _is_engine(pid: int) -> bool:
    """Whether a process takes turns; the one that forks engines takes none."""
    try:
        return "/turns" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False
