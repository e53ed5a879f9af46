"""The compose files say what Compose understands, and nothing that is not there.

There may be no Docker here: this is what `docker compose config` would refuse, of what these files
use. Keys and forms are those of the Compose Specification.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
FILES = sorted(DEPLOY.glob("compose*.yaml"))

# of the specification, those that are used here; one that is misspelt is not among them
TOP = {"name", "services", "volumes", "secrets"}
SERVICE = {
    "build", "command", "depends_on", "environment", "healthcheck", "image", "ports", "restart",
    "secrets", "stop_grace_period", "volumes",
}  # fmt: skip
HEALTH = {"test", "interval", "timeout", "retries", "start_period"}
CONDITIONS = {"service_started", "service_healthy", "service_completed_successfully"}
DURATION = re.compile(r"(\d+(us|ms|s|m|h))+")
# ${NAME}, ${NAME:-default}, ${NAME:?what to do}
VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")


def faults(document: dict[str, Any], folder: Path) -> list[str]:
    """What is wrong with a file, in words."""
    found = [f"there is no {key!r}" for key in document if key not in TOP and key[:2] != "x-"]
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", document.get("name", "")):
        found.append("a project's name is of small letters, digits, - and _")
    for name, service in document["services"].items():
        found += [f"{name}: {fault}" for fault in _of_service(service, document, folder)]
    for name, volume in (document.get("volumes") or {}).items():
        if volume is not None and not isinstance(volume, dict):
            found.append(f"volume {name} is neither empty nor a mapping")
    for name, secret in (document.get("secrets") or {}).items():
        if set(secret) not in ({"environment"}, {"file"}):
            found.append(f"secret {name} comes from an environment variable or a file")
    return found


def _of_service(service: dict[str, Any], document: dict[str, Any], folder: Path) -> list[str]:
    found = [f"there is no {key!r}" for key in service if key not in SERVICE]
    if ("image" in service) == ("build" in service):
        found.append("it has an image or is built, one of them")
    if "image" in service and not re.fullmatch(r"[a-z0-9./-]+:v?\d[\w.-]*", service["image"]):
        found.append(f"{service['image']} has no version")
    if "build" in service:
        build = service["build"]
        context = folder / build["context"]
        if not (context / build["dockerfile"]).is_file():
            found.append(f"there is no {build['dockerfile']} in {context}")
        arguments = re.findall(r"^ARG (\w+)", (context / build["dockerfile"]).read_text(), re.M)
        found += [f"no ARG {each}" for each in build.get("args", {}) if each not in arguments]
    command = service.get("command", [])
    if not isinstance(command, list) or not all(isinstance(word, str) for word in command):
        found.append("the command is a list of strings")
    needed = service.get("depends_on", {})
    found += [f"there is no service {each}" for each in needed if each not in document["services"]]
    if isinstance(needed, dict):
        for each, how in needed.items():
            if set(how) != {"condition"} or how["condition"] not in CONDITIONS:
                found.append(f"depends_on {each}: {how}")
    found += [
        f"port {port!r}" for port in service.get("ports", [])
        if not re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port)
    ]  # fmt: skip
    if service.get("restart", "no") not in ("no", "always", "on-failure", "unless-stopped"):
        found.append(f"restart {service['restart']!r}")
    if not DURATION.fullmatch(service.get("stop_grace_period", "10s")):
        found.append(f"stop_grace_period {service['stop_grace_period']!r}")
    health = service.get("healthcheck")
    if health is not None:
        found += [f"healthcheck has no {key!r}" for key in health if key not in HEALTH]
        if health["test"][0] not in ("CMD", "CMD-SHELL") or not all(
            isinstance(word, str) for word in health["test"]
        ):
            found.append(f"healthcheck {health['test']}")
        times = [health[key] for key in ("interval", "timeout", "start_period") if key in health]
        found += [f"healthcheck {time!r}" for time in times if not DURATION.fullmatch(str(time))]
    for value in service.get("environment", {}).values():
        # true and 1 are not strings, and Compose takes none but strings here
        if not isinstance(value, str):
            found.append(f"environment {value!r} is no string")
    for volume in service.get("volumes", []):
        source, target, *mode = volume.split(":")
        if mode not in ([], ["ro"], ["rw"]) or not target.startswith("/"):
            found.append(f"volume {volume!r}")
        if source.startswith("."):
            if not (folder / source).exists():
                found.append(f"there is no {source}")
        elif source not in (document.get("volumes") or {}):
            found.append(f"volume {source} is not declared")
    found += [
        f"secret {each} is not declared" for each in service.get("secrets", [])
        if each not in document.get("secrets", {})
    ]  # fmt: skip
    return found


def load(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(path.read_text())
    return document


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_compose_would_take_it(path: Path) -> None:
    assert faults(load(path), DEPLOY) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_variables_have_a_default_or_say_what_to_do(path: Path) -> None:
    text = re.sub(r"#.*", "", path.read_text())
    assert text.count("${") == len(VARIABLE.findall(text))
    for name, kind, rest in VARIABLE.findall(text):
        assert kind == "-" or (kind == "?" and rest), name


def test_a_gateway_two_engines_and_what_watches_them() -> None:
    services = load(DEPLOY / "compose.gateway.yaml")["services"]
    assert set(services) == {"engine-a", "engine-b", "gateway", "redis", "prometheus", "grafana"}
    # a start that needs an order says so
    assert services["gateway"]["depends_on"]["redis"] == {"condition": "service_healthy"}
    assert services["redis"]["healthcheck"]["test"] == ["CMD", "redis-cli", "ping"]


BAD = {
    "a key that there is not": ({"restarts": "always"}, "there is no 'restarts'"),
    "a flag that is no string": ({"environment": {"A": True}}, "environment True is no string"),
    "no version": ({"image": "redis", "build": None}, "redis has no version"),
    "a volume of nobody": ({"volumes": ["else:/x"]}, "volume else is not declared"),
    "a file of nobody": ({"volumes": ["./none:/x"]}, "there is no ./none"),
    "a service of nobody": ({"depends_on": ["none"]}, "there is no service none"),
    "a secret of nobody": ({"secrets": ["none"]}, "secret none is not declared"),
    "a port for everybody": ({"ports": ["8080:8080"]}, "port '8080:8080'"),
    "a time without a unit": ({"stop_grace_period": "45"}, "stop_grace_period '45'"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_what_it_would_refuse_is_found(name: str) -> None:
    changes, fault = BAD[name]
    document = json.loads(json.dumps(load(DEPLOY / "compose.gateway.yaml")))
    service = document["services"]["gateway"] | changes
    document["services"]["gateway"] = {k: v for k, v in service.items() if v is not None}
    assert f"gateway: {fault}" in faults(document, DEPLOY)
