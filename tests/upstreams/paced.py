"""vLLM's CPU build with our scheduler and middleware inside: one live server and its checks.

The server runs in float32, so that an answer does not depend on what else is in a step, and holds
few requests, so that some are refused. The flags are those of docs/start/vllm.md. Its recording is
simulated once it has ended.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common.ours import our_places
from benchmarks.peers.vllm_cpu import VllmCpu
from benchmarks.vllm.live import Contender, served
from paceline.checkpoints.open import open_checkpoint
from paceline.gateway import EngineConfig, GatewayConfig
from paceline.gateway.settings.engine_types import KINDS, kind_of_metrics, read_pressure
from tests.checkpoints.adapters import random_pairs, write_peft
from tests.gateway.helpers import gateway_over, until

__all__ = ["CHECKS", "Server", "paced_server", "plain_answers", "simulated"]

PAGE = Path(__file__).parents[2] / "docs" / "start" / "vllm.md"
_FLAGS = (
    "--dtype", "float32", "--max-num-seqs", "2", "--enforce-eager",
    "--enable-lora", "--max-loras", "1", "--max-lora-rank", "8",
)  # fmt: skip
_ADAPTERS = ("one", "two")
# beyond the page's settings: requests are refused for their number alone, however slow the machine
_SETTINGS = {"max_num_waiting": 6, "max_predicted_ttft_s": 3_600}
_RECORDING = "steps.jsonl"
# vLLM's counter of ended requests, by the reason
_ERRORS = "vllm:request_success"
_PROMPTS = tuple(f"Count from {n} on: {n}, {n + 1}, {n + 2}," for n in (1, 7, 20, 55, 90, 340))
_TOKENS = 24
_SLO = {"ttft_ms": 20_000, "tpot_ms": 5_000}
_HEADERS = {"x-slo-ttft-ms": "20000", "x-slo-tpot-ms": "5000"}
_TARGETS = {"ttft_ms": 20_000.0, "tpot_ms": 5_000.0}
_MESSAGES = [{"role": "user", "content": "Say hello."}]
_ROUTES: Mapping[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": _MESSAGES, "max_tokens": 8},
    "/v1/completions": {"prompt": "Hello, my", "max_tokens": 8},
    "/v1/responses": {"input": "Say hello.", "max_output_tokens": 8},
    "/v1/messages": {"messages": _MESSAGES, "max_tokens": 8},
}


class Server:
    """A live server, and the answers that the same vLLM gives without us."""

    def __init__(self, client: httpx.AsyncClient, model: str, plain: list[str]) -> None:
        self.client, self.model, self.plain = client, model, plain

    async def post(self, route: str, body: dict[str, Any], **more: Any) -> httpx.Response:
        return await self.client.post(route, json={"model": self.model} | body, **more)

    async def fate(self, answer: httpx.Response) -> Any:
        tag = answer.headers["x-paceline-request"]
        return (await self.client.get(f"/paceline/explain/{tag}")).json()


@contextmanager
def paced_server(peer: VllmCpu, folder: Path) -> Iterator[tuple[int, str]]:
    """The server of all checks: its port and its model's name."""
    flags = _page_flags()
    at = flags.index("--additional-config") + 1
    settings = json.loads(flags[at])
    settings["paceline"] |= _SETTINGS | {"record": str(folder / _RECORDING)}
    flags[at] = json.dumps(settings)
    contender = Contender("paced", (*flags, *_FLAGS, *_adapter_flags(folder)), paced=True)
    with served(peer, contender, folder) as server:
        yield server.port, server.model
        server.check()


def _adapter_flags(folder: Path) -> list[str]:
    """Random adapters, which change answers clearly."""
    places, _ = our_places()
    config = open_checkpoint(places.model).config
    flags = ["--lora-modules"]
    for seed, name in enumerate(_ADAPTERS):
        pairs = random_pairs(config, rank=8, seed=seed)
        flags.append(f"{name}={write_peft(folder / name, pairs)}")
    return flags


