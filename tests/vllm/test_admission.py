"""The middleware before an application that answers by a script, and the channel to an engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.gateway.settings.engine_types import KINDS, kind_of_metrics, read_pressure
from paceline.server.observability.snapshot.frame import make_frame
from paceline.server.observability.snapshot.scrape import parse_metrics
from paceline.server.protocol.targets import CLASSES
from paceline.vllm import requests
from paceline.vllm.admission import Admission
from paceline.vllm.channel import ask
from paceline.vllm.metrics import METRICS, metrics_lines
from tests.vllm.serving import COUNTS, REFUSED, SERVED, App, Engine, post


def arguments(body: dict[str, Any], headers: Sequence[tuple[str, str]] = ()) -> dict[str, Any]:
    """What vLLM gets as ``vllm_xargs``, without the tag."""
    app = App(200, b"{}")
    status, answer, _ = post(app, body, headers)
    assert status == 200
    passed = json.loads(app.body)
    assert "slo" not in passed and app.headers[b"content-length"] == str(len(app.body)).encode()
    found: dict[str, Any] = passed["vllm_xargs"]
    assert found.pop("paceline_characters", 1) > 0
    assert found.pop("paceline_tag") == answer["x-paceline-request"]
    return found


# ---------------------------------------------------------------- the way in


def test_targets_by_body_and_headers() -> None:
    targets = {"ttft_ms": 500.0, "tpot_ms": 50.0}
    assert arguments({"slo": {"ttft_ms": 500, "tpot_ms": 50}}) == targets
    headers = [("x-slo-ttft-ms", "500"), ("x-slo-tpot-ms", "50")]
    assert arguments({}, headers) == targets
    assert arguments({"slo": {"ttft_ms": 500}}, headers) == targets
    assert arguments({"slo": "batch"}) == {"best_effort": 1, "slo_class": "batch"}
    assert arguments({}) == {}
    # other people's arguments stay, and a caller may write ours there itself
    assert arguments({"vllm_xargs": {"theirs": "x", "ttft_ms": 3}}) == {"theirs": "x", "ttft_ms": 3}


def test_routes_behind_a_root_path() -> None:
    app = App(200, b"{}")
    post(app, {"slo": {"ttft_ms": 500}}, root="/behind")
    assert json.loads(app.body)["vllm_xargs"]["ttft_ms"] == 500.0


def test_classes_are_those_of_our_server() -> None:
    assert set(requests.CLASSES) == set(CLASSES)
    for name, slo in CLASSES.items():
        assert requests.slo_of(requests.slo_arguments(slo)) == slo, name


def test_tenant_by_header_or_key() -> None:
    assert arguments({}, [("x-llm-d-inference-fairness-id", "a")]) == {"tenant": "a"}
    one, other = (
        arguments({}, [("authorization", f"Bearer {key}")])["tenant"] for key in ("k1", "k2")
    )
    assert one != other and "k1" not in one


@pytest.mark.parametrize(
    ("body", "headers", "param", "message"),
    [
        ({"slo": {"ttft_ms": -1}}, (), "slo.ttft_ms", "must be above 0"),
        ({"slo": {"ttft": 1}}, (), "slo", "unknown fields"),
        ({}, [("x-slo-ttft-ms", "soon")], "x-slo-ttft-ms", "must be a number of milliseconds"),
        (
            {"slo": {"ttft_ms": 500}}, [("x-slo-ttft-ms", "400")], "slo.ttft_ms",
            "the body says 500 and a header says 400",
        ),
        ({"vllm_xargs": [1]}, (), "vllm_xargs", "must be an object, got a list"),
        ({"vllm_xargs": {"ttft_ms": "1"}}, (), "ttft_ms", "must be a number, got '1'"),
        ({"vllm_xargs": {"ttft_ms": 10**400}}, (), "ttft_ms", "is too large a number"),
        (
            {"vllm_xargs": {"ttft_ms": 1}, "slo": {"ttft_ms": 2}}, (), "vllm_xargs.ttft_ms",
            "slo says 2.0 and vllm_xargs says 1",
        ),
        ({"vllm_xargs": {"tenant": 7}}, (), "tenant", "vllm_xargs.tenant must be a string, got 7"),
        ({"vllm_xargs": {"tenant": "a" * 129}}, (), "tenant", "128 characters, got 129"),
        (
            {"vllm_xargs": {"tenant": "b"}}, [("x-llm-d-inference-fairness-id", "a")],
            "vllm_xargs.tenant", "a header says 'a' and vllm_xargs says 'b'",
        ),
        ({"explain": "yes"}, (), "explain", "explain must be true or false, got 'yes'"),
        (
            {"explain": True, "stream": True, "stream_options": [1]}, (), "stream_options",
            "stream_options must be an object, got a list of 1",
        ),
    ],
)  # fmt: skip
def test_bad_targets_are_named(body: Any, headers: Any, param: str, message: str) -> None:
    app = App(200, b"{}")
    status, _, answer = post(app, body, headers)
    error = json.loads(answer)["error"]
    assert status == 400 and error["param"] == param and message in error["message"]
    assert app.body is None, "vLLM is not asked"


@pytest.mark.parametrize(
    "part", [b'[{"usage": {"a": 1}}]', b'data: {"response": "x", "usage": {"a": 1}}\n\n']
)
def test_strange_parts_with_a_usage_are_passed_on(engine: Engine, part: bytes) -> None:
    assert post(App(200, part, b""), {"explain": True})[2] == part


def test_what_is_not_ours_passes_unchanged() -> None:
    for app, body in (
        (App(200, b"{}", path="/v1/embeddings"), {"slo": {"ttft_ms": 1}}),
        (App(400, b"{}"), b"no JSON"),
        (App(400, b"{}"), b"[" * 100_000),
    ):
        status, _, _ = post(app, body)
        assert status == app.status
        assert app.body == (body if isinstance(body, bytes) else json.dumps(body).encode())


# ---------------------------------------------------------------- refusals


STREAMED = (b'data: {"error": {"message": "Internal server error"}}\n\n', b"data: [DONE]\n\n")


EARLY = b"event: response.created\ndata: {}\n\n"


# what vLLM sends first in a chat, for each choice, and on Anthropic's route
ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
START = b'event: message_start\ndata: {"type":"message_start","message":{"id":"m"}}\n\n'
STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
FAILED = b'event: error\ndata: {"type":"error","error":{"type":"internal_error"}}\n\n'


@pytest.mark.parametrize(
    "app",
    [
        App(500, b'{"error": {}}'), App(200, *STREAMED), App(200, EARLY, *STREAMED),
        App(200, ROLE, ROLE, *STREAMED), App(200, START, FAILED),
        App(200, EARLY, fails=True), App(200, *STREAMED, fails=True),
        App(200, STREAMED[1]), App(200, ROLE, STREAMED[1]), App(200, START, STOP),
    ],
)  # fmt: skip
def test_refusals_are_429(engine: Engine, app: App) -> None:
    engine.fate = {"refusal": REFUSED, "timeline": None}
    status, headers, body = post(app, {"stream": app.status == 200})
    assert (status, headers["retry-after"]) == (429, "3")
    assert json.loads(body)["error"]["message"] == REFUSED["message"]
    assert headers["content-length"] == str(len(body))
    assert engine.asked == [{"fate": headers["x-paceline-request"]}]


def test_engine_that_refuses_a_bad_argument(engine: Engine) -> None:
    refusal = {"status": 400, "message": "no", "retry_after": None, "reason": "", "param": "tenant"}
    engine.fate = {"refusal": refusal, "timeline": None}
    status, headers, body = post(App(500, b'{"error": {}}'), {})
    assert status == 400 and "retry-after" not in headers
    assert json.loads(body)["error"]["param"] == "tenant"


def test_other_errors_stay_vllms(engine: Engine) -> None:
    engine.fate = SERVED
    assert post(App(500, b'{"error": {}}'), {})[0] == 500
    status, _, body = post(App(200, *STREAMED), {"stream": True})
    assert (status, body) == (200, b"".join(STREAMED))
    with pytest.raises(ValueError, match="no event for an error"):
        post(App(200, EARLY, fails=True), {})
    engine.fate = {"refusal": REFUSED, "timeline": None}
    with pytest.raises(ValueError, match="no event for an error"):
        # a part of the answer is out already
        post(App(200, b"data: {}\n\n", fails=True), {})


def test_answers_without_an_error_ask_nothing(engine: Engine) -> None:
    parts = (EARLY, START, ROLE, b"data: {}\n\n", ROLE, b"data: [DONE]\n\n")
    status, _, body = post(App(200, *parts), {"stream": True})
    assert (status, body) == (200, b"".join(parts)) and not engine.asked


@pytest.mark.parametrize(
    "first",
    [
        b'data: {"choices":[{"delta":{"role":"assistant","content":"Hi"}}]}\n\n',
        b'data: {"choices":[{"delta":{"role":"assistant","tool_calls":[{"index":0}]}}]}\n\n',
        b'data: {"choices":[{"text":"\\"role\\""}]}\n\n',
        b'data: {"role":1}\n\n',
        b'data: ["role"]\n\n',
        b"data: [DONE]\n\n",
    ],
)
def test_first_part_of_an_answer_is_sent_at_once(first: bytes) -> None:
    sent: list[Any] = []

    async def run() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            assert [each.get("body") for each in sent] == [None, first]
            sent.append("all of it")

        async def receive() -> Any:
            return {"type": "http.request", "body": b"{}", "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        await Admission(app)(scope, receive, send)

    asyncio.run(run())
    assert sent[-1] == "all of it"


def test_without_an_engine() -> None:
    assert post(App(500, b'{"error": {}}'), {})[0] == 500
    assert asyncio.run(ask({"fate": "t"})) == []


# ---------------------------------------------------------------- explanations


def test_explanation_in_a_whole_answer(engine: Engine) -> None:
    engine.fate = SERVED
    app = App(200, b'{"choices": [1], "usage": {"prompt_tokens": 3}}')
    _, headers, body = post(app, {"explain": True})
    usage = json.loads(body)["usage"]
    assert usage["prompt_tokens"] == 3 and headers["content-length"] == str(len(body))
    assert usage["timeline"]["waited_ms"] == {"tokens": 250.0}
    assert usage["timeline"]["predicted_ttft_ms"] == 500.0 and usage["timeline"]["ttft_ms"] == 400.0
    assert "explain" not in json.loads(app.body)


@pytest.mark.parametrize(
    "last",
    [
        b'data: {"choices": [], "usage": {"prompt_tokens": 3}}\n\n',
        b'event: response.completed\ndata: {"type": "response.completed", "response": '
        b'{"usage": {"input_tokens": 3}}}\n\n',
        b'event: message_delta\ndata: {"type": "message_delta", "usage": {"output_tokens": 3}}\n\n',
    ],
)
def test_explanation_in_the_last_chunk(engine: Engine, last: bytes) -> None:
    engine.fate = SERVED
    app = App(200, b'data: {"choices": [1], "usage": {"n": 1}}\n\n', last, b"data: [DONE]\n\n")
    _, _, body = post(app, {"explain": True, "stream": True})
    first, *_, end = body.split(b"\n\n")[:-1]
    assert b"timeline" not in first and end == b"data: [DONE]"
    assert body.count(b'"timeline":') == 1 and b'"waited_ms":{"tokens":250.0}' in body
    assert json.loads(app.body)["stream_options"] == {"include_usage": True}


def test_explanation_is_not_given_unasked(engine: Engine) -> None:
    engine.fate = SERVED
    _, _, body = post(App(200, b'{"usage": {}}'), {})
    assert body == b'{"usage": {}}' and not engine.asked


def test_explanation_at_its_address(engine: Engine) -> None:
    engine.fate = SERVED
    app = App(404, b"", path="/paceline/explain/abc")
    status, _, body = post(app, b"", method="GET")
    assert status == 200 and json.loads(body)["waited_ms"] == {"tokens": 250.0}
    engine.fate = {"refusal": REFUSED, "timeline": None}
    assert json.loads(post(app, b"", method="GET")[2])["refused"]["reason"] == "queue-full"
    engine.fate = None
    status, _, body = post(app, b"", method="GET")
    assert status == 404 and b"no engine knows an ended request 'abc'" in body


# ---------------------------------------------------------------- metrics


def test_metrics_follow_vllms(engine: Engine) -> None:
    status, headers, body = post(App(200, b"vllm:x 1\n", path="/metrics"), b"", method="GET")
    assert status == 200 and headers["content-length"] == str(len(body))
    lines = body.decode().splitlines()
    assert lines[0] == "vllm:x 1"
    for line in (
        'paceline:steps_total{engine="0"} 7', 'paceline:vllm_amended_steps_total{engine="0"} 1',
        'paceline:requests_refused_total{engine="0",reason="queue-full"} 8',
        'paceline:requests{engine="0",slo_class="standard",state="waiting"} 5',
        'paceline:goodput_requests_total{engine="0",slo_class="standard"} 2',
        'paceline:step_seconds_total{engine="0",kind="actual"} 1.25',
    ):  # fmt: skip
        assert line in lines
    assert sum(line.startswith("# TYPE") for line in lines) == len(METRICS)


def test_metrics_are_asked_in_plain_text(engine: Engine) -> None:
    # as Prometheus asks, and vLLM would end with "# EOF", compressed
    headers = [("accept", "application/openmetrics-text"), ("Accept-Encoding", "gzip")]
    app = App(200, b"vllm:x 1\n", path="/metrics/")
    post(app, b"", [*headers, ("x-other", "1")], method="GET")
    assert set(app.headers) == {b"content-length", b"x-other"}


def test_metrics_are_what_paceline_top_reads() -> None:
    vllm = 'vllm:num_requests_running{engine="0",model_name="m"} 4.0\n'
    before = parse_metrics(vllm + metrics_lines([COUNTS]).decode(), 10.0)
    later = COUNTS | {
        "num_steps": 17, "ended": {"standard": 7}, "kept": {"standard": 5},
        "missed": [["standard", "ttft", 3]], "waited": {"slots": 4.5},
        "step_tokens": {"prefill": 170, "decode": 34},
        "step_seconds": {"predicted": 2.5, "actual": 2.25},
    }  # fmt: skip
    frame = make_frame(before, parse_metrics(vllm + metrics_lines([later]).decode(), 20.0))
    assert frame.ready and frame.model == "m" and frame.steps_per_s == 1.0
    assert frame.prefill_tokens_per_step == 10.0 and frame.decode_tokens_per_step == 2.0
    assert frame.step_seconds == 0.1 and frame.blocked_by == "slots"
    assert frame.blocked_share == {"slots": 0.2} and frame.attainment == 0.75
    (row,) = frame.classes
    assert (row.name, row.running, row.waiting, row.ended) == ("standard", 4, 5, 4)
    assert row.violations == {"ttft": 2}


def test_the_gateway_knows_it_as_vllm() -> None:
    text = b'vllm:num_requests_running{engine="0"} 4.0\n' + metrics_lines(
        [COUNTS | {"pressure_level": 2}, COUNTS | {"pressure_level": 3}]
    )
    # our own server resumes by token ids, and vLLM does not
    assert kind_of_metrics(text) == "vllm"
    assert read_pressure(text, KINDS["vllm"], 0.0).level == 3


def test_metrics_without_an_engine() -> None:
    assert post(App(200, b"vllm:x 1\n", path="/metrics"), b"", method="GET")[2] == b"vllm:x 1\n"


def test_metrics_are_those_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs/operate/metrics.md").read_text()
    section = page.partition("## Inside vLLM")[2].partition("\n## ")[0]
    listed = [line.split(" | ") for line in section.splitlines() if line.startswith("| `")]
    for metric, cells in zip(METRICS, listed, strict=True):
        suffix = "_total" if metric.kind == "counter" else ""
        labels = sorted({label for pairs, _ in metric.read(COUNTS) for label in pairs})
        assert cells == [
            f"| `{metric.name}{suffix}`", metric.kind, ", ".join(f"`{each}`" for each in labels),
            f"{metric.text} |",
        ]  # fmt: skip
