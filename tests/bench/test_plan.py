"""Plans: when requests are sent, how long they are, what stands in their bodies."""

from __future__ import annotations

import itertools
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.plan import Bodies, Plan, PromptFile, Words
from paceline.errors import ConfigError
from paceline.sim.arrival import Arrival


def test_gaps_have_the_burstiness_asked_for() -> None:
    for cv in (0.0, 1.0, 3.0):
        arrivals = list(Plan.make(rate=50.0, cv=cv, number=4000).arrivals)
        gaps = [b.at - a.at for a, b in itertools.pairwise(arrivals)]
        mean = statistics.fmean(gaps)
        assert mean == pytest.approx(0.02, rel=0.15)
        assert statistics.stdev(gaps) / mean == pytest.approx(cv, rel=0.15, abs=1e-6)


def test_equal_seeds_give_equal_plans() -> None:
    def made(seed: int) -> list[Arrival]:
        return list(Plan.make(rate=5.0, input_len="lognormal(100,1)", seed=seed).arrivals)

    assert made(1) == made(1) != made(2)
    assert len(made(1)) == 100


def test_number_and_duration() -> None:
    assert len(list(Plan.make(rate=10.0, cv=0.0, duration=2.0).arrivals)) == 19
    assert len(list(Plan.make(rate=10.0, number=5, duration=2.0).arrivals)) == 5
    # of a closed loop the driver minds the time
    endless = Plan.make(concurrency=3, duration=2.0)
    assert (endless.concurrency, endless.duration) == (3, 2.0)
    assert len(list(itertools.islice(endless.arrivals, 500))) == 500


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "give --rate, --concurrency or --trace"),
        ({"rate": 1.0, "concurrency": 2}, "give one"),
        ({"rate": 1.0, "input_len": "normal(3)"}, "is not a length"),
        ({"trace": "no-such-file"}, "neither a file"),
    ],
)
def test_plans_that_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Plan.make(**options)


def test_targets_are_for_those_who_have_none() -> None:
    trace = "synthetic:rate=9,prompt=5,output=2,n=50,classes=a(1,ttft=2)+b(1)"
    arrivals = list(Plan.make(trace=trace, ttft=1.0, e2e=9.0).arrivals)
    assert {(a.slo_class, a.ttft, a.deadline) for a in arrivals} == {
        ("a", 2.0, None), ("b", 1.0, 9.0),
    }  # fmt: skip


