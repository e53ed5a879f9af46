/**
 * One call as a value: what happened goes in, what to do comes out. No sockets, clocks or chance.
 *
 * Inputs and actions are plain objects with a `type`: those of paceline/client/steps.py, and
 * tests/client/vectors holds both machines to the same answers. Times are seconds.
 */

import { Answer, usageOf } from "./answer.js";
import { ChunkError, isFilled, isObject, readEvent, Reported } from "./chunks.js";
import { NoAnswerError, RefusedError, StreamInterruptedError } from "./errors.js";
import { SseEvents } from "./sse.js";
import { retryOf } from "./statuses.js";

const MAX_ERROR_BYTES = 64 * 1024;
const ERROR_SECONDS = 2;
const OWN_FIELDS = ["return_token_ids", "seed", "stream_options", "resume_output_ids"];

/**
 * @typedef {import("../types/types.js").Action} Action
 * @typedef {import("../types/types.js").ClientEvent} ClientEvent
 * @typedef {import("../types/types.js").Head} Head
 * @typedef {import("../types/types.js").Input} Input
 * @typedef {import("../types/types.js").Json} Json
 * @typedef {import("../types/types.js").Policy} Policy
 * @typedef {import("../types/types.js").Request} Request
 * @typedef {import("../types/types.js").Target} Target
 */

export class Machine {
  /** @type {Request} */
  #request;
  /** @type {Target[]} */
  #targets;
  /** @type {Policy} */
  #policy;
  /** @type {import("./policy.js").RetryBudget} */
  #budget;
  /** @type {() => number} */
  #draw;
  /** @type {Set<string>[]} */
  #leftOut;
  /** @type {"waiting" | "connecting" | "asked" | "streaming" | "refused" | "over"} */
  #state = "waiting";
  /** @type {Action[]} */
  #out = [];
  #answer = new Answer();
  #started = false;
  #end = Infinity;
  #until = Infinity;
  #target = 0;
  #attempt = 0;
  /** @type {number[]} */
  #ready;
  /** @type {Set<number>} */
  #cannotResume = new Set();
  /** @type {Set<string>} */
  #trial = new Set();
  #opened = 0;
  /** @type {SseEvents} */
  #events;
  /** @type {number | null} */
  #seam = null;
  /** @type {Head | null} */
  #refusal = null;
  /** @type {Uint8Array[]} */
  #refusalBody = [];
  #refusalBytes = 0;

  /**
   * @param {Request} request
   * @param {Target[]} targets in order of preference
   * @param {Policy} policy
   * @param {import("./policy.js").RetryBudget} budget shared by all calls of a client
   * @param {() => number} draw from 0 up to 1, for jitter
   * @param {Set<string>[]} leftOut for each target the fields that its server refuses; added to
   */
  constructor(request, targets, policy, budget, draw, leftOut) {
    this.#request = request;
    this.#targets = targets;
    this.#policy = policy;
    this.#budget = budget;
    this.#draw = draw;
    this.#leftOut = leftOut;
    this.#ready = targets.map(() => -Infinity);
    this.#events = new SseEvents(policy.max_event_bytes);
  }

  get over() {
    return this.#state === "over";
  }

