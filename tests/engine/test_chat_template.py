"""Chat templates: the same text as transformers, and nothing that a hostile one wants."""

from __future__ import annotations

import re
import threading
import time
import tracemalloc
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from paceline.core.errors import InvalidRequestError
from paceline.engine.chat_template import MAX_TEMPLATE_CHARS, RESERVED_NAMES, ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

# small templates in the shapes that published ones have
CHATML = """{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

INST = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{% set loop_messages = messages[1:] %}
{% set system = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}
{% set system = false %}{% endif %}
{% for message in loop_messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate user/assistant') }}
{% endif %}
{% if loop.index0 == 0 and system is not false %}
    {% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message['content'] %}
{% else %}{% set content = message['content'] %}{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + content.strip() + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}{{ ' ' ~ content | trim ~ ' ' ~ eos_token }}{% endif %}
{% endfor %}"""

TOOLS = """{{- bos_token }}
{%- set ns = namespace(found=false, last=messages|length - 1) %}
{%- macro show(message) %}
    {{- '<|start|>' ~ message.role ~ '<|sep|>' }}{{ (message.content or '') | trim }}
    {%- if message.tool_calls is defined and message.tool_calls %}
        {%- for call in message.tool_calls %}
            {%- set function = call.function if call.function is defined else call %}
            {{- '\\n<call>' + {"name": function.name, "arguments": function.arguments} | tojson }}
        {%- endfor %}
    {%- endif %}
    {{- '<|end|>\\n' }}
{%- endmacro %}
{%- if tools is not none and tools %}
    {{- '<|start|>tools\\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=2) }}{{ ',' if not loop.last }}{%- endfor %}
    {{- '<|end|>\\n' }}
{%- endif %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' and not ns.found %}
        {%- set ns.found = true %}
        {%- set ns.last = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages if message.role in ['user', 'assistant', 'tool', 'system'] %}
    {%- if message.role == 'tool' and loop.previtem is defined and loop.previtem.role == 'tool' %}
        {%- continue %}
    {%- endif %}
    {%- if message.content is string and '</think>' in message.content %}
        {%- set rest = message.content.split('</think>')[-1].lstrip('\\n') %}
        {{- '<|start|>' ~ message.role ~ '|' ~ rest ~ '<|end|>\\n' }}
    {%- else %}{{- show(message) }}{%- endif %}
{%- endfor %}
{{- 'last=%d of %s' % (ns.last, messages | map(attribute='role') | join(',')) }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think></think>' }}{% endif %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|sep|>' }}{%- endif %}"""

PARTS = """{% for message in messages %}
<{{ message.role }}>
  {%- if message.content is string %} {{ message.content }}
  {%- else %}
    {%- for part in message.content %}
      {%- if part.type == 'text' %} {{ part.text }}{% elif part.type == 'image' %} [img]{% endif %}
    {%- endfor %}
  {%- endif %}
{% generation %}{{ message.get('name', 'nobody') | upper }}{% endgeneration %}
{% if loop.index > 3 %}{% break %}{% endif %}
{% endfor %}
{# a comment #}
{{ {'b': 1, 'a': [1, 2.5, none, true, 'x<y&z"\\'é']} | tojson }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{{ (messages | first).role | title }} {{ range(3) | list }} {{ [3, 1, 2] | sort | join('-') }}
{{ dict(a=1).items() | list }} {{ 'a,b'.split(',') }} {{ 7 // 2 }} {{ 2 ** 5 }} {{ 7 % 4 }}
{{ '%s-%05.1f' | format('x', 2.25) }} {{ '{:>4}|{}'.format('y', 2) }}
{{ nothing }}{{ nothing is defined }} {{ [1, 2] + [3] }} {{ 'ab' * 2 }} {{ messages[-1:] | length }}
"""

