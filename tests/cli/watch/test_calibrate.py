"""``paceline calibrate`` against two servers, and the gateway that reads what it wrote."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import main
from paceline.errors import ConfigError
from paceline.gateway.settings.config import read_config
from tests.gateway.cascade.helpers import places
from tests.gateway.fault_server import Engine, scripted
from tests.gateway.helpers import CHAT, GOOD, chat, gateway_over, until

CONFIG = """
spend_storage = ""
[[engines]]
name = "one"
url = "{one}"
[[engines]]
name = "two"
url = "{two}"
[[models]]
name = "chat"
tiers = [["two:m"]]
[models.cascade]
small = "small"
max_loss = {most}
calibration = "{file}"
[[models]]
name = "small"
tiers = [["one:m"]]
"""


def number(body: dict[str, Any]) -> int:
    return int(body["messages"][0]["content"].split()[-1])


def small(body: dict[str, Any]) -> Any:
    """Right for even numbers, and then sure of it."""
    n = number(body)
    good = n % 2 == 0
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": str(n) if good else "no idea"},
        "logprobs": {"content": places([-0.1 if good else -2.0] * 4)},
        "finish_reason": "stop",
    }
    return {"id": "x", "model": "m", "choices": [choice]}


def large(body: dict[str, Any]) -> Any:
    message = {"role": "assistant", "content": str(number(body))}
    return {"id": "x", "model": "m", "choices": [{"index": 0, "message": message}]}


def write(folder: Path, engines: list[Engine], count: int, most: float = 0.1) -> list[str]:
    config, labels = folder / "gateway.toml", folder / "labels.jsonl"
    one, two = (engine.url for engine in engines)
    config.write_text(CONFIG.format(one=one, two=two, most=most, file=folder / "chat.json"))
    checks = [{"prompt": f"say {n}", "check": {"exact": str(n)}} for n in range(count)]
    labels.write_text("\n".join(map(json.dumps, checks)))
    return ["calibrate", str(config), "--labels", str(labels)]


async def run(arguments: list[str]) -> int:
    return await asyncio.to_thread(main, arguments)


@pytest.fixture(autouse=True)
def small_forests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.routing.cascade.forest._NUM_TREES", 10)


def without_forests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fit linear scorers, where it is not the scorer that is tested: forests take seconds."""
    monkeypatch.setattr("paceline.bench.calibrate.fitting.has_forests", lambda: False)


async def test_a_calibration_is_measured_and_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncExitStack() as stack:
        answering = ({"/v1/chat/completions": say} for say in (small, large))
        engines = [
            await stack.enter_async_context(scripted(GOOD, pages=pages)) for pages in answering
        ]
        arguments = write(tmp_path, engines, 80)
        assert await run(arguments) == 0
        told = capsys.readouterr().out
        assert "80 labels: quality 0.500 of the small model, 1.000 of the large one" in told
        for name in ("oracle", "random", "longest first", "route", "cascade", "prefix"):
            assert f"\n{name:14}" in told
        assert "cascade: a good answer scores higher than a bad one at 100.0%" in told
        assert "cascade    max_loss 0.02   9 labels are missing" in told
        asked = sum(engine.asked.count("/v1/chat/completions") for engine in engines)
        assert asked == 160
        config = read_config(tmp_path / "gateway.toml")
        async with gateway_over(config) as (_, http):
            for n, by in ((90, "small"), (91, "escalated")):
                messages = [{"role": "user", "content": f"say {n}"}]
                response = await http.post(CHAT, json=chat(model="chat", messages=messages))
                assert response.headers["x-paceline-cascade"].startswith(f"{by};")
                assert response.json()["choices"][0]["message"]["content"] == str(n)
        # nothing is asked twice
        asked = [engine.asked.count("/v1/chat/completions") for engine in engines]
        without_forests(monkeypatch)
        assert await run(arguments) == 0
        assert asked == [engine.asked.count("/v1/chat/completions") for engine in engines]


