"""What is asked before vLLM sees a request, and the page that the middleware serves."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from paceline.vllm.foresight import question, size_of
from tests.vllm.loop import Loop
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
        ({"prompt_tokens": 10**400}, (0, 2**31, 1)),
        ({"prompt_tokens": -3}, (0, 0, 1)),
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
    assert question({"priority": 10**400, "vllm_xargs": {}})["priority"] == 2**31
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


class Watching(App):
    """Looks for the caller's end while it answers, as some middlewares do."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        watcher = asyncio.create_task(gone())
        await asyncio.sleep(0)
        await super().__call__(scope, receive, send)
        watcher.cancel()


def test_watching_for_the_callers_end_hangs_nothing(engine: Engine) -> None:
    engine.forecast = FREE
    assert post(Watching(200, path="/paceline/predict"), {"prompt": "Hello"})[0] == 200


def test_callers_do_not_say_how_long_a_prompt_is(engine: Engine) -> None:
    engine.forecast = FREE
    app = App(200, b"{}", path="/v1/completions")
    post(app, {"prompt": [5] * 90, "vllm_xargs": {"paceline_characters": 1}})
    assert "paceline_characters" not in json.loads(app.body)["vllm_xargs"]
    post(app, {"prompt": "Hello", "vllm_xargs": {"paceline_characters": 1}})
    assert json.loads(app.body)["vllm_xargs"]["paceline_characters"] == 5


def test_predictions_of_bad_bodies(engine: Engine) -> None:
    app = App(200, path="/paceline/predict")
    bodies: tuple[Any, ...] = (b"no JSON", [], {"slo": {"ttft_ms": 0}})
    for bad in bodies:
        assert post(app, bad)[0] == 400
    assert not engine.foreseen
    # the engine has ended, or vLLM schedules by itself
    assert post(app, {"prompt": "a"})[0] == 503


# ---------------------------------------------------------------- in the engine


def asked(**more: Any) -> dict[str, Any]:
    """What the middleware asks about a request."""
    plain = {"characters": 0, "tokens": 20, "max_tokens": 4, "priority": 0, "num_choices": 1}
    return plain | {"arguments": {}} | more


def test_forecast_is_what_the_door_says(paced_class: Any) -> None:
    settings = {"paceline": {"max_num_waiting": 1}}
    engine = Loop(paced_class, additional_config=settings, max_num_seqs=1)
    answer = engine.scheduler.pacer.answer
    free = answer({"foresee": asked()})
    assert free["refusal"] is None and free["prompt_tokens"] == 20
    for number in range(2):
        engine.add(f"r{number}", 20, 40)
        engine.step()
    full = answer({"foresee": asked()})
    assert "the limit is 1" in full["refusal"]["message"]
    assert not answer({"counts": True})["refused"], "it was only asked"
    assert answer({"foresee": asked(), "counts": full["engine"] + 1}) is None, "another engine's"
    tagged = asked(arguments={"paceline_tag": "t"})
    told = answer({"foresee": tagged, "counts": full["engine"]})
    assert told["refusal"] == full["refusal"] == answer({"fate": "t"})["refusal"]
    assert answer({"counts": True})["refused"] == {"queue-full": 1}
    assert answer({"counts": True})["missed"] == [("standard", "refused", 1)]
    engine.run()
    assert not engine.ended.keys() - {"r0", "r1"}, "nothing was queued"


def test_forecast_by_time(paced_class: Any) -> None:
    settings = {"paceline": {"max_predicted_ttft_s": 1.0}}
    engine = Loop(paced_class, additional_config=settings, max_num_seqs=2)
    answer = engine.scheduler.pacer.answer
    for number in range(30):
        engine.add(f"warm{number}", 10 + number, 4)
        engine.run()
    idle = answer({"foresee": asked()})
    assert idle["refusal"] is None and 0.0 < idle["predicted_ttft"] < 0.1
    longer = answer({"foresee": asked(tokens=200)})
    assert longer["predicted_ttft"] > idle["predicted_ttft"]
    for number in range(120):
        engine.add(f"r{number}", 20, 40)
        engine.step()
    full = answer({"foresee": asked()})
    assert full["predicted_ttft"] > 1.0 and full["refusal"]["reason"] == "predicted-ttft"
    advised = [
        answer({"foresee": asked(), "counts": full["engine"]})["refusal"]["retry_after"]
        for _ in range(3)
    ]
    assert advised == sorted(set(advised)), "refused callers do not all come back at once"
    assert answer({"foresee": asked()})["refusal"]["retry_after"] > advised[-1]
    again = answer({"foresee": asked()})["refusal"]["retry_after"]
    assert again == answer({"foresee": asked()})["refusal"]["retry_after"], "asking moves nothing"


def test_long_prompt_that_may_be_cached_is_passed_on(paced_class: Any) -> None:
    settings = {"paceline": {"max_predicted_ttft_s": 0.02}}
    engine = Loop(paced_class, additional_config=settings)
    for number in range(30):
        engine.add(f"warm{number}", 10 + number, 4)
        engine.run()
    told = engine.scheduler.pacer.answer({"foresee": asked(tokens=200)})
    assert told["predicted_ttft"] > 0.02 and told["refusal"] is None


def test_characters_of_a_token_are_learned(paced_class: Any) -> None:
    engine = Loop(paced_class)
    answer = engine.scheduler.pacer.answer
    text = {"foresee": asked(tokens=0, characters=80)}
    assert answer(text)["prompt_tokens"] == 20
    for number in range(300):
        engine.add(f"r{number}", 20, 1, extra_args={"paceline_characters": 40})
        engine.run()
    assert 38 <= answer(text)["prompt_tokens"] <= 40
    # pictures have tokens and no characters, and vLLM's own door takes a caller's word
    for number, characters in enumerate((1, 0, -7, 10**9, "x")):
        engine.add(f"p{number}", 200, 1, extra_args={"paceline_characters": characters})
        engine.run()
    assert 38 <= answer(text)["prompt_tokens"] <= 40
    # neither a longer prompt nor a longer answer than the model takes is a fault
    most = answer({"foresee": asked(tokens=10**9, max_tokens=None)})
    assert most["prompt_tokens"] == 255 and most["refusal"] is None


def test_channel_asks_while_the_engine_steps(paced_class: Any) -> None:
    engine = Loop(paced_class, additional_config={"paceline": {"policy": "fair"}}, max_num_seqs=4)
    answer, told, ended = engine.scheduler.pacer.answer, [], threading.Event()

    def ask() -> None:
        while not ended.is_set():
            told.append(answer({"foresee": asked(arguments={"tenant": f"t{len(told) % 5}"})}))
            told.append(answer({"counts": True}))

    asker = threading.Thread(target=ask)
    asker.start()
    for number in range(60):
        engine.add(f"r{number}", 20, 6, extra_args={"tenant": f"t{number % 7}"})
        engine.step()
    # the loop checks the core's integrity after each step
    engine.run()
    ended.set()
    asker.join()
    assert told and None not in told
    assert all(len(tokens) == 6 for tokens in engine.tokens.values())


def test_no_forecast_while_vllm_schedules_by_itself(paced_class: Any) -> None:
    engine = Loop(paced_class)
    engine.scheduler.pacer.give_up()
    assert engine.scheduler.pacer.answer({"foresee": asked()}) is None


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
