// The page of a gateway: its engines, its models and their cascades, and what keys have spent. It only reads.
import { h, render, signal, useEffect } from "./vendor/preact.js";
import { ApiError, getJson, key, keyWanted } from "./lib/api.js";
import { duration, visible } from "./lib/format.js";
import { Brand, KeyDialog, Theme } from "./pages/frame.js";

/** @type {{ value: any }} what /status says, or null */
const told = signal(null);
const failed = signal("");
const state = signal("asking");
// a key that may not see it is not used to ask again
let refused = "";
// questions that were asked, and the last that was answered
let asked = 0, answered = 0;

async function look() {
  if (refused && refused === key.value) return;
  const turn = ++asked;
  try {
    const status = await getJson("/status");
    if (turn < answered) return;
    answered = turn;
    told.value = status;
    failed.value = refused = "";
    state.value = status.draining ? "draining" : "ready";
  } catch (error) {
    if (turn < answered) return;
    answered = turn;
    failed.value = error instanceof ApiError ? error.message : "The gateway does not answer.";
    state.value = keyWanted.value ? "wants a key" : error instanceof ApiError ? "refused" : "no answer";
    if (error instanceof ApiError && error.status === 403) refused = key.value;
    // what was known a moment ago is not what is
    told.value = null;
  }
}

const count = (/** @type {number | null | undefined} */ number) => (number == null ? "–" : number.toLocaleString("en"));
const percent = (/** @type {number | null | undefined} */ share) => (share == null ? "–" : `${Math.round(100 * share)} %`);
const digits = (/** @type {number | null | undefined} */ number) => (number == null ? "–" : String(Number(number.toPrecision(3))));
/** A threshold of 2 stands for one that no score reaches. @param {number | null} threshold */
const threshold = (threshold) => (threshold === 2 ? "none is enough" : digits(threshold));
/** @param {string} name @param {any} value */
const fact = (name, value) => h("tr", null, h("th", { scope: "row" }, name), h("td", null, value));
/** @param {string} id @param {string} title @param {any} content @param {boolean} [wide] */
const card = (id, title, content, wide) => h("section", { class: wide ? "card across" : "card", "aria-labelledby": id }, h("h2", { id }, title), content);
/** @param {string} label @param {string[]} names columns; a text, then numbers @param {any[]} rows */
const table = (label, names, rows) => h("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": `Table of ${label}` }, h("table", { class: "compared" },
  h("thead", null, h("tr", null, names.map((name) => h("th", { scope: "col" }, name)))), h("tbody", null, rows)));
/** @param {string} name @param {any[]} cells */
const row = (name, cells) => h("tr", { key: name }, h("th", { scope: "row" }, visible(name)), cells.map((cell) => h("td", null, cell)));

/** @param {any} found */
function State(found) {
  const engines = Object.values(found.engines), ready = engines.filter((engine) => !["failing", "unreachable", "cooling_down", "draining"].includes(engine.state)).length;
  return h("table", null, h("tbody", null,
    fact("State", found.draining ? h("span", { class: "bad" }, "draining") : "ready"),
    fact("Engines", `${ready} of ${engines.length} take requests`),
    fact("At engines", count(engines.reduce((sum, engine) => sum + engine.requests, 0))), fact("Waiting here", count(found.waiting)),
    fact("Retries left", count(found.retry_budget)), fact("Version", found.version)));
}

/** @param {any} found */
function Engines(found) {
  const pools = Object.entries(found.pools).map(([name, ago]) => `${visible(name)}: ${ago === null ? "its controller was not heard yet" : `heard ${duration(1e3 * ago)} ago`}`);
  return [
    pools.length > 0 && h("p", { class: "quiet" }, `Pools: ${pools.join("; ")}.`),
    table("engines", ["Engine", "Pool", "State", "Here", "Running", "Waiting", "KV", "Pressure", "Why"],
      Object.entries(found.engines).map(([name, engine]) => row(name, [
        visible(engine.pool ?? "–"), h("span", { class: engine.state === "ready" ? "" : "bad" }, engine.state.replaceAll("_", " ")), count(engine.requests),
        count(engine.pressure?.running), count(engine.pressure?.waiting), percent(engine.pressure?.kv), engine.memory_pressure ? h("span", { class: "bad" }, "memory") : engine.pressure?.level ?? "–",
        visible(engine.trouble ?? "")]))),
  ];
}

/** @param {any} found */
function Models(found) {
  const names = [...new Set([...Object.keys(found.cascades), ...Object.keys(found.models)])];
  if (!names.length) return h("p", { class: "quiet" }, "No model has a cascade, and nothing that has a price was asked for yet.");
  const money = (/** @type {any} */ amount) => (Number(amount) ? `${digits(Number(amount))} ${found.currency}` : "–");
  return table("models", ["Model", "Spent", "Saved", "Small first", "Handed off", "Small", "Escalated", "Large", "Score", "Threshold", "Bound", "Audited loss", "Wasted tokens"],
    names.map((name) => {
      const cascade = found.cascades[name];
      return row(name, [money(found.models[name]?.spent), ...(cascade ? [
        money(cascade.saved), `${visible(cascade.small)} (${cascade.mode})`, percent(cascade.handed_off), ...["small", "escalated", "large"].map((who) => count(cascade.answered[who])),
        digits(cascade.score), threshold(cascade.threshold), digits(cascade.max_loss),
        cascade.alarm ? h("span", { class: "bad" }, `${digits(cascade.audited_loss)}, above the bound`) : digits(cascade.audited_loss), count(cascade.wasted_tokens),
      ] : Array(11).fill("–"))]);
    }));
}

/** @param {any} found */
function Keys(found) {
  const keys = Object.entries(found.spend);
  if (!keys.length) return h("p", { class: "quiet" }, "No key has a budget or has spent anything today.");
  return table("keys", ["Key", "Spent", "Budget"], keys.map(([name, each]) => row(name, [`${digits(Number(each.spent))} ${each.currency}`, each.budget ?? "none: today's spending"])));
}

function App() {
  const with_ = key.value, found = told.value;
  useEffect(() => {
    look();
    const timer = setInterval(() => document.hidden || keyWanted.value || look(), 2000);
    return () => clearInterval(timer);
  }, [with_]);
  return [
    h("a", { class: "skip", href: "#main" }, "Skip to the page"),
    h("header", null,
      h(Brand, null),
      h("span", { class: "state", role: "status" },
        h("span", { class: failed.value ? "dot off" : "dot", "aria-hidden": "true" }),
        state.value),
      h("div", { class: "tools" }, h(Theme, null), h(KeyDialog, { look }))),
    h("main", { id: "main", tabIndex: -1 }, h("div", { class: "page" },
      h("h1", null, "Gateway"),
      failed.value && h("div", { class: "error", role: "alert" }, visible(failed.value)),
      !found && !failed.value && h("p", { class: "quiet" }, "Asking the gateway."),
      found && h("div", { class: "cards" },
        card("state", "State", State(found)), card("keys", "Keys", Keys(found)),
        card("models", "Models", Models(found), true), card("engines", "Engines", Engines(found), true)))),
  ];
}

render(h(App, null), /** @type {Element} */ (document.getElementById("app")));
