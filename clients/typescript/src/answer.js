/** One answer, put together from the chunks of all attempts. See paceline/client/answer.py. */

import { ChunkError, isFilled } from "./chunks.js";

/**
 * @param {unknown} value
 * @returns {string}
 */
function text(value) {
  if (value === null || value === undefined || value === "") return "";
  if (typeof value !== "string") throw new ChunkError();
  return value;
}

/**
 * @param {unknown} value
 * @returns {any[]}
 */
function list(value) {
  if (value === null || value === undefined) return [];
  if (!Array.isArray(value)) throw new ChunkError();
  return value;
}

/**
 * @param {unknown} value
 * @returns {number}
 */
function integer(value) {
  if (typeof value !== "number" || !Number.isInteger(value)) throw new ChunkError();
  return value;
}

/**
 * @param {unknown} value
 * @returns {import("../types/types.js").Json}
 */
function object(value) {
  if (typeof value !== "object" || value === null || Array.isArray(value)) {
    throw new ChunkError();
  }
  return value;
}

/**
 * null: there are no counts, or none that can be read, which is no reason to lose an answer.
 * @param {unknown} told
 * @returns {import("../types/types.js").Usage | null}
 */
export function usageOf(told) {
  try {
    const { prompt_tokens, completion_tokens } = object(told);
    return { prompt_tokens: integer(prompt_tokens), completion_tokens: integer(completion_tokens) };
  } catch {
    return null;
  }
}

export class Answer {
  /** @type {string | null} */
  reason = null;
  /** @type {number[]} */
  ids = [];
  /** @type {number[] | null} */
  promptIds = null;
  idsWhole = true;
  told = false;
  /** @type {string[]} */
  #text = [];
  /** @type {string[]} */
  #reasoning = [];
  /** @type {Map<number, {id: string, name: string, parts: string[]}>} */
  #calls = new Map();
  /** @type {import("../types/types.js").Usage | null} */
  #usage = null;

  get text() {
    return this.#text.join("");
  }

  get resumable() {
    return this.ids.length > 0 && this.idsWhole;
  }

  /**
   * Takes in one chunk; what it makes is appended to `events`, also before an error.
   * @param {import("../types/types.js").Json} chunk
   * @param {import("../types/types.js").ClientEvent[]} events
   */
  read(chunk, events) {
    try {
      this.#read(chunk, events);
    } finally {
      this.told ||= events.length > 0;
    }
  }

  /**
   * @param {number} target
   * @returns {import("../types/types.js").Finished}
   */
  finished(target) {
    const calls = [...this.#calls].sort(([a], [b]) => a - b).map(([, call]) => call);
    let usage = this.#usage;
    if (usage === null && this.promptIds !== null && this.resumable) {
      usage = { prompt_tokens: this.promptIds.length, completion_tokens: this.ids.length };
    }
    return {
      type: "Finished",
      reason: this.reason ?? "",
      usage,
      text: this.text,
      tool_calls: calls.map(({ id, name, parts }) => ({ id, name, arguments: parts.join("") })),
      reasoning: this.#reasoning.join(""),
      target,
      parsed: null,
    };
  }

  /**
   * @param {import("../types/types.js").Json} chunk
   * @param {import("../types/types.js").ClientEvent[]} events
   */
  #read(chunk, events) {
    this.#usage = usageOf(chunk.usage) ?? this.#usage;
    for (const choice of list(chunk.choices).map(object)) {
      if (integer(choice.index ?? 0) !== 0) throw new ChunkError("a choice that was not asked for");
      const given = [chunk.prompt_token_ids, choice.prompt_token_ids].find(isFilled);
      if (given) this.promptIds ??= list(given).map(integer);
      const ids = list(choice.token_ids).map(integer);
      const whole = this.idsWhole;
      this.idsWhole = false;
      this.#content(choice, events);
      this.idsWhole = whole && (ids.length > 0 || events.length === 0);
      for (const id of ids) this.ids.push(id);
      this.reason = text(choice.finish_reason) || this.reason;
    }
  }

  /**
   * @param {import("../types/types.js").Json} choice
   * @param {import("../types/types.js").ClientEvent[]} events
   */
  #content(choice, events) {
    const delta = object(choice.delta ?? {});
    const content = text(choice.text) || text(delta.content);
    const reasoning = text(delta.reasoning_content) || text(delta.reasoning);
    if (reasoning) {
      this.#reasoning.push(reasoning);
      events.push({ type: "ReasoningDelta", text: reasoning });
    }
    if (content) {
      this.#text.push(content);
      events.push({ type: "TextDelta", text: content });
    }
    list(delta.tool_calls).forEach((given, place) => {
      const part = object(given);
      const index = integer(part.index ?? place);
      const of = object(part.function ?? {});
      const [id, name, args] = [text(part.id), text(of.name), text(of.arguments)];
      const call = this.#calls.get(index) ?? { id: "", name: "", parts: [] };
      this.#calls.set(index, call);
      // a resumed attempt may say again what a call is
      const newId = call.id ? "" : id;
      const newName = call.name ? "" : name;
      call.id ||= newId;
      call.name ||= newName;
      call.parts.push(args);
      if (newId || newName || args) {
        events.push({ type: "ToolCallDelta", index, id: newId, name: newName, arguments: args });
      }
    });
  }
}
