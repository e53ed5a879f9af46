"""Nothing that a hostile chat template wants to reach is reached."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.engine.text.template_sandbox import render_template
from paceline.errors import InvalidRequestError

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

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
        render_template(template.replace("{MARK}", str(mark)), {**SPECIAL, "messages": messages})
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
        assert render_template("[{{ " + expression + " }}]", {"messages": []}) == "[]"


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
    try:
        said = render_template(template, {"messages": [{"role": "user", "content": "x"}]})
    except InvalidRequestError as error:
        said = str(error)
    assert not re.search(r"0x[0-9a-fA-F]{6}|\bat 0|[0-9a-fA-F]{11}", said), said
