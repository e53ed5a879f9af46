"""What a chat template leaves out of a conversation, or refuses, is written in another way."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest

from paceline.backends.reference.null import NullBackend
from paceline.engine.testing import ByteTokenizer, null_client
from paceline.engine.text.chat_template import ChatTemplate
from paceline.engine.text.template_sandbox import RendersHere
from paceline.errors import InvalidRequestError
from paceline.server import ServerConfig, create_app
from paceline.server.generation.template_gaps import Conversation, TemplateGaps
from tests.server.helpers import VOCAB, connect

HEADER = "x-paceline-rewritten-messages"
CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
# the roles it knows, and one message of the system
FEW = (
    "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}{% endif %}"
    "{% for m in messages if m.role in ('user', 'assistant') %}<{{ m.role }}>{{ m.content }}"
    "{% endfor %}"
)
# what follows what it does not know is refused
STRICT = (
    "{% for m in messages %}{% if m.role != ('user', 'assistant')[loop.index0 % 2] %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}"
    "{% endfor %}"
)
# a tool's messages and calls, the latter by themselves and with ids of a form alone
NATIVE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.tool_calls %}{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    "CALL {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
# calls where the content is null, as DeepSeek's has it
NULL = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is none %}{% for c in m.tool_calls %}"
    "CALL {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
# the developer's messages, and no others of that kind
OSS = (
    "{% for m in messages if m.role in ('developer', 'user') %}<{{ m.role }}>{{ m.content }}"
    "{% endfor %}"
)


def say(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(*names: str, content: str = "", call_id: str = "abcdefghi") -> dict[str, Any]:
    calls = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": {"a": 1}}}
        for name in names
    ]
    return say("assistant", content, tool_calls=calls)


USER, ANSWER, SYSTEM, DEVELOPER = (
    say(role, role[:1].upper()) for role in ("user", "assistant", "system", "developer")
)
RESULT = say("tool", "42", tool_call_id="abcdefghi")
IN_WORDS = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
RESPONSE = "<tool_response>\n42\n</tool_response>"
AS_TEXT = ("tool_calls as text", "tool results as user messages")


def write(
    source: str,
    messages: list[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None = None,
    gaps: TemplateGaps | None = None,
) -> tuple[str, tuple[str, ...], int]:
    """The prompt, what is told about it, and how often the template was tried before."""
    template = ChatTemplate({"default": source}, {}, renderer=RendersHere(), callers=RendersHere())
    tries = 0

    def render(messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]] | None) -> str:
        nonlocal tries
        tries += 1
        return template.render(messages, tools=tools)

    asked = Conversation(messages=messages, tools=tools, source=source)
    written = (gaps or TemplateGaps()).fill(asked, render)
    return template.render(written.messages, tools=written.tools), written.notes, tries


CASES: list[tuple[str, list[dict[str, Any]], str, tuple[str, ...]]] = [
    (FEW, [USER, ANSWER, USER], "<user>U<assistant>A<user>U", ()),
    (FEW, [SYSTEM, USER], "<system>S<user>U", ()),
    (FEW, [DEVELOPER, USER], "<system>D<user>U", ("developer as system",)),
    # a role that is written down as any other is one that no model was trained on
    (CHATML, [DEVELOPER, USER], "<system>D<user>U", ("developer as system",)),
    (OSS, [DEVELOPER, USER], "<developer>D<user>U", ()),
    (OSS, [SYSTEM, USER], "<user>S\n\nU", ("system in the user message",)),
    (
        FEW,
        [SYSTEM, DEVELOPER, USER, ANSWER, SYSTEM, USER],
        "<system>S\n\nD\n\nS<user>U<assistant>A<user>U",
        ("developer as system", "system messages as one"),
    ),
    (STRICT, [SYSTEM, USER, ANSWER, USER], "<user>S\n\nU<assistant>A<user>U", (
        "system in the user message",)),
    (STRICT, [SYSTEM], "<user>S", ("system in the user message",)),
    (FEW, [USER, call("f"), RESULT], f"<user>U<assistant>{IN_WORDS}<user>{RESPONSE}", AS_TEXT),
    (CHATML, [USER, call("f"), RESULT], f"<user>U<assistant>{IN_WORDS}<user>{RESPONSE}", AS_TEXT),
    (FEW, [USER, call("f", content="So.")], f"<user>U<assistant>So.\n{IN_WORDS}", AS_TEXT[:1]),
    (FEW, [USER, RESULT], f"<user>U\n{RESPONSE}", AS_TEXT[1:]),
    (
        STRICT,
        [USER, call("f", "f"), RESULT, RESULT, USER, ANSWER],
        f"<user>U<assistant>{IN_WORDS}\n{IN_WORDS}<user>{RESPONSE}\n{RESPONSE}\nU<assistant>A",
        AS_TEXT,
    ),
    (STRICT, [SYSTEM, USER, call("f"), RESULT],
     f"<user>S\n\nU<assistant>{IN_WORDS}<user>{RESPONSE}",
     ("system in the user message", *AS_TEXT)),
    (NATIVE, [USER, call("f"), RESULT], '<user>U<assistant>CALL f {"a": 1}<tool>42', ()),
    (NATIVE, [USER, call("f"), say("function", "42", name="f")],
     '<user>U<assistant>CALL f {"a": 1}<tool>42', ("function as tool",)),
    (NATIVE, [USER, call("f", content="So.")], '<user>U<assistant>CALL f {"a": 1}',
     ("left out: content beside tool_calls",)),
    (NULL, [USER, call("f"), RESULT], '<user>U<assistant>CALL f {"a": 1}<tool>42', ()),
    # whatever is tried, one message is all that it writes
    ("{{ messages[-1].content }}", [USER, call("f"), RESULT], "42", ("left out: tool_calls",)),
]  # fmt: skip


@pytest.mark.parametrize(("source", "messages", "prompt", "notes"), CASES)
def test_all_of_a_conversation_is_written(
    source: str, messages: list[dict[str, Any]], prompt: str, notes: tuple[str, ...]
) -> None:
    assert write(source, messages)[:2] == (prompt, notes)


def test_what_is_said_never_passes_for_what_is_left_out() -> None:
    """The result is in the prompt already, as a part of what the user says."""
    prompt, notes, _ = write(FEW, [say("user", "f 42 U"), call("f"), RESULT])
    assert IN_WORDS in prompt and RESPONSE in prompt and notes == AS_TEXT


def test_conversations_of_one_shape_are_tried_once() -> None:
    gaps = TemplateGaps()
    assert write(STRICT, [SYSTEM, USER], gaps=gaps)[2] == 2
    for more in ([], [ANSWER, USER], [ANSWER, USER] * 20):
        assert write(STRICT, [SYSTEM, USER, *more], gaps=gaps)[2] == 0
    assert write(FEW, [USER, ANSWER] * 20)[2] == 0
    assert write(STRICT, [USER, call("f"), RESULT], gaps=gaps)[2] > 0
    other = [say("user", "?"), call("g", call_id="ihgfedcba"), say("tool", "7", tool_call_id="x")]
    assert write(STRICT, other, gaps=gaps)[2] == 0


def test_a_role_that_is_left_out_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"messages\[1\]\.role is 'poet'"):
        write(FEW, [SYSTEM, say("poet", "U"), USER])
    assert write(CHATML, [say("poet", "x"), USER])[:2] == ("<poet>x<user>U", ())


def test_what_is_refused_in_every_way_says_why() -> None:
    source = "{{ raise_exception('never') }}"
    with pytest.raises(InvalidRequestError, match="never"):
        write(source, [SYSTEM, USER, call("f"), RESULT])


def test_tools_in_words_are_in_whatever_the_template_writes() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    prompt, notes, _ = write(STRICT, [USER, call("f"), RESULT], tools)
    assert prompt.startswith("<user>You may call functions") and '"name": "f"' in prompt
    assert prompt.endswith(f"U<assistant>{IN_WORDS}<user>{RESPONSE}")
    assert notes == ("tools as text", "system in the user message", *AS_TEXT)


class Few(ByteTokenizer):
    """Writes as ``FEW`` does."""

    _template = ChatTemplate({"default": FEW}, {}, renderer=RendersHere(), callers=RendersHere())

    @property
    def chat_template_source(self) -> str:
        return FEW

    def render_chat(self, messages: Any, **fields: Any) -> str:
        return self._template.render(messages, **fields)


@pytest.fixture(scope="module")
async def http(anyio_backend: str) -> AsyncIterator[httpx.AsyncClient]:
    client = null_client(NullBackend(vocab_size=VOCAB, max_model_len=4096), tokenizer=Few())
    async with connect(create_app(client, ServerConfig(served_model_names=("tiny",)))) as http:
        yield http
    await client.close()


FUNCTION = {"name": "f", "arguments": '{"a": 1}'}
CALLED = {"id": "c", "type": "function", "function": FUNCTION}
CHAT = {
    "messages": [
        say("developer", "D"),
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALLED]},
        say("tool", "42", tool_call_id="c"),
    ],
    "max_tokens": 1,
}
ALL = "developer as system; tool_calls as text; tool results as user messages"
BODIES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", CHAT, ALL),
    ("/v1/chat/completions", {**CHAT, "stream": True}, ALL),
    ("/apply-template", CHAT, ALL),
    ("/tokenize", CHAT, ALL),
    (
        "/v1/responses",
        {
            "instructions": "D",
            "input": [
                USER,
                {"type": "function_call", "call_id": "c", **FUNCTION},
                {"type": "function_call_output", "call_id": "c", "output": "42"},
            ],
            "max_output_tokens": 1,
        },
        "; ".join(AS_TEXT),
    ),
    (
        "/v1/messages",
        {
            "messages": [
                USER,
                say("assistant", [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]),
                say("user", [{"type": "tool_result", "tool_use_id": "c", "content": "42"}]),
            ],
            "max_tokens": 1,
        },
        "; ".join(AS_TEXT),
    ),
    (
        "/api/chat",
        {
            "messages": [
                USER,
                say("assistant", "", tool_calls=[{"function": {"name": "f", "arguments": {}}}]),
                say("tool", "42"),
            ],
            "options": {"num_predict": 1},
        },
        "; ".join(AS_TEXT),
    ),
]


@pytest.mark.parametrize(("path", "body", "told"), BODIES)
async def test_the_answer_says_what_was_rewritten(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], told: str
) -> None:
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers[HEADER] == told
    plain = await http.post("/v1/chat/completions", json={"messages": [USER], "max_tokens": 1})
    assert HEADER not in plain.headers