async def test_more_signals_are_asked_for_once_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawn(body: dict[str, Any]) -> Any:
        """Sure of everything; further answers to odd numbers differ, and to even ones agree."""
        n, count = number(body), body.get("n", 1)
        texts = [str(n) if n % 2 == 0 else f"{n} {i}" for i in range(count)]
        answer = small({**body, "messages": [{"content": "say 0"}]})
        answer["choices"] = [
            {**answer["choices"][0], "index": i, "message": {"role": "assistant", "content": text}}
            for i, text in enumerate(texts)
        ]
        told = {"9": {"logprob": -1.0}}
        return answer | ({"prompt_logprobs": [None, told]} if "prompt_logprobs" in body else {})

    def vectors(body: dict[str, Any]) -> Any:
        return {"data": [{"embedding": [1.0, len(body["input"]) / 9]}]}

    async with AsyncExitStack() as stack:
        chats, embeddings = "/v1/chat/completions", "/v1/embeddings"
        answering = ({chats: drawn, embeddings: vectors}, {chats: large})
        engines = [
            await stack.enter_async_context(scripted(GOOD, pages=pages)) for pages in answering
        ]
        arguments = write(tmp_path, engines, 80)
        config = tmp_path / "gateway.toml"
        more = 'samples = 2\nperplexity = true\nembeddings = "small"\n[[models]]\nname = "small"'
        config.write_text(config.read_text().replace('[[models]]\nname = "small"', more))
        assert await run(arguments) == 0
        # of each label an answer, further ones, and a vector
        assert [engines[0].asked.count(path) for path in (chats, embeddings)] == [160, 80]
        async with gateway_over(read_config(config)) as (_, http):
            for n, by in ((90, "small"), (91, "escalated")):
                messages = [{"role": "user", "content": f"say {n}"}]
                response = await http.post(CHAT, json=chat(model="chat", messages=messages))
                assert response.headers["x-paceline-cascade"].startswith(f"{by};"), n
        told = engines[0].asked.count(chats)
        without_forests(monkeypatch)
        assert await run(arguments) == 0
        assert engines[0].asked.count(chats) == told
        # another set of signals is another score
        config.write_text(config.read_text().replace("samples = 2", "samples = 3"))
        with pytest.raises(ConfigError, match="made with samples = 2, and the file says 3"):
            async with gateway_over(read_config(config)):
                pass


async def test_shadow_traffic_is_calibrated_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_forests(monkeypatch)
    async with AsyncExitStack() as stack:
        answering = ({"/v1/chat/completions": say} for say in (small, large))
        engines = [
            await stack.enter_async_context(scripted(GOOD, pages=pages)) for pages in answering
        ]
        _, file, *_ = write(tmp_path, engines, 1)
        text, kept = Path(file).read_text(), tmp_path / "kept.jsonl"
        alone = text.replace(f'calibration = "{tmp_path / "chat.json"}"', "")
        more = f'[models.cascade]\nshadow = 1.0\nshadow_file = "{kept}"'
        Path(file).write_text(alone.replace("[models.cascade]", more))
        arguments = ["calibrate", file, "--shadow", "-o", str(tmp_path / "chat.json")]
        assert await run(arguments) == 2
        assert "shadow traffic" in capsys.readouterr().err
        async with gateway_over(read_config(Path(file))) as (_, http):
            for n in range(60):
                messages = [{"role": "user", "content": f"say {n}"}]
                await http.post(CHAT, json=chat(model="chat", messages=messages))
                await until(lambda: kept.exists() and kept.read_bytes().count(b"\n") > n)  # noqa: B023
        asked = [engine.asked.count("/v1/chat/completions") for engine in engines]
        # a killed gateway's last line, and a chat with another model
        line = json.loads(kept.read_bytes().splitlines()[1])
        kept.write_bytes(kept.read_bytes() + b"\n[1,\n" + json.dumps(["0", *line[1:]]).encode())
        assert await run(arguments) == 0
        told = capsys.readouterr()
        assert "60 labels: quality 0.500 of the small model, 1.000 of the large one" in told.out
        assert "2 of 62 chats were answered by other models" in told.err
        assert asked == [engine.asked.count("/v1/chat/completions") for engine in engines]
        assert json.loads((tmp_path / "chat.json").read_bytes())["labels"] == "shadow"
        Path(file).write_text(text)
        assert await run(arguments) == 2
        assert "model chat: its cascade has no shadow_file" in capsys.readouterr().err


