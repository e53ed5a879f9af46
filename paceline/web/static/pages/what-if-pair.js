// Two runs of a what-if beside each other, step by step, with one cursor.
import { h, signal, useEffect, useRef } from "../vendor/preact.js";
import { callAsTab } from "../lib/api.js";
import { duration, visible } from "../lib/format.js";
import { CAPACITY, LANES } from "../timeline/history.js";
import { GUTTER, Painter } from "../timeline/paint.js";
import { firstDifference, Recorded } from "../timeline/recorded.js";
import { wordsOf } from "../timeline/story.js";

/** Which runs are shown, of which job. @type {{ value: any }} */
export const sides = signal({ job: null, a: 0, b: 0 });

/** @param {any} result */
export const nameOf = (result) => `${visible(result.policy)}, ${result.budget} tokens, load ${result.load}`;

const view = { end: 0, zoom: 6, byTime: true, time: 0 };
const narrowPage = matchMedia("(max-width: 900px)");
/** When the cursor is, in seconds; -1: nowhere. */
const cursor = signal(-1);
const listed = signal(false);
/** @type {{ a: Painter | null, b: Painter | null }} */
const painters = { a: null, b: null };
/** @type {{ value: { a: Recorded, b: Recorded, difference: number | null } | null }} */
const pair = signal(null);
const pairFailed = signal("");
/** @type {Map<string, Promise<Recorded>>} by job and run */
const kept = new Map();
let pending = 0;
// midnight where the reader is, so that seconds of a simulation read as times from 0:00:00 on
const MIDNIGHT = new Date(2000, 0, 1).getTime() / 1000;

/** @param {number} job @param {number} run */
function recorded(job, run) {
  const name = `${job} ${run}`;
  let found = kept.get(name);
  if (!found) {
    if (kept.size > 3) kept.clear();
    found = callAsTab(`/ui/api/what-if/timeline?run=${run}&job=${job}`).then(async (response) => new Recorded(new Uint8Array(await response.arrayBuffer())));
    found.catch(() => kept.delete(name));
    kept.set(name, found);
  }
  return found;
}

/** Another job, or another key's. */
export function forgetPair() {
  sides.value = { job: null, a: 0, b: 0 };
  pair.value = null;
  kept.clear();
}

async function load() {
  const of = sides.value, { job, a, b } = of;
  if (job === null) return;
  try {
    const [one, other] = await Promise.all([recorded(job, a), recorded(job, b)]);
    if (sides.value !== of) return;
    pair.value = { a: one, b: other, difference: one === other ? null : firstDifference(one.plans, other.plans) };
    pairFailed.value = "";
    fit();
  } catch (error) {
    if (sides.value !== of) return;
    pair.value = null;
    pairFailed.value = error instanceof Error ? error.message : String(error);
  }
}

/** Seconds that are shown, of either. */
function bounds() {
  const found = pair.value;
  if (!found) return { begin: 0, end: 1 };
  const lasts = [found.a, found.b].map(({ history }) => (history.count ? history.done[history.count - 1] || history.planned[history.count - 1] : 0));
  const firsts = [found.a, found.b].filter(({ history }) => history.count).map(({ history }) => history.planned[0]);
  return { begin: Math.min(...firsts, ...(firsts.length ? [] : [0])), end: Math.max(...lasts) };
}
const room = () => Math.max(100, (painters.a?.width ?? 900) - GUTTER);
/** Seconds that fit. */
const span = () => (room() / view.zoom) * 0.01;

/** Zoom so far that all of it is in sight. */
function fit() {
  const { begin, end } = bounds();
  view.zoom = Math.max(1e-3, (room() * 0.01) / Math.max(0.01, 1.02 * (end - begin)));
  view.time = begin + span();
  cursor.value = begin;
  redraw();
}

/** @param {number} factor */
function zoom(factor) {
  const { begin, end } = bounds();
  const least = (room() * 0.01) / Math.max(0.01, 1.02 * (end - begin));
  // the cursor stays where it is
  const from = (view.time - cursor.value) / span();
  view.zoom = Math.max(Math.min(least, 64), Math.min(64, view.zoom * factor));
  view.time = cursor.value + Math.max(0, Math.min(1, from)) * span();
  redraw();
}

/** @param {number} time */
function go(time) {
  const { begin, end } = bounds();
  cursor.value = Math.max(begin, Math.min(end, time));
  if (cursor.value > view.time) view.time = cursor.value + 0.1 * span();
  if (cursor.value < view.time - span()) view.time = cursor.value + 0.9 * span();
  redraw();
}

