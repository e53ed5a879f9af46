// The state of this server for its operators: keys and their usage, the model, settings, batches. It only reads.
import { h, signal, useEffect } from "../vendor/preact.js";
import { ApiError, getJson, key } from "../lib/api.js";
import { duration, visible } from "../lib/format.js";
import { Batches, lookAtBatches } from "./server.js";

/** @type {{ value: any }} what /ui/api/operations says, or null */
const told = signal(null);
const failed = signal("");
const find = signal("");
// a key that may not see it is not used to ask again
let refused = "";
// questions that were asked, and the last that was answered: an answer that comes behind a later
// question's is not shown
let asked = 0, answered = 0;
let typed = 0;

async function look() {
  if (refused && refused === key.value) return;
  const turn = ++asked;
  try {
    const found = await getJson(`/ui/api/operations?find=${encodeURIComponent(find.value.trim())}`);
    if (turn < answered) return;
    answered = turn;
    told.value = found;
    failed.value = refused = "";
  } catch (error) {
    if (turn < answered) return;
    answered = turn;
    failed.value = error instanceof ApiError ? error.message : "The server does not answer.";
    if (error instanceof ApiError && error.status === 403) refused = key.value;
    // what was known a moment ago is not what is
    told.value = null;
    return;
  }
  await lookAtBatches();
}