async def test_too_few_labels_are_counted_and_what_failed_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with AsyncExitStack() as stack:
        odd: Any = [(500, {"error": "no"}), {"choices": [None]}]
        fails: Any = lambda body: odd[number(body)] if number(body) < 2 else large(body)  # noqa: E731
        answering = ({"/v1/chat/completions": say} for say in (small, fails))
        engines = [
            await stack.enter_async_context(scripted(GOOD, pages=pages)) for pages in answering
        ]
        assert await run(write(tmp_path, engines, 12, 0.05)) == 2
        told = capsys.readouterr().err
        assert "answers 500" in told and "2 answers failed" in told and "10 labels are left" in told
        assert "answers without choices" in told
        assert "max_loss 0.05 needs 38 labels" in told and "are 10: 28 are missing" in told
        # and what was measured is kept
        assert len((tmp_path / "chat.answers.jsonl").read_text().split("\n")) == 23
        assert not (tmp_path / "chat.json").exists()


async def test_checkers_that_fail_cost_their_labels_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_forests(monkeypatch)
    hangs = {"program": [sys.executable, "-c", "while True: pass"], "timeout": 0.3}
    dies = {"program": [sys.executable, "-c", "import os; os.abort()"]}
    silent = {"judge": "http://127.0.0.1:9", "timeout": 1.0}
    async with AsyncExitStack() as stack:
        answering = ({"/v1/chat/completions": say} for say in (small, large))
        engines = [
            await stack.enter_async_context(scripted(GOOD, pages=pages)) for pages in answering
        ]
        arguments = write(tmp_path, engines, 24)
        labels, good = tmp_path / "labels.jsonl", (tmp_path / "labels.jsonl").read_text()
        lines = [json.loads(line) for line in good.splitlines()]
        for line, check in zip(lines, (hangs, dies, silent), strict=False):
            line["check"] = check
        labels.write_text("\n".join(map(json.dumps, lines)))
        assert await run(arguments) == 0
        told = capsys.readouterr()
        for words in ("label 1: ", "within 0.3 s", "label 2: ", "ended with -6", "label 3: "):
            assert words in told.err
        assert "24 labels: 0 answers failed, 3 were not checked; 21 labels are left" in told.err
        assert "21 labels: quality" in told.out and (tmp_path / "chat.json").exists()
        # other checkers ask nothing again
        asked = [engine.asked.count("/v1/chat/completions") for engine in engines]
        labels.write_text(good)
        assert await run(arguments) == 0
        assert "24 labels: quality 0.500" in capsys.readouterr().out
        assert asked == [engine.asked.count("/v1/chat/completions") for engine in engines]


async def test_what_cannot_be_asked_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(scripted(GOOD)) for _ in range(2)]
        engines[0].models = ("other",)
        arguments = write(tmp_path, engines, 12)
        assert await run(arguments) == 2
        assert "has no model 'm'; it lists other" in capsys.readouterr().err
        assert await run([*arguments, "--model", "small"]) == 2
        assert "no model 'small' with a cascade; there are chat" in capsys.readouterr().err
        assert await run([*arguments, "-o", str(tmp_path / "no" / "x")]) == 2
        assert "there is no folder" in capsys.readouterr().err
