// The timeline: every step, who shares it, who waits and why. Live, or stopped and gone through step by step.
import { h, signal, useEffect, useRef } from "../vendor/preact.js";
import { getJson } from "../lib/api.js";
import { duration, visible } from "../lib/format.js";
import { CAPACITY, COLUMN, LANES, QUEUE, ROWS } from "../timeline/history.js";
import { engine, follow, heardAt, history, link, model, news, of, showModel, stories, take } from "../timeline/live.js";
import { looks, Looks, LooksLegend } from "../timeline/looks.js";
import { Painter } from "../timeline/paint.js";
import { byNumber, byTime, calm, cursor, drawing, everybody, filter, find, hover, live, matcher, narrowPage, query, row, selected, table, view, words } from "../timeline/shown.js";
import { missed, nameOf, sentences, short, stateOf, WHY, wordsOf } from "../timeline/story.js";
import { areSeveral } from "./models.js";
import { Tables } from "./tables.js";

/** @type {Painter | null} */
let painter = null;
let pending = 0;


function draw() {
  pending = 0;
  if (!painter) return;
  const behind = history.count - view.end;
  if (live.value) {
    // eased, so that twenty messages a second look like one movement
    if (calm.matches || behind > 400 || behind < 0.05) view.end = history.count;
    else view.end += Math.max(0.02, behind * 0.22);
    view.time = model.now;
  }
  let lanes = 8, queue = 3;
  for (let column = Math.max(history.first, history.count - 1200); column < history.count; column++) {
    lanes = Math.max(lanes, history.lanes[column % CAPACITY]);
    queue = Math.max(queue, Math.min(16, history.queued[column % CAPACITY]));
  }
  const room = painter.canvas.parentElement?.clientWidth ?? 800;
  painter.layout(queue, Math.min(LANES, lanes), room, narrowPage.matches);
  painter.draw(view, {
    cursor: cursor.value, selected: selected.value?.number ?? 0, matches: matcher(), unix: model.hello.unix ?? 0, blocks: model.start.num_blocks ?? 0,
    ...looks(painter, arrangedAt(), everybody, byNumber),
  });
  if (live.value && !calm.matches && Math.abs(history.count - view.end) > 0.05) redraw();
}
/** The column whose lanes are arranged: the one that is looked at, or the newest. */
const arrangedAt = () => (cursor.value >= 0 ? cursor.value : Math.min(history.count, Math.ceil(view.end)) - 1);
/** Draw with the next frame; without a reason nothing is drawn. */
function redraw() {
  if (!pending) pending = requestAnimationFrame(draw);
}
drawing.redraw = redraw;

function stop() {
  if (!live.value) return;
  live.value = false;
  view.end = Math.min(history.count, Math.ceil(view.end));
  if (cursor.value < 0) cursor.value = view.end - 1;
}
function goLive() {
  live.value = true;
  cursor.value = -1;
  redraw();
}

/** @param {number} column */
function look(column) {
  stop();
  cursor.value = Math.max(history.first, Math.min(history.count - 1, column));
  const room = painter ? (painter.width - 72) / view.zoom : 100;
  if (cursor.value >= view.end) view.end = cursor.value + 1;
  if (cursor.value < view.end - room) view.end = cursor.value + room;
  view.time = history.planned[cursor.value % CAPACITY] + (painter ? (painter.width - 72) / view.zoom / 200 : 1);
  redraw();
}

/** @param {number} factor */
function zoom(factor) {
  const before = view.zoom;
  view.zoom = Math.max(0.25, Math.min(32, view.zoom * factor));
  if (!live.value && painter && cursor.value >= 0) {
    // the step that is looked at stays where it is
    const from = (view.end - cursor.value) * before;
    view.end = Math.max(history.first + 1, cursor.value + from / view.zoom);
  }
  redraw();
}

/** @param {number} part of the width */
function pan(part) {
  stop();
  const room = painter ? (painter.width - 72) / view.zoom : 100;
  // not so far that nothing is left to see; where all of it is in sight, nowhere
  const least = Math.min(view.end, history.first + Math.min(room, history.count - history.first));
  view.end = Math.max(least, Math.min(history.count, view.end + part * room));
  view.time += part * room * 0.01;
  if (view.end >= history.count && part > 0) goLive();
  redraw();
}

/** The request in a cell. @param {number} column @param {number} at row */
function choose(column, at) {
  const number = column >= 0 && at >= 0 ? history.who[(column % CAPACITY) * ROWS + at] : 0;
  selected.value = number ? byNumber(number) : null;
  redraw();
}

