// What if: other policies, budgets and loads on this server's last minutes or on a trace, simulated by the server beside its
// work; results as a table, and two timelines whose cursors are one.
import { h, signal, useEffect, useRef } from "../vendor/preact.js";
import { ApiError, call, getJson, key } from "../lib/api.js";
import { duration, visible } from "../lib/format.js";
import { CAPACITY, LANES } from "../timeline/history.js";
import { GUTTER, Painter } from "../timeline/paint.js";
import { firstDifference, Recorded } from "../timeline/recorded.js";
import { wordsOf } from "../timeline/story.js";

/** @type {{ value: any }} what the server says */
const told = signal(null);
const failed = signal("");
const sending = signal("");
/** @type {{ value: { param: string | null, message: string } | null }} why the last job was refused */
const bad = signal(null);
/** @type {{ value: any }} what the form holds */
const form = signal({ workload: "minutes", minutes: "10", policies: null, budgets: "", loads: "1", max_num_seqs: "", times: "server", hardware: "", model: "", ttft_ms: "", tpot_ms: "" });
/** @type {File | null} */
let file = null;
/** @type {File | null} the one that the server has */
let sent = null;
let refused = false;
let askedWith = "";

const running = () => told.value?.job.status === "running";

async function look() {
  if (refused && askedWith === key.value) return;
  askedWith = key.value;
  try {
    take(await getJson("/ui/api/what-if"));
    failed.value = "";
    refused = false;
  } catch (error) {
    refused = error instanceof ApiError && [401, 403, 404].includes(error.status);
    failed.value = error instanceof ApiError ? error.message : "The server does not answer.";
  }
}

/** @param {any} found */
function take(found) {
  told.value = found;
  const { policies, workload } = form.value;
  // as this server is, and another one to compare it with
  if (!policies) {
    const own = found.server.policy;
    const other = found.choices.policies.find((/** @type {string} */ name) => name !== own);
    form.value = { ...form.value, policies: [own, other].filter(Boolean), workload: found.minutes ? workload : "trace", times: found.minutes ? "server" : "card",
      hardware: found.choices.hardware[0], model: found.choices.models[0] };
  }
  const done = found.job.results ?? [];
  if (done.length && sides.value.job !== found.job.number) sides.value = { job: found.job.number, a: done[0].run, b: done[0].run };
  // the second run, once it is there
  if (sides.value.a === sides.value.b && done.length > 1 && !sides.value.chosen) sides.value = { ...sides.value, b: done[1].run };
}

/** @param {string} text @returns {(number | string)[]} numbers where they are numbers: the server says what is wrong with the rest */
const list = (text) => text.split(/[,;\s]+/).filter(Boolean).map((part) => (Number.isNaN(Number(part)) ? part : Number(part)));
/** @param {string} text */
const number = (text) => (text.trim() === "" ? undefined : list(text)[0]);

async function run() {
  bad.value = null;
  const { workload, minutes, policies, budgets, loads, max_num_seqs, times, hardware, model, ttft_ms, tpot_ms } = form.value;
  const body = {
    workload, policies, minutes: workload === "minutes" ? number(minutes) : undefined, budgets: budgets.trim() ? list(budgets) : undefined, loads: list(loads),
    max_num_seqs: number(max_num_seqs), hardware: times === "card" ? hardware : undefined, model: times === "card" ? model : undefined,
    ttft_ms: number(ttft_ms), tpot_ms: number(tpot_ms),
  };
  try {
    if (workload === "trace" && file && file !== sent) {
      sending.value = `Sending ${visible(file.name)}.`;
      await call("/ui/api/what-if/trace", { method: "PUT", body: file });
      sent = file;
    }
    sending.value = "Asking the server.";
    const job = await (await call("/ui/api/what-if", { method: "POST", body: JSON.stringify(body) })).json();
    sides.value = { job: null, a: 0, b: 0 };
    pair.value = null;
    take({ ...told.value, job });
  } catch (error) {
    bad.value = { param: error instanceof ApiError ? error.param : null, message: error instanceof Error ? error.message : String(error) };
  } finally {
    sending.value = "";
  }
}

async function cancel() {
  try {
    await call("/ui/api/what-if", { method: "DELETE" });
  } catch (error) {
    failed.value = error instanceof Error ? error.message : String(error);
  }
  await look();
}

