"""What ``deploy/`` names exists: flags, ports, routes, files, alerts, metrics."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from paceline.checkpoints.hub.resolve import default_cache_dir
from paceline.cli.flags.server_options import batch_config
from paceline.cli.main import build_parser
from paceline.gateway.observability.metrics import GatewayMetrics
from paceline.gateway.settings.config import read_config
from paceline.http.keys import OPEN_PATHS

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
ALERTS_DOC = (ROOT / "docs" / "operate" / "alerts.md").read_text()


def load(path: str) -> Any:
    (document,) = yaml.safe_load_all((DEPLOY / path).read_text())
    return document


def resolve(value: str) -> str:
    """A value with compose's ``${NAME:-default}`` replaced by the default."""
    return re.sub(r"\$\{\w+(?::-([^}]*)|:\?[^}]*)?\}", lambda match: match[1] or "", value)


def flags(arguments: list[str]) -> argparse.Namespace:
    """As the command line takes them; SystemExit for what it does not know."""
    return build_parser().parse_args([resolve(str(argument)) for argument in arguments])


CONTAINER = load("kubernetes/deployment.yaml")["spec"]["template"]["spec"]["containers"][0]
COMPOSE = load("compose.yaml")
COMPOSE_GATEWAY = load("compose.gateway.yaml")
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()


def instruction(name: str) -> list[Any]:
    """The JSON arguments of the Dockerfile's last instruction of this name."""
    found: list[Any] = json.loads(re.findall(rf"^(?: *){name} (\[.*\])$", DOCKERFILE, re.M)[-1])
    return found


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.y*ml")), ids=lambda path: path.name)
def test_every_yaml_file_is_yaml(path: Path) -> None:
    assert all(document for document in yaml.safe_load_all(path.read_text()))


@pytest.mark.parametrize(
    "arguments",
    [CONTAINER["args"], COMPOSE["services"]["paceline"]["command"], instruction("CMD")],
    ids=["kubernetes", "compose", "dockerfile"],
)
def test_the_commands_are_the_servers(arguments: list[str]) -> None:
    args = flags(arguments)
    assert args.command == "serve"
    assert (args.host, args.port) == ("0.0.0.0", 8000)
    assert (args.metrics_host, args.metrics_port) == ("0.0.0.0", 9400)


def test_who_stops_a_server_waits_for_its_drain() -> None:
    pod = load("kubernetes/deployment.yaml")["spec"]["template"]["spec"]
    pause = float(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > flags(CONTAINER["args"]).drain_timeout + pause
    service = COMPOSE["services"]["paceline"]
    grace = float(service["stop_grace_period"].removesuffix("s"))
    assert grace > flags(service["command"]).drain_timeout


def test_ports_are_the_same_everywhere() -> None:
    ports = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}
    assert ports == {"http": 8000, "metrics": 9400}
    service = load("kubernetes/service.yaml")["spec"]
    assert {port["targetPort"] for port in service["ports"]} == set(ports)
    assert re.findall(r"^EXPOSE (.*)$", DOCKERFILE, re.M) == ["8000 9400"]
    scraped = load("prometheus/prometheus.yml")["scrape_configs"][0]
    assert scraped["static_configs"] == [{"targets": ["paceline:9400"]}]
    assert "paceline" in COMPOSE["services"]
    notes = load("kubernetes/deployment.yaml")["spec"]["template"]["metadata"]["annotations"]
    assert (notes["prometheus.io/port"], notes["prometheus.io/path"]) == ("9400", "/metrics")
    source = load("grafana/provisioning/datasources/prometheus.yml")["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
    # what is published is published on this machine
    for name, container in COMPOSE["services"].items():
        for port in container["ports"]:
            assert port.startswith("127.0.0.1:"), name


def test_probes_ask_what_is_served_without_a_key() -> None:
    served = re.findall(r'routes\.add\("GET", "(/[^"]*)"', _source("server/apis/info.py"))
    names = {port["name"] for port in CONTAINER["ports"]}
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        (check,) = (
            CONTAINER[kind][key] for key in ("httpGet", "tcpSocket") if key in CONTAINER[kind]
        )
        assert check["port"] in names
        path = check.get("path")
        assert path is None or (path in served and path in OPEN_PATHS), (kind, path)
    assert CONTAINER["readinessProbe"]["httpGet"]["path"] == "/health/ready"
    assert CONTAINER["livenessProbe"]["httpGet"]["path"] == "/health/live"
    (checked,) = re.findall(r"http://127\.0\.0\.1:8000(/\w+)", DOCKERFILE)
    assert checked in served and checked in OPEN_PATHS


def _source(path: str) -> str:
    return (ROOT / "paceline" / path).read_text()


def test_what_the_image_is_made_of_is_there() -> None:
    copied = [
        word
        for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.M)
        for word in shlex.split(line)[:-1]
    ]
    assert copied and all((ROOT / word).exists() for word in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert instruction("ENTRYPOINT")[0] in project["scripts"]
    (extras,) = re.findall(r"'\.\[([\w,]+)\]'", DOCKERFILE)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])


