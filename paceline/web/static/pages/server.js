// What this server is, how it does now, and its batches.
import { h, signal, useEffect } from "../vendor/preact.js";
import { ApiError, call, getJson, key } from "../lib/api.js";
import { visible } from "../lib/format.js";
import { Models, areSeveral } from "./models.js";

/** @type {{ value: any }} */
const models = signal(null);
/** @type {{ value: any }} */
const load = signal(null);
/** @type {{ value: any }} a list, or the reason why there is none */
const batches = signal(null);
const failed = signal("");
// a server without a place for batches is not asked for them again
let unserved = false;
// the key that was asked with, the questions asked, and the last one that was answered
let askedWith = "", asked = 0, answered = 0;
const ENDED = ["completed", "failed", "cancelled", "expired", "cancelling"];

async function look() {
  try {
    models.value = (await getJson("/v1/models")).data;
    load.value = (await getJson("/load")).server_load;
    failed.value = "";
  } catch (error) {
    failed.value = error instanceof ApiError ? error.message : "The server does not answer.";
    return;
  }
  await lookAtBatches();
}

export async function lookAtBatches() {
  // batches are a key's own
  if (askedWith !== key.value) {
    batches.value = null;
    unserved = false;
  }
  if (unserved) return;
  askedWith = key.value;
  const of = key.value, turn = ++asked;
  /** An answer for another key, or to an earlier question than one that was answered, is not shown. */
  const isLate = () => key.value !== of || turn < answered;
  try {
    const { data } = await getJson("/v1/batches?limit=50");
    if (isLate()) return;
    batches.value = data;
  } catch (error) {
    if (isLate()) return;
    batches.value = error instanceof ApiError ? error.message : "The server does not answer.";
    unserved = error instanceof ApiError && error.status === 501;
  }
  answered = turn;
}

/** @param {string} id */
async function cancel(id) {
  try {
    await call(`/v1/batches/${encodeURIComponent(id)}/cancel`, { method: "POST", body: "{}" });
  } catch (error) {
    failed.value = error instanceof Error ? error.message : String(error);
  }
  await look();
}

export function Batches() {
  const found = batches.value;
  if (found === null) return h("p", { class: "quiet" }, "Asking the server.");
  if (typeof found === "string") return h("p", { class: "quiet" }, found);
  if (!found.length) return h("p", { class: "quiet" }, "There is none. docs/use/batches.md says how to make one.");
  const columns = ["Batch", "Status", "Done", "Failed", "Of", ""];
  return h("div", { class: "scroll" }, h("table", null,
    h("thead", null, h("tr", null, columns.map((name) => h("th", { scope: "col" }, name || h("span", { class: "hidden" }, "Actions"))))),
    h("tbody", null, found.map((/** @type {any} */ batch) => h("tr", { key: batch.id },
      h("td", { class: "code" }, visible(batch.id)),
      h("td", null, batch.status),
      h("td", null, batch.request_counts?.completed ?? 0),
      h("td", null, batch.request_counts?.failed ?? 0),
      h("td", null, batch.request_counts?.total ?? 0),
      h("td", null, !ENDED.includes(batch.status) &&
        h("button", { type: "button", "aria-label": `Cancel ${batch.id}`, onClick: () => cancel(batch.id) }, "Cancel")))))));
}

/** @param {{ shown: boolean }} props */
export function Server({ shown }) {
  const with_ = key.value;
  useEffect(() => {
    if (!shown) return;
    look();
    const timer = setInterval(() => document.hidden || look(), 2000);
    return () => clearInterval(timer);
  }, [shown, with_]);
  return h("div", { class: "page" },
    h("h1", null, "Server"),
    failed.value && h("div", { class: "error", role: "alert" }, visible(failed.value)),
    h("div", { class: "cards" },
      h("section", { class: "card", "aria-labelledby": "models" },
        h("h2", { id: "models" }, models.value !== null && areSeveral(models.value) ? "Models" : "Model"),
        models.value === null ? h("p", { class: "quiet" }, "Asking the server.") :
          areSeveral(models.value) ? h(Models, { models: models.value, look }) :
          h("table", null, h("tbody", null,
            h("tr", null, h("th", { scope: "row" }, "Names"), h("td", null, models.value.map((/** @type {any} */ each) => visible(each.id)).join(", "))),
            h("tr", null, h("th", { scope: "row" }, "Context"), h("td", null, `${models.value[0].max_model_len} tokens`)),
            h("tr", null, h("th", { scope: "row" }, "Vocabulary"), h("td", null, `${models.value[0].meta.n_vocab} tokens`)),
            h("tr", null, h("th", { scope: "row" }, "Requests now"), h("td", null, String(load.value ?? "unknown")))))),
      h("section", { class: "card", "aria-labelledby": "batches" },
        h("h2", { id: "batches" }, "Batches"), h(Batches, null))));
}
