"""The manifests of ``deploy/kubernetes/``: fields and types as Kubernetes describes them, and what
they name of each other. No cluster was at hand: that these start is not tested."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.cli.main import build_parser
from paceline.gateway.settings.config import parse_config
from tests.docs.pages import DOCS, blocks

DEPLOY = Path(__file__).parents[2] / "deploy" / "kubernetes"
# written by scripts/kubernetes_types.py
KNOWN = json.loads((Path(__file__).parent / "kubernetes_types.json").read_text())
PLAIN = {"str": str, "int": int, "bool": bool, "object": (str, int)}


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text()))


FLEET = {
    (each["kind"], each["metadata"]["name"]): each
    for path in (DEPLOY / "fleet").glob("*.yaml")
    for each in documents(path)
}


def wrongs(value: Any, kind: str, where: str) -> Iterator[str]:
    """What a manifest's value has that its type has not, or lacks."""
    if inner := re.fullmatch(r"List\[(.*)\]", kind):
        if not isinstance(value, list):
            yield f"{where} is no list"
            return
        for number, each in enumerate(value):
            yield from wrongs(each, inner[1], f"{where}[{number}]")
    elif inner := re.fullmatch(r"Dict\[str, (.*)\]", kind):
        if not isinstance(value, dict):
            yield f"{where} is no map"
            return
        for name, each in value.items():
            yield from wrongs(each, inner[1], f"{where}.{name}")
    elif kind in PLAIN:
        if not isinstance(value, PLAIN[kind]) or (isinstance(value, bool) and kind != "bool"):
            yield f"{where} is {value!r}, not a {kind}"
    elif kind not in KNOWN["types"]:
        yield f"{where} has type {kind}: run scripts/kubernetes_types.py"
    elif not isinstance(value, dict):
        yield f"{where} is no {kind}"
    else:
        fields = KNOWN["types"][kind]
        for name, each in value.items():
            if name in fields:
                yield from wrongs(each, fields[name][0], f"{where}.{name}")
            else:
                yield f"{where} has no field {name}"
        yield from (
            f"{where} lacks {n}" for n, (_, need) in fields.items() if need and n not in value
        )


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.yaml")), ids=lambda path: path.stem)
def test_manifests_are_of_their_types(path: Path) -> None:
    for each in documents(path):
        kind = KNOWN["kinds"][f"{each['apiVersion']} {each['kind']}"]
        assert not list(wrongs(each, kind, each["kind"]))


@pytest.mark.parametrize(
    ("at", "value", "why"),
    [
        (("spec", "replica"), 3, "Deployment.spec has no field replica"),
        (("spec", "replicas"), "3", "Deployment.spec.replicas is '3', not a int"),
        (("spec", "template", "spec", "containers"), {}, "containers is no list"),
        (("metadata", "labels"), {"app": 1}, "Deployment.metadata.labels.app is 1"),
        (("spec", "selector"), None, "Deployment.spec lacks selector"),
    ],
)
def test_what_is_wrong_with_a_manifest_is_found(at: tuple[str, ...], value: Any, why: str) -> None:
    (broken,) = documents(DEPLOY / "deployment.yaml")
    held = broken
    for name in at[:-1]:
        held = held[name]
    if value is None:
        del held[at[-1]]
    else:
        held[at[-1]] = value
    assert any(why in each for each in wrongs(broken, "V1Deployment", "Deployment"))


def pod(name: str) -> Any:
    return FLEET["Deployment", name]["spec"]["template"]["spec"]


def test_every_object_of_the_fleet_names_one_that_is_there() -> None:
    for name in ("paceline-engines", "paceline-gateway"):
        deployment, service = FLEET["Deployment", name], FLEET["Service", name]
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        assert deployment["spec"]["selector"]["matchLabels"] == labels
        assert service["spec"]["selector"] == labels
        (container,) = pod(name)["containers"]
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        assert all(each["targetPort"] in ports for each in service["spec"]["ports"])
        for each in (container, *pod(name).get("initContainers", ())):
            assert {m["name"] for m in each["volumeMounts"]} == {
                v["name"] for v in pod(name)["volumes"]
            }
        # an update takes nothing away before its replacement is ready
        assert deployment["spec"]["strategy"]["rollingUpdate"] == {
            "maxSurge": 1, "maxUnavailable": 0,
        }  # fmt: skip
    budget = FLEET["PodDisruptionBudget", "paceline-engines"]["spec"]["selector"]["matchLabels"]
    assert budget == FLEET["Service", "paceline-engines"]["spec"]["selector"]
    (config,) = (
        v["configMap"]["name"] for v in pod("paceline-gateway")["volumes"] if "configMap" in v
    )
    assert ("ConfigMap", config) in FLEET


def test_the_gateway_looks_for_the_engines_service(monkeypatch: pytest.MonkeyPatch) -> None:
    (container,) = pod("paceline-gateway")["containers"]
    variable = container["env"][0]["name"]
    monkeypatch.setenv(variable, "a-key-of-8-characters")
    text = FLEET["ConfigMap", "paceline-gateway"]["data"]["gateway.toml"]
    (pool,) = parse_config(text.encode()).pools
    service = FLEET["Service", "paceline-engines"]
    assert service["spec"]["clusterIP"] == "None"
    assert pool.address == (service["metadata"]["name"], service["spec"]["ports"][0]["port"])
    assert pool.api_key_env == variable
    (engine,) = pod("paceline-engines")["containers"]
    assert engine["env"][0]["valueFrom"] == container["env"][0]["valueFrom"]


def test_the_page_shows_the_pool_of_the_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_API_KEY", "a-key-of-8-characters")
    (block,) = [b for b in blocks(DOCS / "operate/fleet.md") if "dns = " in b.code]
    shown = parse_config(block.code.encode())
    text = FLEET["ConfigMap", "paceline-gateway"]["data"]["gateway.toml"]
    manifest = parse_config(text.encode())
    assert (shown.models, shown.pools) == (manifest.models, manifest.pools)


def test_who_stops_a_pod_waits_for_its_drain() -> None:
    (engine,) = pod("paceline-engines")["containers"]
    args = build_parser().parse_args(engine["args"])
    assert (args.host, args.port, args.metrics_port) == ("0.0.0.0", 8000, 9400)
    pause = float(engine["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod("paceline-engines")["terminationGracePeriodSeconds"] > args.drain_timeout + pause
    (pull,) = pod("paceline-engines")["initContainers"]
    assert build_parser().parse_args(pull["args"]).command == "pull"
    # what is pulled is what is served
    assert pull["args"][1] == engine["args"][1]


def test_a_gateway_that_ends_has_the_time_for_its_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_API_KEY", "a-key-of-8-characters")
    text = FLEET["ConfigMap", "paceline-gateway"]["data"]["gateway.toml"]
    drain = parse_config(text.encode()).drain_timeout
    (container,) = pod("paceline-gateway")["containers"]
    pause = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    grace = pod("paceline-gateway")["terminationGracePeriodSeconds"]
    assert drain + pause < grace <= drain + pause + 30.0


def test_only_ports_that_want_no_key_are_scraped() -> None:
    for name in ("paceline-engines", "paceline-gateway"):
        about = FLEET["Deployment", name]["spec"]["template"]["metadata"].get("annotations", {})
        if "prometheus.io/port" in about:
            (container,) = pod(name)["containers"]
            assert f"--metrics-port={about['prometheus.io/port']}" in container["args"]
