// The timeline as tables, the same in words: requests, steps, who stands at the door; and all of it as a trace.
import { h, signal } from "../vendor/preact.js";
import { duration, visible } from "../lib/format.js";
import { save, stepsOf, traceOf } from "../timeline/chrome.js";
import { REASONS } from "../timeline/decode.js";
import { CAPACITY, COLUMN } from "../timeline/history.js";
import { history, model } from "../timeline/live.js";
import { cursor, drawing, everybody, filter, fits, live, order, selected, table, view, words } from "../timeline/shown.js";
import { margin } from "../timeline/slack.js";
import { firstToken, missed, nameOf, short, stateOf, waited } from "../timeline/story.js";

const saved = signal("");
/** A trace of all that this page remembers. */
async function exported() {
  const trace = traceOf(stepsOf(history, CAPACITY), everybody(), model.now);
  const left = trace.otherData.left_out;
  await save(trace, `paceline-timeline${left ? `-without-${left}-slices` : ""}.json.gz`);
  saved.value = `Saved${left ? ` without the oldest ${left} slices` : ""}. Open it in ui.perfetto.dev: that reads it on your computer and uploads nothing.`;
}
const COLUMNS = [
  ["came", "Came"], ["id", "Request"], ["slo", "Class"], ["state", "State"], ["prompt", "Prompt"], ["waited", "Waited"], ["first", "First token"],
  ["left", "Time left"], ["tenant", "Tenant"], ["preempted", "Preempted"],
];
/** Seconds until something of it is due, as of the newest step; none of one that has ended. @param {import("../timeline/model.js").Seen} seen */
const leftOf = (seen) => (seen.ended ? NaN : margin(seen, model.now));

export function Tables() {
  words.value;
  const shown = table.value;
  const tab = (/** @type {string} */ name, /** @type {string} */ label) => h("button", { type: "button", "aria-pressed": String(shown === name), onClick: () => (table.value = shown === name ? "" : name) }, label);
  return h("section", { class: "tables", "aria-label": "The same as tables" },
    h("div", { class: "row" }, tab("requests", "Table of requests"), tab("steps", "Table of steps"),
      h("button", { type: "button", onClick: exported }, "Save as a trace"), h("span", { class: "quiet", role: "status" }, saved.value)),
    h(Door, null), shown === "requests" && h(RequestTable, null), shown === "steps" && h(StepTable, null));
}

/** Who stands before the queue, and who was sent away from there. */
function Door() {
  words.value;
  if (!model.numHeld && !model.numRefused) return null;
  const clock = (/** @type {number} */ time) => new Date(1e3 * (time + (model.hello.unix ?? 0))).toLocaleTimeString([], { hour12: false });
  const held = model.held.map(([id, slo, , arrival]) => `${short(visible(String(id)))} (${visible(String(slo))}) for ${duration(1e3 * Math.max(0, model.now - arrival))}`);
  const refused = model.refused.slice(-5).reverse().map(([id, slo, , time, why]) => `${short(visible(String(id)))} (${visible(String(slo))}) at ${clock(time)}: ${visible(String(why))}`);
  return h("div", { class: "door quiet" },
    model.numHeld > 0 && h("p", null, `${model.numHeld} wait for their grammar, before the queue: ${held.slice(0, 5).join(", ")}${model.numHeld > 5 ? ", …" : ""}.`),
    model.numRefused > 0 && h("p", null, `${model.numRefused} refused at the door since this page came. The last: ${refused.join("; ")}.`));
}

