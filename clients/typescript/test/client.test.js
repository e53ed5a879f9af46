/** The client over fetch, against a server that cuts its streams. */

import assert from "node:assert/strict";
import { once } from "node:events";
import { createServer } from "node:http";
import { test } from "node:test";

import { Client, RefusedError, StreamInterruptedError } from "../src/index.js";

const WORDS = ["One", ", ", "tw\u00f6", "", " \u{1f600}", "."];

/** Chunks of an answer, a token each, behind those that the request has. */
function stream(body, ids) {
  const before = ids ? (body.resume_output_ids ?? []).length : 0;
  const chunks = WORDS.map((content, at) => ({
    id: "c",
    model: "m",
    choices: [
      {
        index: 0,
        delta: { content },
        finish_reason: at + 1 === WORDS.length ? "stop" : null,
        ...(ids ? { token_ids: [at], prompt_token_ids: [7] } : {}),
      },
    ],
    usage: { prompt_tokens: 1, completion_tokens: at + 1 },
  })).slice(before);
  const events = [...chunks.map((chunk) => JSON.stringify(chunk)), "[DONE]"];
  return Buffer.from(events.map((event) => `data: ${event}\n\n`).join(""));
}

async function serving({ cut = Infinity, ids = true, status = 200, stall = false, hold = 0 }, use) {
  const bodies = [];
  const server = createServer(async (request, response) => {
    let text = "";
    for await (const part of request) text += part;
    bodies.push(JSON.parse(text));
    const first = bodies.length === 1;
    response.writeHead(first ? status : 200, { "content-type": "text/event-stream" });
    const data = stream(bodies.at(-1), ids);
    response.write(data.subarray(0, first ? cut : undefined));
    response.on("close", () => server.emit("hung up"));
    if (first && stall) return;
    // time for what was written to be read
    if (first && cut < data.length) setTimeout(() => response.destroy(), 20);
    else response.end();
    // the whole process, client and server
    if (hold) Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 1000 * hold);
  });
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  try {
    const base_url = `http://127.0.0.1:${server.address().port}`;
    const policy = { backoff_base: 0.01, first_token_timeout: hold || 120 };
    const client = new Client([{ base_url, model: "m", api_key: "k" }], { policy });
    return await use(client, bodies, server);
  } finally {
    server.closeAllConnections();
    server.close();
  }
}

test("a cut stream is the uncut one", async () => {
  for (const cut of [0, 1, 150, 300, 431, 700, 900, 1e9]) {
    await serving({ cut }, async (client) => {
      const events = [];
      for await (const event of client.chat([], { max_tokens: 9 })) events.push(event);
      const text = events.filter(({ type }) => type === "TextDelta").map((e) => e.text).join("");
      assert.equal(text, WORDS.join(""), `cut ${cut}`);
      assert.equal(events.at(-1).text, text);
      assert.deepEqual(events.at(-1).usage, { prompt_tokens: 1, completion_tokens: WORDS.length });
    });
  }
});

test("what came in time counts though the process was held up", async () => {
  await serving({ hold: 0.2 }, async (client, bodies) => {
    assert.equal((await Client.result(client.chat([]))).text, WORDS.join(""));
    assert.equal(bodies.length, 1);
  });
});

test("without ids the end is honest", async () => {
  await serving({ cut: 300, ids: false }, async (client) => {
    await assert.rejects(Client.result(client.chat([])), StreamInterruptedError);
  });
});

test("statuses", async () => {
  await serving({ status: 503 }, async (client, bodies) => {
    assert.equal((await Client.result(client.complete("x"))).text, WORDS.join(""));
    assert.equal(bodies.length, 2);
  });
  await serving({ status: 404 }, async (client) => {
    await assert.rejects(Client.result(client.chat([])), RefusedError);
  });
});

test("leaving the loop hangs up", async () => {
  await serving({ cut: 300, stall: true }, async (client, bodies, server) => {
    const hungUp = once(server, "hung up");
    for await (const event of client.chat([])) if (event.type === "TextDelta") break;
    await hungUp;
  });
});

test("what the client says itself", () => {
  const client = new Client([{ base_url: "http://127.0.0.1:1", model: "m" }]);
  assert.throws(() => client.chat([], { stream: false }), TypeError);
  assert.throws(() => client.chat([], { n: 2 }), TypeError);
});

test("what JSON has no number for is refused before it is sent", () => {
  const client = new Client([{ base_url: "http://127.0.0.1:1", model: "m" }]);
  const chat = (options) => client.chat([{ role: "user", content: "hi" }], options);
  assert.throws(() => chat({ temperature: NaN }), /^TypeError: temperature is NaN/);
  assert.throws(() => chat({ slo: { ttfts: [1, Infinity] } }), /slo\.ttfts\[1\] is Infinity/);
});
