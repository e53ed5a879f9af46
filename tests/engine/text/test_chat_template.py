"""Chat templates: the same text as transformers, and a clear error for what is none."""

from __future__ import annotations

import hashlib
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from paceline.engine.text.chat_template import KNOWN_TEMPLATES, RESERVED_NAMES, ChatTemplate
from paceline.engine.text.template_process import TemplateProcess
from paceline.engine.text.template_sandbox import MAX_TEMPLATE_CHARS
from paceline.errors import InvalidRequestError

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
PROCESS = TemplateProcess()


def chat_template(templates: dict[str, str], special: dict[str, str]) -> ChatTemplate:
    return ChatTemplate(templates, special, renderer=PROCESS, callers=PROCESS)


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
    chat = chat_template({"default": template}, SPECIAL)
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
    chat = chat_template({"default": template}, SPECIAL)
    for text in ("The answer is", "So: ", "a\n"):
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]
        wanted = theirs(template, messages, continue_final_message=True)
        assert wanted is not None
        prompt = chat.render(messages, add_generation_prompt=False, continue_final_message=True)
        assert prompt.rstrip() == wanted.rstrip()
        assert messages[1]["content"] == text


def test_continuing_needs_a_text_that_the_template_shows() -> None:
    chat = chat_template({"default": "{{ messages[0].content }}"}, SPECIAL)

    def continued(*messages: dict[str, Any]) -> str:
        return chat.render(list(messages), add_generation_prompt=False, continue_final_message=True)

    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}, {"type": "image"}]
    shown = chat_template(
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
    chat = chat_template({"default": "{{ strftime_now('%d %B %Y') }}"}, {})
    before = datetime.now().strftime("%d %B %Y")
    assert chat.render([]) in (before, datetime.now().strftime("%d %B %Y"))


def test_a_refusal_carries_the_templates_words() -> None:
    chat = chat_template({"default": INST}, SPECIAL)
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
        ("x" * (MAX_TEMPLATE_CHARS + 1), f"at most {MAX_TEMPLATE_CHARS}"),
    ],
)
def test_a_broken_template_is_the_requests_error(template: str, message: str) -> None:
    chat = chat_template({}, {})
    with pytest.raises(InvalidRequestError) as caught:
        chat.render([{"role": "user", "content": "x"}], chat_template=template)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", sorted(RESERVED_NAMES))
def test_kwargs_cannot_set_what_is_not_theirs(name: str) -> None:
    chat = chat_template({"default": CHATML}, SPECIAL)
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
    "value",
    [object(), {1: 2}, {"a": {2, 3}}, b"x", lambda: 1, [Path("/")], 1j],
    ids=lambda value: type(value).__name__,
)
def test_only_json_reaches_a_template(value: Any) -> None:
    chat = chat_template({"default": CHATML}, SPECIAL)
    with pytest.raises(InvalidRequestError, match=r"JSON value|not a string"):
        chat.render([{"role": "user", "content": "x", "more": value}])
    with pytest.raises(InvalidRequestError, match=r"JSON value|not a string"):
        chat.render([{"role": "user", "content": "x"}], template_kwargs={"more": value})


def test_subclasses_lose_their_methods() -> None:
    class Text(str):
        def shout(self) -> str:
            raise AssertionError("called from a template")

    chat = chat_template({"default": "{{ messages[0].content.shout() }}"}, {})
    with pytest.raises(InvalidRequestError, match="no attribute 'shout'"):
        chat.render([{"role": "user", "content": Text("x")}])


def test_messages_nested_deeply_are_refused() -> None:
    value: list[Any] = []
    for _ in range(100):
        value = [value]
    with pytest.raises(InvalidRequestError, match="nested deeper than 64"):
        chat_template({"default": "x"}, {}).render([{"content": value}])


def test_a_long_conversation_is_no_runaway() -> None:
    chat = chat_template({"default": TOOLS}, SPECIAL)
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
        chat = chat_template({"default": template}, SPECIAL)
        assert text.strip() in chat.render([{"role": "user", "content": text}])


def test_a_prompt_that_is_too_long_is_refused() -> None:
    chat = chat_template({"default": "{{ messages[0].content }}{{ messages[0].content }}"}, {})
    with pytest.raises(InvalidRequestError, match="made 40000000 characters, at most"):
        chat.render([{"content": "x" * 20_000_000}])


# of SmolLM2-135M-Instruct, as in its file
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class _Counted:
    """A renderer that says what it was asked for."""

    def __init__(self) -> None:
        self.sources: list[str] = []

    def render(self, source: str, variables: dict[str, Any]) -> str:
        self.sources.append(source)
        return "rendered elsewhere"


def test_who_renders_what() -> None:
    messages = [{"role": "user", "content": "x"}]
    own, callers = _Counted(), _Counted()
    unknown = ChatTemplate({"default": CHATML}, {}, renderer=own, callers=callers)
    assert not unknown.is_known
    unknown.render(messages)
    unknown.render(messages, tools=TOOL_LIST)
    assert (own.sources, callers.sources) == ([CHATML] * 2, [])
    unknown.render(messages, template_kwargs={"a": 1})
    unknown.render(messages, chat_template="{{ 1 }}")
    assert (len(own.sources), callers.sources) == (2, [CHATML, "{{ 1 }}"])
    known = ChatTemplate({"default": SMOLLM2}, {}, renderer=own, callers=callers)
    assert known.is_known and hashlib.sha256(SMOLLM2.encode()).hexdigest() in KNOWN_TEMPLATES
    assert known.render(messages, template_kwargs={"a": 1}).endswith("<|im_start|>assistant\n")
    assert (len(own.sources), len(callers.sources)) == (2, 2)
    # one character more, and nobody has read it
    changed = ChatTemplate({"default": SMOLLM2 + " "}, {}, renderer=own, callers=callers)
    assert not changed.is_known and changed.render(messages) == "rendered elsewhere"
