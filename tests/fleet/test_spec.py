"""The file: what it may say, and which replicas no machine has room for."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.errors import ConfigError
from paceline.fleet.controller import Controller, Scale
from paceline.fleet.spec import parse_fleet, read_fleet, unplaceable

FLEET = '[fleet]\ngateways = ["http://127.0.0.1:8080"]\nadmin_key_env = "FLEET_KEY"\n'
POOL = '[[pools]]\nname = "chat"\nreplicas = 3\nserve = ["smollm2-135m"]\n'


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_KEY", "secret-0123")


def test_a_version_changes_with_what_runs_alone() -> None:
    one = parse_fleet((FLEET + POOL).encode()).pools[0]
    more = parse_fleet((FLEET + POOL.replace("= 3", "= 5") + "surge = 2").encode()).pools[0]
    other = parse_fleet((FLEET + POOL.replace("135m", "360m")).encode()).pools[0]
    assert one.version == more.version != other.version
    assert more.spec().replicas == 5 and more.spec().surge == 2
    grows = parse_fleet((FLEET + POOL.replace("= 3", "= {min = 1, max = 4}")).encode()).pools[0]
    assert grows.most == 4 and grows.spec().scale == Scale(1, 4) and grows.version == one.version


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (POOL, "missing required field `fleet`"),
        ("pools = []\n" + FLEET, "one of \\[\\[pools\\]\\]"),
        (FLEET.replace("http:", "ftp:") + POOL, "is not http://HOST"),
        (FLEET.replace(":8080", ":808080") + POOL, "is not http://HOST"),
        (FLEET + POOL.replace("= 3", "= 1000000000"), "more than 4096"),
        (FLEET.replace("FLEET_KEY", "NO_KEY") + POOL, "'NO_KEY' is not set"),
        (FLEET + POOL + POOL, "two pools are named 'chat'"),
        (FLEET + POOL.replace("= 3", "= {min = 4, max = 3}"), "1 <= min <= max"),
        (FLEET + POOL + "surge = 0", "surge must be 1 or more, got 0"),
        (FLEET + POOL + "lease = 1", "lease must be 5.0 or more, got 1"),
        (FLEET + POOL.replace('"chat"', '"a b"'), "a pool's name"),
        (FLEET + POOL.replace('"]', '", "--port=1"]'), "--port, which the fleet sets itself"),
        (FLEET + POOL + "resources = {CPU = -1}", "0 or more, got CPU = -1"),
        (FLEET + POOL + 'role = "prompts"', "role prompts needs --kv-port in serve"),
        (FLEET + POOL + 'role = "decode"', "Invalid enum value 'decode'"),
        (FLEET + "exit_unwatched = 0\n" + POOL, "exit_unwatched must be 1 or more"),
        (FLEET + POOL + "replica = 3", "unknown field `replica`"),
    ],
)
def test_files_that_cannot_be(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_fleet(text.encode())


def test_a_role_is_told_and_is_no_new_version() -> None:
    pool = POOL.replace('135m"]', '135m", "--kv-port=0"]')
    both, prompts = (
        parse_fleet((FLEET + pool + text).encode()).pools[0] for text in ("", 'role = "prompts"')
    )
    assert both.version == prompts.version
    controller = Controller("chat", both.spec())
    assert controller.members(0.0).role == "both"
    controller.change(prompts.spec())
    assert controller.members(0.0).role == "prompts"


def test_which_replica_lacks_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pools = parse_fleet((FLEET + POOL + "resources = {CPU = 2, GPU = 1}").encode()).pools
    nodes = {"a": {"CPU": 4.0, "GPU": 1.0}, "b": {"CPU": 8.0, "GPU": 1.0}}
    assert unplaceable(pools, nodes) == [
        "replica 3 of pool chat lacks GPU (it needs 1, and 0 is free)"
    ]
    assert not unplaceable(pools, nodes | {"c": {"CPU": 2.0, "GPU": 4.0}})
    file = tmp_path / "fleet.toml"
    file.write_text(FLEET + POOL + "resources = {CPU = 1000}")
    assert main(["fleet", "up", str(file), "--check"]) == 2
    assert "replica 1 of pool chat lacks CPU (it needs 1000" in capsys.readouterr().err
    file.write_text(FLEET + POOL)
    assert main(["fleet", "up", str(file), "--check"]) == 0
    assert capsys.readouterr().out == "1 pools, 3 replicas: valid\n"
    assert read_fleet(file).state_folder(file).name.startswith("fleet-")
    (tmp_path / "taken").touch()
    (tmp_path / "held" / "lock").mkdir(parents=True)
    for where, why in (("taken/state", "cannot be made"), ("held", "cannot be opened")):
        file.write_text(FLEET + f'state_dir = "{where}"\n' + POOL)
        assert main(["fleet", "up", str(file)]) == 2
        assert why in capsys.readouterr().err
    file.write_text(FLEET + POOL)
    assert main(["fleet", "status", str(file)]) == 2
    assert "no fleet of" in capsys.readouterr().err


def test_a_folder_of_what_runs_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An actor of Ray has another working folder than who read the file."""
    monkeypatch.chdir(tmp_path)
    text = f'{FLEET}state_dir = "state"\n{POOL}'
    found = parse_fleet(text.encode()).state_folder(Path("fleet.toml"))
    assert found == tmp_path.resolve() / "state"