def test_the_key_is_read_where_it_is_put() -> None:
    (variable,) = (each["name"] for each in CONTAINER["env"])
    assert variable in COMPOSE["services"]["paceline"]["environment"]
    assert f'os.environ.get("{variable}")' in _source("cli/serve/command.py")


def test_volumes_are_mounted_and_there() -> None:
    pod = load("kubernetes/deployment.yaml")["spec"]["template"]["spec"]
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    claims = [
        v["persistentVolumeClaim"]["claimName"]
        for v in pod["volumes"]
        if len(v) > 1 and "persistentVolumeClaim" in v
    ]
    assert claims == [load("kubernetes/volume.yaml")["metadata"]["name"]]
    for service in COMPOSE["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in COMPOSE["volumes"] or (DEPLOY / source).exists(), volume


@pytest.mark.parametrize("kept", ["models", "batches"])
def test_what_a_server_keeps_is_on_a_volume(kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody writes to a container's own file system, and all of it is gone with the container."""
    monkeypatch.setenv("HOME", "/home/paceline")
    for variable in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "PACELINE_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    for arguments, mounted in (
        (CONTAINER["args"], [mount["mountPath"] for mount in CONTAINER["volumeMounts"]]),
        (
            COMPOSE["services"]["paceline"]["command"],
            [volume.split(":")[1] for volume in COMPOSE["services"]["paceline"]["volumes"]],
        ),
        (instruction("CMD"), re.findall(r"^VOLUME (.*)$", DOCKERFILE, re.M)[0].split()),
    ):
        folder = default_cache_dir()
        if kept == "batches":
            config = batch_config(flags(arguments), 8000)
            assert config is not None
            folder = config.folder
        assert any(folder.is_relative_to(place) for place in mounted), (folder, mounted)
    # made by the image for its user: a new volume begins as what it is mounted over
    made = re.findall(r"install -d -o paceline -g paceline ((?:[^&]|\n)*?)\n[A-Z]", DOCKERFILE)
    assert any(folder.is_relative_to(place) for place in made[0].replace("\\", "").split())


UNIT = (DEPLOY / "paceline.service").read_text()


def setting(name: str) -> str:
    """The value of a setting that the unit has once."""
    (value,) = re.findall(rf"^{name}=(.*)$", UNIT, re.M)
    return str(value)


def test_the_unit_starts_a_server_and_waits_for_its_drain() -> None:
    command = shlex.split(setting("ExecStart"))
    assert command[0].endswith("/bin/paceline") and command[-1] == "$PACELINE_FLAGS"
    args = flags(command[1:-1])
    assert args.command == "serve" and float(setting("TimeoutStopSec")) > args.drain_timeout
    for example in re.findall(r'^#   Environment="PACELINE_FLAGS=(.*)"$', UNIT, re.M):
        flags([*command[1:-1], *shlex.split(example)])
    variables = dict(
        re.findall(r"(\w+)=(/\S+)", " ".join(re.findall(r"^Environment=(.*)$", UNIT, re.M)))
    )
    assert variables["PACELINE_CACHE"] == f"/var/cache/{setting('CacheDirectory')}"
    assert variables["XDG_STATE_HOME"] == f"/var/lib/{setting('StateDirectory')}"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_the_unit_is_one(tmp_path: Path) -> None:
    program = setting("ExecStart").split()[0]
    unit = tmp_path / "paceline.service"
    # which is not installed here
    unit.write_text(UNIT.replace(f"ExecStart={program}", f"ExecStart={shutil.which('true')}"))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


ALERTS = [rule for group in load("prometheus/alerts.yml")["groups"] for rule in group["rules"]]


def test_every_alert_is_explained_and_tried() -> None:
    names = [rule["alert"] for rule in ALERTS]
    assert len(names) == len(set(names))
    for rule in ALERTS:
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["runbook"] == f"docs/operate/alerts.md#{rule['alert'].lower()}"
    assert re.findall(r"^## (Paceline\w+)$", ALERTS_DOC, re.M) == names
    table = re.findall(r"^\| \[(Paceline\w+)\]\(#(\w+)\) \| (\w+) \|", ALERTS_DOC, re.M)
    assert table == [(r["alert"], r["alert"].lower(), r["labels"]["severity"]) for r in ALERTS]
    tried = (DEPLOY / "prometheus" / "alerts_test.yml").read_text()
    assert set(re.findall(r'alertname="(\w+)"', tried)) == set(names)


DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_the_dashboard_is_laid_out(path: Path) -> None:
    dashboard = json.loads(path.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (place["x"] + column, place["y"] + row)
            for column in range(place["w"])
            for row in range(place["h"])
        }
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
        assert panel["datasource"]["uid"] == "${datasource}"
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = set(
        re.findall(
            r"\$(\w+)", " ".join(target["expr"] for panel in panels for target in panel["targets"])
        )
    )
    assert used - {"__rate_interval"} <= variables


def test_dashboards_are_told_apart() -> None:
    found = [json.loads(path.read_text()) for path in DASHBOARDS]
    assert len({each["uid"] for each in found}) == len({each["title"] for each in found}) == 2


def test_the_gateways_dashboard_shows_all_of_its_metrics() -> None:
    text = (DEPLOY / "grafana" / "dashboards" / "gateway.json").read_text()
    for family in GatewayMetrics().registry.describe():
        # how often a breaker opened is in the log; it is open or not here
        if family.name != "paceline:gateway_breaker_opened":
            assert family.name in text, family.name


def test_the_gateways_compose_file_names_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_API_KEY", "a-key-of-tests")
    services = COMPOSE_GATEWAY["services"]
    for name in ("engine-a", "engine-b"):
        assert flags(services[name]["command"]).port == 8000
    assert flags(services["gateway"]["command"]).host == "0.0.0.0"
    config = read_config(DEPLOY / "gateway.toml")
    hosts = {urlsplit(engine.url).hostname for engine in config.engines}
    hosts.add(urlsplit(config.rate_limit_storage).hostname)
    assert hosts <= set(services)
    assert str(config.port) in services["gateway"]["ports"][0]
    scraped = load("prometheus/gateway.yml")["scrape_configs"]
    targets = {target for job in scraped for group in job["static_configs"]
               for target in group["targets"]}  # fmt: skip
    assert targets == {"engine-a:9400", "engine-b:9400", f"gateway:{config.port}"}
    assert services["prometheus"]["secrets"] == list(COMPOSE_GATEWAY["secrets"])
    # what is spent outlives the container
    folder = Path(config.spend_storage).parent
    (mounted,) = [v.split(":")[1] for v in services["gateway"]["volumes"] if v.startswith("state:")]
    assert Path(mounted) == folder and mounted in DOCKERFILE
    # and the image's own check, which asks a server's port, is not the gateway's
    asked = re.findall(
        r"http://127\.0\.0\.1:(\d+)(/\w+)", services["gateway"]["healthcheck"]["test"][-1]
    )
    assert asked == [(str(config.port), "/health")] and "/health" in OPEN_PATHS
    # a Redis that forgets makes budgets whole again
    redis = services["redis"]
    assert redis["command"][redis["command"].index("--appendonly") + 1] == "yes"
    mounts = {volume.partition(":")[0] for volume in redis["volumes"]}
    assert mounts <= set(COMPOSE_GATEWAY["volumes"])
