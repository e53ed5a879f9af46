// The shell: tabs, what the server is, and the page that the address names.
import { h, render, signal, useEffect, useLayoutEffect, useRef } from "./vendor/preact.js";
import { call, getJson, key, keyWanted } from "./lib/api.js";
import { Brand, KeyDialog, Theme } from "./pages/frame.js";
import { Playground } from "./pages/playground.js";
import { Timeline } from "./pages/timeline.js";
import { Server } from "./pages/server.js";

/**
 * A page whose module is fetched when it is first shown.
 * @param {() => Promise<any>} load @param {string} name
 */
function lazy(load, name) {
  /** @type {{ value: any }} */
  const found = signal(null);
  const failed = signal(false);
  return (/** @type {{ shown: boolean }} */ props) => {
    useEffect(() => {
      if (props.shown && !found.value) load().then((module) => { found.value = { page: module[name] }; failed.value = false; }, () => (failed.value = true));
    }, [props.shown]);
    if (found.value) return h(found.value.page, props);
    return h("p", { class: "pad quiet" }, failed.value ? "This page did not come. Reload to try again." : "Asking the server.");
  };
}

const TABS = [
  { name: "playground", title: "Playground", page: Playground },
  { name: "timeline", title: "Timeline", page: Timeline },
  { name: "promises", title: "Promises", page: lazy(() => import("./pages/promises.js"), "Promises") },
  { name: "what-if", title: "What if", page: lazy(() => import("./pages/what-if.js"), "WhatIf") },
  { name: "server", title: "Server", page: Server },
  { name: "operations", title: "Operations", page: lazy(() => import("./pages/operations.js"), "Operations") },
];

/** @returns {string} the tab that the address names */
const named = () => location.pathname.replace(/^.*\/ui\/?/, "").split("/")[0] || TABS[0].name;
const tab = signal(named());
/** How far each page is scrolled: they share one window. @type {Record<string, number>} */
const scrolled = {};
/** @param {string} name */
function show(name) {
  scrolled[tab.value] = scrollY;
  tab.value = name;
}
addEventListener("popstate", () => show(named()));

/** @type {{ value: any }} what /v1/models says, or null */
const server = signal(null);
const problem = signal("");
async function look() {
  const of = key.value;
  try {
    const [models, version] = await Promise.all([getJson("/v1/models"), getJson("/version")]);
    await call("/health");
    server.value = { model: models.data[0].id, version: version.version };
    problem.value = "";
  } catch (error) {
    // what the key before was refused says nothing of this one
    if (of !== key.value) return;
    problem.value = keyWanted.value ? "wants a key" : error instanceof TypeError ? "no answer" : "not ready";
  }
}

const KEYS = [
  ["Enter", "send (Shift+Enter: a new line)"],
  ["Esc", "stop the answer that is coming"],
  ["← →", "go from token to token, in token probabilities"],
  ["Space", "timeline: stop, or go on live"],
  ["← →", "timeline: one step (Shift: ten)"],
  ["↑ ↓", "timeline: another request of that step"],
  ["W S", "timeline: zoom"],
  ["A D", "timeline: pan"],
  ["Home End", "timeline: the oldest step, live"],
  ["/", "timeline: find a request by its id"],
  ["Enter", "timeline: to the chosen request's story"],
  ["T", "timeline: as a table"],
  ["← → W S A D", "what if: both timelines"],
  ["?", "this help"],
];

function Help() {
  /** @type {{ current: HTMLDialogElement | null }} */
  const dialog = useRef(null);
  useEffect(() => {
    const open = (/** @type {KeyboardEvent} */ event) => {
      const typing = event.target instanceof HTMLElement && event.target.matches("input, textarea, select");
      if (event.key === "?" && !typing) dialog.current?.showModal();
    };
    addEventListener("keydown", open);
    return () => removeEventListener("keydown", open);
  }, []);
  return [
    h("button", { type: "button", class: "for-keys", onClick: () => dialog.current?.showModal() }, "Keys ", h("kbd", null, "?")),
    h("dialog", { ref: dialog, "aria-labelledby": "keys-title" },
      h("h2", { id: "keys-title" }, "Keys"),
      h("table", null, h("tbody", null, KEYS.map(([name, what]) =>
        h("tr", null, h("th", { scope: "row" }, h("kbd", null, name)), h("td", null, what))))),
      h("div", { class: "row" }, h("button", { type: "button", onClick: () => dialog.current?.close() }, "Close"))),
  ];
}

/** @param {MouseEvent} event @param {string} name */
function go(event, name) {
  if (event.metaKey || event.ctrlKey || event.shiftKey || event.button) return;
  // without a reload, which would forget the key and the conversation
  event.preventDefault();
  history.pushState(null, "", name);
  show(name);
}

function App() {
  const shown = TABS.find((each) => each.name === tab.value);
  useEffect(() => {
    document.title = `${shown?.title ?? "Not found"} · Paceline`;
  });
  // before the page is painted: one frame would show it as far scrolled as the page before it
  useLayoutEffect(() => scrollTo(0, scrolled[tab.value] ?? 0), [tab.value]);
  return [
    h("a", { class: "skip", href: "#main" }, "Skip to the page"),
    h("header", null,
      h(Brand, null),
      h("nav", { "aria-label": "Pages" }, TABS.map(({ name, title }) =>
        h("a", { href: name, "aria-current": tab.value === name ? "page" : undefined,
          onClick: (/** @type {MouseEvent} */ event) => go(event, name) }, title))),
      h("span", { class: "state", role: "status" },
        h("span", { class: problem.value ? "dot off" : "dot", "aria-hidden": "true" }),
        problem.value || (server.value ? "ready" : "asking"),
        server.value && h("b", null, server.value.model)),
      h("div", { class: "tools" },
        h(Theme, null),
        h(KeyDialog, { look }),
        h(Help, null))),
    h("main", { id: "main", tabIndex: -1 },
      // kept while hidden, so that a conversation outlives a look at another page
      TABS.map(({ name, page }) => h("div", { hidden: tab.value !== name, key: name }, h(page, { shown: tab.value === name }))),
      !shown && h("p", { class: "pad" }, "There is no such page here.")),
  ];
}

render(h(App, null), /** @type {Element} */ (document.getElementById("app")));
look();
setInterval(() => document.hidden || keyWanted.value || look(), 5000);
