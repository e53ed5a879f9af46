import assert from "node:assert/strict";
import { beforeEach, test } from "node:test";

/** @type {Map<string, string>} */
const held = new Map();
let room = Infinity;
const storage = {
  getItem: (/** @type {string} */ key) => held.get(key) ?? null,
  setItem: (/** @type {string} */ key, /** @type {string} */ value) => {
    if (value.length > room) throw new DOMException("full", "QuotaExceededError");
    held.set(key, value);
  },
  removeItem: (/** @type {string} */ key) => held.delete(key),
};
Object.defineProperty(globalThis, "localStorage", { value: storage, configurable: true });
// a browser that blocks cookies
Object.defineProperty(globalThis, "sessionStorage", { configurable: true, get: () => { throw new DOMException("denied", "SecurityError"); } });
const { forgetAll, keep, kept, openHere, setOpen } = await import("../../paceline/web/static/lib/conversations.js");

const KEY = "paceline-conversations";
const said = (/** @type {string} */ content) => [{ role: "user", content }, { role: "assistant", content: "yes" }];
const stored = () => JSON.parse(held.get(KEY) ?? "[]").map((/** @type {{ id: string }} */ { id }) => id);

beforeEach(() => {
  room = Infinity;
  forgetAll();
});

test("a full browser loses the oldest, and nothing for one that is too long by itself", () => {
  for (const id of ["a", "b", "c"]) keep(id, "", said(id));
  room = (held.get(KEY) ?? "").length;
  keep("d", "", said("d"));
  assert.deepEqual(stored(), ["d", "c"]);
  assert.deepEqual(kept.value.map(({ id }) => id), ["d", "c"]);
  keep("long", "", said("x".repeat(room)));
  assert.deepEqual(stored(), ["d", "c"]);
});

test("what another page keeps under the name is left out", () => {
  keep("a", "", said("a"));
  held.set(KEY, JSON.stringify([{ id: "x", turns: [{ role: "user", content: { html: 1 } }] }, null, 3, { id: "y", turns: [] }, ...JSON.parse(held.get(KEY) ?? "")]));
  keep("b", "", said("b"));
  assert.deepEqual(stored(), ["b", "a"]);
});

test("a tab without storage still knows what is open, until it is reloaded", () => {
  keep("a", "", said("a"));
  setOpen("a");
  assert.equal(openHere()?.id, "a");
  setOpen("");
  assert.equal(openHere(), undefined);
});