// ------------------------------------------------------------------ the form

/** Its words, and beneath it what the server has against it. @param {{ name: string, label: string, children: any, hint?: string }} props */
function Field({ name, label, children, hint }) {
  const wrong = bad.value?.param === name;
  return h("div", { class: "what-if-field" },
    h("label", null, h("span", null, label), children),
    hint && h("p", { class: "quiet hint-line" }, hint),
    wrong && h("p", { class: "bad", id: `bad-${name}`, role: "alert" }, visible(bad.value?.message ?? "")));
}

/** @param {string} name */
const about = (name) => ({
  name, value: form.value[name], "aria-invalid": bad.value?.param === name ? "true" : undefined, "aria-describedby": bad.value?.param === name ? `bad-${name}` : undefined,
  onInput: (/** @type {any} */ event) => (form.value = { ...form.value, [name]: event.target.value }),
});

/** @param {string} name @param {string} value @param {string} label @param {boolean} [off] */
const radio = (name, value, label, off) => h("label", { class: "tick" },
  h("input", { type: "radio", name, value, checked: form.value[name] === value, disabled: off, onChange: () => (form.value = { ...form.value, [name]: value }) }), label);

function Form() {
  const { choices, server, minutes, most_runs: most } = told.value;
  const { workload, policies, budgets, loads, times } = form.value;
  const runs = (policies?.length ?? 0) * Math.max(1, list(budgets).length) * Math.max(1, list(loads).length);
  const select = (/** @type {string} */ name, /** @type {string[]} */ names) => h("select", about(name), names.map((each) => h("option", { value: each }, each)));
  return h("form", { class: "what-if-form", onSubmit: (/** @type {Event} */ event) => { event.preventDefault(); if (!running()) run(); } },
    h("fieldset", null, h("legend", null, "Workload"),
      radio("workload", "minutes", "This server's last minutes", !minutes),
      h("p", { class: "quiet hint-line" }, minutes ? `It remembers ${minutes.requests} requests of the last ${Math.max(1, Math.round(minutes.seconds / 60))} min.` : "This server keeps no timeline (--no-timeline)."),
      workload === "minutes" && h(Field, { name: "minutes", label: "Minutes" }, h("input", { ...about("minutes"), inputMode: "decimal" })),
      radio("workload", "trace", "A trace"),
      workload === "trace" && h(Field, { name: "trace", label: "File: CSV or JSON lines with times and lengths, up to 32 MiB", hint: "Formats: docs/simulator.md. It is deleted when the server ends." },
        h("input", { type: "file", accept: ".csv,.jsonl,.json,.txt", onChange: (/** @type {any} */ event) => (file = event.target.files[0] ?? null) })),
      bad.value?.param === "workload" && h("p", { class: "bad", id: "bad-workload", role: "alert" }, visible(bad.value.message))),
    h("fieldset", null, h("legend", null, "Policies"),
      choices.policies.map((/** @type {string} */ name) => h("label", { class: "tick", key: name },
        h("input", { type: "checkbox", checked: policies?.includes(name), onChange: (/** @type {any} */ event) => {
          const rest = (form.value.policies ?? []).filter((/** @type {string} */ each) => each !== name);
          form.value = { ...form.value, policies: event.target.checked ? [...rest, name] : rest };
        } }), name, name === server.policy && h("span", { class: "quiet" }, "(this server's)"))),
      bad.value?.param === "policies" && h("p", { class: "bad", id: "bad-policies", role: "alert" }, visible(bad.value.message))),
    h("fieldset", null, h("legend", null, "Budgets and loads"),
      h(Field, { name: "budgets", label: "Tokens in a step, several with commas" }, h("input", { ...about("budgets"), placeholder: server.max_num_batched_tokens })),
      h(Field, { name: "loads", label: "Loads, several with commas", hint: "2: twice as many requests a second" }, h("input", about("loads"))),
      h(Field, { name: "max_num_seqs", label: "Requests running at once" }, h("input", { ...about("max_num_seqs"), placeholder: server.max_num_seqs, inputMode: "numeric" }))),
    h("fieldset", null, h("legend", null, "Step times and targets"),
      radio("times", "server", "As this server's steps were", !minutes),
      radio("times", "card", "Of a hardware and a model"),
      times === "card" && [h(Field, { name: "hardware", label: "Hardware" }, select("hardware", choices.hardware)), h(Field, { name: "model", label: "Model" }, select("model", choices.models))],
      bad.value?.param === "hardware" && times === "server" && h("p", { class: "bad", role: "alert" }, visible(bad.value.message)),
      h("div", { class: "fields" },
        h(Field, { name: "ttft_ms", label: "First token, ms" }, h("input", { ...about("ttft_ms"), inputMode: "decimal", placeholder: "none" })),
        h(Field, { name: "tpot_ms", label: "Each token, ms" }, h("input", { ...about("tpot_ms"), inputMode: "decimal", placeholder: "none" }))),
      h("p", { class: "quiet hint-line" }, "Targets of requests that have none.")),
    h("div", { class: "what-if-run" },
      running() ? h("button", { type: "button", onClick: cancel }, "Cancel") : h("button", { type: "submit", class: "main", disabled: !runs || runs > most || sending.value !== "" }, runs === 1 ? "Simulate" : `Simulate ${runs} runs`),
      h("span", { class: "quiet", role: "status" }, sending.value || (runs > most ? `At most ${most} runs at once.` : "")),
      bad.value && !["workload", "minutes", "policies", "budgets", "loads", "max_num_seqs", "hardware", "model", "ttft_ms", "tpot_ms"].includes(bad.value.param ?? "") &&
        h("div", { class: "error", role: "alert" }, visible(bad.value.message))));
}