def simulated(folder: Path) -> str:
    """The recording of the server, which has ended, is a workload and has step times."""
    path = folder / _RECORDING
    words = ["--workload", str(path), "--step-times", f"recorded:{path}", "--json"]
    command = [sys.executable, "-m", "paceline.cli.main", "simulate", *words]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-300:]
    (found,) = json.loads(run.stdout)["runs"]
    return f"{found['finished']} requests"


def _commands() -> list[str]:
    """The shell blocks of the page."""
    return re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def _page_flags() -> list[str]:
    """The flags behind ``vllm serve MODEL`` on the page."""
    words = shlex.split(_commands()[0].replace("\\\n", " "))
    return words[words.index("MODEL") + 1 :]


def plain_answers(peer: VllmCpu, folder: Path) -> list[str]:
    """What vLLM without us answers to the prompts, one after another."""
    with served(peer, Contender("plain", _FLAGS), folder) as server:
        return [_complete(server.port, server.model, prompt) for prompt in _PROMPTS]


def _complete(port: int, model: str, prompt: str) -> str:
    answer = httpx.post(
        f"http://127.0.0.1:{port}/v1/completions", timeout=120.0,
        json={"model": model, "prompt": prompt, "max_tokens": _TOKENS, "temperature": 0},
    )  # fmt: skip
    text: str = answer.json()["choices"][0]["text"]
    return text


# ---------------------------------------------------------------- the checks


async def _targets(server: Server) -> str:
    """Targets by body and by header reach the scheduler, on four routes."""
    for route, body in _ROUTES.items():
        for more, headers in (({"slo": _SLO}, {}), ({}, _HEADERS)):
            answer = await server.post(route, body | more, headers=headers)
            assert answer.status_code == 200, f"{route}: {answer.text[:200]}"
            fate = await server.fate(answer)
            assert fate["targets"] == _TARGETS, f"{route}: {fate}"
            assert fate["ttft_ms"] > 0.0 and fate["violated"] == [], f"{route}: {fate}"
    return f"{len(_ROUTES)} routes, by body and by header"