/** @param {string} text */
function search(text) {
  const found = everybody().filter((seen) => seen.told?.id.includes(text)).at(-1);
  if (!text || !found) return false;
  selected.value = found;
  const time = found.spans[0]?.end ?? found.since;
  if (found.ended) look(history.at(time));
  redraw();
  return true;
}

/** Up and down among the rows of the column that is looked at. @param {number} by */
function moveRow(by) {
  if (cursor.value < 0) look(Math.floor(view.end) - 1);
  const base = (cursor.value % CAPACITY) * ROWS;
  let at = row.value < 0 ? (by > 0 ? -1 : ROWS) : row.value;
  do at += by; while (at >= 0 && at < ROWS && !history.who[base + at]);
  if (at < 0 || at >= ROWS) return;
  row.value = at;
  choose(cursor.value, at);
}

/** @param {KeyboardEvent} event */
function onKey(event) {
  if (event.target instanceof HTMLElement && event.target.closest("input, textarea, select, dialog[open]")) return;
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const step = event.shiftKey ? 10 : 1;
  const newest = () => (cursor.value < 0 ? Math.floor(view.end) : cursor.value);
  /** @type {Record<string, () => void>} */
  const keys = {
    " ": () => (live.value ? stop() : goLive()),
    ArrowLeft: () => look(newest() - step), ArrowRight: () => look(newest() + step),
    ArrowUp: () => moveRow(-1), ArrowDown: () => moveRow(1),
    w: () => zoom(1.5), s: () => zoom(1 / 1.5), a: () => pan(-0.25), d: () => pan(0.25),
    Home: () => look(history.first), End: goLive,
    "/": () => document.getElementById("find")?.focus(),
    Enter: () => document.getElementById("story")?.focus(),
    Escape: () => { selected.value = null; redraw(); },
    t: () => (table.value = table.value ? "" : "requests"),
  };
  const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
  // a button that has the focus is pressed by these
  const pressed = event.target instanceof HTMLElement && event.target.closest("button, a");
  if (!keys[key] || (pressed && (key === " " || key === "Enter"))) return;
  event.preventDefault();
  keys[key]();
  redraw();
}

function Chart() {
  /** @type {{ current: HTMLCanvasElement | null }} */
  const canvas = useRef(null);
  useEffect(() => {
    const element = /** @type {HTMLCanvasElement} */ (canvas.current);
    painter = drawing.painter = new Painter(element, history);
    painter.recolour();
    const colour = () => { painter?.recolour(); redraw(); };
    const theme = matchMedia("(prefers-color-scheme: dark)");
    theme.addEventListener("change", colour);
    const themed = new MutationObserver(colour);
    themed.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
    const sized = new ResizeObserver(redraw);
    sized.observe(/** @type {Element} */ (element.parentElement));
    redraw();
    return () => {
      theme.removeEventListener("change", colour);
      themed.disconnect();
      sized.disconnect();
      painter = drawing.painter = null;
    };
  }, []);
  /** @param {MouseEvent} event */
  const place = (event) => {
    const box = /** @type {HTMLElement} */ (event.currentTarget).getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };
  /** @type {{ current: { x: number, end: number, time: number, moved: boolean } | null }} */
  const drag = useRef(null);
  return h("div", { class: "chart",
    onPointerDown: (/** @type {PointerEvent} */ event) => { drag.current = { x: event.clientX, end: view.end, time: view.time, moved: false }; },
    onPointerMove: (/** @type {PointerEvent} */ event) => {
      const { x, y } = place(event);
      if (drag.current && event.buttons) {
        const by = event.clientX - drag.current.x;
        if (Math.abs(by) > 4 || drag.current.moved) {
          drag.current.moved = true;
          stop();
          view.end = Math.max(history.first + 1, Math.min(history.count, drag.current.end - by / view.zoom));
          view.time = drag.current.time - (by / view.zoom) * 0.01;
          redraw();
        }
        return;
      }
      const column = painter?.columnAt(view, x) ?? -1;
      hover.value = { x, y, text: column < 0 ? "" : hint(column, painter?.rowAt(y) ?? -1) };
    },
    onPointerLeave: () => (hover.value = { x: 0, y: 0, text: "" }),
    onClick: (/** @type {MouseEvent} */ event) => {
      const moved = drag.current?.moved;
      drag.current = null;
      if (moved) return;
      const { x, y } = place(event);
      const column = painter?.columnAt(view, x) ?? -1;
      if (column < 0) return;
      stop();
      cursor.value = column;
      row.value = painter?.rowAt(y) ?? -1;
      choose(column, row.value);
    },
    onWheel: (/** @type {WheelEvent} */ event) => {
      if (!event.ctrlKey && Math.abs(event.deltaX) <= Math.abs(event.deltaY)) return;
      event.preventDefault();
      if (event.ctrlKey) zoom(event.deltaY < 0 ? 1.2 : 1 / 1.2);
      else pan(event.deltaX / 800);
    },
  },
  h("canvas", { ref: canvas, role: "img", "aria-label": "Steps of the engine over time: tokens, duration, who waits, who runs, memory. The tables below say the same." }),
  h(Hint, null));
}

