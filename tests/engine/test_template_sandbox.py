"""Nothing that a hostile chat template wants: neither time and memory, nor a way out."""

from __future__ import annotations

import re
import threading
import time
import tracemalloc
from pathlib import Path

import pytest

from paceline.core.errors import InvalidRequestError
from paceline.engine import template_meter
from paceline.engine.chat_template import ChatTemplate

# a tenth of the limits that hold elsewhere: what is metered ends as surely, and ten times as soon
SCALE = 10
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

# every one of these would take hours, gigabytes, or both
RUNAWAYS = [
    "{% for i in range(10**14) %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}x"
    "{% endfor %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{{ range(99999) | list | length }}{% endfor %}",
    "{% for i in range(99999) %}{{ range(99999) | map('string') | join | length }}{% endfor %}",
    "{{ 'a' * 10**10 }}",
    "{{ 10**10 * 'a' }}",
    "{{ [1] * 10**10 }}",
    "{{ (range(99999) | list) * 99999 }}",
    "{{ 10 ** (10 ** 10) }}",
    "{{ (2 ** 4000) ** 4000 }}",
    "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x %}{{ n.x }}{{ n.x }}"
    "{% endset %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x.replace('a', n.x) %}"
    "{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x.join([n.x, n.x]) %}"
    "{% endfor %}",
    "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = '%s%s' % (n.x, n.x) %}"
    "{% endfor %}",
    "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = '{0}{0}'.format(n.x) %}"
    "{% endfor %}",
    "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "{% block b %}{{ self.b() }}{{ self.b() }}{% endblock %}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%.1000000000f' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%(a(b))999999999d' % {'a(b)': 1} }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '{:>1000000000}'.format('x') }}",
    "{{ '{:>{}}'.format('x', 1000000000) }}",
    "{{ '{x:>1000000000}'.format_map({'x': 1}) }}",
    "{{ 'x'.center(10**9) }}",
    "{{ 'x'.ljust(10**9) }}",
    "{{ 'x'.zfill(10**9) }}",
    "{{ 'x' | center(10**9) }}",
    "{{ ('\\t' * 99999).expandtabs(10**9) }}",
    "{{ ('\\n' * 1000000) | indent(9999, true, true) }}",
    "{{ ('a' * 1000000) | wordwrap(1, true, 'b' * 9999) }}",
    "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}",
    "{{ (['b' * 1000000] * 9999) | join }}",
    "{{ ('b' * 1000000).join('a' * 1000000) }}",
    "{{ ''.join((['b' * 1000000] * 9999) | map('string')) }}",
    "{{ ('a' * 1000000).strip('b' * 1000000 ~ 'a') }}",
    "{{ ('a' * 1000000) | trim('b' * 1000000 ~ 'a') }}",
    "{{ range(9) | batch(10**9, 'x') | list }}",
    "{{ range(9) | slice(10**9) | list }}",
    "{{ 1.5 | round(10**9) }}",
    "{{ [1] | tojson(indent=10**9) }}",
    "{{ strftime_now('%999999999d') }}",
    "{{ strftime_now('%Y' * 999999) }}",
]
# data that is small in memory and astronomically large when walked
NESTED = [
    "{{ n.x }}",
    "{{ n.x | string }}",
    "{{ n.x | tojson }}",
    "{{ n.x | pprint }}",
    "{{ n.x | join }}",
    "{{ 'a' ~ n.x }}",
    "{{ '%s' % (n.x,) }}",
    "{{ '{}'.format(n.x) }}",
    "{{ n.x == n.y }}",
    "{{ n.x in [n.y] }}",
    "{{ n.x < n.y }}",
    "{{ n.x is eq n.y }}",
    "{{ [n.x].index(n.y) }}",
    "{{ [n.x].count(n.y) }}",
    "{{ [n.x, n.y] | sort }}",
    "{{ [n.x, n.y] | max }}",
    "{{ {'a': n.x, 'b': n.y} | dictsort(by='value') }}",
]