MESSAGES: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi there "}],
    [{"role": "system", "content": "S"}, {"role": "user", "content": " a\n\nb"}],
    [
        {"role": "user", "content": "What is <b>1 & 2</b>?"},
        {"role": "assistant", "content": "<think>hm</think>\n\nThree, é 😀"},
        {"role": "user", "content": ""},
    ],
    [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "type": "function",
                    "function": {"name": "w", "arguments": {"city": "Köln", "n": [1, None]}},
                }
            ],
        },
        {"role": "tool", "content": "rain", "name": "w"},
        {"role": "tool", "content": "sun", "name": "w"},
    ],
    [{"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "image"}]}],
]
EXTRA: list[dict[str, Any]] = [{}, {"enable_thinking": False}]
TOOL_LIST = [
    {
        "type": "function",
        "function": {"name": "w", "description": "a <b> & 'c'", "parameters": {"type": "object"}},
    }
]


def theirs(template: str, messages: list[dict[str, Any]], **options: Any) -> str | None:
    """transformers' text, or None when the template fails."""
    try:
        rendered, _ = render_jinja_template(
            [messages], chat_template=template, **{**SPECIAL, **options}
        )
    except Exception:
        return None
    assert isinstance(rendered[0], str)
    return rendered[0]


@pytest.mark.parametrize(
    "template", [CHATML, INST, TOOLS, PARTS], ids=["chatml", "inst", "tools", "parts"]
)
def test_the_text_is_that_of_transformers(template: str) -> None:
    chat = ChatTemplate({"default": template}, SPECIAL)
    rendered = 0
    for messages in MESSAGES:
        for tools in (None, TOOL_LIST):
            for generate in (True, False):
                for kwargs in EXTRA:
                    wanted = theirs(
                        template, messages, tools=tools, add_generation_prompt=generate, **kwargs
                    )
                    if wanted is None:
                        with pytest.raises(InvalidRequestError):
                            chat.render(
                                messages, tools=tools, add_generation_prompt=generate,
                                template_kwargs=dict(kwargs),
                            )  # fmt: skip
                        continue
                    rendered += 1
                    assert wanted == chat.render(
                        messages,
                        tools=tools,
                        add_generation_prompt=generate,
                        template_kwargs=dict(kwargs),
                    )
    assert rendered >= 16


@pytest.mark.parametrize(
    "template", [CHATML, INST, TOOLS, PARTS], ids=["chatml", "inst", "tools", "parts"]
)
def test_continuing_a_message_is_as_in_transformers(template: str) -> None:
    chat = ChatTemplate({"default": template}, SPECIAL)
    for text in ("The answer is", "So: ", "a\n"):
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]
        wanted = theirs(template, messages, continue_final_message=True)
        assert wanted is not None
        prompt = chat.render(messages, add_generation_prompt=False, continue_final_message=True)
        assert prompt.rstrip() == wanted.rstrip()
        assert messages[1]["content"] == text


def test_continuing_needs_a_text_that_the_template_shows() -> None:
    chat = ChatTemplate({"default": "{{ messages[0].content }}"}, SPECIAL)

    def continued(*messages: dict[str, Any]) -> str:
        return chat.render(list(messages), add_generation_prompt=False, continue_final_message=True)

    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}, {"type": "image"}]
    shown = ChatTemplate(
        {"default": "{% for p in messages[0].content %}{{ p.text }}|{% endfor %}"}, SPECIAL
    )
    assert (
        shown.render(
            [{"role": "assistant", "content": parts}],
            add_generation_prompt=False,
            continue_final_message=True,
        )
        == "one|two"
    )
    with pytest.raises(InvalidRequestError, match="does not show"):
        continued({"content": "a"}, {"content": "hidden"})
    for messages in ([], [{"role": "user"}], [{"content": None}], [{"content": [{"text": 1}]}]):
        with pytest.raises(InvalidRequestError, match="needs a last message"):
            continued(*messages)
    with pytest.raises(InvalidRequestError, match="cannot both be true"):
        chat.render([{"content": "x"}], continue_final_message=True)