function Hint() {
  const { x, y, text } = hover.value;
  if (!text) return null;
  const right = x > (painter?.width ?? 800) - 300;
  return h("div", { class: "hint", "aria-hidden": "true", style: { left: right ? "auto" : `${x + 14}px`, right: right ? `${(painter?.width ?? 800) - x + 14}px` : "auto", top: `${y + 12}px` } }, text);
}

/** @param {number} column @param {number} at row */
function hint(column, at) {
  const number = at >= 0 ? history.who[(column % CAPACITY) * ROWS + at] : 0;
  const seen = number ? byNumber(number) : null;
  const left = at >= 0 ? history.slack[(column % CAPACITY) * ROWS + at] : NaN;
  const due = Number.isNaN(left) ? "" : left < 0 ? `, late by ${duration(-1e3 * left)}` : `, ${duration(1e3 * left)} left`;
  const who = seen ? `${short(nameOf(seen))} (${visible(seen.told?.slo ?? "")}) ${at < QUEUE ? "waits" : `in lane ${at - QUEUE}`}${due}\n` : "";
  return who + stepWords(column);
}

/** @param {number} column */
const stepWords = (column) => wordsOf(history, column, model.start.num_blocks);

function Status() {
  words.value;
  const { state, why } = link.value;
  const silent = (performance.now() - heardAt) / 1000;
  const { level, draining, lost } = engine.value;
  const said = {
    asking: "Asking the server.", retry: `No connection: ${why}. Trying again.`, refused: why, off: why, full: why, mismatch: why,
    live: silent > 2.5 ? `Stale: the last news came ${silent.toFixed(0)} s ago.` : "",
  }[state] ?? "";
  const found = [
    said && h("p", { class: "notice", role: "status" }, visible(said)),
    lost && h("p", { class: "notice bad", role: "status" }, "The engine failed. Its last steps are below; its requests go on in the next one, or failed."),
    draining && state === "live" && h("p", { class: "notice", role: "status" }, "The server is shutting down: what runs may end, nothing new is taken."),
    level > 0 && h("p", { class: "notice", role: "status" },
      ["", "The engine is busy: who computes what is told in one step of eight.", "The engine is very busy: steps are summed over 10 ms.", "The engine is too busy to tell of its steps."][level]),
    !said && !history.count && h("p", { class: "notice empty-timeline" }, "No step in the last 60 s. Send a request from the ", h("a", { href: "playground" }, "playground"), ", and watch it here."),
  ];
  return found.filter(Boolean);
}

/** @type {{ value: string[] }} names of the models of a server of several */
const names = signal([]);
async function lookForModels() {
  try {
    const found = (await getJson("/v1/models")).data;
    names.value = areSeveral(found) ? found.map((/** @type {any} */ each) => each.id).filter((/** @type {string} */ _, /** @type {number} */ at) => !found[at].parent) : [];
  } catch {
    // it has none to choose from until it answers
  }
}

/** Which of several models' steps are shown. */
function Of() {
  if (names.value.length < 2) return null;
  return h("label", { class: "field" }, "Model ",
    h("select", { id: "of", "aria-label": "Model of the steps", value: of.value || names.value[0], onChange: (/** @type {any} */ event) => {
      selected.value = null;
      hover.value = { x: 0, y: 0, text: "" };
      view.end = 0;
      showModel(event.target.value);
      goLive();
    } }, names.value.map((name) => h("option", { value: name, key: name }, visible(name)))));
}

