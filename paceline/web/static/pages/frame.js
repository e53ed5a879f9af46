// What stands in the head of every page: the name, the theme, the key.
import { effect, h, signal, useEffect, useRef } from "../vendor/preact.js";
import { key, keyWanted, setKey } from "../lib/api.js";
import { local } from "../lib/storage.js";

const theme = signal(local.getItem("paceline-theme") ?? "auto");
effect(() => {
  document.documentElement.dataset.theme = theme.value;
  local.setItem("paceline-theme", theme.value);
});

export const Brand = () => h("span", { class: "brand" },
  h("svg", { viewBox: "0 0 32 32", "aria-hidden": "true" },
    h("path", { d: "M6 22h6V10h6v8h8", fill: "none", stroke: "currentColor", "stroke-width": 3, "stroke-linejoin": "round", "stroke-linecap": "round" })),
  "Paceline");

export const Theme = () => h("label", null, h("span", { class: "hidden" }, "Theme"),
  h("select", { value: theme.value, onChange: (/** @type {any} */ event) => (theme.value = event.target.value) },
    ["auto", "light", "dark"].map((each) => h("option", { value: each }, `Theme: ${each}`))));

/** Where the reader types the key in. @param {{ look: () => void }} props */
export function KeyDialog({ look }) {
  /** @type {{ current: HTMLDialogElement | null }} */
  const dialog = useRef(null);
  const wanted = keyWanted.value;
  useEffect(() => {
    if (wanted && !dialog.current?.open) dialog.current?.showModal();
  }, [wanted]);
  const submit = (/** @type {SubmitEvent} */ event) => {
    event.preventDefault();
    const form = new FormData(/** @type {HTMLFormElement} */ (event.target));
    setKey(String(form.get("key") ?? "").trim(), form.has("keep"));
    dialog.current?.close();
    look();
  };
  return [
    h("button", { type: "button", onClick: () => dialog.current?.showModal() }, key.value ? "API key: set" : "API key"),
    h("dialog", { ref: dialog, "aria-labelledby": "key-title" },
      h("form", { onSubmit: submit },
        h("h2", { id: "key-title" }, "API key"),
        h("p", null, wanted ? "This server asks for a key, or does not know the one you gave." : "It is kept in memory until this page is left or reloaded."),
        h("label", null, h("span", null, "Key"),
          h("input", { name: "key", type: "password", autocomplete: "off", spellcheck: false })),
        h("label", { class: "tick row" }, h("input", { name: "keep", type: "checkbox" }), "Keep it in this tab over reloads"),
        h("div", { class: "row" },
          h("button", { type: "submit", class: "main" }, "Use this key"),
          h("button", { type: "button", onClick: () => dialog.current?.close() }, "Close")))),
  ];
}