async def _commands_of_page(server: Server) -> str:
    """The page's requests are answered."""
    commands = "".join(_commands()[1:]).replace('"MODEL"', json.dumps(server.model))
    commands = commands.replace("http://localhost:8000", str(server.client.base_url))
    shell = await asyncio.create_subprocess_shell(
        commands.replace("curl ", "curl -sS --fail-with-body "), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await shell.communicate()
    told = f"ended with {shell.returncode}: {output[-250:]!r}"
    assert shell.returncode == 0 and b'"timeline"' in output and b'"accepted"' in output, told
    return "as written"


async def _bad_targets(server: Server) -> str:
    """Bad targets are refused by name."""
    for body, headers, param in (
        ({"slo": {"ttft_ms": 0}}, {}, "slo.ttft_ms"),
        ({"slo": {"ttft_ms": 5}}, {"x-slo-ttft-ms": "6"}, "slo.ttft_ms"),
        ({"vllm_xargs": "x"}, {}, "vllm_xargs"),
    ):
        answer = await server.post(
            "/v1/completions", {"prompt": "a", "max_tokens": 1} | body, headers=headers
        )
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param, answer.text
    return "400 by name"


async def _explained(server: Server) -> str:
    """The explanation is in a whole answer, and in the last part with a usage of a stream."""
    for route in _ROUTES:
        body = _ROUTES[route] | {"explain": True, "slo": _SLO}
        usage = (await server.post(route, body)).json()["usage"]
        assert usage["timeline"]["targets"] == _TARGETS, usage
        streamed = await server.post(route, body | {"stream": True})
        lines = [line for line in streamed.text.splitlines() if line.startswith("data: {")]
        events = [json.loads(line[6:]) for line in lines]
        # the usage lies in an event, or in the whole answer that the last one carries
        told = [event.get("usage") or event.get("response", {}).get("usage") for event in events]
        *others, last = [usage for usage in told if usage]
        assert last["timeline"]["targets"] == _TARGETS, f"{route}: {last}"
        assert not any("timeline" in usage for usage in others), f"{route}: {others}"
    return f"whole and streamed, on {len(_ROUTES)} routes"


async def _refused(server: Server) -> str:
    """A burst over the limit: 429 with Retry-After on all routes, streamed or whole."""
    kinds = [(route, stream) for route in _ROUTES for stream in (True, False)]
    counts: dict[tuple[str, bool], list[httpx.Response]] = {kind: [] for kind in kinds}

    async def one(route: str, stream: bool) -> None:
        body = {name: 40 if name.startswith("max_") else v for name, v in _ROUTES[route].items()}
        counts[route, stream].append(await server.post(route, body | {"stream": stream}))

    await asyncio.gather(*(one(*kind) for _ in range(6) for kind in kinds))
    for kind, answers in counts.items():
        refused = [answer for answer in answers if answer.status_code == 429]
        assert refused, f"{kind}: {[answer.status_code for answer in answers]}"
        for answer in refused:
            assert int(answer.headers["retry-after"]) >= 1
            assert "wait already" in answer.json()["error"]["message"]
        for answer in answers:
            if answer not in refused:
                assert answer.status_code == 200, f"{kind}: {answer.text[:200]}"
                assert "Internal server error" not in answer.text, f"{kind}: {answer.text[:200]}"
    every = [answer.status_code for answers in counts.values() for answer in answers]
    assert 200 in every
    return f"{every.count(429)} of {len(every)}, streamed and whole, on {len(_ROUTES)} routes"


async def _predicted(server: Server) -> str:
    """A prediction queues nothing; what follows a full queue is refused before vLLM sees it."""
    answer = await server.client.post("/paceline/predict", json=_ROUTES["/v1/completions"])
    told = answer.json()
    assert told["accepted"] and told["predicted_ttft_ms"] > 0.0 and told["refused"] is None, told
    assert 1 <= told["prompt_tokens"] <= 10, told
    body = {"prompt": "Hello, my", "max_tokens": 200}
    # no more than run and wait: the engine's own door refuses none of them
    full = 2 + _SETTINGS["max_num_waiting"]
    running = [asyncio.create_task(server.post("/v1/completions", body)) for _ in range(full)]
    try:
        for _ in range(600):
            if not (told := await _foretold(server))["accepted"]:
                break
            await asyncio.sleep(0.1)
        assert not told["accepted"] and "wait already" in told["refused"]["message"], told
        assert told["refused"]["retry_after"] > 0.0
        before = await _values(server)
        refused = [await server.post("/v1/completions", body) for _ in range(4)]
        after = await _values(server)
    finally:
        for each in running:
            each.cancel()
    assert after[_ERRORS] == before[_ERRORS], "vLLM saw a refused request"
    assert [each.status_code for each in refused] == [429] * 4
    fate = await server.fate(refused[0])
    assert fate["refused"]["reason"] == "queue-full", fate
    await _idle(server)
    return told["refused"]["message"]


async def _foretold(server: Server) -> Any:
    answer = await server.client.post("/paceline/predict", json=_ROUTES["/v1/completions"])
    return answer.json()


async def _values(server: Server) -> dict[str, float]:
    """Ours of /metrics by name, and the number of requests that vLLM ended with an error."""
    text = (await server.client.get("/metrics")).text
    found = {
        name: float(value)
        for name, value in re.findall(r'^(paceline:\w+)\{engine="0"\} (\S+)$', text, re.MULTILINE)
    }
    ended = re.findall(rf"^{_ERRORS}_total\{{.*=\"error\".*\}} (\S+)$", text, re.MULTILINE)
    return found | {_ERRORS: sum(map(float, ended))}


async def _idle(server: Server) -> None:
    """Wait until nothing runs."""
    for _ in range(600):
        text = (await server.client.get("/metrics")).text
        if 'state="running"' not in text and 'state="waiting"' not in text:
            return
        await asyncio.sleep(0.1)
    raise AssertionError("requests still run")


async def _adapters(server: Server) -> str:
    """Requests with adapters answer together as they do alone. A request without one is not next to
    them: in vLLM's CPU build, with or without us, a step's rows without an adapter get its last."""
    body = {"prompt": _PROMPTS[0], "max_tokens": 8, "temperature": 0, "slo": _SLO}

    async def one(model: str) -> str:
        answer = await server.post("/v1/completions", body | {"model": model})
        assert answer.status_code == 200, f"{model}: {answer.text[:200]}"
        assert (await server.fate(answer))["targets"] == _TARGETS
        text: str = answer.json()["choices"][0]["text"]
        return text

    models = (*_ADAPTERS, server.model)
    alone = [await one(model) for model in models]
    assert len(set(alone)) == len(models), f"the adapters change nothing: {alone}"
    together = await asyncio.gather(*(one(model) for model in _ADAPTERS * 2))
    assert together == alone[:2] * 2, f"{together} instead of {alone}"
    return f"{len(_ADAPTERS)} adapters with --max-loras 1"


async def _gateway(server: Server) -> str:
    """Behind a gateway, targets reach the scheduler, and its refusals reach callers."""
    engine = EngineConfig(name="paced", url=str(server.client.base_url).rstrip("/"))
    config = GatewayConfig(engines=(engine,), poll_interval=0.2, spend_storage="")
    async with gateway_over(config) as (gateway, client):
        known = gateway.upstreams.by_name["paced"]
        await until(lambda: known.kind == "vllm" and known.models and not known.trouble, 30.0)
        behind = Server(client, server.model, [])
        client.timeout = server.client.timeout
        for more, headers in (({"slo": _SLO}, {}), ({}, _HEADERS)):
            body = _ROUTES["/v1/chat/completions"] | more | {"explain": True}
            answer = await behind.post("/v1/chat/completions", body, headers=headers)
            assert answer.status_code == 200, answer.text[:200]
            assert answer.json()["usage"]["timeline"]["targets"] == _TARGETS, answer.text[:300]
        body = _ROUTES["/v1/completions"] | {"max_tokens": 40}
        answers = await asyncio.gather(
            *(
                behind.post("/v1/completions", body | {"stream": bool(number % 2)})
                for number in range(24)
            )
        )
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 429}, statuses
    for answer in answers:
        assert answer.status_code == 200 or int(answer.headers["retry-after"]) >= 1
    return f"targets by body and header; {statuses.count(429)} of {len(statuses)} refused"


