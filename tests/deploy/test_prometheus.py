"""A real Prometheus over a real server: all queries of dashboard and alerts find series.

``make test-services`` installs ``prometheus`` and ``promtool``; elsewhere these tests skip.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.server.live_process import LiveServer, eventually, live_server

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus"

pytestmark = [
    pytest.mark.services,
    pytest.mark.skipif(
        shutil.which("prometheus") is None or shutil.which("promtool") is None,
        reason="needs prometheus and promtool (Debian: apt-get install prometheus)",
    ),
]


def promtool(*arguments: str) -> str:
    done = subprocess.run(
        ["promtool", *arguments], cwd=RULES, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["prometheus.yml", "gateway.yml"])
def test_promtool_takes_the_configuration(name: str) -> None:
    # the key is a secret of the container
    assert "SUCCESS" in promtool("check", "config", "--syntax-only", name)


def test_alerts_fire_on_faults_and_only_then() -> None:
    assert "SUCCESS" in promtool("test", "rules", "alerts_test.yml")


class Prometheus:
    """One server process that scrapes a server and a gateway, configured as in ``deploy/``."""

    def __init__(self, folder: Path, target: str, gateway: str) -> None:
        config = yaml.safe_load((RULES / "gateway.yml").read_text())
        config["global"] = {"scrape_interval": "200ms", "evaluation_interval": "500ms"}
        of_servers, of_gateways = config["scrape_configs"]
        of_servers["static_configs"] = [{"targets": [target]}]
        of_gateways["static_configs"] = [{"targets": [gateway]}]
        # of the file in the container; nobody is asked for a key here
        del of_gateways["authorization"]
        shutil.copy(RULES / "alerts.yml", folder)
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/api/v1"
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                stdout=log,
                stderr=log,
            )

    def ask(self, path: str, **parameters: str) -> Any:
        url = f"{self.url}/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    def result(self, query: str) -> list[Any]:
        found: list[Any] = self.ask("query", query=query)["result"]
        return found

    def is_scraping(self) -> bool:
        try:
            return bool(self.result("vllm:num_requests_running"))
        except OSError:
            assert self.process.poll() is None, self.log.read_text()
            return False


@pytest.fixture(scope="module", autouse=True)
def started(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[LiveServer, str, Prometheus]]:
    """Begun with the first test: Prometheus asks its targets no sooner than 5 s after its start."""
    folder = tmp_path_factory.mktemp("prometheus")
    with (
        live_server(
            folder / "server-log",
            metrics_port=0,
            backend={"step_time": 0.004, "num_blocks": 24, "poison_token": 7},
            core={
                "pipeline_depth": 1,
                "max_num_seqs": 3,
                "max_num_waiting": 3,
                "future_memory_check": False,
            },
            config={"price_per_hour": 2.0},
        ) as server,
        gateway_over(server, folder) as gateway,
    ):
        address = gateway.removeprefix("http://")
        made = Prometheus(folder, f"127.0.0.1:{server.metrics_port}", address)
        try:
            yield server, gateway, made
        finally:
            made.process.terminate()
            made.process.wait(20)


@contextmanager
def gateway_over(server: LiveServer, folder: Path) -> Iterator[str]:
    """The address of a gateway with prices before the server."""
    config = folder / "gateway.toml"
    config.write_text(
        f'spend_storage = ""\n[[engines]]\nname = "a"\nurl = "{server.url}"\n'
        "[[prices]]\ninput = 1\noutput = 2\n"
    )
    with (folder / "gateway-log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "paceline.cli.main", "gateway", str(config), "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[3].removesuffix("/v1")
        finally:
            process.terminate()
            process.wait(20)
            process.stdout.close()


@pytest.fixture(scope="module")
def prometheus(started: tuple[LiveServer, str, Prometheus]) -> Prometheus:
    """After a few seconds in which everything happened that the dashboards show."""
    server, gateway, made = started
    eventually(made.is_scraping, timeout=30)
    # a rate needs what was before as well as what is
    keep_busy(server, gateway, seconds=1.0)
    eventually(lambda: len(made.result("paceline:slo_requests_total")) >= 2, timeout=30)
    eventually(lambda: bool(made.result("paceline:gateway_attempts_total")), timeout=30)
    keep_busy(server, gateway, seconds=2.0)
    time.sleep(0.5)
    return made


def keep_busy(server: LiveServer, gateway: str, seconds: float) -> None:
    """Requests of several classes at once: met and missed targets, refusals, failures, waits; and
    some through the gateway."""
    until = time.monotonic() + seconds

    def ask_gateway() -> None:
        while time.monotonic() < until:
            body = {"prompt": [5] * 9, "max_tokens": 4, "stream": True}
            httpx.post(f"{gateway}/v1/completions", json=body, timeout=30)

    def ask(number: int) -> None:
        while time.monotonic() < until:
            body: dict[str, Any] = {"prompt": [10 + number] * 40, "max_tokens": 40 + number}
            body["ignore_eos"] = True
            if number % 3 == 1:
                body["slo"] = {"class": "interactive", "ttft_ms": 0.001}
            if number % 3 == 2:
                body["slo"] = "batch"
            if number == 4:
                body["prompt"] = [7]
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)

    with ThreadPoolExecutor(10) as threads:
        through = threads.submit(ask_gateway)
        list(threads.map(ask, range(9)))
        through.result()


DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))


def queries() -> Iterator[tuple[str, str]]:
    """(panel, PromQL) of the dashboards, as Grafana would ask."""
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                query = target["expr"].replace("$__rate_interval", "30s")
                if "gateway_pool_age_seconds" in query:
                    # this gateway has no pool; tests/gateway/test_pools.py reads the metric
                    continue
                yield panel["title"], re.sub(r"\$(model|instance|engine)", ".*", query)


@pytest.mark.parametrize(("title", "query"), list(queries()))
def test_every_query_of_the_dashboard_finds_something(
    prometheus: Prometheus, title: str, query: str
) -> None:
    result = prometheus.result(query)
    assert result, f"{title}: nothing for {query}"
    assert any(series["value"][1] != "NaN" for series in result), (title, result)


def questions() -> list[str]:
    """The queries of docs/operate/observability.md."""
    page = (DEPLOY.parent / "docs" / "operate" / "observability.md").read_text()
    found = re.findall(r"^\| [^|]+ \| `(.+)` \|$", page, re.M)
    return [query for query in found if "rate(" in query]


@pytest.mark.parametrize("query", questions())
def test_the_pages_queries_find_something(prometheus: Prometheus, query: str) -> None:
    assert prometheus.result(query.replace("[5m]", "[30s]"))


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_variables_of_the_dashboard_find_something(prometheus: Prometheus, path: Path) -> None:
    dashboard = json.loads(path.read_text())
    asked = [each["query"]["query"] for each in dashboard["templating"]["list"][1:]]
    for query in asked:
        series, label = re.fullmatch(r"label_values\((\S+), (\w+)\)", query).groups()  # type: ignore[union-attr]
        assert prometheus.ask(f"label/{label}/values", **{"match[]": series})


def test_alerts_are_loaded_and_ask_for_series_that_exist(prometheus: Prometheus) -> None:
    groups = prometheus.ask("rules")["groups"]
    rules = {rule["name"]: rule for group in groups for rule in group["rules"]}
    shipped = yaml.safe_load((RULES / "alerts.yml").read_text())["groups"][0]["rules"]
    assert set(rules) == {rule["alert"] for rule in shipped}
    eventually(lambda: not _unevaluated(prometheus), timeout=20)
    for rule in shipped:
        selectors = re.findall(r"(?:up|(?:vllm|paceline):\w+|http_\w+)(?:\{[^}]*\})?", rule["expr"])
        assert selectors, rule["alert"]
        for selector in selectors:
            assert prometheus.result(selector), (rule["alert"], selector)


def _unevaluated(prometheus: Prometheus) -> list[str]:
    groups = prometheus.ask("rules")["groups"]
    return [rule["name"] for group in groups for rule in group["rules"] if rule["health"] != "ok"]


def test_the_scrapes_lose_nothing(prometheus: Prometheus) -> None:
    """What Prometheus kept of the last scrapes is what server and gateway showed."""
    for job in ("paceline", "gateway"):
        assert prometheus.result(f'up{{job="{job}"}}')[0]["value"][1] == "1"
    names = prometheus.ask("label/__name__/values")
    for kind in ("vllm:", "paceline:", "http_"):
        assert any(name.startswith(kind) for name in names)
    dropped = prometheus.result("scrape_samples_scraped - scrape_samples_post_metric_relabeling")
    assert [each["value"][1] for each in dropped] == ["0", "0"]
