"""Earlier calls as templates want them: ids of nine letters and digits, arguments as JSON text."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from paceline.backends.reference.null import NullBackend
from paceline.engine.testing import ByteTokenizer, null_client
from paceline.engine.text.template_sandbox import render_template
from paceline.errors import InvalidRequestError
from paceline.server import ServerConfig, create_app
from paceline.server.protocol.earlier_calls import render_with_calls, wants_short_ids
from tests.server.helpers import VOCAB, connect

EACH = "{%% for m in messages %%}{%% for c in m.tool_calls or [] %%}%s{%% endfor %%}{%% endfor %%}"
CHECKED = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{% if c.id is not defined or c.id|length != 9 %}{{ raise_exception('nine!') }}{% endif %}"
    "[{{ c.id }}]{% endfor %}{% if m.role == 'tool' %}"
    "{% if m.tool_call_id|length != 9 %}{{ raise_exception('nine!') }}{% endif %}"
    "({{ m.tool_call_id }}){% endif %}{% endfor %}"
)
PLAIN = CHECKED.replace("length != 9", "length < 1")


def made(*ids: str | None, arguments: Any = None) -> dict[str, Any]:
    calls = [
        {"type": "function", "function": {"name": "look", "arguments": arguments or {}}}
        | ({} if call_id is None else {"id": call_id})
        for call_id in ids
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def result(call_id: str | None) -> dict[str, Any]:
    found = {"role": "tool", "content": "4"}
    return found if call_id is None else {**found, "tool_call_id": call_id}


def rendered(template: str, messages: list[dict[str, Any]]) -> str:
    def render(messages: list[dict[str, Any]]) -> str:
        return render_template(template, {"messages": messages})

    return render_with_calls(render, messages, template)


def test_ids_are_mapped_for_a_template_that_wants_nine() -> None:
    messages = [
        made("call_1", "abcDEF123"),
        result("call_1"),
        result("abcDEF123"),
        made("toolu_01A", "call_1"),
        result("toolu_01A"),
    ]
    before = repr(messages)
    text = rendered(CHECKED, messages)
    first, second, one, two, third, again, three = re.findall(r"[\[(]([A-Za-z0-9]{9})[\])]", text)
    assert first == one == again and second == two == "abcDEF123" and third == three
    assert len({first, second, third}) == 3
    # the same in the next turn, and for the template alone
    assert rendered(CHECKED, messages) == text and repr(messages) == before
    assert rendered(PLAIN, messages).startswith("[call_1][abcDEF123](call_1)")


def test_calls_without_an_id_get_one_there() -> None:
    text = rendered(CHECKED, [made(None, None), result(None), result(None), made(None)])
    first, second, one, two, third = re.findall(r"[A-Za-z0-9]{9}", text)
    assert (first, second) == (one, two) and len({first, second, third}) == 3


@pytest.mark.parametrize(
    ("template", "wants"),
    [
        (None, False),
        ("{{ messages }}", False),
        ("{{ c.id|length }} != 900", False),
        ("{{ '[TOOL_CALLS]' }}", True),
        ("[AVAILABLE_TOOLS]", True),
        ("{% if (c.id|length) == 9 %}", True),
        ("{% if c['id'] | length!=9 %}", True),
        ("{% if 9 != m.tool_call_id|length %}", True),
    ],
)
def test_which_templates_want_them(template: str | None, wants: bool) -> None:
    assert wants_short_ids(template) == wants


ARGUMENTS = {"at": 'a "b" é', "deep": [{"x": 1}]}
JSON = '{"at": "a \\"b\\" é", "deep": [{"x": 1}]}'


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        # they take an object
        ("{{ c.function.arguments|tojson }}", JSON),
        ("{% for k, v in c.function.arguments|items %}{{ k }}={{ v }} {% endfor %}", None),
        ("{% for k in c.function.arguments %}{{ k }} {% endfor %}", "at deep "),
        # they join it, print it, or take no object
        ("{{ 'x' + c.function.arguments }}", "x" + JSON),
        ("{{ 'x' ~ c.function.arguments }}", "x" + JSON),
        ("{{ c.function.arguments }}", JSON),
        ("{{ c.function.arguments|string }}", JSON),
        ("{{ c.function.arguments.strip() }}", JSON),
        ("{% if c.function.arguments is string %}{{ c.function.arguments }}{% endif %}", JSON),
        ("{{ raise_exception('text') if c.function.arguments is mapping }}{{ c }}", "look"),
        # they do both
        (
            "{% if c.function.arguments is string %}text{% else %}"
            "{{ c.function.arguments|tojson(indent=1) }}{% endif %}",
            '{\n "at"',
        ),
        # they show none
        ("{{ c.function.name }}", "look"),
    ],
)
def test_arguments(shown: str, text: str | None) -> None:
    found = rendered(EACH % shown, [made("a", arguments=ARGUMENTS)])
    assert found.startswith("at=") if text is None else text in found


def test_a_template_that_refuses_both_says_why() -> None:
    with pytest.raises(InvalidRequestError, match="can only concatenate"):
        rendered(
            EACH % "{{ '' + c.function.arguments }}{{ raise_exception('no') }}",
            [made("a", arguments=ARGUMENTS)],
        )


class Nine(ByteTokenizer):
    """Its template is ``CHECKED``, and prints arguments as text."""

    source = CHECKED + "{# tools #}{{ '' + messages[1].tool_calls[0].function.arguments }}"

    @property
    def chat_template_source(self) -> str | None:
        return self.source

    def render_chat(self, messages: Any, **fields: Any) -> str:
        if len(messages) < 2:
            return super().render_chat(messages)
        return render_template(self.source, {"messages": list(messages)})


@pytest.fixture(scope="module")
async def http(anyio_backend: str) -> AsyncIterator[httpx.AsyncClient]:
    client = null_client(NullBackend(vocab_size=VOCAB, max_model_len=4096), tokenizer=Nine())
    async with connect(create_app(client, ServerConfig())) as http:
        yield http
    await client.close()


async def test_our_own_ids_have_that_form_and_others_are_taken(http: httpx.AsyncClient) -> None:
    user = {"role": "user", "content": "hi"}
    parameters = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "look", "parameters": parameters}}]
    fields = {"tools": tools, "max_tokens": 200, "parallel_tool_calls": False}
    body = {"messages": [user], "tool_choice": "required", **fields}
    answer = (await http.post("/v1/chat/completions", json=body)).json()
    said = answer["choices"][0]["message"]
    (call,) = said["tool_calls"]
    assert re.fullmatch("[A-Za-z0-9]{9}", call["id"])
    for call_id in (call["id"], "call_0123456789", "x"):
        said["tool_calls"][0]["id"] = call_id
        history = [user, said, {"role": "tool", "tool_call_id": call_id, "content": "4"}]
        body = {"messages": history, "max_tokens": 1, "return_token_ids": True, "tools": tools}
        answer = (await http.post("/v1/chat/completions", json=body)).json()
        prompt = ByteTokenizer().decode(answer["prompt_token_ids"])
        found = re.search(r'\[(\w{9})\]\((\w{9})\)\{"a": 1\}$', prompt)
        assert found and found[1] == found[2]
