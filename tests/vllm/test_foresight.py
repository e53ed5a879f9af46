"""What is asked before vLLM sees a request, and the page that the middleware serves."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.vllm.foresight import question, size_of
from tests.vllm.serving import REFUSED, App, Engine, post

FULL = {"engine": 7, "predicted_ttft": 2.5, "prompt_tokens": 9, "refusal": REFUSED}
FREE = FULL | {"refusal": None, "predicted_ttft": 0.25}


def test_refused_before_vllm_sees_it(engine: Engine) -> None:
    engine.forecast = FULL
    app = App(200, b"{}")
    status, headers, body = post(app, {"messages": [{"role": "user", "content": "Hello"}]})
    assert (status, headers["retry-after"]) == (429, "3") and app.body is None
    assert json.loads(body)["error"]["message"] == REFUSED["message"]
    first, second = engine.foreseen
    tag = first["foresee"]["arguments"]["paceline_tag"]
    assert tag == headers["x-paceline-request"]
    assert "counts" not in first and second == {**first, "counts": 7}, "it counts once"


def test_engine_that_would_take_it_gets_it(engine: Engine) -> None:
    for forecast in (FREE, None):
        engine.forecast = forecast
        assert post(App(200, b"{}"), {})[0] == 200


def test_unknown_caller_learns_nothing(engine: Engine) -> None:
    engine.forecast = FULL
    assert post(App(401, b"{}", models=401), {})[0] == 401
    assert len(engine.foreseen) == 1, "it does not count"
    status, _, body = post(App(401, b"{}", path="/paceline/predict", models=401), {"prompt": "a"})
    assert status == 401 and b"predicted" not in body


@pytest.mark.parametrize(
    ("body", "size"),
    [
        ({"prompt": "abcd"}, (4, 0, 1)),
        ({"prompt": ["abcd", "ef"]}, (6, 0, 2)),
        ({"prompt": [5, 6, 7]}, (0, 3, 1)),
        ({"prompt": [[5, 6], [7]]}, (0, 3, 2)),
        ({"prompt_tokens": 300}, (0, 300, 1)),
        ({"prompt": [], "messages": "x"}, (1, 0, 1)),
        ({"messages": [{"content": [{"text": "abc"}, {"url": "data:xyz"}]}]}, (17, 0, 1)),
        ({"input": "abc", "instructions": "de", "user": "nobody"}, (5, 0, 1)),
    ],
)
def test_size_of_prompts(body: dict[str, Any], size: tuple[int, int, int]) -> None:
    assert size_of(body) == size


def test_deep_bodies_are_measured() -> None:
    body: Any = "abc"
    for _ in range(5_000):
        body = [body]
    assert size_of({"prompt": body}).characters == 3


def test_question() -> None:
    body = {"prompt": ["ab", "cdef"], "n": 2, "max_tokens": 5, "priority": -1}
    asked = question(body | {"vllm_xargs": {"theirs": 1, "ttft_ms": 3.0}})
    assert asked == {
        "characters": 3, "tokens": 0, "max_tokens": 5, "priority": -1, "num_choices": 4,
        "arguments": {"ttft_ms": 3.0},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("forecast", "answer"),
    [
        (FREE, {"accepted": True, "predicted_ttft_ms": 250.0, "refused": None}),
        (FULL, {"accepted": False, "predicted_ttft_ms": 2500.0, "refused": REFUSED}),
        (FREE | {"predicted_ttft": None}, {"accepted": True, "predicted_ttft_ms": None,
                                           "refused": None}),
    ],
)  # fmt: skip
def test_prediction(engine: Engine, forecast: Any, answer: Any) -> None:
    engine.forecast = forecast
    app = App(200, path="/paceline/predict")
    status, _, body = post(app, {"prompt": "Hello", "slo": {"ttft_ms": 500}})
    assert status == 200 and json.loads(body) == answer | {"prompt_tokens": 9}
    assert engine.foreseen[0]["foresee"]["arguments"]["ttft_ms"] == 500.0
    assert "counts" not in engine.foreseen[0] and app.body is None


def test_predictions_of_bad_bodies(engine: Engine) -> None:
    app = App(200, path="/paceline/predict")
    bodies: tuple[Any, ...] = (b"no JSON", [], {"slo": {"ttft_ms": 0}})
    for bad in bodies:
        assert post(app, bad)[0] == 400
    assert not engine.foreseen
    # the engine has ended, or vLLM schedules by itself
    assert post(app, {"prompt": "a"})[0] == 503


# ---------------------------------------------------------------- the page


def get(app: App, path: str) -> tuple[int, dict[str, str], bytes]:
    app.path = path
    return post(app, b"", method="GET")


def test_page_is_served() -> None:
    app = App(200, b"{}")
    status, headers, body = get(app, "/ui/promises")
    assert status == 200 and "script-src 'self'" in headers["content-security-policy"]
    version = body.partition(b"v/")[2].partition(b"/")[0].decode()
    assert get(app, f"/ui/v/{version}/main.js")[1]["content-type"].startswith("text/javascript")
    assert get(app, "/ui")[1]["location"] == "ui/"
    for absent in ("/ui/api/timeline", "/ui/v/1/none.js", "/ui/a/b", "/ui/x.js"):
        assert get(app, absent)[0] == 404, absent
    assert app.body is None, "vLLM sees none of it"


def test_promises_are_of_the_metrics(engine: Engine) -> None:
    theirs = b"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 4\n"
    status, _, body = get(App(200, theirs), "/ui/api/promises")
    assert status == 200 and json.loads(body)["window"] == 60
    frame = json.loads(body)["frame"]
    assert frame["running"] == 4 and frame["attainment"] == pytest.approx(2 / 3)
    assert get(App(200, theirs, models=401), "/ui/api/promises")[0] == 401
    # vLLM without metrics
    assert get(App(200, b""), "/ui/api/promises")[0] == 404