def stopped(template: str, *, watch_memory: bool = False) -> str:
    """Render: it must end soon, with an error, and in little memory (watching that is slow)."""
    chat = ChatTemplate({"default": template}, SPECIAL)
    if watch_memory:
        tracemalloc.start()
    start = time.monotonic()
    try:
        with pytest.raises(InvalidRequestError) as caught:
            chat.render([{"role": "user", "content": "x"}])
        most = 5 * template_meter.MAX_SIZE
        assert not watch_memory or tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()
    assert time.monotonic() - start < 15
    return str(caught.value)


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_STEPS", "MAX_SIZE"):
        monkeypatch.setattr(template_meter, name, getattr(template_meter, name) // SCALE)


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("template", RUNAWAYS)
def test_a_runaway_template_is_stopped(template: str) -> None:
    message = stopped(template, watch_memory=True)
    assert "was stopped" in message or "is not available" in message


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "more than (500000 steps|2 s)",
        ),
        (
            "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}"
            "{% endfor %}",
            "more than 134217728 characters",
        ),
    ],
)
def test_the_limits_that_hold_elsewhere(template: str, says: str) -> None:
    assert re.search(says, stopped(template, watch_memory="namespace" in template))


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("use", NESTED)
def test_data_nested_into_itself_is_not_walked(use: str) -> None:
    template = (
        "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(60) %}"
        "{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}" + use
    )
    assert "was stopped" in stopped(template)


def test_tuples_nested_into_themselves_are_not_hashed() -> None:
    template = (
        "{% set n = namespace(x=(1,)) %}{% for i in range(60) %}{% set n.x = (n.x, n.x) %}"
        "{% endfor %}{{ {n.x: 1} }}"
    )
    assert "was stopped" in stopped(template)


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
def test_a_template_that_does_not_compile_is_refused(template: str) -> None:
    assert "chat template does not" in stopped(template)


# each reaches for the interpreter in some known way; "{MARK}" is a folder it would make
ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__']['__mro__'][1]['__subclasses__']() }}",
    "{{ '' | attr('__class__') }}",
    "{{ ([''] | map(attribute='__class__') | first).mro() }}",
    "{{ '{0.__class__.__mro__}'.format('') }}{{ 1/0 }}",
    "{{ ('{0.__class__}'.format)('') }}{{ 1/0 }}",
    "{{ self.__init__.__globals__.__builtins__.__import__('os').mkdir('{MARK}') }}",
    "{{ self._TemplateReference__context.environment }}{{ 1/0 }}",
    "{{ cycler.__init__.__globals__.os.mkdir('{MARK}') }}",
    "{{ joiner.__init__.__globals__.os.mkdir('{MARK}') }}",
    "{{ namespace.__init__.__globals__.__builtins__.__import__('os').mkdir('{MARK}') }}",
    "{{ lipsum.__globals__.os.mkdir('{MARK}') }}",
    "{{ raise_exception.__globals__.json.codecs.open('{MARK}', 'w') }}",
    "{{ strftime_now.__globals__['datetime'] }}{{ 1/0 }}",
    "{{ dict.__call__.__globals__.time }}{{ 1/0 }}",
    "{{ dict.mro() }}",
    "{{ range.__self__ }}{{ 1/0 }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ messages.append({'role': 'user'}) }}",
    "{{ messages[0].update({'role': 'root'}) }}",
    "{{ messages[0].pop('role') }}",
    "{{ messages.clear() }}",
    "{{ ''.encode('utf-16') }}",
    "{{ ''.translate({}) }}",
    "{{ messages[0].fromkeys(messages) }}",
    "{{ (1).from_bytes('a', 'little') }}",
    "{% for x in messages %}{{ loop.__class__.__init__.__globals__ }}{{ 1/0 }}{% endfor %}",
    "{% macro m() %}{% endmacro %}{{ m.__init__.__globals__ }}{{ 1/0 }}",
    "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}{{ 1/0 }}",
    "{% set x = namespace() %}{% set x.__class__ = 1 %}{{ x.__class__.mro() }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% extends '/etc/passwd' %}",
    "{{ nothing.__class__.__init__.__globals__.sys.modules.os.mkdir('{MARK}') }}",
    "{{ nothing._fail_with_undefined_error.__globals__ }}{{ 1/0 }}",
    "{{ context.environment }}{{ environment.from_string('x').render() }}",
    "{{ (messages | tojson).__class__.__mro__ }}{{ 1/0 }}",
    "{{ get_flashed_messages.__globals__ }}",
    "{{ x | map('eval') | list }}{{ ['1'] | map('eval') | list }}",
    "{{ _meter.steps }}{{ ['x'] | map('attr', '__class__') | list }}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_nothing_escapes_the_sandbox(template: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(InvalidRequestError):
        ChatTemplate({"default": template.replace("{MARK}", str(mark))}, SPECIAL).render(messages)
    assert not mark.exists()
    assert messages == [{"role": "user", "content": "x"}]