def test_the_date(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = ChatTemplate({"default": "{{ strftime_now('%d %B %Y') }}"}, {})
    before = datetime.now().strftime("%d %B %Y")
    assert chat.render([]) in (before, datetime.now().strftime("%d %B %Y"))


def test_a_refusal_carries_the_templates_words() -> None:
    chat = ChatTemplate({"default": INST}, SPECIAL)
    with pytest.raises(InvalidRequestError, match="roles must alternate") as caught:
        chat.render([{"role": "assistant", "content": "x"}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for %}", "does not parse: line 1"),
        ("\n\n{{ 1 + }}", "does not parse: line 3"),
        ("{{ messages[0].content.nothing() }}", "has no attribute"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ 'a' + 1 }}", "TypeError"),
        ("{{ x | nofilter }}", "No filter named"),
        ("{{ nothing.more }}", "is undefined"),
        ("{{ messages | tojson(indent='x') }}", "indent"),
        ("x" * (MAX_TEMPLATE_CHARS + 1), f"at most {MAX_TEMPLATE_CHARS}"),
    ],
)
def test_a_broken_template_is_the_requests_error(template: str, message: str) -> None:
    chat = ChatTemplate({}, {})
    with pytest.raises(InvalidRequestError) as caught:
        chat.render([{"role": "user", "content": "x"}], chat_template=template)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", sorted(RESERVED_NAMES))
def test_kwargs_cannot_set_what_is_not_theirs(name: str) -> None:
    chat = ChatTemplate({"default": CHATML}, SPECIAL)
    with pytest.raises(InvalidRequestError, match=name) as caught:
        chat.render([{"role": "user", "content": "x"}], template_kwargs={"ok": 1, name: True})
    assert caught.value.param == "chat_template_kwargs"


def test_reserved_names_are_these() -> None:
    must = {
        "messages",
        "tools",
        "add_generation_prompt",
        "tokenize",
        "raise_exception",
        "tokenizer",
    }
    assert must <= RESERVED_NAMES


@pytest.mark.parametrize(
    "value", [object(), {1: 2}, {"a": {2, 3}}, b"x", lambda: 1, [Path("/")], 1j], ids=repr
)
def test_only_json_reaches_a_template(value: Any) -> None:
    chat = ChatTemplate({"default": CHATML}, SPECIAL)
    with pytest.raises(InvalidRequestError, match=r"JSON value|not a string"):
        chat.render([{"role": "user", "content": "x", "more": value}])
    with pytest.raises(InvalidRequestError, match=r"JSON value|not a string"):
        chat.render([{"role": "user", "content": "x"}], template_kwargs={"more": value})


def test_subclasses_lose_their_methods() -> None:
    class Text(str):
        def shout(self) -> str:
            raise AssertionError("called from a template")

    chat = ChatTemplate({"default": "{{ messages[0].content.shout() }}"}, {})
    with pytest.raises(InvalidRequestError, match="no attribute 'shout'"):
        chat.render([{"role": "user", "content": Text("x")}])


def test_messages_nested_deeply_are_refused() -> None:
    value: list[Any] = []
    for _ in range(100):
        value = [value]
    with pytest.raises(InvalidRequestError, match="nested deeper than 64"):
        ChatTemplate({"default": "x"}, {}).render([{"content": value}])


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
        assert not watch_memory or tracemalloc.get_traced_memory()[1] < 600 << 20
    finally:
        tracemalloc.stop()
    assert time.monotonic() - start < 15
    return str(caught.value)


@pytest.mark.parametrize("template", RUNAWAYS)
def test_a_runaway_template_is_stopped(template: str) -> None:
    message = stopped(template, watch_memory=True)
    assert "was stopped" in message or "is not available" in message


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


def test_a_long_conversation_is_no_runaway() -> None:
    chat = ChatTemplate({"default": TOOLS}, SPECIAL)
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": f"message {i} " * 40} for i in range(2000)
    ]
    start = time.monotonic()
    prompt = chat.render(messages, tools=TOOL_LIST * 50)
    assert prompt.count("<|end|>") >= 2000 and len(prompt) > 900_000
    assert time.monotonic() - start < 5


def test_one_very_long_message_is_no_runaway() -> None:
    text = "word " * 2_000_000
    for template in (CHATML, INST, TOOLS):
        chat = ChatTemplate({"default": template}, SPECIAL)
        assert text.strip() in chat.render([{"role": "user", "content": text}])


def test_a_prompt_that_is_too_long_is_refused() -> None:
    chat = ChatTemplate({"default": "{{ messages[0].content }}{{ messages[0].content }}"}, {})
    with pytest.raises(InvalidRequestError, match="made 40000000 characters, at most"):
        chat.render([{"content": "x" * 20_000_000}])
