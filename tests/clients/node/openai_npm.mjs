// The npm package "openai"; reports like scripts/conversation.py.
import assert from "node:assert/strict";
import OpenAI, { AuthenticationError, BadRequestError, NotFoundError } from "openai";

const [url, key, model, shared] = process.argv.slice(2);
const { counting, messages, ask_weather: askWeather, weather, place } = JSON.parse(shared);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });
const chat = client.chat.completions;
const steps = [];
const step = (capability, run) => steps.push([capability, run]);

function checkWeather(text) {
  const value = JSON.parse(text);
  assert.deepEqual(Object.keys(value).sort(), ["city", "unit"]);
  assert.ok(["celsius", "fahrenheit"].includes(value.unit), text);
}

step("models", async () => {
  const names = [];
  for await (const card of client.models.list()) names.push(card.id);
  assert.deepEqual(names, [model]);
});

step("chat", async () => {
  const answer = await chat.create({ model, messages, temperature: 0, max_tokens: 24 });
  assert.match(answer.choices[0].message.content, /Paris/);
  assert.equal(
    answer.usage.total_tokens,
    answer.usage.prompt_tokens + answer.usage.completion_tokens,
  );
});

step("stream", async () => {
  const options = { model, messages, temperature: 0, max_tokens: 24 };
  const whole = (await chat.create(options)).choices[0].message.content;
  const stream = await chat.create({
    ...options, stream: true, stream_options: { include_usage: true },
  });
  let text = "", usage = null;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, whole);
  assert.ok(usage.completion_tokens > 0);
  // aborted halfway: the server must not mind
  const halfway = await chat.create({ ...options, max_tokens: 200, stream: true });
  for await (const _ of halfway) { halfway.controller.abort(); break; }
});

step("async", async () => {
  const one = () => chat.create({ model, messages, temperature: 0, max_tokens: 12 });
  const answers = await Promise.all(Array.from({ length: 6 }, one));
  assert.equal(new Set(answers.map((a) => a.choices[0].message.content)).size, 1);
});

step("tools", async () => {
  const answer = await chat.create({
    model, messages: askWeather, tools: [weather], max_tokens: 120,
    tool_choice: { type: "function", function: { name: "get_weather" } },
  });
  checkWeather(answer.choices[0].message.tool_calls[0].function.arguments);
});

step("tool stream", async () => {
  const stream = chat.stream({
    model, messages: askWeather, tools: [weather], max_tokens: 120,
    tool_choice: "required", parallel_tool_calls: false,
  });
  const final = await stream.finalChatCompletion();
  checkWeather(final.choices[0].message.tool_calls[0].function.arguments);
});

step("tool result", async () => {
  let called = null;
  const runner = chat.runTools({
    model, messages: askWeather, max_tokens: 120, parallel_tool_calls: false,
    tool_choice: { type: "function", function: { name: "get_weather" } },
    tools: [{
      type: "function",
      function: {
        ...weather.function,
        parse: JSON.parse,
        function: (args) => { called = args; return "It is 3 C."; },
      },
    }],
  });
  await runner.done();
  assert.ok(called.city !== undefined && called.unit, JSON.stringify(called));
  const first = runner.messages.find((m) => m.tool_calls);
  const result = runner.messages.find((m) => m.role === "tool");
  const answer = await chat.create({
    model, messages: [...askWeather, first, result], tools: [weather], tool_choice: "none",
    max_tokens: 24,
  });
  assert.ok(answer.choices[0].message.content);
});

step("schema", async () => {
  const answer = await chat.create({
    model, messages, max_tokens: 120,
    response_format: { type: "json_schema", json_schema: { name: "place", schema: place } },
  });
  const value = JSON.parse(answer.choices[0].message.content);
  assert.deepEqual(Object.keys(value).sort(), ["city", "kind", "population"]);
});

step("logprobs", async () => {
  const answer = await chat.create({
    model, messages, max_tokens: 6, temperature: 0, logprobs: true, top_logprobs: 3,
  });
  const content = answer.choices[0].logprobs.content;
  assert.equal(content.map((c) => c.token).join(""), answer.choices[0].message.content);
  assert.ok(content.every((c) => c.logprob <= 0 && c.top_logprobs.length === 3));
});

step("completions", async () => {
  const stream = await client.completions.create({
    model, prompt: counting, max_tokens: 4, stream: true,
  });
  let text = "";
  for await (const chunk of stream) text += chunk.choices[0]?.text ?? "";
  assert.ok(text);
});

step("responses", async () => {
  const first = await client.responses.create({
    model, input: messages[0].content, max_output_tokens: 24,
  });
  assert.ok(first.output_text);
  const kinds = [];
  const stream = await client.responses.create({
    model, input: "And of Italy?", previous_response_id: first.id, max_output_tokens: 8,
    stream: true,
  });
  for await (const event of stream) kinds.push(event.type);
  assert.equal(kinds[0], "response.created");
  assert.ok(["response.completed", "response.incomplete"].includes(kinds.at(-1)), kinds.at(-1));
});

step("errors", async () => {
  await assert.rejects(chat.create({ model: "no-such-model", messages }), (error) => {
    return error instanceof NotFoundError && error.param === "model";
  });
  await assert.rejects(chat.create({ model, messages, temperature: 1000 }), (error) => {
    return error instanceof BadRequestError && error.param === "temperature" && Boolean(error.requestID);
  });
  const stranger = new OpenAI({ baseURL: `${url}/v1`, apiKey: "wrong-key", maxRetries: 0 });
  await assert.rejects(stranger.models.list(), AuthenticationError);
});

for (const [capability, run] of steps) {
  const started = Date.now();
  let error = null;
  try {
    await run();
  } catch (fault) {
    const line = /openai_npm\.mjs:(\d+)/.exec(fault?.stack ?? "")?.[1] ?? "?";
    error = `line ${line}: ${fault?.name}: ${fault?.message}`.slice(0, 500);
  }
  console.log(JSON.stringify({ capability, error, seconds: (Date.now() - started) / 1000 }));
}
