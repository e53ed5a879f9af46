"""Whatever a template does: it ends soon, in little memory, and the next render works."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.engine.text.template_process import TemplateLimits, TemplateProcess
from paceline.errors import InvalidRequestError

# of processor time; a tenth of the limit that holds elsewhere
CPU = 0.2
# integers of one hash value: tables of them are lists
COLLIDING = [i * (2**61 - 1) for i in range(1, 30_000)]
VARIABLES: dict[str, Any] = {
    "messages": [{"role": "user", "content": "x"}],
    "keys": COLLIDING,
    "pairs": [[key, 1] for key in COLLIDING],
}
_GROWN = (
    "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(60) %}"
    "{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}"
)
# the first are single calls, in which no count of steps sees time pass: conversions and arithmetic
# of long numbers, wrapping to nothing, hash tables whose keys collide
ATTACKS = {
    "hexadecimal divided": "{{ ('f' * 4000000) | int(base=16) // (('e' * 2000000) | int(base=16)) "
    "> 0 }}",
    "hexadecimal modulo": "{{ ('f' * 4000000) | int(base=16) % (('e' * 2000000) | int(base=16)) "
    "> 0 }}",
    "hexadecimal multiplied": "{% set a = ('f' * 9000000) | int(base=16) %}{{ a * a > 0 }}",
    "wrapped to one": "{{ ('a ' * 3000000) | wordwrap(1) | length }}",
    "wrapped inside words": "{{ ('a' * 3000000) | wordwrap(1, true, '--') | length }}",
    "unique over colliding integers": "{{ keys | unique | list | length }}",
    "dict over colliding integers": "{{ dict(pairs) | length }}",
    "a huge range": "{% for i in range(10**14) %}{% endfor %}",
    "a huge repetition": "{{ 'a' * 10**10 }}",
    "a list repeated": "{{ [1] * 10**10 }}",
    "loops in loops": "{% for i in range(9999) %}{% for j in range(9999) %}{% for k in range(9999) "
    "%}x{% endfor %}{% endfor %}{% endfor %}",
    "a loop that passes over all": "{% for i in range(10**14) if false %}{% endfor %}",
    "a text doubled": "{% set n = namespace(x='ab') %}{% for i in range(99) %}"
    "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "a width": "{{ '%1000000000d' % 1 }}",
    "a width of format": "{{ '{:>{}}'.format('x', 1000000000) }}",
    "a width of center": "{{ 'x' | center(10**9) }}",
    "an indent": "{{ [1] | tojson(indent=10**9) }}",
    "a macro without end": "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "two macros each": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}"
    "{% endmacro %}{{ m(60) }}",
    "a block in itself": "{% block b %}{{ self.b() }}{{ self.b() }}{% endblock %}",
    "a loop in itself": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "a power": "{{ 7 ** (10 ** 9) > 1 }}",
    "stripped of much": "{{ ('a' * 3000000).strip('b' * 3000000 ~ 'a') }}",
    "replaced by much": "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}",
    "nested and printed": _GROWN + "{{ n.x }}",
    "nested and compared": _GROWN + "{{ n.x == n.y }}",
    "slices": "{{ range(9) | slice(10**9) | list }}",
}


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    process = TemplateProcess(TemplateLimits(cpu_seconds=CPU, memory_bytes=256 << 20))
    yield process
    process.close()


def stopped(process: TemplateProcess, template: str) -> str:
    """Render: it must end soon, with an error, and the next one must be served."""
    began = time.monotonic()
    with pytest.raises(InvalidRequestError) as caught:
        process.render(template, VARIABLES)
    assert time.monotonic() - began < 15
    assert process.render("{{ messages[0].content }}", VARIABLES) == "x"
    return str(caught.value)


# one of each kind
DAILY = (
    "hexadecimal divided", "wrapped to one", "dict over colliding integers", "a huge range",
    "a huge repetition", "a text doubled", "a macro without end", "a power", "nested and printed",
)  # fmt: skip


@pytest.mark.parametrize(
    "template",
    [
        pytest.param(text, id=name, marks=() if name in DAILY else pytest.mark.thorough)
        for name, text in ATTACKS.items()
    ],
)
def test_an_attack_is_stopped(process: TemplateProcess, template: str) -> None:
    assert "was stopped" in stopped(process, template)


def test_the_limits_that_hold_elsewhere() -> None:
    process = TemplateProcess()
    assert "2 s of processor time" in stopped(process, ATTACKS["a huge range"])
    assert "512 MiB of memory" in stopped(process, ATTACKS["a huge repetition"])
    process.close()


@pytest.mark.parametrize(
    "template",
    [
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + "-" * 50_000 + "1 }}",
        "{{ a" + "|upper" * 20_000 + " }}",
        "{{ " + "a." * 20_000 + "b }}",
        "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
        "{% for i in [1] %}" * 60 + "{% endfor %}" * 60,
        "{{ " + "9" * 10_000 + " }}",
        "{#" * 50_000,
    ],
    ids=lambda template: template[:20],
)
def test_a_template_that_does_not_compile_is_refused(
    process: TemplateProcess, template: str
) -> None:
    assert re.search("does not compile|does not parse|was stopped", stopped(process, template))


def test_a_worker_that_is_gone_is_replaced() -> None:
    process = TemplateProcess()
    assert process.pid is None
    assert process.render("a", {}) == "a"
    first = process.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    assert process.render("b", {}) == "b"
    assert process.pid not in (None, first)
    process.close()


def test_a_worker_that_is_halted_is_ended() -> None:
    process = TemplateProcess(TemplateLimits(wall_seconds=2.0))
    assert process.render("a", {}) == "a"
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(InvalidRequestError, match=r"more than 2 s$"):
        process.render("b", {})
    assert process.render("b", {}) == "b"
    process.close()


def test_the_worker_knows_no_secret_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_API_KEY", "sk-very-secret")
    process = TemplateProcess()
    process.render("a", {})
    about = Path(f"/proc/{process.pid}")
    assert b"secret" not in (about / "environ").read_bytes()
    limits = (about / "limits").read_text()
    assert re.search(r"Max file size +0 +0 ", limits)
    assert re.search(r"Max core file size +0 +0 ", limits)
    assert re.search(r"Max address space +\d+ +\d+ ", limits)
    assert (about / "oom_score_adj").read_text() == "1000\n"
    process.close()


def test_no_process_outlives_who_asked_it() -> None:
    process = TemplateProcess()
    process.render("a", {})
    pid = process.pid
    del process
    gc.collect()
    assert not Path(f"/proc/{pid}").exists()


def test_texts_come_through_as_they_are() -> None:
    process = TemplateProcess()
    text = "é😀\x00\ud800 \u2028" + "x" * 10_000_000
    assert process.render("{{ t }}", {"t": text}) == text
    odd = {"n": 10**60, "f": 1.5, "b": [True, None], "s": "'\""}
    assert process.render("{{ n }} {{ f }} {{ b }} {{ s }}", odd) == (
        "1" + "0" * 60 + " 1.5 [True, None] '\""
    )
    process.close()


def test_threads_take_turns(process: TemplateProcess) -> None:
    heavy = "{% for i in range(20000) %}{{ i }},{% endfor %}"
    wanted = "".join(f"{i}," for i in range(20000))
    results: list[str] = []
    threads = [
        threading.Thread(target=lambda: results.append(process.render(heavy, {}))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [wanted] * 4
