// What of the timeline is looked at, and how: shared by the chart and by the tables that say the same.
import { signal } from "../vendor/preact.js";
import { model, stories } from "./live.js";
import { missed } from "./story.js";

export const calm = matchMedia("(prefers-reduced-motion: reduce)");
export const query = new URLSearchParams(location.search);

/** What is looked at. `end`: the column behind the right edge; while it is live, it follows the newest. */
export const view = { end: 0, zoom: Number(query.get("zoom")) || 6, byTime: false, time: 0 };
export const live = signal(true);
export const byTime = signal(false);
export const cursor = signal(-1);
export const row = signal(-1);
/** @type {{ value: import("../timeline/model.js").Seen | null }} */
export const selected = signal(null);
export const filter = signal(query.get("filter") ?? "");
export const find = signal(query.get("sel") ?? "");
export const table = signal("");
export const order = signal({ column: "came", up: false });
export const hover = signal({ x: 0, y: 0, text: "" });
// a slower clock for words and tables, as no reader needs them sixty times a second
export const words = signal(0);
export const narrowPage = matchMedia("(max-width: 900px)");
/** What is drawn with, once there is a canvas, and how to ask for a frame. */
/** @type {{ painter: import("./paint.js").Painter | null, redraw: () => void }} */
export const drawing = { painter: null, redraw: () => {} };

/** All that is known of requests, the newest last. */
export const everybody = () => [...stories.values(), ...model.requests.values()];

/** @param {number} number */
export function byNumber(number) {
  const here = model.requests.get(number);
  if (here) return here;
  let found = null;
  for (const seen of stories.values()) if (seen.number === number) found = seen;
  return found;
}

/** @param {import("../timeline/model.js").Seen} seen @param {string} text */
export function fits(seen, text) {
  if (text === "missed") return missed(seen) === true;
  if (text === "preempted") return seen.preemptions > 0;
  if (text === "waiting") return seen.lane === 0xffff && !seen.ended;
  const told = seen.told;
  return !!told && [told.id, told.slo, told.tenant].some((each) => each.toLowerCase().includes(text));
}

/** @returns {((number: number) => boolean) | null} */
export function matcher() {
  const text = filter.value.trim().toLowerCase();
  if (!text) return null;
  const found = new Set(everybody().filter((seen) => fits(seen, text)).map((seen) => seen.number));
  return (number) => found.has(number);
}

