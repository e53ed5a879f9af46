import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { test } from "node:test";

import { blocksOf, codeOf, headingOf, itemsOf, quoted, rowsOf, spansOf } from "../../paceline/web/static/lib/markdown.js";
import { asCurl, asLiteral, asPython } from "../../paceline/web/static/lib/snippets.js";

const kinds = (/** @type {string} */ text) => blocksOf(text).map(({ kind }) => kind);
const spans = (/** @type {string} */ text) => spansOf(text).map(({ kind, text: said, href }) => (href ? `${kind}:${said}:${href}` : `${kind}:${said}`));

test("an answer is cut into blocks", () => {
  const text = "# Title\nFirst line\nsecond line\n\n- one\n  goes on\n\n- two\n  1. inner\n\n> said\n> twice\n***\n| a | b |\n|---|:-:|\n| 1 | x\\|y |\n\n```py\n# no title\n\n- no list\n```\nend";
  assert.deepEqual(kinds(text), ["heading", "text", "list", "quote", "rule", "table", "code", "text"]);
  const [heading, said, list, quote, , table, code] = blocksOf(text).map(({ source }) => source);
  assert.deepEqual(headingOf(heading), { level: 1, text: "Title" });
  assert.equal(said, "First line\nsecond line");
  assert.deepEqual(itemsOf(list).map(({ depth, mark, text: item }) => [depth, mark, item]), [[1, "\u2022", "one\ngoes on"], [1, "\u2022", "two"], [2, "1.", "inner"]]);
  assert.equal(quoted(quote), "said\ntwice");
  assert.deepEqual(rowsOf(table), [["a", "b"], ["1", "x|y"]]);
  assert.deepEqual(codeOf(code), { language: "py", text: "# no title\n\n- no list" });
});

test("text that only looks like it stays text", () => {
  assert.deepEqual(kinds("#hashtag\n-5 degrees\n1.5 m\na | b"), ["text"]);
  assert.deepEqual(spans("2 * 3 * 4, snake_case_name, a ` b, **, [x](javascript:alert(1)), ![i](https://x.example/y)"), ["text:2 * 3 * 4, snake_case_name, a ` b, **, [x](javascript:alert(1)), ![i](https://x.example/y)"]);
  assert.deepEqual(spans("<b>x</b>"), ["text:<b>x</b>"]);
});

test("a block of code ends with its fence alone", () => {
  const code = (/** @type {string} */ text) => codeOf(blocksOf(text)[0].source).text;
  // a fence with text behind it is a line of the code, be it the last one so far or not
  assert.equal(code("```md\n```js\n"), "```js\n");
  assert.equal(code("```md\n```js"), "```js");
  assert.deepEqual(kinds("```md\n```js\nlet x;\n```\nend"), ["code", "text"]);
  assert.equal(code("```md\n```js\nlet x;\n```\nend"), "```js\nlet x;");
  // longer ones end it too, shorter ones, others and those set in like code do not
  assert.equal(code("````\n```\n~~~~\n    ````\n   `````  \t\nend"), "```\n~~~~\n    ````");
  // what has backticks behind three of them is code within a line
  assert.deepEqual(kinds("```let x``` is said\nmore"), ["text"]);
  assert.deepEqual(kinds("~~~ a`b`\nx\n~~~"), ["code"]);
});

test("tables are bounded, and what is beyond stays text", () => {
  const row = (/** @type {number} */ columns, cell = "a") => `|${`${cell}|`.repeat(columns)}`;
  const table = (/** @type {number} */ columns, rows = 1) => [row(columns), row(columns, "-"), ...Array(rows).fill(row(columns, "1"))].join("\n");
  const cells = (/** @type {string} */ text) => blocksOf(text).filter(({ kind }) => kind === "table").map(({ source }) => rowsOf(source)).flat(2).length;
  assert.deepEqual(kinds(table(64)), ["table"]);
  assert.deepEqual(kinds(table(65)), ["text"]);
  // each row is as wide as the head, however short it is
  const short = `${row(64)}\n|-\n${"|\n".repeat(10_000)}`;
  assert.deepEqual(kinds(short), ["table", "text"]);
  assert.equal(cells(short), 64 * Math.floor(10_000 / 64));
  assert.equal(blocksOf(short).map(({ source }) => source).join("\n"), short.trimEnd());
  // and many tables are no way around it
  const many = `${table(50, 99)}\n\n`.repeat(4);
  assert.equal(cells(many), 10_000);
  assert.deepEqual(kinds(many), ["table", "table", "text", "text"]);
  // those that came before stay as they are
  assert.deepEqual(blocksOf(many.slice(0, -300)).slice(0, 2), blocksOf(many).slice(0, 2));
});