/** To another step of the first timeline, and of the second where the first has none. @param {number} by */
function step(by) {
  const found = pair.value;
  if (!found) return;
  const here = found.a.at(cursor.value) >= 0 || by < 0 ? found.a : found.b;
  const { history } = here;
  if (!history.count) return;
  let column = Math.max(0, Math.min(history.count - 1, history.at(cursor.value) + by));
  // where two were planned at once, the cursor is at the second
  while (by < 0 && column > 0 && history.planned[column] >= cursor.value) column--;
  const wanted = history.planned[column];
  // behind the end of the first, the second goes on
  if (by > 0 && wanted <= cursor.value && here === found.a) go(found.b.history.planned[Math.min(found.b.history.count - 1, found.b.history.at(cursor.value) + by)]);
  else go(wanted);
}

/** @param {number} part of the width */
function pan(part) {
  view.time += part * span();
  cursor.value = Math.max(view.time - span(), Math.min(view.time, cursor.value));
  go(cursor.value);
}

/** @param {KeyboardEvent} event */
export function onKey(event) {
  if (!pair.value || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target instanceof HTMLElement && event.target.closest("input, textarea, select, dialog[open]")) return;
  const by = event.shiftKey ? 10 : 1;
  /** @type {Record<string, () => void>} */
  const keys = {
    ArrowLeft: () => step(-by), ArrowRight: () => step(by), w: () => zoom(1.5), s: () => zoom(1 / 1.5), a: () => pan(-0.25), d: () => pan(0.25),
    Home: () => go(bounds().begin), End: () => go(bounds().end), t: () => (listed.value = !listed.value),
  };
  const act = keys[event.key.length === 1 ? event.key.toLowerCase() : event.key];
  if (!act) return;
  event.preventDefault();
  act();
}

function draw() {
  pending = 0;
  const found = pair.value;
  if (!found) return;
  // as many rows in both, so that they can be compared
  let lanes = 4, queue = 2;
  for (const { history } of [found.a, found.b]) {
    for (let column = 0; column < history.count; column++) {
      lanes = Math.max(lanes, history.lanes[column % CAPACITY]);
      queue = Math.max(queue, Math.min(16, history.queued[column % CAPACITY]));
    }
  }
  for (const name of /** @type {("a" | "b")[]} */ (["a", "b"])) {
    const painter = painters[name], side = found[name];
    const width = painter?.canvas.parentElement?.clientWidth ?? 0;
    // while it is hidden it has none
    if (!painter || width < 2 * GUTTER) continue;
    painter.history = side.history;
    painter.layout(queue, Math.min(LANES, lanes), width, narrowPage.matches);
    painter.draw(view, { cursor: side.at(cursor.value), selected: 0, matches: null, unix: MIDNIGHT, blocks: side.model.start.num_blocks ?? 0, tint: null, bySlack: false, arrangement: null });
  }
}
function redraw() {
  if (!pending) pending = requestAnimationFrame(draw);
}

/** @param {{ name: "a" | "b", label: string }} props */
function Chart({ name, label }) {
  /** @type {{ current: HTMLCanvasElement | null }} */
  const canvas = useRef(null);
  useEffect(() => {
    const element = /** @type {HTMLCanvasElement} */ (canvas.current);
    const painter = (painters[name] = new Painter(element, /** @type {any} */ (pair.value)[name].history));
    painter.recolour();
    const colour = () => { painter.recolour(); redraw(); };
    const theme = matchMedia("(prefers-color-scheme: dark)");
    theme.addEventListener("change", colour);
    const themed = new MutationObserver(colour);
    themed.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
    let width = 0;
    const sized = new ResizeObserver(() => {
      const now = element.parentElement?.clientWidth ?? 0;
      // the first time there is a width to fit into
      if (!width && now) { painter.width = now; fit(); }
      width = now;
      redraw();
    });
    sized.observe(/** @type {Element} */ (element.parentElement));
    return () => {
      theme.removeEventListener("change", colour);
      themed.disconnect();
      sized.disconnect();
      painters[name] = null;
    };
  }, []);
  const side = /** @type {any} */ (pair.value)[name];
  const column = side.at(cursor.value);
  return h("figure", { class: "what-if-chart" },
    h("figcaption", null, h("b", null, label)),
    h("div", { class: "chart", onClick: (/** @type {MouseEvent} */ event) => {
      const box = /** @type {HTMLElement} */ (event.currentTarget).getBoundingClientRect();
      const x = event.clientX - box.left - GUTTER;
      if (x >= 0) go(view.time - span() + (x / room()) * span());
    } }, h("canvas", { ref: canvas, role: "img", "aria-label": `Steps of ${label}: tokens, duration, who waits, who runs, memory. The table below says the same.` })),
    h("p", { class: "step-words" }, column < 0 ? "No step at this time." : wordsOf(side.history, column, side.model.start.num_blocks)));
}

