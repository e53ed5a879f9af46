"""systemd.md, kubernetes.md and docker.md of docs/use/recipes/ fit the files of ``deploy/``."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.deploy.test_files import DEPLOY, DOCKERFILE, UNIT, flags, setting
from tests.docs.pages import DOCS, blocks

RECIPES = DOCS / "use" / "recipes"


def shown(page: str) -> str:
    """The page's only block of code."""
    (block,) = blocks(RECIPES / page)
    return block.code


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_reads_the_unit_with_a_file_of_flags(tmp_path: Path) -> None:
    program = setting("ExecStart").split()[0]
    unit, own = tmp_path / "paceline.service", tmp_path / "paceline.service.d" / "flags.conf"
    # which is not installed here
    unit.write_text(UNIT.replace(f"ExecStart={program}", f"ExecStart={shutil.which('true')}"))
    own.parent.mkdir()
    for text, code in ((shown("systemd.md"), 0), (shown("systemd.md") + "MemoryMax=much\n", None)):
        own.write_text(text)
        done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
        # what it does not know is said, and is no error to it
        assert (done.returncode, done.stderr) == (0, "") if code == 0 else "much" in done.stderr


def test_the_flags_of_the_service_are_the_servers() -> None:
    own = shown("systemd.md")
    (given,) = re.findall(r'^Environment="PACELINE_FLAGS=(.*)"$', own, re.MULTILINE)
    args = flags([*shlex.split(setting("ExecStart"))[1:-1], *given.split()])
    assert (args.max_model_len, args.drain_timeout) == (8192, 60.0)
    (name,) = re.findall(r"^LoadCredential=(\w+):", own, re.MULTILINE)
    assert str(args.api_key_file) == f"%d/{name}"


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl here")
def test_kubectl_renders_what_is_changed(tmp_path: Path) -> None:
    shutil.copytree(DEPLOY / "kubernetes", tmp_path / "deploy" / "kubernetes")
    (tmp_path / "kustomization.yaml").write_text(shown("kubernetes.md"))
    done = subprocess.run(["kubectl", "kustomize", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    documents = {each["kind"]: each for each in yaml.safe_load_all(done.stdout)}
    assert set(documents) == {"Deployment", "Service", "PersistentVolumeClaim"}
    assert {each["metadata"]["namespace"] for each in documents.values()} == {"models"}
    (container,) = documents["Deployment"]["spec"]["template"]["spec"]["containers"]
    args = flags(container["args"])
    assert (args.command, args.host, args.max_model_len) == ("serve", "0.0.0.0", 8192)
    assert "qwen2.5-1.5b" in container["args"] and "smollm2-135m" not in container["args"]
    assert container["image"].endswith("/paceline:0.1")
    assert container["resources"]["limits"]["memory"] == "12Gi"


def test_the_container_is_started_as_the_image_is_made() -> None:
    build, run = shown("docker.md").replace("\\\n", "").splitlines()
    words = shlex.split(build)
    assert (DEPLOY.parent / words[words.index("-f") + 1]).is_file()
    image = words[words.index("-t") + 1]
    options, _, command = run.partition(f" {image} ")
    args = flags(shlex.split(command))
    ports = re.findall(r"-p 127\.0\.0\.1:\d+:(\d+)", options)
    assert (args.command, args.host, ports) == ("serve", "0.0.0.0", [str(args.port)])
    (kept,) = re.findall(r"^VOLUME (.*)$", DOCKERFILE, re.MULTILINE)
    assert re.findall(r"-v \S+:(\S+)", options) == kept.split()