test("spans within a line", () => {
  assert.deepEqual(spans("a **b** `c*d*` *e* _f_ [g](https://h.example/i?j=1) k"),
    ["text:a ", "strong:b", "text: ", "code:c*d*", "text: ", "em:e", "text: ", "em:f", "text: ", "link:g:https://h.example/i?j=1", "text: k"]);
});

test("while an answer grows, its blocks but the last one stay", () => {
  const whole = "# A\n\ntext *so*\nmore\n\n- one\n- two\n\n```js\nlet x = 1;\n\nx++;\n```\n\nlast";
  const lasting = blocksOf(whole);
  for (let cut = 1; cut <= whole.length; cut++) {
    const found = blocksOf(whole.slice(0, cut));
    // what a line becomes is known when the next one begins
    assert.deepEqual(found.slice(0, -2), lasting.slice(0, Math.max(0, found.length - 2)), `cut at ${cut}`);
  }
  // a block of code that is not closed yet
  assert.deepEqual(codeOf(blocksOf("```sh\nls\n").at(-1).source), { language: "sh", text: "ls\n" });
});

test("no text makes it slow", () => {
  const blanks = " ".repeat(40_000);
  for (const text of [`a|b\n-|${blanks}x`, `# ${blanks}x`, `---${blanks}x`, `- ${blanks}x`, `1${blanks}.`, `|${blanks}|\n|-|\n|${blanks}x`, `**${blanks}x`]) {
    const began = performance.now();
    for (const { kind, source } of blocksOf(text)) {
      if (kind === "heading") headingOf(source);
      if (kind === "list") itemsOf(source);
      if (kind === "table") rowsOf(source);
      spansOf(source.slice(0, 8000));
    }
    assert.ok(performance.now() - began < 500, `${text.slice(0, 9)} ${performance.now() - began}`);
  }
  for (const piece of ["`", "*", "_", "[", "**a", "`a", "[a](", "|", "- ", "> ", "`\n", "_a*", "|\n-|\n", "|-|\n"]) {
    const text = piece.repeat(Math.ceil(40_000 / piece.length));
    const began = performance.now();
    blocksOf(text).forEach(({ source }) => spansOf(source));
    spansOf(text.slice(0, 8000));
    assert.ok(performance.now() - began < 1500, `${JSON.stringify(piece)} ${performance.now() - began}`);
  }
});

test("a request as a shell's words and as Python's", () => {
  const body = JSON.stringify({ model: "it's", stream: true, stream_options: { include_usage: true }, temperature: 0, explain: true, slo: { ttft_ms: 500 }, stop: null,
    messages: [{ role: "user", content: "say \"hi\"\nto $HOME `now` 😀" }] });
  const curl = asCurl("http://127.0.0.1:8000", "/v1/chat/completions", body, true);
  assert.match(curl, /-H "Authorization: Bearer \$API_KEY"/);
  assert.doesNotMatch(asCurl("http://x", "/p", "{}", false), /Authorization/);
  // what a shell makes of it
  const words = execFileSync("sh", ["-c", curl.replace(/^curl/, "printf '%s\\n'")], { env: { API_KEY: "k1" }, encoding: "utf8" });
  assert.equal(words, ["-N", "http://127.0.0.1:8000/v1/chat/completions", "-H", "Content-Type: application/json", "-H", "Authorization: Bearer k1", "-d", body, ""].join("\n"));
  assert.equal(asLiteral({ a: [true, null, 1.5, "x\"y"], b: {} }), '{"a": [True, None, 1.5, "x\\"y"], "b": {}}');
  const python = asPython("http://127.0.0.1:8000", "/v1/chat/completions", body, false);
  assert.match(python, /client\.chat\.completions\.create\(\n    model="it's",\n    temperature=0,\n/);
  assert.match(python, /    extra_body=\{"explain": True, "slo": \{"ttft_ms": 500\}\},\n\)\nprint\(answer\.choices\[0\]\.message\.content\)\n/);
  assert.doesNotMatch(python, /stream/);
  assert.match(asPython("http://x", "/v1/completions", '{"prompt": "a"}', true), /os\.environ\["API_KEY"\]\)\nanswer = client\.completions\.create\(\n    prompt="a",\n\)\nprint\(answer\.choices\[0\]\.text\)/);
});