function Progress() {
  const { job } = told.value;
  if (job.status === "idle") return h("p", { class: "quiet" }, "Nothing was simulated yet. It runs when nothing else wants the processor, for two minutes of it at most.");
  const doing = { starting: "Starting.", reading: "Reading the workload.", fitting: "Learning how long steps take.", simulating: `Simulating ${job.requests ?? ""} requests, run ${Math.min((job.results?.length ?? 0) + 1, job.runs ?? 1)} of ${job.runs ?? ""}.` };
  if (job.status === "running") {
    return h("div", { class: "what-if-progress" },
      h("label", { for: "what-if-done" }, doing[/** @type {keyof typeof doing} */ (job.doing)] ?? job.doing), h("progress", { id: "what-if-done", max: 1, value: job.done }));
  }
  const said = { done: `Done in ${duration(1e3 * job.seconds)}.`, cancelled: `Cancelled${job.error ? `: ${job.error}` : ""}.`, failed: `It failed: ${job.error}.` };
  return [
    h("p", { class: job.status === "failed" ? "notice bad" : "quiet", role: "status" }, visible(said[/** @type {keyof typeof said} */ (job.status)] ?? job.status)),
    job.left_out > 0 && h("p", { class: "notice" }, `The first ${job.requests} requests were simulated; ${job.left_out} more were left out.`),
  ];
}

// ------------------------------------------------------------------ results

/** Which runs the two timelines show. @type {{ value: any }} */
const sides = signal({ job: null, a: 0, b: 0 });

/** @param {any} result */
const nameOf = (result) => `${visible(result.policy)}, ${result.budget} tokens, load ${result.load}`;
/** @param {any} distribution @param {string} name */
const at = (distribution, name) => (distribution ? duration(1e3 * distribution[name]) : "–");
/** @param {number} share */
const percent = (share) => `${(100 * share).toFixed(1)} %`;
/** @param {number} value */
const plain = (value) => String(Number(value.toPrecision(3)));

