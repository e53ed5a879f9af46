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
function mebibytes(bytes) {
  const total = Object.values(bytes).reduce((sum, each) => sum + each, 0);
  return Math.round(total / 2 ** 20).toLocaleString("en");
}

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
    h("table", null,
      h("thead", null, h("tr", null, ["Model", "State", "Requests", "Waiting", "MiB", "Load, s", ""].map((name) => h("th", { scope: "col", key: name }, name)))),
      h("tbody", null, models.map((model) => h(Row, { model, look, key: model.id })))));
}

/** @param {{ model: any, look: () => void }} props */
function Row({ model, look }) {
  const { id, status } = model;
  const resident = ["ready", "draining", "loading"].includes(status.value);
  const state = status.value === "loading" ? `loading ${Math.round(100 * status.progress)} %` : status.value;
  /** @param {string} name @param {string} path @param {Record<string, unknown>} more */
  const button = (name, path, more = {}) =>
    h("button", { type: "button", "aria-label": `${name} ${visible(id)}`, onClick: () => change(path, { model: id, ...more }, look) }, name);
  return h("tr", null,
    h("th", { scope: "row" }, visible(id)),
    h("td", { title: visible(status.reason ?? "") }, state),
    h("td", null, String(status.requests)),
    h("td", null, String(status.waiting)),
    h("td", null, resident ? mebibytes(status.bytes) : ""),
    h("td", null, status.load_seconds.toFixed(2)),
    h("td", null,
      resident ? button("Unload", "/models/unload") : button("Load", "/models/load"),
      " ",
      status.pinned ? button("Unpin", "/models/pin", { pinned: false }) : button("Pin", "/models/pin", { pinned: true })));
}
