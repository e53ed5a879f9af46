import assert from "node:assert/strict";
import { test } from "node:test";

import { bodyOf, FieldError, FIELDS, fieldOf, MAX_TOKENS } from "../../paceline/web/static/lib/fields.js";
import { duration, lines, story, visible, waterfall } from "../../paceline/web/static/lib/format.js";

test("times have three digits and the unit that fits", () => {
  const cases = { 0: "0 ms", 0.1234: "0.123 ms", 12.345: "12.3 ms", 999.4: "999 ms", 999.6: "1 s", 12345: "12.3 s" };
  for (const [ms, told] of Object.entries(cases)) assert.equal(duration(Number(ms)), told);
});

test("the time of a request stands in parts, each wait by its reason, with marks", () => {
  const told = { waited_ms: { step: 18, slots: 194, memory: 0 }, queued_ms: 212, ttft_ms: 251, predicted_ttft_ms: 240 };
  const { parts, marks } = waterfall(told, 1004, 500);
  assert.deepEqual(parts.map(({ kind, ms }) => [kind, ms]), [["reason0", 18], ["reason2", 194], ["chunk", 39], ["decode", 753]]);
  assert.equal(parts[1].name, "waited for a place");
  assert.deepEqual(marks.map(({ name, ms, at }) => [name, ms, Number(at.toFixed(3))]), [["first token predicted", 240, 0.239], ["first token due", 500, 0.498]]);
  // nothing came of it, and nothing was promised
  const none = waterfall({ waited_ms: {}, queued_ms: 0, ttft_ms: null, predicted_ttft_ms: null }, 30, null);
  assert.deepEqual([none.parts.map(({ ms }) => ms), none.marks], [[30, 0], []]);
  assert.equal(waterfall(told, 260, 90_000).marks[1].at, 1);
});

test("what a preempted request waited for counts once", () => {
  // 212 ms before its first token at 251, and 600 when it was preempted
  const told = { waited_ms: { slots: 212, memory: 600 }, queued_ms: 812, ttft_ms: 251, predicted_ttft_ms: null, preemptions: 1 };
  const { parts, marks } = waterfall(told, 1500, 500);
  assert.deepEqual(parts.map(({ kind, ms }) => [kind, ms]), [["reason2", 212], ["reason3", 600], ["decode", 688]]);
  assert.equal(parts.reduce((sum, { ms }) => sum + ms, 0), 1500);
  assert.equal(marks[0].at, 500 / 1500);
  // an engine's clock and a browser's differ a little: no part is less than nothing
  assert.equal(waterfall(told, 800, null).parts.at(-1).ms, 0);
});

test("lines are whole however the text was cut", () => {
  const text = 'data: {"a": 1}\r\n\r\ndata: [DONE]\n\n';
  const whole = lines()(text);
  assert.deepEqual(whole, ['data: {"a": 1}', "", "data: [DONE]", ""]);
  for (let cut = 0; cut <= text.length; cut++) {
    const split = lines();
    assert.deepEqual([...split(text.slice(0, cut)), ...split(text.slice(cut))], whole, `cut at ${cut}`);
  }
});

test("characters that would deceive are shown, others stay", () => {
  assert.equal(visible("a\u202eb\u0000c\u2066"), "a\u27e6U+202E\u27e7b\u27e6U+0000\u27e7c\u27e6U+2066\u27e7");
  assert.equal(visible("a\n\tb é 漢 😀"), "a\n\tb é 漢 😀");
});

test("a body holds what was filled in, and a chat the page's own limit", () => {
  assert.deepEqual(bodyOf("chat", "m", { temperature: "", explain: false, system: "a message, and no field" }, []), {
    model: "m", stream: true, stream_options: { include_usage: true }, messages: [], max_tokens: MAX_TOKENS,
  });
  assert.equal(bodyOf("chat", "m", { max_tokens: "7" }, []).max_tokens, 7);
  assert.equal(bodyOf("completion", "m", {}, "text").max_tokens, undefined);
  const body = bodyOf("chat", "m", {
    temperature: "0", ttft_ms: "500", class: "batch", logprobs: true, stop: "x", tools: "[1]", response_format: '{"type": "object"}',
  }, []);
  assert.equal(body.temperature, 0);
  assert.deepEqual(body.slo, { class: "batch", ttft_ms: 500 });
  assert.deepEqual([body.logprobs, body.top_logprobs, body.stop, body.tools], [true, 5, "x", [1]]);
  assert.deepEqual(body.response_format.json_schema.schema, { type: "object" });
  const completion = bodyOf("completion", "m", { tools: "[1]", logprobs: true }, "text");
  assert.deepEqual([completion.prompt, completion.logprobs, completion.tools], ["text", 5, undefined]);
  assert.throws(() => bodyOf("chat", "m", { tools: "[" }, []), (error) => error instanceof FieldError && error.param === "tools");
});

test("an error finds its field", () => {
  assert.equal(fieldOf("response_format.json_schema.schema"), "response_format");
  assert.equal(fieldOf("slo.ttft_ms"), "ttft_ms");
  assert.equal(fieldOf("slo"), "class");
  assert.equal(fieldOf("messages[0].content"), null);
  assert.equal(fieldOf(null), null);
  assert.equal(new Set(FIELDS.map(({ name }) => name)).size, FIELDS.length);
});

test("a story adds up what a request waited for, and judges its target", () => {
  const told = {
    queued_ms: 212.4, waited_ms: { step: 18.1, slots: 194.3 }, chunks: 2, preemptions: 1, recomputed_tokens: 640, swapped_tokens: 0,
    demoted: false, predicted_ttft_ms: 240.1, ttft_ms: 251.7, tokens_per_second: 38.2,
  };
  const usage = { prompt_tokens: 812, prompt_tokens_details: { cached_tokens: 16 } };
  assert.equal(story(told, usage, 500).join(" "),
    "Waited 212 ms: 18.1 ms for the step under way, 194 ms for a place. Prompt of 812 tokens in 2 chunks, 16 of them from the cache. " +
    "Preempted once: 640 tokens computed again, 0 swapped. First token after 252 ms, predicted 240 ms, target 500 ms: met. Then 38.2 tokens a second.");
  assert.match(story(told, usage, 250).join(" "), /target 250 ms: missed/);
  assert.equal(story({ ...told, waited_ms: {}, queued_ms: 0 }, usage, null)[0], "Did not wait.");
});
