// The conversations that this browser keeps: listed, opened, exported, deleted.
import { h } from "../vendor/preact.js";
import { visible } from "../lib/format.js";
import { forget, forgetAll, kept } from "../lib/conversations.js";

/** @param {any} told @param {string} name */
function download(told, name) {
  const url = URL.createObjectURL(new Blob([JSON.stringify(told, null, 1)], { type: "application/json" }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** @param {{ open: string, choose: (each: import("../lib/conversations.js").Kept) => void, gone: (id: string) => void, idle: boolean }} props */
export function Conversations({ open, choose, gone, idle }) {
  const list = kept.value;
  if (!list.length) return null;
  return h("details", { class: "kept" },
    h("summary", null, `Conversations (${list.length})`),
    h("ul", { class: "said-list" }, list.map((each) => {
      const title = visible(each.title) || "without a title";
      return h("li", { key: each.id },
        h("button", { type: "button", disabled: !idle, "aria-pressed": String(each.id === open), onClick: () => choose(each) },
          title, h("span", { class: "quiet" }, ` ${new Date(each.at).toLocaleDateString()}`)),
        h("button", { type: "button", class: "copy", disabled: !idle, "aria-label": `Delete ${title}`, onClick: () => { forget(each.id); gone(each.id); } }, "Delete"));
    })),
    h("div", { class: "copies" },
      h("button", { type: "button", class: "copy", onClick: () => download(list, "paceline-conversations.json") }, "Export all"),
      h("button", { type: "button", class: "copy", disabled: !idle, onClick: () => { forgetAll(); gone(open); } }, "Delete all"),
      h("span", { class: "quiet" }, "They are kept in this browser alone.")));
}