def test_a_trace_brings_times_or_lengths_alone(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrived_at_s,prompt_tokens,output_tokens\n0,10,1\n4,20,2\n6,30,3\n")
    assert [(a.at, a.prompt_tokens) for a in Plan.make(trace=str(path)).arrivals] == [
        (0, 10), (4, 20), (6, 30),
    ]  # fmt: skip
    drawn = list(Plan.make(trace=str(path), rate=2.0, number=200).arrivals)
    assert {(a.prompt_tokens, a.output_tokens) for a in drawn} == {(10, 1), (20, 2), (30, 3)}
    assert drawn[-1].at == pytest.approx(100, rel=0.3)
    in_turn = Plan.make(trace=str(path), concurrency=2)
    assert [a.output_tokens for a in in_turn.arrivals] == [1, 2, 3]


def test_words_fit_the_server_s_tokenizer() -> None:
    """A word of two tokens, and a template of 30."""
    words = Words(0).fit([(16, 62), (144, 318)])
    text = words.text(Arrival(0.0, 230, 1), 0)
    assert len(text.split()) == 100
    # figures that no tokenizer gives are not believed
    assert Words(0).fit([(16, 10), (144, 10)]) == Words(0)
    # never none
    assert len(words.text(Arrival(0.0, 5, 1), 0).split()) == 1


def test_prompts_differ_but_for_their_prefix() -> None:
    words = Words(3, prefix_block=8)
    one, other = (words.text(Arrival(0.0, 20, 1, prefix=(5,)), n) for n in (0, 1))
    assert one.split()[:8] == other.split()[:8]
    assert one.split()[8:] != other.split()[8:]
    assert words.text(Arrival(0.0, 20, 1), 0) != words.text(Arrival(0.0, 20, 1), 1)
    assert words.text(Arrival(0.0, 20, 1), 0) != Words(4).text(Arrival(0.0, 20, 1), 0)


def made(bodies: Bodies, arrival: Arrival, number: int = 0) -> tuple[dict[str, Any], Any, int]:
    body, prompt_tokens, output_tokens = bodies.make(arrival, number)
    return json.loads(body), prompt_tokens, output_tokens


def test_bodies() -> None:
    arrival = Arrival(0.0, 4, 9, ttft=0.5, deadline=2.0)
    body, prompt_tokens, output_tokens = made(Bodies("m", "chat", Words(0)), arrival)
    (message,) = body.pop("messages")
    assert message["role"] == "user" and len(message["content"].split()) == 4
    assert body == {
        "model": "m",
        "max_tokens": 9,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert (prompt_tokens, output_tokens) == (4, 9)
    whose, _, _ = made(Bodies("m", "chat", Words(0)), replace(arrival, tenant="ada"))
    assert whose["user"] == "ada"
    bodies = Bodies(
        "m", "completions", Words(0), include_usage=False, ignore_eos=True, send_slo=True,
        extra={"temperature": 0, "max_tokens": 3},
    )  # fmt: skip
    body, _, _ = made(bodies, arrival)
    assert len(body.pop("prompt").split()) == 4
    assert body == {
        "model": "m",
        "max_tokens": 3,
        "stream": True,
        "ignore_eos": True,
        "slo": {"ttft_ms": 500.0, "deadline_ms": 2000.0},
        "temperature": 0,
    }


def test_prompts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Hi", "max_tokens": 2}\n\n"Ho"\n')
    bodies = Bodies("m", "completions", Words(0), PromptFile(path))
    found = [made(bodies, Arrival(0.0, 99, 7), n) for n in range(3)]
    assert [(b["prompt"], b["max_tokens"], asked, most) for b, asked, most in found] == [
        ("Hi", 2, None, 2), ("Ho", 7, None, 7), ("Hi", 2, None, 2),
    ]  # fmt: skip
    path.write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n')
    body, _, _ = made(Bodies("m", "chat", Words(0), PromptFile(path)), Arrival(0.0, 1, 1))
    assert body["messages"] == [{"role": "user", "content": "Hi"}]
    with pytest.raises(ConfigError, match="completions cannot send"):
        Bodies("m", "completions", Words(0), PromptFile(path))


def test_a_line_of_a_file_says_more_of_its_request(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    line = {
        "messages": [{"role": "user", "content": "a\u2028b"}],
        "max_completion_tokens": 3,
        "temperature": 0.2,
        "top_p": 0.5,
        "seed": 4,
        "stop": ["\n"],
        "user": "u",
        "response_format": {"type": "json_object"},
    }
    # what the run says of all requests, and a line's name
    others = {"model": "x", "stream": False, "stream_options": {}, "custom_id": "one"}
    text = json.dumps(line | others, ensure_ascii=False)
    path.write_text(text + '\n{"prompt": "Hi"}\n', encoding="utf-8")
    bodies = Bodies("m", "chat", Words(0), PromptFile(path), ignore_eos=True, extra={"seed": 5})
    arrival = Arrival(0.0, 9, 7, tenant="t")
    body, asked, most = made(bodies, arrival)
    assert (asked, most) == (None, 3)
    assert body == {
        **line,
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "seed": 5,
    }
    body, _, most = made(bodies, arrival, 1)
    assert body["max_tokens"] == most == 7 and body["user"] == "t" and "top_p" not in body


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no prompts"),
        ('{"prompt": "a", "max_tokens": 1, "max_completion_tokens": 1}', ":1: expected"),
        ("{", ":1: not JSON"),
        ('"a"\n{"text": "b"}', ":2: expected"),
        ('{"prompt": "a", "max_tokens": 0}', ":1: expected"),
        ('{"prompt": "a", "messages": []}', ":1: expected"),
    ],
)
def test_prompt_files_that_are_none(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        PromptFile(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        PromptFile(tmp_path / "nothing")
