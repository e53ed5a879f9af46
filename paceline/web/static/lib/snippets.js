// A request as a program: what the playground sent, for a shell and for Python. Nothing here needs a browser.

// what OpenAI's client has an argument for; the rest goes in its `extra_body`
const KNOWN = ["model", "messages", "prompt", "temperature", "top_p", "presence_penalty", "frequency_penalty", "max_tokens", "seed", "stop", "logprobs", "top_logprobs", "tools", "response_format"];
// a program that prints an answer at once wants no stream
const OF_STREAMS = ["stream", "stream_options"];

/** @param {string} text */
const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

/** @param {string} origin of the server @param {string} path @param {string} body JSON @param {boolean} keyed the server wants a key */
export function asCurl(origin, path, body, keyed) {
  const lines = [`curl -N ${quoted(origin + path)}`, "-H 'Content-Type: application/json'", ...(keyed ? ['-H "Authorization: Bearer $API_KEY"'] : []), `-d ${quoted(body)}`];
  return `${lines.join(" \\\n  ")}\n`;
}

/** A value of JSON as Python writes it. @param {any} value @param {string} [margin] @returns {string} */
export function asLiteral(value, margin = "") {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const within = `${margin}    `;
  const parts = Array.isArray(value) ? value.map((each) => asLiteral(each, within)) : Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${asLiteral(each, within)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const short = `${open}${parts.join(", ")}${close}`;
  return short.length + margin.length <= 90 && !short.includes("\n") ? short : `${open}\n${parts.map((part) => `${within}${part},\n`).join("")}${margin}${close}`;
}

/** @param {string} origin @param {string} path of chat or completions @param {string} body JSON @param {boolean} keyed */
export function asPython(origin, path, body, keyed) {
  const fields = Object.entries(JSON.parse(body)).filter(([name]) => !OF_STREAMS.includes(name));
  const chat = path.endsWith("/chat/completions");
  const own = fields.filter(([name]) => KNOWN.includes(name));
  const extra = Object.fromEntries(fields.filter(([name]) => !KNOWN.includes(name)));
  const values = [...own, ...(Object.keys(extra).length ? [["extra_body", extra]] : [])];
  return [
    ...(keyed ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${JSON.stringify(`${origin}/v1`)}, api_key=${keyed ? 'os.environ["API_KEY"]' : '"none"'})`,
    `answer = client.${chat ? "chat.completions" : "completions"}.create(`,
    ...values.map(([name, value]) => `    ${name}=${asLiteral(value, "    ")},`),
    ")",
    `print(answer.choices[0].${chat ? "message.content" : "text"})`,
    "",
  ].join("\n");
}