function RequestTable() {
  words.value;
  const text = filter.value.trim().toLowerCase();
  const place = drawing.painter?.place(view);
  const from = live.value || !place ? -Infinity : history.planned[Math.max(history.first, place.first) % CAPACITY];
  const to = live.value || !place ? Infinity : history.planned[Math.max(0, place.last - 1) % CAPACITY];
  const rows = everybody()
    .filter((seen) => (!text || fits(seen, text)) && (seen.told?.arrival ?? 0) <= to && (seen.ended?.when ?? Infinity) >= from)
    .map((seen) => ({ seen, came: seen.told?.arrival ?? 0, id: nameOf(seen), slo: visible(seen.told?.slo ?? ""), state: stateOf(seen), prompt: seen.told?.prompt ?? 0,
      waited: waited(seen, model.now), first: firstToken(seen) ?? Infinity, preempted: seen.preemptions,
      left: Number.isNaN(leftOf(seen)) ? Infinity : leftOf(seen), tenant: visible(seen.told?.tenant ?? "") }));
  const { column, up } = order.value;
  rows.sort((a, b) => {
    const [x, y] = [/** @type {any} */ (a)[column], /** @type {any} */ (b)[column]];
    return (x < y ? -1 : x > y ? 1 : 0) * (up ? 1 : -1);
  });
  const most = 100;
  return h("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": "Requests" }, h("table", null,
    h("caption", null, rows.length > most ? `${most} of ${rows.length} requests, by the column that is marked` : `${rows.length} requests ${live.value ? "that this page knows" : "in the steps above"}`),
    h("thead", null, h("tr", null, COLUMNS.map(([name, label]) => h("th", { scope: "col", "aria-sort": column === name ? (up ? "ascending" : "descending") : undefined },
      h("button", { type: "button", class: "sorter", onClick: () => (order.value = { column: name, up: column === name && !up }) }, label, column === name ? (up ? " ▴" : " ▾") : ""))))),
    h("tbody", null, rows.slice(0, most).map((each) => h("tr", { key: `${each.seen.number} ${each.came}`, class: selected.value === each.seen ? "chosen" : "" },
      h("td", null, each.came ? new Date(1e3 * (each.came + (model.hello.unix ?? 0))).toLocaleTimeString([], { hour12: false }) : "before"),
      h("td", null, h("button", { type: "button", class: "link code", onClick: () => { selected.value = each.seen; drawing.redraw(); }, title: each.id }, short(each.id))),
      h("td", null, each.slo), h("td", null, each.state), h("td", { class: "num" }, each.prompt), h("td", { class: "num" }, duration(1e3 * each.waited)),
      h("td", { class: "num" }, each.first === Infinity ? "–" : `${duration(1e3 * each.first)}${missed(each.seen) ? " missed" : ""}`),
      h("td", { class: "num" }, each.left === Infinity ? "–" : each.left < 0 ? `late by ${duration(-1e3 * each.left)}` : duration(1e3 * each.left)),
      h("td", null, each.tenant || "–"), h("td", { class: "num" }, each.preempted))))));
}

function StepTable() {
  words.value;
  const last = live.value ? history.count : Math.ceil(view.end);
  const rows = [];
  for (let column = last - 1; column >= Math.max(history.first, last - 50); column--) rows.push(column);
  const names = ["Step", "Tokens", "Budget", "Of one", "Chunks", "Took", "Predicted", "Waiting", "Blocked by", "Free blocks"];
  return h("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": "Steps" }, h("table", null,
    h("caption", null, "The 50 steps up to the right edge, the newest first"),
    h("thead", null, h("tr", null, names.map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", null, rows.map((column) => {
      const at = column % CAPACITY;
      if (history.kind[at] !== COLUMN.step) return h("tr", { key: column }, h("td", { colSpan: names.length, class: "bad" }, history.notes.get(column)));
      const took = history.took(column);
      return h("tr", { key: column, class: column === cursor.value ? "chosen" : "" }, [
        history.step[at], history.tokens[at], history.budget[at], history.narrow[at], history.wide[at], Number.isNaN(took) ? "under way" : duration(1e3 * took),
        history.predicted[at] ? duration(1e3 * history.predicted[at]) : "–", history.waiting[at], REASONS[history.held[at]] ?? "–", history.free[at],
      ].map((value) => h("td", null, value)));
    }))));
}