async def _top(server: Server) -> str:
    """``paceline top`` reads the server."""
    command = ("-m", "paceline.cli.main", "top", str(server.client.base_url), "--once", "--json")
    read = await asyncio.create_subprocess_exec(
        sys.executable, *command, "--interval", "0.1", stdout=asyncio.subprocess.PIPE
    )
    output, _ = await read.communicate()
    assert read.returncode == 0, output
    frame = json.loads(output)
    told = {each["name"]: each["attainment_since_start"] for each in frame["classes"]}
    assert frame["running"] == 0 and told["standard"] is not None, frame
    return f"attainment since start {told['standard']:.2f}"


async def _ui(server: Server) -> str:
    """A browser gets the page, and what the page asks for."""
    page = await server.client.get("/ui/promises")
    assert page.status_code == 200 and b"main.js" in page.content, page.status_code
    for script in re.findall(r'src="([^"]+)"', page.text):
        assert (await server.client.get(f"/ui/{script}")).status_code == 200, script
    for path in ("/v1/models", "/version", "/health"):
        assert (await server.client.get(path)).status_code == 200, path
    told = (await server.client.get("/ui/api/promises?seconds=0")).json()
    assert told["frame"]["attainment"] > 0.0, told
    assert (await server.client.get("/ui/api/timeline")).status_code == 404
    return f"attainment {told['frame']['attainment']:.2f}"


