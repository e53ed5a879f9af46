"""A body described once: what follows from a line of it."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from paceline.core.pooling import EMBED, PoolingInfo
from paceline.errors import InvalidRequestError, RequestError, UnknownModelError
from paceline.ranges import Range
from paceline.server.apis.anthropic import MessagesBody, parse_messages_api
from paceline.server.apis.llama_cpp.protocol import LlamaBody, parse_llama_completion
from paceline.server.apis.ollama.protocol import (
    OllamaChatBody,
    OllamaGenerateBody,
    parse_ollama_chat,
    parse_ollama_generate,
)
from paceline.server.apis.pooling.ollama import (
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    parse_embed,
    parse_ollama_embeddings,
)
from paceline.server.apis.responses.protocol import ResponsesBody, parse_responses
from paceline.server.apis.token_ids import TokenGenerateBody, parse_token_generate
from paceline.server.openapi.document import shared_schemas
from paceline.server.protocol.body import (
    IGNORED,
    REFUSED,
    SERVED,
    Body,
    OtherName,
    fields_of,
    schema_of,
)
from paceline.server.protocol.field_types import (
    MODEL,
    boolean,
    choice,
    ignored,
    integer,
    mapping,
    needed,
    nested,
    number,
    refused,
    string,
    token_ids,
)
from paceline.server.protocol.generation import ChatBody, CompletionBody
from paceline.server.protocol.requests import RequestRules, parse_chat, parse_completion
from tests.server.test_api_doc import MESSAGES, RULES, api_tables

STRICT = RequestRules(
    **{name: getattr(RULES, name) for name in RULES.__slots__} | {"strict_fields": True}
)
TOOL = {"type": "function", "function": {"name": "f"}}


class Sizes(Body):
    width = integer(1, 9, 3)


class Everything(Body):
    model = MODEL
    prompt = needed(string(1, 5))
    n = integer(1, lambda rules: rules.max_choices, 1, note="see [there](x.md#y)")
    scale = number(Range(0, 2, above=True))
    side = choice("left", "right", default="left")
    effort = choice("low", "high", "most")
    shown = boolean()
    ids = token_ids(0, 2)
    sizes = nested(Sizes)
    loose = mapping(names=("kind",))
    beams = refused("={value} is not served", (False, 1))
    store = ignored()
    count = OtherName("n", nothing=-1)


def read(_rules: RequestRules = RULES, /, **values: Any) -> Everything:
    return Everything.read({"prompt": "x"} | values, _rules)


def test_a_field_that_is_absent_or_null_has_its_default() -> None:
    for body in (read(), read(**dict.fromkeys(fields_of(Everything)) | {"prompt": "x"})):
        assert (body.model, body.prompt, body.n, body.scale) == (None, "x", 1, None)
        assert (body.side, body.effort, body.shown, body.ids) == ("left", None, False, None)
        assert (body.sizes, body.ignored_fields) == (None, ())
    given = read(model="m", n=2, scale=1, side="right", effort="low", ids=[1], sizes={"width": 4})
    assert (given.model, given.n, given.scale, given.side) == ("m", 2, 1.0, "right")
    assert (given.effort, given.ids) == ("low", [1])
    assert given.sizes is not None and given.sizes.width == 4
    assert read(side="").side == "left"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("prompt", None, "prompt is missing"),
        ("prompt", "", "prompt must have 1 to 5 characters, got 0"),
        ("n", 5, "n must be in [1, 4], got 5"),
        ("n", True, "n must be an integer, got True"),
        ("scale", "1", "scale must be a number, got '1'"),
        ("side", "up", "side must be left or right, got 'up'"),
        ("effort", "", "effort must be one of low, high, most, got ''"),
        ("shown", 1, "shown must be true or false, got 1"),
        ("ids", 3, "ids must be a list, got 3"),
        ("ids", [259], "ids holds token id 259; ids of this model are 0 to 258"),
        ("ids", [1, 2, 3], "ids may hold 2 ids, got 3"),
        ("sizes", {"width": 0}, "sizes.width must be in [1, 9], got 0"),
        ("sizes", [], "sizes must be an object, got a list of 0"),
        ("beams", 4, "beams=4 is not served"),
    ],
)
def test_a_fault_names_the_field_and_the_numbers(name: str, value: Any, says: str) -> None:
    with pytest.raises(InvalidRequestError) as told:
        read(**{name: value})
    assert (str(told.value), told.value.param) == (says, name)


def test_a_body_may_pass_fields_on_to_another() -> None:
    class Wrapped(Body, passes=(Everything, ("n", "scale")), refuses_unknown="{names}: unknown"):
        text = string()

    class More(Wrapped):
        more = boolean()

    # they are not looked at, and null is as good as absent
    body = More.read({"n": 99, "scale": None, "text": "y", "more": True}, RULES)
    assert (body.passed(), body.text, body.more) == ({"n": 99}, "y", True)
    told, whole = schema_of(More, RULES)["properties"], schema_of(Everything, RULES)["properties"]
    assert told["n"] == whole["n"] and set(told) == {"n", "scale", "text", "more"}
    with pytest.raises(InvalidRequestError, match="'side': unknown"):
        More.read({"side": "left"}, RULES)


def test_of_two_faults_the_first_of_the_class_is_told_whatever_the_order_sent() -> None:
    with pytest.raises(UnknownModelError):
        read(n=99, model="zzz")
    with pytest.raises(InvalidRequestError, match="n must"):
        read(shown=5, n=99)


def test_unknown_names_are_told_refused_or_left_alone_by_the_class() -> None:
    assert read(odd=1, beams=1, store="x", **{"x" * 99: 2}).ignored_fields[0] == "'odd'"
    assert len(read(**{f"odd{i}": 1 for i in range(99)}).ignored_fields) == 16
    with pytest.raises(InvalidRequestError, match=r"'shwn' \(did you mean 'shown'\?\)") as told:
        read(STRICT, shwn=True)
    assert told.value.param == "shwn"
    # those inside an object are told with their path
    assert read(sizes={"odd": 1}, b=2).ignored_fields == ("'sizes.odd'", "'b'")
    with pytest.raises(InvalidRequestError, match=r"'sizes.wdth' \(did you mean 'sizes.width'\?"):
        read(STRICT, sizes={"wdth": 1})
    # of a mapping, what it says that it reads; a value that asks for nothing is no matter
    loose = {"kind": 1, "odd": 1, "empty": [], "null": None}
    assert read(loose=loose).ignored_fields == ("'loose.odd'",)
    with pytest.raises(InvalidRequestError, match=r"^unknown fields: 'loose.odd'; this server"):
        read(STRICT, loose=loose)
    assert (
        len(
            read(
                loose={f"a{i}": 1 for i in range(9)}, sizes={f"b{i}": 1 for i in range(9)}
            ).ignored_fields
        )
        == 16
    )

    class Part(Body, partial=True):
        prompt = string()

    assert Part.read({"prompt": "x", "n": 1}, STRICT).prompt == "x"

    class Closed(Everything, refuses_unknown="{names}: not served here"):
        pass

    with pytest.raises(InvalidRequestError, match=r"^'odd', 'b': not served here$"):
        Closed.read({"prompt": "x", "odd": 1, "b": 2}, RULES)
    assert schema_of(Closed, RULES)["additionalProperties"] is False
    assert "additionalProperties" not in schema_of(Everything, RULES)


@pytest.mark.parametrize(
    ("body", "given", "param"),
    [
        (ResponsesBody, {"input": "x", "odd": 1}, "odd"),
        (MessagesBody, {"messages": MESSAGES, "max_tokens": 1, "odd": 1}, "odd"),
        (OllamaChatBody, {"odd": 1}, "odd"),
        (OllamaChatBody, {"options": {"odd": 1}}, "options.odd"),
        (OllamaChatBody, {"options": {"num_predict": -3}}, "options.num_predict"),
        (TokenGenerateBody, {"token_ids": [1], "odd": 1}, "odd"),
    ],
)
def test_a_name_that_is_refused_is_the_faults_param(
    body: type[Body], given: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequestError) as told:
        body.read(given, RULES)
    assert told.value.param == param


def test_another_servers_name_is_ours() -> None:
    assert read(count=2).n == 2
    assert read(count=-1, n=3).n == 3
    assert read(STRICT, count=None).n == 1
    with pytest.raises(InvalidRequestError, match="count=2 and n=3 mean the same"):
        read(count=2, n=3)


def test_the_schema_is_of_the_same_lines() -> None:
    schema = schema_of(Everything, RULES)
    assert schema["required"] == ["prompt"]
    told = schema["properties"]
    # what is refused, and names of others, are left out
    assert set(told) == set(fields_of(Everything)) - {"beams"}
    assert told["prompt"] == {"type": "string", "minLength": 1, "maxLength": 5}
    assert told["n"] == {
        "type": ["integer", "null"], "minimum": 1, "maximum": 4, "description": "see there"
    }  # fmt: skip
    assert told["scale"] == {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 2}
    assert told["side"] == {
        "anyOf": [{"type": "string", "enum": ["left", "right"]}, {"type": "null"}]
    }
    assert told["store"] == {"description": "accepted, without effect"}


def test_one_line_adds_a_field() -> None:
    """The example of CONTRIBUTING.md."""

    class Longer(ChatBody):
        sentences = integer(1, 99, note="the answer ends after so many")

    assert Longer.read({"messages": MESSAGES, "sentences": 7}, RULES).sentences == 7
    assert Longer.read({"messages": MESSAGES, "sentences": None}, STRICT).sentences is None
    with pytest.raises(InvalidRequestError, match=r"^sentences must be in \[1, 99\], got 100$"):
        Longer.read({"messages": MESSAGES, "sentences": 100}, RULES)
    told = schema_of(Longer, RULES)["properties"]["sentences"]
    assert (told["minimum"], told["maximum"]) == (1, 99)
    lines = api_tables.table_of(fields_of(Longer))
    assert "| `sentences` | served | the answer ends after so many |\n" in lines


EMBEDS = PoolingInfo(task=EMBED, pooling="mean", size=128, is_matryoshka=True)
BODIES: dict[type[Body], Any] = {
    ChatBody: lambda body: parse_chat({"messages": MESSAGES} | body, RULES),
    CompletionBody: lambda body: parse_completion({"prompt": "x"} | body, RULES),
    ResponsesBody: lambda body: parse_responses(
        {"input": "x"} | body, RULES, "", before=[], owner=""
    ),
    OllamaChatBody: lambda body: parse_ollama_chat({"messages": MESSAGES} | body, RULES),
    OllamaGenerateBody: lambda body: parse_ollama_generate({"prompt": "x"} | body, RULES),
    OllamaEmbedBody: lambda body: parse_embed({"input": "x"} | body, RULES, "", EMBEDS),
    OllamaEmbeddingsBody: lambda body: parse_ollama_embeddings(
        {"prompt": "x"} | body, RULES, "", EMBEDS
    ),
    LlamaBody: lambda body: parse_llama_completion({"prompt": "x"} | body, RULES),
    TokenGenerateBody: lambda body: parse_token_generate({"token_ids": [1]} | body, RULES),
    MessagesBody: lambda body: parse_messages_api(
        {"messages": MESSAGES, "max_tokens": 3} | body, RULES
    ),
}
# of every type, and beside the bounds that there are
VALUES: list[Any] = [
    True, False, 0, -1, -2, 1, 2, 3, 4, 5, 20, 21, 100, 101, 128, 129, 258, 259, 511, 512,
    2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 0.5, -0.5, 1.01, 2.01, -2.01, 100.5,
    "x", "left", "auto", "none", "m", "x" * 1024, "x" * 1025, "x y", [], [1], [259], [-1], ["x"],
    [""], [1] * 129, ["x"] * 16, ["x"] * 17, ["x"] * 129, [[1]], [[259]], [None], {}, {"x": 1},
    {"1": 1}, {"1": 101}, {"type": "text"}, {"type": "x"}, {"max_tokens": 33}, {"include_usage": 1},
    {"ttft_ms": 0}, {"ttft_ms": 86_400_001}, {"class": "x"}, {"choice": []}, {"regex": ""},
]  # fmt: skip


# other roles are looked at when the template has rendered
LOOSE = ("messages",)
# taken beyond the schema, as in chat
MORE: dict[tuple[type[Body], str], list[Any]] = {
    (MessagesBody, "stop_sequences"): [v for v in VALUES if type(v) is str],
    (MessagesBody, "thinking"): [{}],
}


def pairs() -> list[Any]:
    found = []
    for body in BODIES:
        for name, field in fields_of(body).items():
            if field.status == SERVED and field.schema(RULES) != {} and name not in LOOSE:
                found.append(pytest.param(body, name, id=f"{body.__name__}-{name}"))
    return found


@pytest.mark.parametrize(("body", "name"), pairs())
def test_what_the_schema_forbids_is_refused(body: type[Body], name: str) -> None:
    components = {"schemas": json.loads(json.dumps(shared_schemas(RULES)))}
    schema = schema_of(body, RULES)["properties"][name] | {"components": components}
    validator = jsonschema.Draft202012Validator(schema)
    taken = MORE.get((body, name), [])
    bad = [value for value in VALUES if not validator.is_valid(value) and value not in taken]
    assert bad
    for value in bad:
        with pytest.raises(RequestError) as told:
            BODIES[body]({name: value})
        assert told.value.param is not None, value


@pytest.mark.parametrize("body", BODIES)
def test_what_is_served_is_acted_on(body: type[Body], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[str] = set()

    def spy(self: Any, name: str) -> Any:
        if type(self) is body:
            asked.add(name)
        return object.__getattribute__(self, name)

    monkeypatch.setattr(Body, "__getattribute__", spy, raising=False)
    # whether several calls may come is asked where there are tools
    BODIES[body]({"tools": [TOOL]} if body is ChatBody else {})
    by_status = {
        status: {name for name, field in fields_of(body).items() if field.status == status}
        for status in (SERVED, IGNORED, REFUSED)
    }
    if "passed" in asked:
        asked |= set(body._passes) & by_status[SERVED]
    # looked at when they are read, or before
    elsewhere = {"model", "user", "safety_identifier"}
    if body is MessagesBody:
        elsewhere = {"metadata"}
    assert by_status[SERVED] - asked - elsewhere == set()
    # it says whether anything is wanted of an empty request
    assert not asked & (by_status[IGNORED] | by_status[REFUSED]) - {"keep_alive"}