  /** When a Tick is due, in the time of `handle`. */
  get deadline() {
    return Math.min(this.#until, this.#end);
  }

  /**
   * What to do, in order.
   * @param {Input} event
   * @param {number} now
   * @returns {Action[]}
   */
  handle(event, now) {
    this.#out = [];
    if (this.over) return this.#out;
    if (event.type === "Start") {
      this.#budget.deposit();
      this.#end = now + this.#policy.total_timeout;
      this.#open(now);
    } else if (now >= this.#end) {
      const reason = "the call took too long";
      this.#giveUp(reason, new NoAnswerError(reason, this.#attempt));
    } else if (event.type === "Tick") this.#tick(now);
    else if (this.#state === "waiting") return this.#out;
    else if (event.type === "Broken") this.#failed(event.reason, now);
    else if (event.type === "Connected") {
      this.#state = "asked";
      this.#until = this.#firstTokenEnd;
    } else if (event.type === "Head") this.#head(event, now);
    else if (event.type === "Data") this.#data(event.data, now);
    else if (this.#state === "refused") this.#refused(now);
    else this.#failed("the stream ended early", now);
    return this.#out;
  }

  /** @param {number} now */
  #open(now) {
    this.#attempt += 1;
    this.#send(now);
  }

  /** @param {number} now */
  #send(now) {
    this.#state = "connecting";
    this.#opened = now;
    this.#until = now + this.#policy.connect_timeout;
    this.#events = new SseEvents(this.#policy.max_event_bytes);
    this.#refusal = null;
    this.#seam = null;
    if (this.#canResume(this.#target)) this.#seam = this.#answer.ids.length;
    else if (this.#attempt > 1) {
      const { told } = this.#answer;
      this.#answer = new Answer();
      if (told) this.#emit({ type: "Restarted", target: this.#target });
    }
    const { path } = this.#request;
    this.#out.push({ type: "Open", target: this.#target, path, body: this.#body() });
  }

  /** @returns {Json} */
  #body() {
    const given = this.#request.body;
    const options = { include_usage: true, ...given.stream_options };
    /** @type {Json} */
    const own = { return_token_ids: true, seed: this.#request.seed, stream_options: options };
    if (this.#seam !== null) {
      own.resume_output_ids = [...this.#answer.ids];
      own.stream_options = { ...options, continuous_usage_stats: true };
    }
    for (const name of [...this.#leftOut[this.#target], ...this.#trial]) delete own[name];
    if ((given.seed ?? null) !== null) delete own.seed;
    return { ...given, ...own, model: this.#targets[this.#target].model, stream: true };
  }

  /** @param {number} target */
  #canResume(target) {
    // ids mean the same to the same model only
    const same = this.#targets[target].model === this.#targets[this.#target].model;
    const toldIds = !this.#leftOut[target].has("return_token_ids");
    return this.#answer.resumable && same && toldIds && !this.#cannotResume.has(target);
  }

  get #mayBeginAgain() {
    return this.#policy.restart_allowed || !this.#answer.told;
  }

  get #firstTokenEnd() {
    return this.#opened + this.#policy.first_token_timeout;
  }

  /**
   * @param {string} reason
   * @param {number} now
   * @param {number | null} [after] seconds that the server asked to wait
   * @param {RefusedError | null} [refusal] what this target would say again; another one may not
   */
  #failed(reason, now, status = 0, after = null, refusal = null) {
    const { body } = this.#request;
    const most = body.max_completion_tokens || body.max_tokens || Infinity;
    if (this.#answer.resumable && this.#answer.ids.length >= most) {
      this.#answer.reason ||= "length";
    }
    if (this.#answer.reason !== null) {
      this.#finish();
      return;
    }
    this.#drop();
    const policy = this.#policy;
    const backoff = Math.min(
      policy.backoff_max,
      policy.backoff_base * 2 ** (this.#attempt - 1),
    );
    const pause = Math.max(after ?? 0, this.#draw() * backoff);
    const tooLong = after !== null && after > policy.max_retry_after;
    this.#ready[this.#target] = tooLong || refusal ? Infinity : now + pause;
    const following = this.#attempt < policy.attempts ? this.#next() : null;
    const paid = following !== null && this.#budget.take(now);
    if (!paid) {
      const why = following === null ? reason : `${reason}; the budget of retries is spent`;
      this.#giveUp(why, refusal ?? new NoAnswerError(why, this.#attempt, status, after));
      return;
    }
    const wait = Math.max(0, this.#ready[following] - now);
    this.#emit({ type: "Retrying", attempt: this.#attempt + 1, reason, wait });
    if (following !== this.#target) {
      this.#trial = new Set();
      this.#emit({ type: "FellBack", target: following });
      if (!this.#canResume(following)) this.#answer.idsWhole = false;
    }
    this.#target = following;
    if (wait > 0) {
      this.#state = "waiting";
      this.#until = now + wait;
    } else this.#open(now);
  }

  #next() {
    const count = this.#targets.length;
    for (let step = 1; step <= count; step++) {
      const target = (this.#target + step) % count;
      const inTime = this.#ready[target] < this.#end;
      if (inTime && (this.#mayBeginAgain || this.#canResume(target))) return target;
    }
    return null;
  }

  /**
   * @param {string} reason
   * @param {import("./errors.js").ClientError} error where nothing was told
   */
  #giveUp(reason, error) {
    if (this.#answer.reason !== null) {
      // what went wrong lies behind the whole answer
      this.#finish();
      return;
    }
    this.#drop();
    this.#state = "over";
    const { told, text } = this.#answer;
    const raised = told ? new StreamInterruptedError(reason, this.#attempt, text) : error;
    this.#out.push({ type: "Fail", error: raised });
  }

  /** @param {ClientEvent} event */
  #emit(event) {
    this.#out.push({ type: "Emit", event });
  }

  #drop() {
    if (this.#state === "waiting" || this.#state === "over") return;
    this.#out.push({ type: "Close" });
    this.#state = "waiting";
  }

  /** @param {number} now */
  #tick(now) {
    if (now < this.#until) return;
    if (this.#state === "waiting") this.#open(now);
    else if (this.#state === "connecting") this.#failed("no connection in time", now);
    else if (this.#state === "refused") this.#refused(now);
    else if (this.#state === "asked" || this.#until === this.#firstTokenEnd) {
      this.#failed("no first token in time", now);
    } else this.#failed("no further token in time", now);
  }

  /**
   * @param {Head} head
   * @param {number} now
   */
  #head(head, now) {
    if (head.status !== 200) {
      this.#state = "refused";
      this.#refusal = head;
      this.#refusalBody = [];
      this.#refusalBytes = 0;
      this.#until = now + ERROR_SECONDS;
    } else if (!(head.headers["content-type"] ?? "").toLowerCase().includes("text/event-stream")) {
      this.#failed("the answer is no event stream", now);
    } else if ((head.headers["x-paceline-ignored-fields"] ?? "").includes("resume_output_ids")) {
      this.#notResumed(now);
    } else {
      for (const name of this.#trial) this.#leftOut[this.#target].add(name);
      this.#state = "streaming";
    }
  }

  /**
   * @param {Uint8Array} data
   * @param {number} now
   */
  #data(data, now) {
    if (this.#state === "refused") {
      this.#refusalBody.push(data);
      this.#refusalBytes += data.length;
      if (this.#refusalBytes > MAX_ERROR_BYTES) this.#refused(now);
      return;
    }
    for (const event of this.#events.feed(data)) {
      if (this.#state !== "streaming") return;
      this.#event(event, now);
    }
    if (this.#events.tooLong && this.#state === "streaming") {
      this.#failed(`an event has more than ${this.#policy.max_event_bytes} bytes`, now);
    }
  }

  /**
   * @param {import("./sse.js").SseEvent} event
   * @param {number} now
   */
  #event(event, now) {
    try {
      const found = readEvent(event);
      if (found instanceof Reported) this.#reported(found, now);
      else if (found !== null && (this.#seam === null || this.#prove(found, now))) {
        this.#chunk(found, now);
      }
    } catch (error) {
      if (!(error instanceof ChunkError)) throw error;
      this.#failed(error.message, now);
    }
  }

  /**
   * @param {Json} chunk
   * @param {number} now
   */
  #chunk(chunk, now) {
    if (!this.#started) {
      this.#started = true;
      const [id, model] = [chunk.id, chunk.model].map((name) =>
        typeof name === "string" ? name : "",
      );
      this.#emit({ type: "Started", target: this.#target, id, model });
    }
    /** @type {ClientEvent[]} */
    const events = [];
    const before = this.#answer.ids.length;
    try {
      this.#answer.read(chunk, events);
    } finally {
      for (const event of events) this.#emit(event);
    }
    if (events.length || this.#answer.ids.length > before || this.#answer.reason !== null) {
      this.#until = now + this.#policy.gap_timeout;
    }
  }

  /**
   * Whether the attempt has gone on behind the seam, or said nothing yet.
   * @param {Json} chunk
   * @param {number} now
   */
  #prove(chunk, now) {
    const seam = this.#seam ?? 0;
    const choices = Array.isArray(chunk.choices) ? chunk.choices.filter(isObject) : [];
    const asked = this.#answer.promptIds;
    for (const { prompt_token_ids: ids } of [chunk, ...choices]) {
      if (isFilled(ids) && asked !== null && JSON.stringify(ids) !== JSON.stringify(asked)) {
        this.#notResumed(now);
        return false;
      }
    }
    if (!choices.some(saysSomething)) return true;
    let added = 0;
    for (const { token_ids: ids } of choices) added += Array.isArray(ids) ? ids.length : 0;
    const counted = usageOf(chunk.usage);
    if (counted === null || counted.completion_tokens < seam + added) {
      this.#notResumed(now);
      return false;
    }
    this.#emit({ type: "Resumed", target: this.#target, position: seam });
    this.#seam = null;
    return true;
  }

  /** @param {number} now */
  #notResumed(now) {
    this.#cannotResume.add(this.#target);
    this.#failed("the server does not go on behind tokens it is given", now);
  }

  /** @param {number} now */
  #refused(now) {
    const refusal = this.#refusal;
    if (refusal === null) return;
    const { status, headers } = refusal;
    const decoder = new TextDecoder();
    const parts = this.#refusalBody.map((part) => decoder.decode(part, { stream: true }));
    const text = parts.join("") + decoder.decode();
    const own = this.#sentOwn().filter((name) => text.includes(name));
    if ((status === 400 || status === 422) && own.length) {
      if (own.includes("resume_output_ids")) {
        this.#cannotResume.add(this.#target);
        this.#failed("the server refuses to resume", now, status);
      } else {
        // nothing was computed: asking once more without them is no attempt
        for (const name of own) this.#trial.add(name);
        this.#drop();
        this.#send(now);
      }
      return;
    }
    const retry = retryOf(status, (headers["x-should-retry"] ?? "").toLowerCase());
    const reason = `status ${status}`;
    const error = new RefusedError(status, messageOf(text));
    if (retry === "anywhere") this.#failed(reason, now, status, retryAfter(refusal));
    else if (retry === "elsewhere") this.#failed(reason, now, 0, null, error);
    else this.#giveUp(reason, error);
  }

  #sentOwn() {
    return OWN_FIELDS.filter(
      (name) =>
        (this.#request.body[name] ?? null) === null &&
        (name !== "resume_output_ids" || this.#seam !== null) &&
        !this.#leftOut[this.#target].has(name) &&
        !this.#trial.has(name),
    );
  }

  /**
   * @param {Reported} error
   * @param {number} now
   */
  #reported({ code, words }, now) {
    const retry = code !== null && code >= 400 ? retryOf(code) : "anywhere";
    const refusal = new RefusedError(200, words);
    if (retry === "nowhere") this.#giveUp(words, refusal);
    else {
      const again = retry === "anywhere" ? null : refusal;
      this.#failed(`the server reports: ${words}`, now, 0, null, again);
    }
  }

  #finish() {
    this.#drop();
    this.#state = "over";
    this.#emit(this.#answer.finished(this.#target));
  }
}

/** @param {Json} choice */
function saysSomething(choice) {
  const delta = isObject(choice.delta) ? choice.delta : {};
  const told = Object.entries(delta).some(([name, value]) => name !== "role" && isFilled(value));
  return [choice.token_ids, choice.finish_reason, choice.text].some(isFilled) || told;
}

/**
 * Seconds that the server asks to wait; null: it names none that can be read.
 * @param {Head} head
 */
function retryAfter({ headers, wall }) {
  const ms = headers["retry-after-ms"] ?? "";
  const text = headers["retry-after"] ?? "";
  let seconds = ms ? Number(ms) / 1000 : text ? Number(text) : NaN;
  if (Number.isNaN(seconds)) {
    const sent = Date.parse(headers.date ?? "") / 1000;
    seconds = Date.parse(text) / 1000 - (Number.isNaN(sent) ? wall : sent);
  }
  return Number.isFinite(seconds) ? Math.max(0, seconds) : null;
}

/** @param {string} body */
function messageOf(body) {
  let words = null;
  try {
    const { error } = JSON.parse(body);
    words = isObject(error) ? error.message : error;
  } catch {
    // it is no JSON, and told as it is
  }
  return (typeof words === "string" && words ? words : body).slice(0, 2000);
}
