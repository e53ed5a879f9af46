import assert from "node:assert/strict";
import { test } from "node:test";

import { arranged, Names, tinted } from "../../paceline/web/static/timeline/groups.js";
import { History } from "../../paceline/web/static/timeline/history.js";
import { Model } from "../../paceline/web/static/timeline/model.js";
import { BINS, binOf, margin, note } from "../../paceline/web/static/timeline/slack.js";

const ASKED = { arrival: 10, prompt: 100, ttft: null, tpot: null, deadline: null, slo: "standard", tenant: "" };
/** @param {any} told @param {number} computed @returns {any} */
const seen = (told, computed = 0) => ({ number: 1, told: { ...ASKED, ...told }, computed, output: 0, young: false, firstAt: NaN });

test("time left is until the next token that is due, as the engine counts it", () => {
  const one = seen({ ttft: 2, tpot: 0.5 });
  const at = (/** @type {number} */ now, /** @type {number} */ computed) => {
    one.computed = computed;
    note(one, now);
    return margin(one, now);
  };
  assert.equal(at(11, 0), 1);
  assert.equal(at(11.5, 100), 0.5);
  // the first token came, and the next is due half a second later
  assert.equal(at(13, 101), 0.5);
  assert.equal(at(13.2, 102), 13 + 2 * 0.5 - 13.2);
  // preempted, nothing of it is computed any more, and its next token is due as before
  assert.ok(at(15, 0) < -0.9);
  assert.ok(at(15.5, 60) < -1.4);
});

test("where several things are due the first counts, and where nothing is there is nothing", () => {
  assert.ok(Number.isNaN(margin(seen({}), 11)));
  assert.ok(Number.isNaN(margin({ ...seen({}), told: null }, 11)));
  assert.equal(margin(seen({ deadline: 5 }), 11), 4);
  assert.equal(margin(seen({ deadline: 5, ttft: 9 }), 11), 4);
  assert.equal(margin(seen({ deadline: 5, ttft: 2 }), 11), 1);
  // of one whose first token came before this page did, only the whole's end is known
  const late = seen({ ttft: 2, tpot: 0.5, deadline: 5 }, 130);
  note(late, 12);
  assert.equal(margin(late, 12), 3);
});

test("bins go from late to early and leave nothing out", () => {
  assert.deepEqual([-9, -0.1, 0, 0.05, 0.1, 0.99, 1, 99, NaN].map(binOf), [0, 1, 2, 2, 3, 3, 4, 4, -1]);
  assert.equal(BINS.at(-1)?.below, Infinity);
});

test("lanes of a group stand together, those that are due soonest first, free ones last", () => {
  const model = new Model();
  const lanes = [["b", "t2", 3], ["a", "t1", 1], null, ["b", "t1", 2]];
  lanes.forEach((lane, at) => {
    if (!lane) return;
    const told = { ...ASKED, slo: lane[0], tenant: lane[1], deadline: lane[2], arrival: 0 };
    model.requests.set(at + 1, { ...seen({}), number: at + 1, told, lane: at, state: 3, ended: null });
    model.put(at, at + 1);
  });
  const history = new History();
  history.plan({ step: 1, planned: 1, predicted: 0, tokens: 3, budget: 9, free: 9, waiting: 0, narrow: 3, wide: 0, merged: 1, blockedBy: 255, pressure: 0, thin: false }, model);
  const find = (/** @type {number} */ number) => model.requests.get(number);
  const by = (/** @type {string} */ name) => {
    const found = arranged(history, 0, 4, name, find);
    return found && [[...found.order], found.groups];
  };
  assert.equal(by("lane"), null);
  assert.deepEqual(by("class"), [[1, 0, 3, 2], [{ name: "a", row: 0 }, { name: "b", row: 1 }]]);
  assert.deepEqual(by("tenant"), [[1, 3, 0, 2], [{ name: "t1", row: 0 }, { name: "t2", row: 2 }]]);
  assert.deepEqual(by("slack"), [[1, 3, 0, 2], []]);
  assert.equal(arranged(history, 7, 4, "class", find), null);
});

test("a name keeps its colour, and those beyond the last share it", () => {
  const names = new Names();
  assert.deepEqual(["x", "y", "x", "z", "v", "w", "y"].map((name) => names.of(name)), [0, 1, 0, 2, 3, 3, 1]);
  for (let i = 0; i < 5000; i++) assert.equal(names.of(`made up ${i}`), 3);
  assert.ok(names.known.size <= 1000);
  const requests = ["x", "w"].map((slo, i) => ({ ...seen({ slo }), number: 65536 * i + i + 1 }));
  const found = tinted(requests, "class", names, [10, 20, 30, 40]);
  assert.deepEqual([found[1], found[2], found[3]], [10, 40, 0]);
});