function Results() {
  const { results } = told.value.job;
  if (!results?.length) return null;
  const classes = [...new Set(results.flatMap((/** @type {any} */ result) => Object.keys(result.by_class)))].sort();
  const names = ["Policy", "Tokens in a step", "Load", "Offered, requests/s", "First token, half", "99 %", "Each token, half", "99 %", "Met", "Goodput, requests/s", "Refused", "Preempted", "Busy"];
  // among those of the same load
  const best = (/** @type {any} */ result) => results.every((/** @type {any} */ other) => other.load !== result.load || other.goodput <= result.goodput);
  const side = (/** @type {"a" | "b"} */ name, /** @type {any} */ result) => h("td", null, h("input", { type: "radio", name: `side-${name}`, checked: sides.value[name] === result.run,
    "aria-label": `${name === "a" ? "First" : "Second"} timeline: ${nameOf(result)}`, onChange: () => (sides.value = { ...sides.value, [name]: result.run, chosen: true }) }));
  return h("section", { class: "what-if-results", "aria-labelledby": "compared" },
    h("h2", { id: "compared" }, "Compared"),
    h("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": "Results" }, h("table", { class: "compared" },
      h("thead", null, h("tr", null, names.map((name, i) => h("th", { scope: "col", class: i ? "num" : undefined }, name)),
        classes.length > 1 && classes.map((name) => h("th", { scope: "col", class: "num" }, `Met, ${visible(name)}`)), h("th", { scope: "col" }, "1st"), h("th", { scope: "col" }, "2nd"))),
      h("tbody", null, results.map((/** @type {any} */ result) => h("tr", { key: result.run, class: best(result) && results.length > 1 ? "best" : undefined },
        h("th", { scope: "row" }, visible(result.policy)),
        [result.budget, `${result.load}×`, plain(result.offered_rate), at(result.ttft, "p50"), at(result.ttft, "p99"), at(result.tpot, "p50"), at(result.tpot, "p99"), percent(result.attainment),
          best(result) && results.length > 1 ? h("b", null, `${plain(result.goodput)} ★`) : plain(result.goodput), result.refused, result.preemptions, percent(result.busy)].map((value, i) => h("td", { key: i, class: "num" }, value)),
        classes.length > 1 && classes.map((name) => h("td", { class: "num", key: name }, result.by_class[name] ? percent(result.by_class[name].attainment) : "–")),
        side("a", result), side("b", result)))))),
    results.length > 1 && h("p", { class: "quiet" }, "★: the most goodput of its load. Attainment and goodput count requests within all their targets."),
    h(Pair, null));
}

// ------------------------------------------------------------------ two timelines

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
    found = call(`/ui/api/what-if/timeline?run=${run}`).then(async (response) => new Recorded(new Uint8Array(await response.arrayBuffer())));
    found.catch(() => kept.delete(name));
    kept.set(name, found);
  }
  return found;
}

async function load() {
  const { job, a, b } = sides.value;
  if (job === null) return;
  try {
    const [one, other] = await Promise.all([recorded(job, a), recorded(job, b)]);
    if (sides.value.a !== a || sides.value.b !== b) return;
    pair.value = { a: one, b: other, difference: one === other ? null : firstDifference(one.plans, other.plans) };
    pairFailed.value = "";
    fit();
  } catch (error) {
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
function onKey(event) {
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
    painter.draw(view, { cursor: side.at(cursor.value), selected: 0, matches: null, unix: MIDNIGHT, blocks: side.model.start.num_blocks ?? 0 });
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

function Pair() {
  const { results } = told.value.job;
  const { a, b } = sides.value;
  useEffect(() => void load(), [sides.value]);
  useEffect(() => {
    addEventListener("keydown", onKeyShown);
    return () => removeEventListener("keydown", onKeyShown);
  }, []);
  if (pairFailed.value) return h("p", { class: "notice bad", role: "status" }, visible(pairFailed.value));
  const found = pair.value;
  if (!found) return h("p", { class: "quiet" }, "Asking the server for the timelines.");
  const label = (/** @type {number} */ run) => { const result = results.find((/** @type {any} */ each) => each.run === run); return result ? nameOf(result) : "?"; };
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

// ------------------------------------------------------------------ the page

let isShown = false;
/** @param {KeyboardEvent} event */
const onKeyShown = (event) => { if (isShown) onKey(event); };

/** @param {{ shown: boolean }} props */
export function WhatIf({ shown }) {
  isShown = shown;
  const busy = running();
  useEffect(() => {
    // a job that nobody asks for is ended, so it is asked for from another tab of this page too
    if (!shown && !busy) return;
    look();
    const timer = setInterval(look, busy ? 1000 : 5000);
    return () => clearInterval(timer);
  }, [shown, busy, key.value]);
  return h("div", { class: "page what-if" },
    h("h1", null, "What if"),
    failed.value && h("div", { class: "error", role: "alert" }, visible(failed.value)),
    told.value && !refused ? [h(Form, null), h(Progress, null), h(Results, null)] : !failed.value && h("p", { class: "quiet" }, "Asking the server."));
}

// for tests and for whoever asks in the console
/** @type {any} */ (globalThis).pacelineWhatIf = { told, view, cursor, pair, painters };