async def _metrics(server: Server) -> str:
    """Our lines are in /metrics, the gateway reads them, and no step was vLLM's own."""
    text = (await server.client.get("/metrics")).text
    assert "vllm:num_requests_running" in text
    raw = text.encode()
    assert kind_of_metrics(raw) == "vllm"
    assert read_pressure(raw, KINDS["vllm"], 0.0).level == 0.0
    values = await _values(server)
    assert values["paceline:steps_total"] > 0
    assert 'paceline:goodput_requests_total{engine="0",slo_class="standard"}' in text
    assert values["paceline:vllm_own_steps_total"] == values["paceline:vllm_faults_total"] == 0
    amended = values["paceline:vllm_amended_steps_total"]
    return f"{values['paceline:steps_total']:.0f} steps, {amended:.0f} amended"


async def _grammar(server: Server) -> str:
    """A request with a grammar is answered by it, next to one without."""
    schema = {
        "type": "object", "properties": {"n": {"type": "integer", "maximum": 9}},
        "required": ["n"], "additionalProperties": False,
    }  # fmt: skip
    body = {
        "messages": _MESSAGES, "max_tokens": 40, "temperature": 0,
        "response_format": {
            "type": "json_schema", "json_schema": {"name": "one", "schema": schema}
        },
    }  # fmt: skip
    with_grammar, other = await asyncio.gather(
        server.post("/v1/chat/completions", body),
        server.post("/v1/completions", _ROUTES["/v1/completions"]),
    )
    assert other.status_code == 200
    found = json.loads(with_grammar.json()["choices"][0]["message"]["content"])
    assert isinstance(found["n"], int), found
    return json.dumps(found)


async def _identical(server: Server) -> str:
    """Greedy answers, all at once with targets, are those of vLLM without us."""

    async def one(prompt: str) -> str:
        body = {"prompt": prompt, "max_tokens": _TOKENS, "temperature": 0, "slo": _SLO}
        answer = await server.post("/v1/completions", body)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text

    found = await asyncio.gather(*map(one, _PROMPTS))
    same = sum(a == b for a, b in zip(found, server.plain, strict=True))
    assert same == len(_PROMPTS), f"{same} of {len(_PROMPTS)} are equal"
    return f"{same} of {len(_PROMPTS)}"


async def _prefix(server: Server) -> str:
    """A prompt that was there before is found in vLLM's cache."""
    hits = []
    for _ in range(2):
        await server.post("/v1/completions", {"prompt": list(range(100, 400)), "max_tokens": 2})
        text = (await server.client.get("/metrics")).text
        found = re.search(r"^vllm:prefix_cache_hits_total\{.*\} (\S+)$", text, re.MULTILINE)
        assert found is not None
        hits.append(float(found[1]))
    assert hits[1] - hits[0] >= 128, f"{hits} tokens were found after the first and the second"
    return f"{hits[1] - hits[0]:.0f} tokens"


async def _leaves(server: Server) -> str:
    """A caller hangs up: its request ends in both, and the next ones are served."""
    body = {"model": server.model, "prompt": "a", "max_tokens": 2000, "stream": True,
            "ignore_eos": True}  # fmt: skip
    async with server.client.stream("POST", "/v1/completions", json=body) as answer:
        async for _ in answer.aiter_lines():
            break
    await _idle(server)
    return "nothing runs"


CHECKS: Mapping[str, Callable[[Server], Awaitable[str]]] = {
    "targets by body and header": _targets,
    "docs page": _commands_of_page,
    "bad targets": _bad_targets,
    "explanation": _explained,
    "429 with Retry-After": _refused,
    "predictions": _predicted,
    "grammar": _grammar,
    "adapters": _adapters,
    "greedy answers are vLLM's": _identical,
    "cached prefix": _prefix,
    "a caller leaves": _leaves,
    "behind a gateway": _gateway,
    "paceline top": _top,
    "the page at /ui": _ui,
    "metrics": _metrics,
}
