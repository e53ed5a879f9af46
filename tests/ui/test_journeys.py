"""What a reader does with the page, in Chromium, with the null backend behind it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from tests.security.keys import KEYS, USER
from tests.server.helpers import metric
from tests.server.live_process import LiveServer, eventually, live_server
from tests.ui.conftest import OpenPage, drawn, expect, say

KEY = KEYS[0]


def test_a_chat_streams_and_says_what_became_of_it(server: LiveServer, open_page: OpenPage) -> None:
    page = open_page(f"{server.url}/ui/")
    page.get_by_text("ready").wait_for()
    say(page, "hello", Max_tokens="24")
    page.locator(".story").wait_for()
    facts = page.locator(".facts").inner_text()
    assert "finished: length · 24 tokens" in facts
    assert re.search(r"Prompt of \d+ tokens in 1 chunk", facts)
    assert re.search(r"First token after [\d.]+ ms", facts)
    # steps take 10 ms, and 23 tokens follow the first: not the few that deliveries were made of
    speed = float(re.findall(r"Then ([\d.]+) tokens a second", facts)[0])
    assert 10 < speed <= 100
    # what the model said is in the next request, in full: the prompt has grown by both
    first = int(re.findall(r"Prompt of (\d+)", facts)[0])
    with page.expect_request("**/v1/chat/completions") as asked:
        say(page, "more")
    body = asked.value.post_data_json
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "user"]
    assert body["max_tokens"] == 24 and "temperature" not in body
    page.locator(".story").nth(1).wait_for()
    second = int(re.findall(r"Prompt of (\d+)", page.locator(".story").nth(1).inner_text())[0])
    assert second > first + 24


def test_a_reader_chooses_what_answers(tmp_path: Path, open_page: OpenPage) -> None:
    names = ["one", "two"]
    with live_server(tmp_path / "log", config={"served_model_names": names}) as server:
        page = open_page(f"{server.url}/ui/")
        picker = page.get_by_label("What answers")
        expect(picker.locator("option")).to_have_text(names)
        picker.select_option("two")
        with page.expect_request("**/v1/chat/completions") as asked:
            say(page, "hello", Max_tokens="4")
        assert asked.value.post_data_json["model"] == "two"
        page.locator(".story").wait_for()
        # an adapter says whose it is
        listed = {"data": [{"id": "one"}, {"id": "sql", "parent": "one"}]}
        page.route("**/v1/models", lambda route: route.fulfill(json=listed))
        page.reload()
        page.get_by_label("What answers").select_option("sql (adapter of one)")
        page.route("**/v1/models", lambda route: route.fulfill(json={"data": [{"id": "one"}]}))
        page.reload()
        # as soon as it knows what answers, a raw request names it
        page.get_by_role("button", name="Raw request").click()
        expect(page.get_by_label("Body, JSON")).to_have_value(re.compile('"model": "one"'))
        page.get_by_role("button", name="Chat").click()
        page.get_by_label("Max tokens").wait_for()
        expect(page.get_by_label("What answers")).to_have_count(0)


def test_stop_ends_the_request_in_the_engine(server: LiveServer, open_page: OpenPage) -> None:
    page = open_page(f"{server.url}/ui/")
    say(page, "go on", Max_tokens="3000")
    stop = page.get_by_role("button", name="Stop")
    stop.wait_for()
    eventually(lambda: server.running() == 1)
    page.keyboard.press("Escape")
    page.get_by_text("stopped by you").wait_for()
    eventually(lambda: server.running() == 0)
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_errors_stand_beside_their_field(server: LiveServer, open_page: OpenPage) -> None:
    page = open_page(f"{server.url}/ui/")
    schema = page.get_by_label("JSON schema of the answer")
    schema.fill('{"type": "nope"}')
    say(page, "hello")
    told = page.locator("#bad-response_format")
    expect(told).to_contain_text("must be of object, array, string")
    expect(schema).to_have_attribute("aria-invalid", "true")
    # nothing came of it, so what was written is still there
    expect(page.get_by_label("Message")).to_have_value("hello")
    schema.fill("{")
    page.get_by_label("Message").press("Enter")
    page.get_by_text("This is not JSON").wait_for()
    schema.fill("")
    say(page, "hello", Temperature="-3")
    page.locator("#bad-temperature").wait_for()


def test_probabilities_by_keyboard(server: LiveServer, open_page: OpenPage) -> None:
    page = open_page(f"{server.url}/ui/")
    page.get_by_label("Token probabilities").check()
    say(page, "hello", Max_tokens="5")
    page.locator("caption").get_by_text("Token 1 of 5").wait_for()
    page.locator("button.token").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.locator("caption").get_by_text("Token 3 of 5").wait_for()
    expect(page.locator("table.alternatives tbody tr").first).to_be_visible()


def streamed(tokens: list[tuple[str, str]]) -> str:
    """An answer of these tokens, each of which could have been another one."""
    events = []
    for token, other in tokens:
        likely = [{"token": token, "logprob": -0.5}, {"token": other, "logprob": -1.5}]
        told = {"content": [{**likely[0], "top_logprobs": likely}]}
        events.append({"choices": [{"delta": {"content": token}, "logprobs": told}]})
    events.append({"choices": [{"delta": {}, "finish_reason": "length"}]})
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


def answered(page: Any, tokens: list[tuple[str, str]]) -> None:
    """A chat whose answer has these tokens; the null backend would be sure of each."""
    page.get_by_label("Token probabilities").check()
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(body=streamed(tokens), content_type="text/event-stream"),
    )
    say(page, "hello", Max_tokens="6")
    page.get_by_text("finished: length").wait_for()
    page.unroute("**/v1/chat/completions")


def test_another_token_is_gone_on_from(server: LiveServer, open_page: OpenPage) -> None:
    page = open_page(f"{server.url}/ui/")
    answered(page, [("It", "He"), (" is", " was"), (" so", " not"), (".", "!")])
    page.locator("button.token").nth(2).click()
    page.locator("caption").get_by_text("Token 3 of 4").wait_for()
    with page.expect_request("**/v1/chat/completions") as asked:
        page.get_by_role("button", name='Go on from " not"').click()
    sent = asked.value.post_data_json
    assert sent["continue_final_message"] and not sent["add_generation_prompt"]
    assert sent["messages"] == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "It is not"},
    ]
    # the same turn: the tokens before it, the other one, and what the model goes on with
    expect(page.locator("button.token")).to_have_count(3 + 6)
    assert page.locator("button.token").all_inner_texts()[:3] == ["It", " is", " not"]
    expect(page.locator(".turn")).to_have_count(2)


def test_what_is_typed_while_an_answer_goes_on_stays(
    server: LiveServer, open_page: OpenPage
) -> None:
    page = open_page(f"{server.url}/ui/")
    answered(page, [("It", "He"), (" is", " was")])
    held: list[Any] = []
    page.route("**/v1/chat/completions", lambda route: held.append(route))
    message = page.get_by_label("Message")
    message.fill("and then")
    page.locator("button.token").nth(1).click()
    page.get_by_role("button", name='Go on from " was"').click()
    eventually(lambda: page.wait_for_timeout(20) or bool(held))
    expect(message).to_have_value("and then")
    message.fill("and then?")
    refusal = '{"error": {"message": "not now", "param": null, "code": 503}}'
    held.pop().fulfill(status=503, body=refusal)
    page.get_by_role("alert").get_by_text("not now").wait_for()
    # the answer is as it was, and what was typed too
    eventually(lambda: page.locator("button.token").all_inner_texts() == ["It", " is"])
    expect(message).to_have_value("and then?")
    # a message that is refused is given back before what was typed since
    message.press("Enter")
    eventually(lambda: page.wait_for_timeout(20) or bool(held))
    expect(message).to_have_value("")
    message.fill("one more")
    held.pop().fulfill(status=503, body=refusal.replace("now", "yet"))
    page.get_by_role("alert").get_by_text("not yet").wait_for()
    expect(message).to_have_value("and then?\none more")


def test_an_answer_cannot_go_on_from_within_a_character(
    server: LiveServer, open_page: OpenPage
) -> None:
    """A token that is a part of one has no text of its own that could be sent."""
    page = open_page(f"{server.url}/ui/")
    answered(page, [("It", "He"), ("\ufffd", "x"), ("\ufffd", "\ufffd\ufffd"), ("!", "?")])
    asked: list[Any] = []
    page.on("request", lambda one: one.method == "POST" and asked.append(one.post_data_json))
    page.locator("button.token").nth(3).click()
    page.get_by_role("button", name='Go on from "?"').click()
    page.get_by_role("alert").get_by_text("a part of a character").wait_for()
    expect(page.locator("button.token")).to_have_count(4)
    assert asked == []
    # before those it can
    page.locator("button.token").nth(1).click()
    page.get_by_role("button", name='Go on from "x"').click()
    expect(page.locator("button.token")).to_have_count(2 + 6)
    assert asked[0]["messages"][-1] == {"role": "assistant", "content": "Itx"}


def test_a_completion_and_a_raw_request(server: LiveServer, open_page: OpenPage) -> None:
    page = open_page(f"{server.url}/ui/playground")
    page.get_by_role("button", name="Completion").click()
    page.get_by_label("Text to go on from").fill("once")
    expect(page.get_by_label("Tools (JSON list)")).to_have_count(0)
    page.get_by_label("Max tokens").fill("4")
    page.get_by_role("button", name="Send").click()
    page.get_by_text("finished: length · 4 tokens").wait_for()
    page.get_by_role("button", name="Raw request").click()
    page.get_by_label("POST").select_option("/tokenize")
    page.get_by_label("Body, JSON").fill('{"prompt": "ab", "add_special_tokens": false}')
    page.get_by_label("Body, JSON").press("Control+Enter")
    page.get_by_text('"count": 2').wait_for()


def test_what_a_model_says_is_text(server: LiveServer, open_page: OpenPage) -> None:
    """The reader's words and the model's pass the same way; these would run as HTML."""
    page = open_page(f"{server.url}/ui/")
    hostile = "<img src=x onerror=alert(1)><script>alert(1)</script>\u202etxet"
    say(page, hostile, Max_tokens="2")
    page.locator(".story").wait_for()
    shown = hostile.replace("\u202e", "\u27e6U+202E\u27e7")
    expect(page.locator(".user .said")).to_have_text(shown)
    assert page.locator(".turn img, .turn script").count() == 0


def test_an_answer_is_markdown_and_never_html(server: LiveServer, open_page: OpenPage) -> None:
    page = open_page(f"{server.url}/ui/")
    text = (
        "## Plan\n\nSay **so** <img src=x onerror=alert(1)> ![i](https://elsewhere.example/i.png)\n\n"
        "- one\n- [two](https://elsewhere.example/two) [three](javascript:alert(1))\n\n"
        "```py\nprint('<b>')\n```\n"
    )
    pieces = [text[i : i + 7] for i in range(0, len(text), 7)]
    events = [{"choices": [{"delta": {"content": piece}}]} for piece in pieces]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(body=body, content_type="text/event-stream"),
    )
    say(page, "hello")
    answer = page.locator(".assistant .said")
    answer.get_by_role("heading", name="Plan").wait_for()
    answer.locator("pre").get_by_text("print('<b>')", exact=True).wait_for()
    page.get_by_role("button", name="Copy the answer").wait_for()
    expect(answer.locator("strong")).to_have_text("so")
    assert answer.locator("img, script, b").count() == 0
    links = answer.locator("a").all()
    assert [link.get_attribute("href") for link in links] == ["https://elsewhere.example/two"]
    assert links[0].get_attribute("rel") == "noopener noreferrer"
    # where it leads can be read
    assert "two (https://elsewhere.example/two)" in answer.inner_text()
    page.evaluate(
        "navigator.clipboard.writeText = async (text) => { globalThis.copied = text; }; 0"
    )
    page.get_by_role("button", name="Copy the answer").click()
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("copied") == text
    # where a page may not write to the clipboard, the text is shown, selected
    page.evaluate("navigator.clipboard.writeText = async () => { throw new Error('no'); }; 0")
    page.get_by_role("button", name="Copy this code").click()
    shown = page.get_by_role("textbox", name="Copy this code: the text to copy")
    expect(shown).to_have_value("print('<b>')")
    eventually(lambda: page.evaluate("String(getSelection())") == "print('<b>')")


def test_a_request_is_copied_as_a_program_that_runs(
    server: LiveServer, open_page: OpenPage
) -> None:
    page = open_page(f"{server.url}/ui/")
    say(page, 'it\'s "so"', Max_tokens="5", Temperature="0", **{"First token, ms": "900"})
    page.locator(".story").wait_for()
    page.evaluate(
        "navigator.clipboard.writeText = async (text) => { globalThis.copied = text; }; 0"
    )

    def copied(name: str) -> str:
        page.evaluate("void (globalThis.copied = null)")
        page.get_by_role("button", name=name).click()
        eventually(lambda: page.evaluate("copied") is not None)
        return str(page.evaluate("copied"))

    curl, python = copied("As curl"), copied("As Python")
    if shutil.which("curl"):
        done = subprocess.run(["sh", "-c", curl], capture_output=True, text=True, timeout=30)
        assert '"completion_tokens":5' in done.stdout.replace(" ", ""), done.stdout + done.stderr
    done = subprocess.run(
        [sys.executable, "-c", python], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


def test_a_key_is_asked_for_and_kept_out_of_sight(tmp_path: Path, open_page: OpenPage) -> None:
    keys = [{"name": KEY.name, "scope": KEY.scope, "key": USER}]
    with live_server(tmp_path / "log", backend={"step_time": 0.001}, keys=keys) as server:
        page = open_page(f"{server.url}/ui/")
        dialog = page.get_by_role("dialog", name="API key")
        dialog.wait_for()
        dialog.get_by_label("Key").fill("wrong-key-01234567")
        dialog.get_by_role("button", name="Use this key").click()
        # asked again: the server does not know it
        dialog.get_by_text("does not know the one you gave").wait_for()
        dialog.get_by_label("Key").fill(USER)
        # for which it asks as soon as it knows what answers
        with page.expect_request("**/props"):
            dialog.get_by_role("button", name="Use this key").click()
        page.get_by_text("ready").wait_for()
        with page.expect_request("**/v1/chat/completions") as asked:
            say(page, "hello", Max_tokens="3")
        page.locator(".story").wait_for()
        assert asked.value.post_data_json["model"] == "null"
        kept = page.evaluate("JSON.stringify([localStorage, sessionStorage, document.cookie])")
        assert USER not in kept and USER not in page.url
        assert page.context.cookies() == []
        # it asks on while the server ends
        page.close()


def test_a_refusal_that_comes_late_asks_for_no_key_again(
    tmp_path: Path, open_page: OpenPage
) -> None:
    """It is about what was asked before there was a key."""
    keys = [{"name": KEY.name, "scope": KEY.scope, "key": USER}]
    with live_server(tmp_path / "log", backend={"step_time": 0.001}, keys=keys) as server:
        page = open_page(f"{server.url}/health")
        held: list[Any] = []
        page.route("**/v1/models", lambda route: route.continue_() if held else held.append(route))
        page.goto(f"{server.url}/ui/")
        dialog = page.get_by_role("dialog", name="API key")
        dialog.get_by_label("Key").fill(USER)
        dialog.get_by_role("button", name="Use this key").click()
        page.get_by_text("ready").wait_for()
        with page.expect_response(lambda answer: answer.status == 401):
            held[0].continue_()
        drawn(page)
        assert not dialog.is_visible()
        page.close()


def test_an_answer_that_is_none_ends(server: LiveServer, open_page: OpenPage) -> None:
    page = open_page(f"{server.url}/ui/")
    answers = [
        ('data: {"choices": [{"delta": {"con\n\n', "text/event-stream"),
        ("<html>", "application/json"),
    ]
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(body=answers[0][0], content_type=answers[0][1]),
    )
    for _ in range(2):
        with page.expect_response("**/v1/chat/completions"):
            say(page, "hello")
        page.get_by_role("alert").get_by_text("What came is not JSON").wait_for()
        # it can be sent again
        page.get_by_role("button", name="Send").wait_for()
        expect(page.get_by_label("Message")).to_have_value("hello")
        answers.reverse()


def test_too_many_requests_count_down(server: LiveServer, open_page: OpenPage) -> None:
    page = open_page(f"{server.url}/ui/")
    body = '{"error": {"message": "one request a second", "param": null, "code": 429}}'
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=429, headers={"Retry-After": "3"}, body=body),
    )
    say(page, "hello")
    page.get_by_text("one request a second").wait_for()
    page.get_by_text(re.compile(r"Try again in [123] s\.")).wait_for()
    page.get_by_text("You may try again now.").wait_for()
    expect(page.get_by_label("Message")).to_have_value("hello")


def test_the_servers_own_limit_counts_down(tmp_path: Path, open_page: OpenPage) -> None:
    config = {"limits": {"requests": "1/minute"}}
    with live_server(tmp_path / "log", backend={"step_time": 0.001}, config=config) as server:
        page = open_page(f"{server.url}/ui/")
        say(page, "hello", Max_tokens="2")
        page.locator(".story").wait_for()
        say(page, "more")
        left = page.locator(".countdown")
        left.get_by_text(re.compile(r"Try again in \d+ s\.")).wait_for()
        first = left.inner_text()
        eventually(lambda: left.inner_text() != first)
        expect(page.get_by_label("Message")).to_have_value("more")
        # it asks on while the server ends
        page.close()


def test_a_waterfall_says_why_it_waited(tmp_path: Path, open_page: OpenPage) -> None:
    core = {"max_num_seqs": 1}
    with live_server(tmp_path / "log", backend={"step_time": 0.01}, core=core) as server:
        page = open_page(f"{server.url}/ui/")
        page.get_by_text("ready").wait_for()
        body = {"model": "null", "prompt": "x", "max_tokens": 3000, "stream": True}
        url = f"{server.url}/v1/completions"
        with httpx.stream("POST", url, json=body | {"ignore_eos": True}, timeout=60) as other:
            # kept, as a reader that is dropped closes the stream
            lines = other.iter_lines()
            next(lines)
            say(page, "hello", Max_tokens="6", **{"First token, ms": "300"})
            waiting = "vllm:num_requests_waiting"
            eventually(lambda: metric(server.metrics(), waiting) == 1)
            # the time that it is to have waited
            time.sleep(0.1)
        legend = page.locator(".facts .legend")
        legend.get_by_text("waited for a place").wait_for()
        waited, unit = re.findall(r"waited for a place ([\d.]+) (ms|s)", legend.inner_text())[0]
        assert float(waited) * (1000 if unit == "s" else 1) > 100
        expect(legend).to_contain_text("first token due 300 ms")
        expect(page.locator(".waterfall .mark.due")).to_have_count(1)
        page.close()


def test_a_conversation_is_kept_edited_and_retried(server: LiveServer, open_page: OpenPage) -> None:
    page = open_page(f"{server.url}/ui/")
    page.get_by_label("System prompt").fill("be short")
    say(page, "hello", Max_tokens="6")
    page.get_by_text("finished: length").wait_for()
    page.reload()
    page.locator(".turn.user .said").get_by_text("hello").wait_for()
    expect(page.get_by_label("System prompt")).to_have_value("be short")
    expect(page.locator(".turn")).to_have_count(2)

    # once more, and on from its end
    with page.expect_request("**/v1/chat/completions") as asked:
        page.get_by_role("button", name="Retry").click()
    sent = asked.value.post_data_json
    system = {"role": "system", "content": "be short"}
    assert sent["messages"] == [system, {"role": "user", "content": "hello"}]
    assert sent["max_tokens"] == 1024, "the page's own limit"
    page.get_by_text("stopped, as it repeats itself").wait_for()
    with page.expect_request("**/v1/chat/completions") as asked:
        page.get_by_role("button", name="Go on").click()
    assert asked.value.post_data_json["continue_final_message"]
    page.get_by_role("button", name="Stop").click()

    # taken back, written anew
    page.get_by_role("button", name="Edit").click()
    expect(page.get_by_label("Message")).to_have_value("hello")
    expect(page.locator(".turn")).to_have_count(0)
    page.get_by_label("Max tokens").fill("6")
    say(page, "other")
    page.get_by_text("finished: length").wait_for()

    # another one; then the first again, which can be exported and deleted
    page.get_by_role("button", name="New").click()
    expect(page.locator(".turn")).to_have_count(0)
    say(page, "second")
    page.get_by_text("finished: length").wait_for()
    page.get_by_text("Conversations (2)").click()
    page.get_by_role("button", name="other", exact=False).first.click()
    page.locator(".turn.user .said").get_by_text("other").wait_for()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export all").click()
    found = json.loads(Path(download.value.path()).read_text())
    assert [each["title"] for each in found] == ["second", "other"]
    page.get_by_role("button", name="Delete all").click()
    expect(page.locator(".turn")).to_have_count(0)
    expect(page.get_by_text("Conversations (")).to_have_count(0)


def test_tabs_keep_what_was_said(server: LiveServer, open_page: OpenPage) -> None:
    page = open_page(f"{server.url}/ui/")
    say(page, "remember me", Max_tokens="2")
    page.locator(".story").wait_for()
    page.get_by_role("link", name="Server").click()
    page.get_by_role("cell", name="4096 tokens").wait_for()
    assert page.url.endswith("/ui/server")
    page.go_back()
    expect(page.locator(".said").get_by_text("remember me")).to_be_visible()
    page.goto(f"{server.url}/ui/server")
    page.get_by_role("heading", name="Server").wait_for()


def test_by_keyboard_alone(server: LiveServer, open_page: OpenPage) -> None:
    page = open_page(f"{server.url}/ui/")
    page.get_by_text("ready").wait_for()
    focused = "document.activeElement.textContent || document.activeElement.placeholder"
    seen = []
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.append(page.evaluate(focused))
        if seen[-1] == "Write a message":
            break
    assert seen[0] == "Skip to the page"
    assert seen[1:4] == ["Playground", "Timeline", "Promises"]
    assert seen[-1] == "Write a message"
    page.keyboard.type("hello")
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    page.get_by_text("finished:").wait_for()
    page.get_by_role("link", name="Server").focus()
    page.keyboard.press("?")
    page.get_by_role("dialog", name="Keys").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("dialog", name="Keys").wait_for(state="hidden")


def test_the_theme_is_kept(server: LiveServer, open_page: OpenPage) -> None:
    page = open_page(f"{server.url}/ui/", color_scheme="light")
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    eventually(lambda: page.evaluate(ground) == "rgb(255, 255, 255)")
    page.get_by_label("Theme").select_option("dark")
    eventually(lambda: page.evaluate(ground) == "rgb(16, 20, 24)")
    page.reload()
    page.get_by_text("ready").wait_for()
    assert page.evaluate(ground) == "rgb(16, 20, 24)"
