// The stream of the timeline: asked for, read, asked for again when it breaks, from where it broke off.
import { signal } from "../vendor/preact.js";
import { ApiError, call, key } from "../lib/api.js";
import { Decoder, VERSION } from "./decode.js";
import { COLUMN, History } from "./history.js";
import { Model } from "./model.js";

const MOST_STORIES = 4096;
// milliseconds of reading after which others get their turn
const SLICE = 8;

/** How the stream is: asking, live, stale, retry, refused, off, full, mismatch. */
export const link = signal({ state: "asking", why: "" });
/** Changes whenever there is something new to draw. */
export const news = signal(0);
/** What the engine is said to be: its level of detail, whether it drains, is lost. */
export const engine = signal({ level: 0, draining: false, lost: false });

export const history = new History();
/** @type {Map<string, import("./model.js").Seen>} of requests that ended, by engine and number */
export const stories = new Map();
export let heardAt = 0;
// which server it is, by when it began; of engines, as it counts them, and the last column: which engine's, and which step
let server = 0;
let epoch = 0;
let lastEpoch = -1;
let lastStep = -1;
let lostAt = 0;

/** @type {ConstructorParameters<typeof Model>[0]} */
const hooks = {
  planned: (step) => {
    // after a break some are told again
    if (epoch < lastEpoch || (epoch === lastEpoch && step.plan.step <= lastStep)) return;
    if (epoch > lastEpoch && lastEpoch >= 0) history.mark(COLUMN.began, step.plan.planned, "another engine began");
    lastEpoch = epoch;
    lastStep = step.plan.step;
    history.plan(step.plan, model);
  },
  stepped: (step) => history.result(step),
  ended: (seen) => {
    const name = `${server}.${epoch}.${seen.number}`;
    // after a break it is told again, by a reader that has seen less of it
    if (stories.has(name)) return;
    stories.set(name, seen);
    history.ended(seen);
    if (stories.size > MOST_STORIES) stories.delete(/** @type {string} */ (stories.keys().next().value));
  },
  reset: () => {
    epoch++;
    history.cut();
    engine.value = { ...engine.value, lost: false };
  },
};
export const model = new Model(hooks);

/** The model of several whose steps are shown; empty: the server's first. */
export const of = signal(new URLSearchParams(location.search).get("model") ?? "");
// ends the stream of the model that was shown before
let current = new AbortController();

/** Show the steps of another model, and forget those of this one. @param {string} name */
export function showModel(name) {
  of.value = name;
  Object.assign(history, new History());
  Object.assign(model, new Model(hooks));
  stories.clear();
  server = epoch = lostAt = heardAt = 0;
  lastEpoch = lastStep = -1;
  link.value = { state: "asking", why: "" };
  engine.value = { level: 0, draining: false, lost: false };
  current.abort();
  news.value++;
}

/** @param {any} frame */
export function take(frame) {
  if (frame.frame === "hello") {
    if (frame.told.version !== VERSION) throw new RangeError("version");
    // who runs is told anew
    model.synced = false;
    epoch = frame.told.first;
    if (server && server !== frame.told.server) {
      // it counts from the beginning again
      lastEpoch = lastStep = -1;
      engine.value = { level: 0, draining: false, lost: false };
      history.mark(COLUMN.began, frame.told.now, "another server began");
    }
    server = frame.told.server;
  }
  const before = model.now;
  model.take(frame);
  if (frame.frame === "gauges" && frame.told.up && engine.value.lost && frame.told.now > lostAt + 0.5) {
    // another one is there; its first steps will say so too
    engine.value = { ...engine.value, lost: false };
  }
  if (frame.frame === "gap") {
    const { from, to, why } = frame.told;
    history.mark(COLUMN.gap, Math.max(0, before), `${Math.max(0, to - from)} steps missing: ${why}`);
  } else if (frame.frame === "notice") {
    const { kind, level } = frame.told;
    if (kind === "level") engine.value = { ...engine.value, level };
    else if (kind === "draining") engine.value = { ...engine.value, draining: true };
    else if (kind === "engine_failed" && frame.told.now > lostAt) {
      lostAt = frame.told.now;
      history.mark(COLUMN.lost, frame.told.now, "the engine failed");
      engine.value = { ...engine.value, lost: true };
    }
  }
}

/** @param {number} ms */
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/** Reads until told to stop. @param {AbortSignal} stop */
export async function follow(stop) {
  let wait = 500;
  stop.addEventListener("abort", () => current.abort());
  while (!stop.aborted) {
    const { signal: ends } = (current = new AbortController());
    try {
      const from = lastEpoch >= 0 ? `since=${lastEpoch}.${lastStep}` : "seconds=60";
      const whose = of.value ? `&model=${encodeURIComponent(of.value)}` : "";
      const response = await call(`/ui/api/timeline?${from}&follow=1${whose}`, { signal: ends });
      const decoder = new Decoder();
      const reader = /** @type {ReadableStream<Uint8Array>} */ (response.body).getReader();
      for (;;) {
        const { done, value } = await reader.read();
        if (done) break;
        heardAt = performance.now();
        if (link.value.state !== "live") link.value = { state: "live", why: "" };
        wait = 500;
        let began = heardAt;
        // gauges are words: of them alone nothing is drawn
        let fresh = false;
        for (const frame of decoder.feed(value)) {
          take(frame);
          fresh ||= frame.frame !== "gauges";
          if (performance.now() - began > SLICE) {
            news.value++;
            await pause(0);
            ends.throwIfAborted();
            began = performance.now();
          }
        }
        if (fresh) news.value++;
      }
      link.value = { state: "retry", why: engine.value.draining ? "the server is shutting down" : "the stream ended" };
    } catch (error) {
      if (stop.aborted) return;
      if (ends.aborted) {
        wait = 500;
        continue;
      }
      if (error instanceof RangeError && error.message === "version") {
        link.value = { state: "mismatch", why: "the server was upgraded: reload this page" };
        return;
      }
      if (error instanceof ApiError && (error.status === 404 || error.status === 403 || error.status === 401)) {
        link.value = { state: error.status === 404 ? "off" : "refused", why: error.message };
        const asked = key.value;
        // another key, or none: until then there is no use in asking
        while (!ends.aborted && key.value === asked) await pause(300);
        continue;
      }
      // no place for one more viewer, or nothing to see yet of a model of several
      const full = error instanceof ApiError && (error.status === 503 || error.status === 409);
      link.value = { state: full ? "full" : "retry", why: error instanceof ApiError ? error.message : "the server does not answer" };
    }
    history.cut();
    await pause(wait * (0.75 + 0.5 * Math.random()));
    wait = Math.min(8000, wait * 2);
  }
}