/** Seconds in the unit that fits. @param {number} seconds */
function span(seconds) {
  if (seconds < 120) return duration(1e3 * seconds);
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : seconds < 172_800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86_400)} days`;
}
const count = (/** @type {number} */ number) => number.toLocaleString("en");
/** @param {string} name @param {any} value */
const fact = (name, value) => value !== "" && value != null && h("tr", null, h("th", { scope: "row" }, name), h("td", null, value));
/** @param {string} id @param {string} title @param {any} content @param {boolean} [wide] */
const card = (id, title, content, wide) => h("section", { class: wide ? "card across" : "card", "aria-labelledby": id }, h("h2", { id }, title), content);

/** @param {{ state: any, version: string }} props */
function State({ state, version }) {
  const failures = Object.entries(state.engine_failures).map(([why, times]) => `${times} × ${why}`).join(", ");
  const now = state.dead ? `the engine is gone for good: ${state.dead}`
    : state.draining ? `draining: what runs has ${span(state.drain_timeout)} to end, nothing new is taken`
      : !state.engine_up ? "another engine is being started" : state.ready ? "ready" : "not ready";
  return h("table", null, h("tbody", null,
    fact("State", h("span", { class: state.ready ? "" : "bad" }, visible(now))),
    fact("Requests under way", count(state.in_flight)),
    fact("At a stop", `they get ${span(state.drain_timeout)} to end`),
    fact("Since", new Date(1e3 * state.started).toLocaleString([], { hour12: false })),
    fact("Engines that failed", failures), state.requests_sent_again > 0 && fact("Requests sent to the next engine", count(state.requests_sent_again)),
    state.requests_lost > 0 && fact("Requests lost with one", count(state.requests_lost)),
    fact("Version", version)));
}

/** @param {{ models: string[], engine: any }} props */
function Model({ models, engine }) {
  const memory = (engine.num_blocks * engine.block_bytes) / 2 ** 20;
  return h("table", null, h("tbody", null,
    fact("Names", models.map(visible).join(", ")), fact("Model", visible(engine.model)), fact("Backend", `${engine.backend} on ${engine.device}`),
    fact("Weights, KV cache", `${engine.dtype}, ${engine.kv_dtype}`), fact("Why", visible(engine.choice)), fact("Context", `${count(engine.max_model_len)} tokens`),
    fact("KV cache", `${count(engine.num_blocks * engine.block_size)} tokens in ${count(engine.num_blocks)} blocks${memory >= 1 ? `, ${count(Math.round(memory))} MiB` : ""}`),
    fact("Prefix caching", engine.enable_prefix_caching ? "on" : "off"), fact("Policy", engine.policy),
    fact("At once", `${count(engine.max_num_seqs)} requests, ${count(engine.max_num_batched_tokens)} tokens a step`),
    fact("May wait", engine.max_num_waiting === null ? "any number" : count(engine.max_num_waiting)), fact("NUMA nodes", engine.numa_nodes)));
}

/** @param {{ limits: any }} props */
function Limits({ limits }) {
  const { requests, tokens, concurrent } = limits.default;
  const refusals = Object.entries(limits.refused ?? {}).filter(([, times]) => times).map(([kind, times]) => `${times} for ${kind}`);
  return h("table", null, h("tbody", null,
    fact("Requests", requests?.rate ?? "no limit"), fact("Tokens", tokens?.rate ?? "no limit"), fact("At once", concurrent?.limit ?? "no limit"),
    fact("Counted in", limits.storage && (limits.storage_up === false ? h("span", { class: "bad" }, `${limits.storage}, which does not answer: this server counts by itself`) : limits.storage)),
    limits.refused && fact("Refused so far", refusals.join(", ") || "none")));
}

/** @param {any} limit @param {boolean} own */
function used(limit, own) {
  if (!limit) return "no limit";
  const full = limit.used >= limit.limit;
  return [h("span", { class: full ? "bad" : "" }, `${count(limit.used ?? 0)} of ${limit.rate ?? count(limit.limit)}`), own && h("span", { class: "quiet" }, " own"),
    limit.used > 0 && limit.reset_s > 0 && h("span", { class: "quiet" }, `, all free in ${span(limit.reset_s)}`)];
}

/** @param {{ keys: any[], all: number, found: number }} props */
function Keys({ keys, all, found }) {
  if (!all) return h("p", { class: "quiet" }, "This server asks for no key; --api-key-file gives it some (docs/operate/security.md).");
  const names = ["Name", "Scope", "Requests", "Tokens", "At once", "Under way", "Served", "Tokens read", "Tokens written"];
  return [
    h("label", { class: "find" }, h("span", null, "Name holds"), h("input", { type: "search", value: find.value, autocomplete: "off", spellcheck: false,
      onInput: (/** @type {any} */ event) => { find.value = event.target.value; clearTimeout(typed); typed = setTimeout(look, 150); } })),
    h("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": "Keys" }, h("table", null,
      h("caption", null, keys.length < found ? `${keys.length} of ${found} keys: type a part of a name for others` : `${found} of ${all} keys`),
      h("thead", null, h("tr", null, names.map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", null, keys.map((each) => h("tr", { key: each.name },
        h("td", { class: "code" }, visible(each.name)), h("td", null, each.scope),
        ["requests", "tokens", "concurrent"].map((kind) => h("td", null, used(each.limits[kind], each.own.includes(kind)))),
        h("td", { class: "num" }, count(each.running)),
        ["requests", "prompt_tokens", "output_tokens"].map((kind) => h("td", { class: "num" }, each.served ? count(each.served[kind]) : "–"))))))),
  ];
}

/** @param {{ settings: any[] }} props */
function Settings({ settings }) {
  if (!settings.length) return h("p", { class: "quiet" }, "Everything is as it is without flags.");
  return h("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": "Settings" }, h("table", null,
    h("thead", null, h("tr", null, ["Flag", "Value", "Without it"].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", null, settings.map(({ flag, value, default: without }) => h("tr", { key: flag },
      h("td", { class: "code" }, flag), h("td", { class: "code" }, value ? visible(value) : "given"), h("td", { class: "code" }, visible(without) || "–"))))));
}

/** @param {{ shown: boolean }} props */
export function Operations({ shown }) {
  const with_ = key.value;
  useEffect(() => {
    if (!shown) return;
    look();
    const timer = setInterval(() => document.hidden || look(), 3000);
    return () => clearInterval(timer);
  }, [shown, with_]);
  const found = told.value;
  return h("div", { class: "page" },
    h("h1", null, "Operations"),
    failed.value && h("div", { class: "error", role: "alert" }, visible(failed.value)),
    !found && !failed.value && h("p", { class: "quiet" }, "Asking the server."),
    found && h("div", { class: "cards" },
      card("op-state", "State", h(State, { state: found.state, version: found.version })),
      card("op-model", "Model", h(Model, { models: found.models, engine: found.engine })),
      card("op-limits", found.num_keys ? "Limits of a key without its own" : "Limits of an address", h(Limits, { limits: found.limits })),
      card("op-settings", "Settings that were given", h(Settings, { settings: found.settings }), true),
      card("op-keys", "Keys", h(Keys, { keys: found.keys, all: found.num_keys, found: found.num_found }), true),
      card("op-batches", "Batches of this key", h(Batches, null), true)));
}