function Toolbar() {
  const press = (/** @type {string} */ label, /** @type {() => void} */ act, extra = {}) => h("button", { type: "button", onClick: () => { act(); redraw(); }, ...extra }, label);
  return h("div", { class: "toolbar", role: "group", "aria-label": "Timeline" },
    press(live.value ? "Pause" : "Live", () => (live.value ? stop() : goLive()), { class: live.value ? "" : "main" }),
    press("◂", () => look((cursor.value < 0 ? Math.floor(view.end) : cursor.value) - 1), { "aria-label": "One step back" }),
    press("▸", () => look((cursor.value < 0 ? Math.floor(view.end) : cursor.value) + 1), { "aria-label": "One step on" }),
    press("−", () => zoom(1 / 1.5), { "aria-label": "Zoom out" }),
    press("+", () => zoom(1.5), { "aria-label": "Zoom in" }),
    press("By time", () => { byTime.value = view.byTime = !view.byTime; }, { "aria-pressed": String(byTime.value) }),
    h(Of, null),
    h(Looks, { changed: redraw }),
    h("label", { class: "field" }, h("span", { class: "hidden" }, "Find a request by its id"),
      h("input", { id: "find", type: "search", placeholder: "Find an id", value: find.value, autocomplete: "off", spellcheck: false,
        onInput: (/** @type {any} */ event) => (find.value = event.target.value),
        onKeyDown: (/** @type {any} */ event) => { if (event.key === "Enter" && search(event.target.value.trim())) event.target.blur(); } })),
    h("label", { class: "field" }, h("span", { class: "hidden" }, "Show only"),
      h("input", { id: "filter", type: "search", placeholder: "Class, tenant, id, missed, preempted", value: filter.value, autocomplete: "off", spellcheck: false,
        onInput: (/** @type {any} */ event) => { filter.value = event.target.value; redraw(); } })));
}

function Now() {
  words.value;
  const gauges = model.gauges;
  const column = cursor.value >= 0 && history.has(cursor.value) ? cursor.value : history.count - 1;
  const rate = rateOf();
  const numbers = [
    ["running", gauges?.running ?? 0], ["waiting", gauges?.waiting ?? 0], ["steps a second", rate === null ? "0" : rate],
    ["KV in use", gauges?.blocks ? `${Math.round((100 * (gauges.blocks - gauges.free)) / gauges.blocks)} %` : "?"],
    ["preempted so far", gauges?.preemptions ?? 0],
    ...(model.numHeld ? [["wait for a grammar", model.numHeld]] : []), ...(model.numRefused ? [["refused", model.numRefused]] : []),
  ];
  return h("div", { class: "now" },
    h("dl", null, numbers.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, String(value))))),
    h("p", { class: "step-words" }, column >= 0 ? stepWords(column) : ""));
}

/** Steps in the last second that there were any. */
function rateOf() {
  if (!history.count) return null;
  const newest = model.now;
  let steps = 0;
  for (let column = history.count - 1; column >= history.first && history.planned[column % CAPACITY] > newest - 1; column--) {
    if (history.kind[column % CAPACITY] === COLUMN.step) steps += Math.max(1, history.merged[column % CAPACITY]);
  }
  return (model.gauges?.running ?? 0) || performance.now() - heardAt < 1500 ? steps : 0;
}

function Legend() {
  const known = ["wait", "chunk", "decode", "preempted", "swapped"];
  const names = { wait: "waits", chunk: "computes its prompt", decode: "writes a token", preempted: "preempted", swapped: "in host memory" };
  const classes = history.classes.slice(0, 4);
  words.value;
  /** @type {Set<number>} */
  const reasons = new Set();
  for (let column = Math.max(history.first, history.count - 600); column < history.count; column++) reasons.add(history.held[column % CAPACITY]);
  return h("div", { class: "legend" },
    known.map((name) => h("span", null, h("span", { class: `tick-sample ${name}`, "aria-hidden": "true" }), names[/** @type {keyof typeof names} */ (name)])),
    WHY.map((why, i) => reasons.has(i) && h("span", null, h("span", { class: `tick-sample reason${i}`, "aria-hidden": "true" }), `queue: waits for ${why}`)),
    h(LooksLegend, null),
    h("span", null, "line: budget, and predicted ms"), h("span", null, "end: ✓ done, | length, ✕ aborted"),
    classes.map((name, i) => h("span", null, h("span", { class: `tick-sample class${i}`, "aria-hidden": "true" }), `KV of ${visible(name)}`)),
    h("span", null, h("span", { class: "tick-sample cached", "aria-hidden": "true" }), "cached, free"));
}

