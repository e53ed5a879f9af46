/** Drives a Machine with fetch: works in Node, Deno, Bun, workers and browsers. */

import { Machine } from "./machine.js";
import { DEFAULT_POLICY, RetryBudget } from "./policy.js";

/**
 * @typedef {import("../types/types.js").ClientEvent} ClientEvent
 * @typedef {import("../types/types.js").Finished} Finished
 * @typedef {import("../types/types.js").Input} Input
 * @typedef {import("../types/types.js").Json} Json
 * @typedef {import("../types/types.js").Message} Message
 * @typedef {import("../types/types.js").Open} Open
 * @typedef {import("../types/types.js").Options} Options
 * @typedef {import("../types/types.js").Policy} Policy
 * @typedef {import("../types/types.js").Target} Target
 */

const now = () => performance.now() / 1000;

/** @typedef {(url: string, init: RequestInit) => Promise<Response>} Fetch */

/**
 * NaN and infinities would be sent as null: another request.
 * @param {unknown} value
 * @param {string} path
 */
function refuseNoNumbers(value, path) {
  if (typeof value === "number" && !Number.isFinite(value)) {
    throw new TypeError(`${path} is ${value}, which JSON has no number for`);
  }
  if (typeof value !== "object" || value === null) return;
  for (const [key, item] of Object.entries(value)) {
    const inside = path ? `${path}.${key}` : key;
    refuseNoNumbers(item, Array.isArray(value) ? `${path}[${key}]` : inside);
  }
}

export class Client {
  /** @type {Target[]} */
  #targets;
  /** @type {Policy} */
  #policy;
  /** @type {RetryBudget} */
  #budget;
  /** @type {Set<string>[]} */
  #leftOut;
  /** @type {Fetch} */
  #fetch;

  /**
   * @param {Target[]} targets in order of preference
   * @param {{policy?: Partial<Policy>, budget?: RetryBudget, fetch?: Fetch}} [settings]
   */
  constructor(targets, { policy = {}, budget = new RetryBudget(), fetch = globalThis.fetch } = {}) {
    if (!targets.length) throw new TypeError("a client needs at least one target");
    this.#targets = targets;
    this.#policy = { ...DEFAULT_POLICY, ...policy };
    this.#budget = budget;
    this.#leftOut = targets.map(() => new Set());
    this.#fetch = fetch;
  }

  /**
   * The events of an answer to a conversation; leaving the loop closes the connection.
   * @param {Message[]} messages
   * @param {Options} [options]
   */
  chat(messages, options = {}) {
    return this.#events("/chat/completions", { ...options, messages });
  }

  /**
   * The events of what follows a prompt, which is text or token ids.
   * @param {string | number[]} prompt
   * @param {Options} [options]
   */
  complete(prompt, options = {}) {
    return this.#events("/completions", { ...options, prompt });
  }

  /**
   * Reads such events to the end, and returns the Finished one.
   * @param {AsyncIterable<ClientEvent>} events
   * @returns {Promise<Finished>}
   */
  static async result(events) {
    for await (const event of events) if (event.type === "Finished") return event;
    throw new TypeError("the stream has been read or closed");
  }

  /**
   * @param {string} path
   * @param {Json} body
   */
  #events(path, body) {
    for (const name of ["model", "stream"]) {
      if (name in body) throw new TypeError(`${name} is set by the client itself: leave it out`);
    }
    if ((body.n ?? 1) !== 1) throw new TypeError("n must be 1: a stream has one answer");
    refuseNoNumbers(body, "");
    const request = { path, body, seed: Math.floor(Math.random() * 2 ** 31) };
    const machine = new Machine(
      request,
      this.#targets,
      this.#policy,
      this.#budget,
      Math.random,
      this.#leftOut,
    );
    return this.#drive(machine);
  }

  /**
   * @param {Machine} machine
   * @returns {AsyncGenerator<ClientEvent, void, void>}
   */
  async *#drive(machine) {
    /** @type {Connection | null} */
    let connection = null;
    /** @type {Input[]} */
    let inputs = [{ type: "Start" }];
    try {
      for (;;) {
        /** @type {Open | null} */
        let opening = null;
        for (const input of inputs) {
          const actions = machine.handle(input, now());
          for (const action of actions) {
            if (action.type === "Emit") yield action.event;
            else if (action.type === "Open") opening = action;
            else if (action.type === "Fail") throw action.error;
            else {
              connection?.close();
              connection = null;
            }
          }
          if (opening || actions.some(({ type }) => type === "Close")) break;
        }
        if (machine.over) return;
        if (opening) {
          connection = new Connection(this.#fetch, this.#targets[opening.target], opening);
          // fetch does not tell when the connection stands
          inputs = [{ type: "Connected" }];
        } else inputs = await until(connection?.next(), machine.deadline);
      }
    } finally {
      connection?.close();
    }
  }
}

/**
 * What happens next, or a Tick at the deadline.
 * @param {Promise<Input[]> | undefined} next
 * @param {number} deadline
 * @returns {Promise<Input[]>}
 */
async function until(next, deadline) {
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  let timer;
  /** @type {Promise<Input[]>} */
  const tick = new Promise((resolve) => {
    const wait = Math.max(0, deadline - now()) * 1000;
    timer = setTimeout(() => {
      // a process that was held up sees the answer and the time at once: what lies there is read
      // before the second timer, and counts
      timer = setTimeout(() => resolve([{ type: "Tick" }]), 0);
    }, wait);
  });
  try {
    return await (next ? Promise.race([next, tick]) : tick);
  } finally {
    clearTimeout(timer);
  }
}

class Connection {
  #abort = new AbortController();
  /** @type {Promise<Response>} */
  #answer;
  /** @type {ReadableStreamDefaultReader<Uint8Array> | null} */
  #reader = null;
  /**
   * Of a read that a Tick overtook.
   * @type {Promise<Input[]> | null}
   */
  #pending = null;

  /**
   * @param {Fetch} fetch
   * @param {Target} target
   * @param {Open} opening
   */
  constructor(fetch, target, { path, body }) {
    const base = target.base_url.replace(/\/+$/, "");
    /** @type {Record<string, string>} */
    const headers = { accept: "text/event-stream", "content-type": "application/json" };
    if (target.api_key) headers.authorization = `Bearer ${target.api_key}`;
    this.#answer = fetch(`${base.endsWith("/v1") ? base : `${base}/v1`}${path}`, {
      method: "POST",
      headers,
      body: JSON.stringify(body),
      // keys do not travel to other places
      redirect: "manual",
      signal: this.#abort.signal,
    });
    this.#answer.catch(() => {});
  }

  close() {
    this.#abort.abort();
  }

  next() {
    this.#pending ??= this.#read().finally(() => {
      this.#pending = null;
    });
    return this.#pending;
  }

  /** @returns {Promise<Input[]>} */
  async #read() {
    try {
      if (this.#reader === null) {
        const answer = await this.#answer;
        this.#reader = answer.body?.getReader() ?? null;
        const headers = Object.fromEntries(answer.headers);
        /** @type {import("../types/types.js").Head} */
        const head = { type: "Head", status: answer.status, headers, wall: Date.now() / 1000 };
        return this.#reader ? [head] : [head, { type: "Closed" }];
      }
      const { done, value } = await this.#reader.read();
      return [done ? { type: "Closed" } : { type: "Data", data: value }];
    } catch (error) {
      const { cause, name } = /** @type {{cause?: {code?: string}, name: string}} */ (error);
      const why = cause?.code ?? name;
      return [{ type: "Broken", reason: `the connection failed: ${why}` }];
    }
  }
}