def test_what_an_escape_could_print_is_empty() -> None:
    for expression in (
        "''.__class__",
        "messages.__class__",
        "raise_exception.__globals__",
        "range.__self__",
        "self.__init__",
        "namespace.__init__",
        "'{0[__class__]}'.format('')",
        "'{0.__doc__}'.format(1)",
        "dict.__class__",
        "strftime_now.__code__",
    ):
        chat = ChatTemplate({"default": "[{{ " + expression + " }}]"}, {})
        assert chat.render([]) == "[]"


ODD_VALUES = (
    "range", "dict", "namespace", "strftime_now", "raise_exception", "self", "'x'.upper",
    "'x'.format", "messages.items", "messages[0].items", "messages | map('upper')",
    "messages | map(attribute='role')", "messages | select", "messages | batch(2)",
    "messages | slice(2)", "messages | reverse", "messages[0] | items", "messages[0].items()",
    "namespace(a=range)", "namespace(a=range).a", "[range, {'a': 'x'.upper}]",
    "messages | groupby('role')",
)  # fmt: skip
USES = (
    "{{ V ~ '' }}{{ [V] | string }}",
    "{{ [V] | join }}{{ {'a': V} | pprint }}",
    "{{ '%s' % [V] }}{{ '{}'.format(V) }}",
    "{{ V | upper }}{{ V | replace('a', 'b') }}",
    "{{ V | tojson }}",
    "{{ V + V }}",
    "{{ V.x.y }}",
    "{{ V(V) }}",
    "{% set x %}{{ V }}{% endset %}{{ x[1:] }}",
    "{% for x in [V] %}{{ loop.previtem }}{{ x }}{{ loop }}{{ loop.cycle }}{% endfor %}",
    "{% macro m(a) %}{{ a }}{{ varargs }}{{ caller }}{% endmacro %}{{ m }}{{ m(V, V) }}",
    "{% block b %}{{ V }}{% if false %}{{ self.b() }}{% endif %}{% endblock %}{{ self.b }}",
)


@pytest.mark.parametrize(
    "template",
    [
        form.replace("V", value)
        for value in ODD_VALUES
        for form in ("{{ V }}", "{{ raise_exception(V) }}")
    ]
    + [
        use.replace("V", f"({value})")
        for use in USES
        for value in ("range", "'x'.upper", "messages | select")
    ],
)
def test_nothing_prints_an_address(template: str) -> None:
    """Python shows functions and generators with where they are in memory."""
    chat = ChatTemplate({"default": template}, {})
    try:
        said = chat.render([{"role": "user", "content": "x"}])
    except InvalidRequestError as error:
        said = str(error)
    assert not re.search(r"0x[0-9a-fA-F]{6}|\bat 0|[0-9a-fA-F]{11}", said), said


def test_renders_do_not_share_their_meters() -> None:
    heavy = "{% for i in range(60000) %}{{ i }},{% endfor %}"
    chat = ChatTemplate({"default": heavy}, {})
    wanted = "".join(f"{i}," for i in range(60000))
    # together far above the limit of one render
    results: list[str] = []
    threads = [threading.Thread(target=lambda: results.append(chat.render([]))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in range(8):
        results.append(chat.render([]))
    assert results == [wanted] * 12