function Story() {
  words.value;
  const seen = selected.value;
  if (!seen) {
    return h("section", { class: "story-panel", "aria-labelledby": "story" },
      h("h2", { id: "story", tabIndex: -1 }, "A request's story"),
      h("p", { class: "quiet" }, "Choose a request: click its lane, or stop with Space and go with the arrow keys."));
  }
  const told = seen.told;
  const facts = [
    ["class", told?.slo], ["tenant", told?.tenant], ["prompt", told && `${told.prompt} tokens`], ["may write", told && `${told.most} tokens`],
    ["token target", told?.tpot != null ? duration(1e3 * told.tpot) : ""], ["deadline", told?.deadline != null ? duration(1e3 * told.deadline) : ""],
    ["priority", told?.priority || ""], ["lane", seen.lane !== 0xffff ? seen.lane : ""],
  ].filter(([, value]) => value !== "" && value != null);
  const late = missed(seen);
  return h("section", { class: "story-panel", "aria-labelledby": "story" },
    h("h2", { id: "story", tabIndex: -1 }, nameOf(seen)),
    h("p", { class: "chips" }, h("span", { class: "chip" }, stateOf(seen)), late !== null && h("span", { class: late ? "chip bad" : "chip" }, late ? "first token: missed" : "first token: met"), seen.demoted && h("span", { class: "chip bad" }, "demoted")),
    h("p", { class: "story" }, sentences(seen, model.now).join(" ")),
    h(Spans, { seen }),
    h("table", null, h("tbody", null, facts.map(([name, value]) => h("tr", null, h("th", { scope: "row" }, name), h("td", null, visible(String(value))))))),
    h("div", { class: "row" }, h("button", { type: "button", onClick: () => { look(history.at(seen.spans[0]?.end ?? seen.since)); } }, "Show its beginning"),
      h("button", { type: "button", onClick: () => { selected.value = null; redraw(); } }, "Close")));
}

/** @param {{ seen: import("../timeline/model.js").Seen }} props */
function Spans({ seen }) {
  const classes = ["wait", "wait", "chunk", "decode", "skipped", "preempted", "swapped", "wait"];
  const spans = [...seen.spans];
  if (!seen.ended) spans.push({ state: seen.state, start: seen.since, end: Math.max(model.now, seen.since), lane: 0, steps: 0, tokens: 0 });
  return h("div", { class: "bar", "aria-hidden": "true" },
    spans.slice(-200).map(({ state, start, end }) => end > start && h("span", { class: classes[state], style: { flex: `${end - start} 0 0` } })));
}

/** @param {{ shown: boolean }} props */
export function Timeline({ shown }) {
  useEffect(() => {
    if (!shown) return;
    let stopper = new AbortController();
    follow(stopper.signal);
    lookForModels();
    const timer = setInterval(() => { if (!document.hidden) words.value++; }, calm.matches ? 1000 : 250);
    const unsubscribe = news.subscribe(() => { if (!calm.matches) redraw(); });
    // without movement: once a second, if there are any
    let shownNews = -1;
    const still = setInterval(() => {
      if (calm.matches && shownNews !== news.value) redraw();
      shownNews = news.value;
    }, 1000);
    /** @type {any} */
    let away;
    const hidden = () => {
      clearTimeout(away);
      if (document.hidden) away = setTimeout(() => stopper.abort(), 30_000);
      else if (stopper.signal.aborted) {
        stopper = new AbortController();
        follow(stopper.signal);
      }
    };
    document.addEventListener("visibilitychange", hidden);
    addEventListener("keydown", onKey);
    const wanted = query.get("sel");
    const finding = wanted ? setInterval(() => { if (search(wanted)) clearInterval(finding); }, 300) : 0;
    redraw();
    return () => {
      clearInterval(finding);
      stopper.abort();
      clearInterval(timer);
      clearInterval(still);
      clearTimeout(away);
      unsubscribe();
      document.removeEventListener("visibilitychange", hidden);
      removeEventListener("keydown", onKey);
    };
  }, [shown]);
  return h("div", { class: "timeline" },
    h("div", { class: "timeline-main" },
      h("h1", { class: "hidden" }, "Timeline"),
      h(Toolbar, null), h(Status, null), h(Now, null), h(Chart, null), h(Legend, null), h(Tables, null)),
    h(Story, null));
}

// for tests and for the console: the drawn values, as numbers
/** @type {any} */ (globalThis).pacelineTimeline = { history, model, stories, view, take, find: byNumber, painter: () => painter, heardAt: () => heardAt, pending: () => pending };
