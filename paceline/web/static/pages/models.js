// Several models in one server: a row each, and what loads, unloads and pins them.
import { h, signal } from "../vendor/preact.js";
import { call } from "../lib/api.js";
import { visible } from "../lib/format.js";

const failed = signal("");

/**
 * @param {string} path
 * @param {Record<string, unknown>} body
 * @param {() => void} done
 */
async function change(path, body, done) {
  try {
    await call(path, { method: "POST", body: JSON.stringify(body) });
    failed.value = "";
  } catch (error) {
    failed.value = error instanceof Error ? error.message : String(error);
  }
  done();
}

/** @param {Record<string, number>} bytes */
const sum = (bytes) => Object.values(bytes).reduce((all, each) => all + each, 0);
/** @param {number} bytes */
const mebibytes = (bytes) => Math.round(bytes / 2 ** 20).toLocaleString("en");
/** @param {any} model */
const isResident = (model) => ["ready", "draining", "loading"].includes(model.status.value);

/**
 * Whether the cards of /v1/models are those of a server of several.
 * @param {any[]} models
 */
export function areSeveral(models) {
  return models.some((each) => typeof each.status === "object" && each.status !== null && "bytes" in each.status);
}

/** @param {{ models: any[], look: () => void }} props */
export function Models({ models, look }) {
  return h("div", null,
    failed.value && h("div", { class: "error", role: "alert" }, visible(failed.value)),
    h(Ledger, { resident: models.filter(isResident), memory: models[0].status.memory }),
    h("table", null,
      h("thead", null, h("tr", null, ["Model", "State", "Requests", "Waiting", "MiB", "Load, s", ""].map((name) => h("th", { scope: "col", key: name }, name)))),
      h("tbody", null, models.map((model) => h(Row, { model, look, key: model.id })))));
}

/**
 * The memory for models, and what each in memory takes of it.
 * @param {{ resident: any[], memory: number }} props
 */
function Ledger({ resident, memory }) {
  const taken = resident.map((model) => sum(model.status.bytes));
  const free = Math.max(0, memory - taken.reduce((all, each) => all + each, 0));
  return h("div", null,
    h("p", { class: "quiet" }, `${mebibytes(memory - free)} of ${mebibytes(memory)} MiB`),
    h("div", { class: "bar", "aria-hidden": "true" },
      resident.map((model, at) => h("span", { class: `reason${at % 6}`, title: `${visible(model.id)}: ${mebibytes(taken[at] ?? 0)} MiB`, style: { flex: `${taken[at]} 0 0` } })),
      h("span", { style: { flex: `${free} 0 0` } })));
}

/** @param {{ model: any, look: () => void }} props */
function Row({ model, look }) {
  const { id, status } = model;
  const resident = isResident(model);
  const state = status.value === "loading" ? `loading ${Math.round(100 * status.progress)} %` : status.value;
  /** @param {string} name @param {string} path @param {Record<string, unknown>} more */
  const button = (name, path, more = {}) =>
    h("button", { type: "button", "aria-label": `${name} ${visible(id)}`, onClick: () => change(path, { model: id, ...more }, look) }, name);
  return h("tr", null,
    h("th", { scope: "row" }, visible(id)),
    h("td", { title: visible(status.reason ?? "") }, state),
    h("td", null, String(status.requests)),
    h("td", null, String(status.waiting)),
    h("td", null, resident ? mebibytes(sum(status.bytes)) : ""),
    h("td", null, status.load_seconds.toFixed(2)),
    h("td", null,
      resident ? button("Unload", "/models/unload") : button("Load", "/models/load"),
      " ",
      status.pinned ? button("Unpin", "/models/pin", { pinned: false }) : button("Pin", "/models/pin", { pinned: true })));
}
