// How lanes are coloured and arranged: what the reader chose, the two fields for it, and what the colours stand for.
import { h, signal } from "../vendor/preact.js";
import { visible } from "../lib/format.js";
import { arranged, BY, Names, tinted } from "./groups.js";
import { CLASSES } from "./history.js";
import { BINS } from "./slack.js";

const COLOURS = ["state", "class", "tenant", "slack"];
const query = new URLSearchParams(location.search);
/** @param {string} name @param {string[]} known */
const asked = (name, known) => (known.includes(query.get(name) ?? "") ? String(query.get(name)) : known[0]);
export const colourBy = signal(asked("colour", COLOURS));
export const groupBy = signal(asked("group", BY));
/** The names that have colours, of each kind. */
const names = { class: new Names(), tenant: new Names() };

/**
 * What the painter is told.
 * @param {import("./paint.js").Painter} painter @param {number} column whose lanes are arranged
 * @param {() => Iterable<import("./model.js").Seen>} everybody @param {import("./groups.js").Find} find
 */
export function looks(painter, column, everybody, find) {
  const by = colourBy.value;
  const tint = by === "class" || by === "tenant" ? tinted(everybody(), by, names[by], painter.groupPixels) : null;
  return { tint, bySlack: by === "slack", arrangement: arranged(painter.history, column, painter.laneRows, groupBy.value, find) };
}

/** @param {{ changed: () => void }} props */
export function Looks({ changed }) {
  /** @param {string} label @param {{ value: string }} chosen @param {string[]} known @param {Record<string, string>} said */
  const field = (label, chosen, known, said) => h("label", { class: "look" }, h("span", null, label),
    h("select", { value: chosen.value, onChange: (/** @type {any} */ event) => { chosen.value = event.target.value; changed(); } },
      known.map((name) => h("option", { value: name }, said[name] ?? name))));
  return [
    field("Colour", colourBy, COLOURS, { slack: "time left" }),
    field("Lanes", groupBy, BY, { lane: "as given", class: "by class", tenant: "by tenant", slack: "by time left" }),
  ];
}

/** What the colours of the lanes stand for, where they are not those of states. */
export function LooksLegend() {
  const by = colourBy.value;
  if (by === "slack") {
    return h("span", { class: "legend" }, BINS.map(({ name, colour }) => h("span", null, h("span", { class: `tick-sample ${colour}`, "aria-hidden": "true" }), name)),
      h("span", null, "others have no target, or their first token came before this page"));
  }
  if (by !== "class" && by !== "tenant") return null;
  const known = [...names[by].known.keys()];
  const shown = known.slice(0, known.length > CLASSES ? CLASSES - 1 : CLASSES);
  return h("span", { class: "legend" }, shown.map((name, i) => h("span", null, h("span", { class: `tick-sample class${i}`, "aria-hidden": "true" }), `lane of ${visible(name || "no name")}`)),
    known.length > CLASSES && h("span", null, h("span", { class: `tick-sample class${CLASSES - 1}`, "aria-hidden": "true" }), `lane of ${known.length - CLASSES + 1} others`));
}
