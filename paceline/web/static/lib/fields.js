// The fields of a request that the playground offers, and the body that they make.

/**
 * @typedef {{ name: string, label: string, group: string, kind?: "number" | "text" | "code" | "lines" | "choice" | "tick",
 *   step?: number, choices?: string[], fallback?: string, only?: "chat" | "completion" }} Field
 */

/** The longest answer where the field is empty: a model that loops would write until its context is full. */
export const MAX_TOKENS = 1024;

/** @type {Field[]} `fallback` is what the API does without the field; the server may know better */
export const FIELDS = [
  { name: "system", label: "System prompt", group: "Talk", kind: "lines", only: "chat", fallback: "none" },
  { name: "temperature", label: "Temperature", group: "Sampling", step: 0.1, fallback: "1" },
  { name: "top_p", label: "Top p", group: "Sampling", step: 0.05, fallback: "1" },
  { name: "top_k", label: "Top k", group: "Sampling", step: 1, fallback: "0" },
  { name: "min_p", label: "Min p", group: "Sampling", step: 0.05, fallback: "0" },
  { name: "presence_penalty", label: "Presence penalty", group: "Sampling", step: 0.1, fallback: "0" },
  { name: "frequency_penalty", label: "Frequency penalty", group: "Sampling", step: 0.1, fallback: "0" },
  { name: "repetition_penalty", label: "Repetition penalty", group: "Sampling", step: 0.1, fallback: "1" },
  { name: "max_tokens", label: "Max tokens", group: "Sampling", step: 1, fallback: `${MAX_TOKENS}, this page's` },
  { name: "seed", label: "Seed", group: "Sampling", step: 1, fallback: "random" },
  { name: "stop", label: "Stop at", group: "Sampling", kind: "text", fallback: "nothing" },
  { name: "class", label: "Class", group: "Promise", kind: "text", fallback: "standard" },
  { name: "priority", label: "Priority", group: "Promise", step: 1, fallback: "0" },
  { name: "ttft_ms", label: "First token, ms", group: "Promise", step: 50, fallback: "the class's" },
  { name: "tpot_ms", label: "Each token, ms", group: "Promise", step: 10, fallback: "the class's" },
  { name: "deadline_ms", label: "Deadline, ms", group: "Promise", step: 1000, fallback: "the class's" },
  { name: "queue_ttl_ms", label: "Longest wait, ms", group: "Promise", step: 1000, fallback: "the class's" },
  { name: "explain", label: "Explain what became of it", group: "Tell", kind: "tick" },
  { name: "logprobs", label: "Token probabilities", group: "Tell", kind: "tick" },
  { name: "tools", label: "Tools (JSON list)", group: "Shape", kind: "code", only: "chat", fallback: "none" },
  { name: "response_format", label: "JSON schema of the answer", group: "Shape", kind: "code", only: "chat", fallback: "none" },
];

const OF_SLO = ["class", "ttft_ms", "tpot_ms", "deadline_ms", "queue_ttl_ms"];

/** A field's text that is not JSON, before any server is asked. */
export class FieldError extends Error {
  /** @param {string} param @param {string} message */
  constructor(param, message) {
    super(message);
    this.param = param;
  }
}

/** @param {string} name @param {string} text */
function json(name, text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new FieldError(name, `This is not JSON: ${error instanceof Error ? error.message : error}`);
  }
}

/**
 * The body of a request. What is left empty is left out, so the server's defaults hold.
 * @param {"chat" | "completion"} mode
 * @param {string} model
 * @param {Record<string, any>} values
 * @param {any} said messages, or the prompt
 * @returns {Record<string, any>}
 */
export function bodyOf(mode, model, values, said) {
  /** @type {Record<string, any>} */
  const body = { model: model || undefined, stream: true, stream_options: { include_usage: true } };
  body[mode === "chat" ? "messages" : "prompt"] = said;
  if (mode === "chat") body.max_tokens = MAX_TOKENS;
  /** @type {Record<string, any>} */
  const slo = {};
  for (const { name, kind, only } of FIELDS) {
    const value = values[name];
    // the system prompt is a message
    if (name === "system" || value === undefined || value === "" || value === false || (only && only !== mode)) continue;
    if (name === "logprobs") Object.assign(body, mode === "chat" ? { logprobs: true, top_logprobs: 5 } : { logprobs: 5 });
    else if (name === "response_format") {
      body[name] = { type: "json_schema", json_schema: { name: "answer", schema: json(name, value) } };
    } else {
      const told = kind === "code" ? json(name, value) : kind === undefined ? Number(value) : value;
      (OF_SLO.includes(name) ? slo : body)[name] = told;
    }
  }
  if (Object.keys(slo).length) body.slo = slo;
  return body;
}

/** The field that an error of the server is about, if it is one of those here. @param {string | null} param */
export function fieldOf(param) {
  if (!param) return null;
  const parts = param.split(/[.[\]]+/);
  return FIELDS.find(({ name }) => parts.includes(name))?.name ?? (parts[0] === "slo" ? "class" : null);
}
