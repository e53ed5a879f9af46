"""Shadow traffic: both models asked, their answers compared, and what follows from that."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from paceline.errors import ConfigError
from paceline.gateway.cascade.judge import Judge
from paceline.gateway.settings.calibration import Shadow
from paceline.gateway.settings.cascade import CascadeConfig, check_cascade
from paceline.gateway.settings.config import KeyConfig
from paceline.http.keys import ApiKey
from paceline.routing.cascade import Answer, Audit, agree
from tests.gateway.cascade.helpers import calibration, cascade, said, told
from tests.gateway.cascade.test_cascade import PRICES, SURE, TOOLS, UNSURE, asked, by, metric
from tests.gateway.helpers import CHAT, is_clean, refused, until

NAME = "paceline:gateway_cascade_"


def lines(path: Path) -> list[Shadow]:
    if not path.exists():
        return []
    return [msgspec.json.decode(line, type=Shadow) for line in path.read_bytes().split(b"\n")[1:]]


def audited(gateway: Any) -> int:
    return len(gateway.cascades._judges["chat"].audit._recent)


async def test_both_models_are_asked_once_the_caller_has_its_answer(tmp_path: Path) -> None:
    file = tmp_path / "shadow.jsonl"
    more = {"rate_limit_tokens": "1000/minute"}
    async with cascade(
        said("Yes.", *SURE), said("no"), calibration=calibration(tmp_path), shadow=1.0,
        shadow_file=str(file), gateway=more,
    ) as (one, two, gateway, http):  # fmt: skip
        body = asked(stream=True, user="ann", tools=TOOLS, max_tokens=9, store=True)
        response = await http.post(CHAT, json=body)
        assert by(response) == "small"
        await until(lambda: len(lines(file)) == 1 and is_clean(gateway))
        assert len(one.bodies) == 2 and len(two.bodies) == 1
        assert one.bodies[0]["store"] is True
        assert "store" not in one.bodies[1] and "store" not in two.bodies[0]
        # whole, with what the calibration reads
        assert one.bodies[1]["logprobs"] is True and not two.bodies[0].get("stream")
        (line,) = lines(file)
        assert set(line.chat) == {"messages", "tools"} and b"Yes." in bytes(line.small)
        assert b'"no"' in bytes(line.large) and line.small_digest and line.large_digest
        assert file.stat().st_mode & 0o077 == 0
        # nothing counts against the caller's rate but its own two requests
        again = await http.post(CHAT, json=asked())
        assert again.headers["x-ratelimit-remaining-tokens"] == "970"
        await until(lambda: len(lines(file)) == 2 and is_clean(gateway))
        text = (await http.get("/metrics")).text
        assert metric(text, f"{NAME}audited_total", model="chat") == 2
        assert metric(text, f"{NAME}audited_loss", model="chat") == 1.0
        assert metric(text, f"{NAME}alarm", model="chat") == 0.0


@pytest.mark.parametrize("mode", ["route", "cascade", "prefix"])
async def test_an_alarm_after_a_loss_that_no_chance_explains(tmp_path: Path, mode: Any) -> None:
    path, small = calibration(tmp_path), said("yes", *SURE)
    if mode != "cascade":
        small = told(["y", "es"], *SURE)
    async with cascade(
        (small, said("yes", *SURE)) * 20, said("no"), calibration=path, shadow=1.0, mode=mode
    ) as (_, _, gateway, http):
        for number in range(20):
            messages = [{"role": "user", "content": str(number)}]
            await http.post(CHAT, json=asked(stream=True, messages=messages))
            await until(lambda: audited(gateway) > number)  # noqa: B023
        text = (await http.get("/metrics")).text
        assert metric(text, f"{NAME}alarm", model="chat") == 1.0


async def test_what_the_large_model_answers_loses_nothing(tmp_path: Path) -> None:
    path = calibration(tmp_path)
    async with cascade(
        said("yes", *UNSURE), said("no"), calibration=path, shadow=1.0
    ) as (_, _, gateway, http):  # fmt: skip
        assert by(await http.post(CHAT, json=asked())) == "escalated"
        await until(lambda: gateway.cascades._judges["chat"].audit.loss == 0.0)


async def test_a_comparison_that_fails_concerns_no_caller(tmp_path: Path) -> None:
    path = calibration(tmp_path)
    async with cascade(
        said("yes", *SURE), refused(503), calibration=path, shadow=1.0,
        shadow_file=str(tmp_path / "none" / "x"),
    ) as (_, two, gateway, http):  # fmt: skip
        assert by(await http.post(CHAT, json=asked())) == "small"
        await until(lambda: bool(two.bodies) and not gateway.cascades._shadows._running)
        await until(lambda: is_clean(gateway))
        assert "cascade_audited_total{" not in (await http.get("/metrics")).text


async def test_comparisons_are_paid_and_end_with_the_gateway(tmp_path: Path) -> None:
    path, slow = calibration(tmp_path), told(["a"], then="stall")
    async with cascade(
        said("yes", *SURE), (said("no"), slow), calibration=path, shadow=1.0,
        gateway={"prices": PRICES, "keys": (KeyConfig(name="ann", budget="1/day"),)},
        keys=(ApiKey.of("ann", "user", "k" * 8),),
    ) as (_, two, gateway, http):  # fmt: skip
        key = {"authorization": f"Bearer {'k' * 8}"}
        await http.post(CHAT, json=asked(max_tokens=20), headers=key)
        await until(lambda: audited(gateway) == 1 and is_clean(gateway))
        spent = gateway.spending.status()["ann"]["spent"]
        # 15 tokens of the answer and of the comparison at 1 a million, and 15 at 100
        assert float(spent) == pytest.approx(30e-6 + 1500e-6)
        await http.post(CHAT, json=asked(max_tokens=20), headers=key)
        await until(lambda: len(two.bodies) == 2)
        await gateway.cascades.close()
        await until(lambda: two.hung_up == 1 and is_clean(gateway))


async def test_a_gateway_that_drains_compares_nothing(tmp_path: Path) -> None:
    path, slow = calibration(tmp_path), told(["a"], then="stall")
    async with cascade(
        said("yes", *SURE), slow, calibration=path, shadow=1.0
    ) as (_, two, gateway, http):  # fmt: skip
        await http.post(CHAT, json=asked())
        await until(lambda: len(two.bodies) == 1)
        await gateway.begin_draining()
        await until(lambda: two.hung_up == 1 and is_clean(gateway))
        assert gateway.in_flight == 0
        shadows, judge = gateway.cascades._shadows, gateway.cascades._judges["chat"]
        request: Any = SimpleNamespace(route=SimpleNamespace(local_only=False))
        unused: Any = None
        shadows.begin(judge, request, unused, unused, unused, "cascade")
        assert not shadows._running


async def test_what_an_audit_has_found_outlasts_a_reload(tmp_path: Path) -> None:
    path = calibration(tmp_path, labels="shadow")
    async with cascade(
        said("yes", *SURE), said("no"), calibration=path, shadow=1.0, adaptive=True
    ) as (_, two, gateway, http):
        await http.post(CHAT, json=asked())
        await until(lambda: audited(gateway) == 1 and is_clean(gateway))
        shift = gateway.cascades._judges["chat"].audit.shift
        await gateway.reload(gateway.config, gateway.keys)
        assert gateway.cascades._judges["chat"].audit.shift == shift > 0.0
        # with another calibration it says nothing
        calibration(tmp_path, labels="shadow", losses=[float(i < 90) for i in range(200)])
        await gateway.reload(gateway.config, gateway.keys)
        assert audited(gateway) == 0
        # nor does a comparison of a model that has no cascade any more go on
        two.script[:] = [told(["a"], then="stall")]
        await http.post(CHAT, json=asked())
        await until(lambda: len(two.bodies) == 2)
        models = tuple(msgspec.structs.replace(m, cascade=None) for m in gateway.config.models)
        config = msgspec.structs.replace(gateway.config, models=models)
        await gateway.reload(config, gateway.keys)
        await until(lambda: two.hung_up == 1 and is_clean(gateway))


async def test_a_file_does_not_grow_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("paceline.gateway.cascade.shadow._MOST_BYTES", 1)
    caplog.set_level("INFO", "paceline.gateway")
    file = tmp_path / "shadow.jsonl"
    async with cascade(
        said("yes", *SURE), said("no"), calibration=calibration(tmp_path), shadow=1.0,
        shadow_file=str(file),
    ) as (_, _, gateway, http):  # fmt: skip
        for number in range(2):
            await http.post(CHAT, json=asked())
            await until(lambda: audited(gateway) > number and is_clean(gateway))  # noqa: B023
        await until(lambda: "none is added beyond 1" in caplog.text)
        assert len(lines(file)) == 1


async def test_what_may_not_leave_is_not_compared_where_the_large_model_is_local_too(
    tmp_path: Path,
) -> None:
    file = tmp_path / "shadow.jsonl"
    async with cascade(
        said("yes", *SURE), said("no"), calibration=calibration(tmp_path), shadow=1.0,
        shadow_file=str(file), gateway={"local_only_tags": ("private",)},
    ) as (_, two, gateway, http):  # fmt: skip
        for tags, kept in (("private", 0), ("public", 1)):
            response = await http.post(CHAT, json=asked(), headers={"x-paceline-tags": tags})
            assert by(response) == "small"
            await until(lambda: not gateway.cascades._shadows._running and is_clean(gateway))
            assert len(two.bodies) == len(lines(file)) == kept


def test_the_threshold_adapts_and_keeps_the_loss_within_its_bound() -> None:
    draw, bound, count = random.Random(3), 0.1, 2000
    audit, total = Audit(), 0.0
    for _ in range(count):
        # scores that say nothing, where every second answer is wrong
        loss = float(draw.random() >= 0.3 + audit.shift and draw.random() < 0.5)
        total += loss
        audit.add(loss, bound)
        assert audit.shift >= 0.0
    assert total / count <= bound + 1.05 / (0.05 * count)
    assert not audit.is_broken
    for _ in range(count):
        audit.add(0.0, bound)
    assert audit.shift == 0.0 and audit.loss == 0.0


def test_an_alarm_is_about_the_bounds_that_held() -> None:
    audit = Audit()
    for number in range(100):
        audit.add(float(number % 5 == 0), 0.25)
    # under load the second bound held, which 20 % are within; one audit later it does not
    audit.add(0.0, 0.05)
    assert not audit.is_broken
    for number in range(400):
        audit.add(float(number % 5 == 0), 0.05)
    assert audit.is_broken


async def test_an_adaptive_cascade_moves_its_threshold(tmp_path: Path) -> None:
    path = calibration(tmp_path, labels="shadow")
    async with cascade(
        said("yes", *SURE), said("no"), calibration=path, shadow=1.0, adaptive=True
    ) as (_, _, gateway, http):
        seen = []
        for number in range(3):
            messages = [{"role": "user", "content": str(number)}]
            response = await http.post(CHAT, json=asked(messages=messages))
            seen.append(float(response.headers["x-paceline-cascade"].rsplit("=", 1)[1]))
            await until(lambda: audited(gateway) > number)  # noqa: B023
        assert seen[1] - seen[0] == pytest.approx(0.05 * 0.95, abs=1e-3) and seen[2] > seen[1]


def test_answers_agree_by_what_they_say() -> None:
    call = ("f", '{"a": 1, "b": 2}')
    for one, other, same in (
        (Answer(text="Paris."), Answer(text=" paris"), True),
        (Answer(text="Paris"), Answer(text="Rome"), False),
        (Answer(text='{"a": 1,"b":2}'), Answer(text='{"b": 2, "a": 1}'), True),
        (Answer(text="", calls=[call]), Answer(text="x", calls=[("f", '{"b":2,"a":1}')]), True),
        (Answer(text="", calls=[call]), Answer(text=""), False),
    ):
        assert agree(one, other) is same


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"shadow": 1.5}, "shadow must be 0 to 1, got 1.5"),
        ({"shadow": 0.1}, "needs a shadow_file, a calibration or both"),
        ({"shadow_file": "x"}, "shadow_file needs shadow"),
        ({"adaptive": True, "calibration": "c"}, "adaptive needs shadow"),
        ({"adaptive": True, "shadow": 0.1, "shadow_file": "x"}, "adaptive needs a calibration"),
        ({"early_prefill": 0.1}, "early_prefill needs mode prefix, got cascade"),
        ({"early_prefill": 2.0, "mode": "prefix"}, "early_prefill must be 0 to 1, got 2"),
    ],
)
def test_bad_values_are_refused_with_the_numbers(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_cascade("chat", CascadeConfig(small="small", **fields))


def test_checkers_labels_do_not_adapt(tmp_path: Path) -> None:
    config = CascadeConfig(
        small="s", calibration=calibration(tmp_path), shadow=0.1, adaptive=True, prefix_tokens=2
    )
    with pytest.raises(ConfigError, match="adaptive needs a calibration by shadow traffic"):
        Judge("chat", config)
    assert json.loads(Path(config.calibration).read_bytes())["labels"] == "checked"
