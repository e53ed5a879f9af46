/** Drives a Machine with fetch: works in Node, Deno, Bun, workers and browsers. */

import { Machine } from "./machine.js";
import { DEFAULT_POLICY, RetryBudget } from "./policy.js";

const now = () => performance.now() / 1000;

export class Client {
  #targets;
  #policy;
  #budget;
  #leftOut;
  #fetch;

  /**
   * @param {{base_url: string, model: string, api_key?: string}[]} targets in order of preference
   * @param {{policy?: object, budget?: RetryBudget, fetch?: typeof fetch}} [settings]
   */
  constructor(targets, { policy = {}, budget = new RetryBudget(), fetch = globalThis.fetch } = {}) {
    if (!targets.length) throw new TypeError("a client needs at least one target");
    this.#targets = targets;
    this.#policy = { ...DEFAULT_POLICY, ...policy };
    this.#budget = budget;
    this.#leftOut = targets.map(() => new Set());
    this.#fetch = fetch;
  }

  /** The events of an answer to a conversation; leaving the loop closes the connection. */
  chat(messages, options = {}) {
    return this.#events("/chat/completions", { ...options, messages });
  }

  /** The events of what follows a prompt, which is text or token ids. */
  complete(prompt, options = {}) {
    return this.#events("/completions", { ...options, prompt });
  }

  /** Reads such events to the end, and returns the Finished one. */
  static async result(events) {
    for await (const event of events) if (event.type === "Finished") return event;
    throw new TypeError("the stream has been read or closed");
  }

  #events(path, body) {
    for (const name of ["model", "stream"]) {
      if (name in body) throw new TypeError(`${name} is the client's to say`);
    }
    if ((body.n ?? 1) !== 1) throw new TypeError("n must be 1: a stream has one answer");
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

  async *#drive(machine) {
    let connection = null;
    let inputs = [{ type: "Start" }];
    try {
      for (;;) {
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

/** What happens next, or a Tick at the deadline. */
async function until(next, deadline) {
  let timer;
  const tick = new Promise((resolve) => {
    const wait = Math.max(0, deadline - now()) * 1000;
    timer = setTimeout(() => resolve([{ type: "Tick" }]), wait);
  });
  try {
    return await (next ? Promise.race([next, tick]) : tick);
  } finally {
    clearTimeout(timer);
  }
}

class Connection {
  #abort = new AbortController();
  #answer;
  #reader = null;
  // of a read that a Tick overtook
  #pending = null;

  constructor(fetch, target, { path, body }) {
    const base = target.base_url.replace(/\/+$/, "");
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

  async #read() {
    try {
      if (this.#reader === null) {
        const answer = await this.#answer;
        this.#reader = answer.body?.getReader() ?? null;
        const headers = Object.fromEntries(answer.headers);
        const head = { type: "Head", status: answer.status, headers, wall: Date.now() / 1000 };
        return this.#reader ? [head] : [head, { type: "Closed" }];
      }
      const { done, value } = await this.#reader.read();
      return [done ? { type: "Closed" } : { type: "Data", data: value }];
    } catch (error) {
      const why = error.cause?.code ?? error.name;
      return [{ type: "Broken", reason: `the connection failed: ${why}` }];
    }
  }
}