/** @param {{ results: any[] }} props */
export function Pair({ results }) {
  const { a, b } = sides.value;
  useEffect(() => void load(), [sides.value]);
  if (pairFailed.value) return h("p", { class: "notice bad", role: "status" }, visible(pairFailed.value));
  const found = pair.value;
  if (!found) return h("p", { class: "quiet" }, "Asking the server for the timelines.");
  const label = (/** @type {number} */ run) => { const result = results.find((each) => each.run === run); return result ? nameOf(result) : "?"; };
  const press = (/** @type {string} */ text, /** @type {() => void} */ act, extra = {}) => h("button", { type: "button", onClick: act, ...extra }, text);
  const { begin, end } = bounds();
  return h("section", { "aria-labelledby": "two" },
    h("h2", { id: "two" }, "Step by step"),
    h("div", { class: "toolbar", role: "group", "aria-label": "Both timelines" },
      press("◂", () => step(-1), { "aria-label": "One step back" }), press("▸", () => step(1), { "aria-label": "One step on" }),
      press("−", () => zoom(1 / 1.5), { "aria-label": "Zoom out" }), press("+", () => zoom(1.5), { "aria-label": "Zoom in" }), press("All", fit),
      found.difference !== null && press("First difference", () => { toShown(/** @type {number} */ (found.difference)); zoom(20); }),
      (found.a.cut || found.b.cut) && h("label", null, h("span", null, "From second "), h("input", { type: "number", class: "from-second", min: 0, step: "any", value: Math.floor(begin), onChange: (/** @type {any} */ event) => { shift(Number(event.target.value)); fit(); } })),
      h("span", { class: "quiet", id: "at-time" }, `at ${cursor.value.toFixed(3)} s of ${end.toFixed(1)} s`)),
    found.difference === null && a !== b && h("p", { class: "quiet", role: "status" }, "Both took the same steps."),
    (found.a.cut || found.b.cut) && h("p", { class: "quiet" }, `${CAPACITY} steps of each are shown at once.`),
    h("div", { class: "what-if-pair" }, h(Chart, { name: "a", label: label(a), key: "a" }), h(Chart, { name: "b", label: label(b), key: "b" })),
    press(listed.value ? "Hide the table" : "Steps as a table", () => (listed.value = !listed.value), { "aria-expanded": String(listed.value) }),
    listed.value && h(StepTable, { one: label(a), other: label(b) }));
}

/** Show the steps from a second on. @param {number} from */
function shift(from) {
  const found = pair.value;
  if (!found || !Number.isFinite(from)) return;
  found.a.show(from);
  if (found.b !== found.a) found.b.show(from);
}

/** @param {number} time */
function toShown(time) {
  const { begin, end } = bounds();
  if (time < begin || time > end) shift(time - 1);
  go(time);
}

/** Twenty steps of each from the cursor on. @param {{ one: string, other: string }} props */
function StepTable({ one, other }) {
  const found = /** @type {{ a: Recorded, b: Recorded }} */ (pair.value);
  const rows = [found.a, found.b].map(({ history }) => {
    const first = history.count ? history.at(cursor.value) : 0;
    return Array.from({ length: Math.min(20, history.count - first) }, (_, i) => first + i).map((column) =>
      [history.planned[column].toFixed(3), history.tokens[column], history.wide[column], history.waiting[column], duration(1e3 * history.took(column) || 0)]);
  });
  const names = ["Second", "Tokens", "Chunks", "Waiting", "Took"];
  return h("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": "Steps of both" }, h("table", null,
    h("caption", null, "Twenty steps from the cursor on"),
    h("thead", null,
      h("tr", null, h("th", { colSpan: 5, scope: "colgroup" }, one), h("th", { colSpan: 5, scope: "colgroup" }, other)),
      h("tr", null, [...names, ...names].map((name, i) => h("th", { scope: "col", key: i, class: "num" }, name)))),
    h("tbody", null, Array.from({ length: Math.max(rows[0].length, rows[1].length) }, (_, i) => h("tr", { key: i },
      [...(rows[0][i] ?? ["", "", "", "", ""]), ...(rows[1][i] ?? ["", "", "", "", ""])].map((value, j) => h("td", { key: j, class: "num" }, value)))))));
}

// for tests and for the console
export const seen = { view, cursor, pair, painters };
