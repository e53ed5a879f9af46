"""clients/typescript in a browser, from its sources as they are."""

from __future__ import annotations

from typing import Any

from tests.clients.typescript.compiler import CLIENT
from tests.server.live_process import LiveServer
from tests.ui.conftest import OpenPage

ASK = """async ([base_url, options]) => {
  const { Client } = await import("/paceline-client/index.js");
  const client = new Client([{ base_url, model: "null" }], { policy: { backoff_base: 0.01 } });
  const events = [];
  const messages = [{ role: "user", content: "Tell me a story" }];
  for await (const event of client.chat(messages, options)) {
    events.push(event);
    if (event.type === options.leave_at) break;
  }
  return events;
}"""


def test_it_streams_goes_on_and_leaves(open_page: OpenPage, server: LiveServer) -> None:
    page = open_page(f"{server.url}/health")
    sources = {path.name: path.read_text() for path in (CLIENT / "src").glob("*.js")}
    bodies: list[Any] = []

    def source(route: Any) -> None:
        text = sources[route.request.url.rsplit("/", 1)[1]]
        route.fulfill(body=text, content_type="text/javascript")

    def cut_the_first(route: Any) -> None:
        bodies.append(route.request.post_data_json)
        if len(bodies) > 1:
            route.continue_()
            return
        answer = route.fetch()
        head = {"content-type": answer.headers["content-type"]}
        route.fulfill(status=200, headers=head, body=answer.body()[: len(answer.body()) // 2])

    page.route("**/paceline-client/*", source)
    options = {"max_tokens": 30, "temperature": 0}
    whole = page.evaluate(ASK, [server.url, options])
    assert whole[0]["type"] == "Started" and whole[-1]["type"] == "Finished"
    assert whole[-1]["usage"]["completion_tokens"] == 30
    page.route("**/v1/chat/completions", cut_the_first)
    cut = page.evaluate(ASK, [server.url, options])
    assert cut[-1]["text"] == whole[-1]["text"]
    (resumed,) = [event for event in cut if event["type"] == "Resumed"]
    assert 0 < resumed["position"] < 30
    assert len(bodies[1]["resume_output_ids"]) == resumed["position"]
    # whoever leaves the loop hangs up, and the server stops
    page.unroute("**/v1/chat/completions")
    long = {"max_tokens": 4000, "ignore_eos": True, "leave_at": "TextDelta"}
    assert page.evaluate(ASK, [server.url, long])[-1]["type"] == "TextDelta"
    page.wait_for_function(
        "async (url) => (await (await fetch(`${url}/metrics`)).text())"
        ".split('\\n').some((line) => /^vllm:num_requests_running\\{.*\\} 0/.test(line))",
        arg=server.url,
    )
