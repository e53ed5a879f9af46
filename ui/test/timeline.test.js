import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { stepsOf, traceOf } from "../../paceline/web/static/timeline/chrome.js";
import { CAPACITY, History } from "../../paceline/web/static/timeline/history.js";
import { Decoder, ENDS, NO_LANE, STATES } from "../../paceline/web/static/timeline/decode.js";
import { Model } from "../../paceline/web/static/timeline/model.js";
import { firstDifference, Recorded } from "../../paceline/web/static/timeline/recorded.js";

const vector = JSON.parse(readFileSync(new URL("../../tests/ui/vectors/timeline.json", import.meta.url), "utf8"));
/** @param {string} name */
const bytesOf = (name) => new Uint8Array(Buffer.from(vector[name].frames, "base64"));
const data = bytesOf("told");
const near = (/** @type {number} */ value, digits = 6) => Number(value.toFixed(digits));

/** What the frames mean to the page, in the words of the vector. @param {any[]} frames */
function meaning(frames) {
  /** @type {any} */
  const found = { columns: [], ended: [], steps: [], doubts: 0 };
  /** @type {any[]} */
  const seens = [];
  /** @type {any[]} */
  const steps = [];
  const model = new Model({
    planned: () => found.columns.push([model.step, ...model.lanes.map((number) => {
      const seen = model.requests.get(number);
      return seen ? [number, seen.state, seen.computed] : null;
    })]),
    stepped: (step) => {
      const { plan, done, start } = step;
      steps.push(step);
      found.steps.push([plan.step, plan.tokens, plan.narrow, plan.wide, plan.blockedBy, near(start), near(done.done)]);
    },
    ended: (seen) => void seens.push(seen) || found.ended.push({
      number: seen.number, id: seen.told?.id, tenant: seen.told?.tenant, end: ENDS[seen.ended.reason], waited: near(seen.waited),
      waits: seen.ended.waits.map((/** @type {number} */ s) => near(s, 5)), preemptions: seen.preemptions, output: seen.ended.output,
      spans: seen.spans.map((s) => [STATES[s.state], near(s.start), near(s.end), s.lane === NO_LANE ? null : s.lane, s.steps, s.tokens]),
    }),
  });
  for (const frame of frames) model.take(frame);
  Object.assign(found, { doubts: model.doubts, held: model.held, num_held: model.numHeld, refused: model.refused, num_refused: model.numRefused });
  found.trace = traceOf(steps, seens, model.now, 60);
  return found;
}

test("the page rebuilds what the engine's own model does", () => {
  assert.deepEqual(vector.states, STATES);
  for (const name of ["told", "guessed"]) {
    const decoder = new Decoder();
    assert.deepEqual(meaning(decoder.feed(bytesOf(name))), vector[name].meaning);
    assert.deepEqual([decoder.unknown, decoder.broken], [0, 0]);
  }
  const kinds = new Set(vector.told.meaning.ended.map((/** @type {any} */ seen) => seen.end));
  assert.ok(kinds.has("expired") && kinds.has("abort") && kinds.has("length"));
});

test("cut at every byte it is the same", () => {
  const whole = JSON.stringify(new Decoder().feed(data));
  for (let cut = 0; cut <= data.length; cut += cut < 600 ? 1 : 13) {
    const decoder = new Decoder();
    const frames = [...decoder.feed(data.slice(0, cut)), ...decoder.feed(data.slice(cut))];
    // the text is long: its length first
    const text = JSON.stringify(frames);
    assert.ok(text.length === whole.length && text === whole, `cut at ${cut}`);
  }
});

test("bytes that were changed or lost break nothing", () => {
  let seed = 7;
  const random = (/** @type {number} */ below) => (seed = (seed * 48271) % 2147483647) % below;
  for (let turn = 0; turn < 300; turn++) {
    const bad = data.slice(random(2) ? 0 : random(data.length), data.length - random(400));
    for (let i = 0; i < 4; i++) bad[random(bad.length)] = random(256);
    meaning(new Decoder().feed(bad).filter((frame) => frame.told === undefined || frame.frame === "announce"));
  }
});

test("unknown frames are passed over, and an impossible header ends it", () => {
  const odd = new Uint8Array(8 + 3);
  odd[0] = 99;
  odd[4] = 3;
  const decoder = new Decoder();
  const frames = decoder.feed(new Uint8Array([...odd, ...data]));
  assert.equal(frames.length, new Decoder().feed(data).length);
  assert.equal(decoder.unknown, 1);
  decoder.feed(new Uint8Array([4, 0, 0, 0, 255, 255, 255, 255]));
  assert.ok(decoder.lost);
  assert.deepEqual(decoder.feed(data), []);
});

test("the page's own memory makes the same trace", () => {
  const history = new History();
  /** @type {any[]} */
  const seens = [];
  const model = new Model({
    planned: (step) => history.plan(step.plan, model), stepped: (step) => history.result(step), ended: (seen) => seens.push(seen),
  });
  for (const frame of new Decoder().feed(data)) model.take(frame);
  const trace = traceOf(stepsOf(history, CAPACITY), seens, model.now, 60);
  assert.deepEqual(trace, vector.told.meaning.trace);
  assert.ok(trace.otherData.left_out > 0);
});

test("a history forgets the oldest and finds steps by their time", () => {
  const history = new History();
  const model = new Model();
  for (let step = 0; step < CAPACITY + 10; step++) {
    history.plan({ step, planned: step, predicted: 0.5, tokens: 1, budget: 2, free: 3, waiting: 0, narrow: 1, wide: 0, merged: 1, blockedBy: 255, pressure: 0, thin: false }, model);
    history.result({ plan: { step }, start: step, done: { done: step + 0.5, backend: 0.5 } });
  }
  assert.equal(history.first, 10);
  assert.ok(!history.has(9) && history.has(10));
  assert.equal(history.at(20.7), 20);
  assert.equal(history.at(-5), 10);
  assert.equal(history.took(50), 0.5);
});

test("an engine that goes on is known by the keyframe that follows, and one that begins by itself", () => {
  const lane = { number: 3, lane: 0, state: 3, demoted: false, computed: 9, preemptions: 0, waited: 0, since: 1 };
  for (const [told, doubts] of /** @type {[any, boolean][]} */ ([[{ goes_on: true }, false], [{}, true]])) {
    const model = new Model();
    model.take({ frame: "start", told });
    model.take({ frame: "keyframe", step: 5, now: 2, reset: false, lanes: [lane] });
    assert.equal(model.doubts > 0, doubts);
    assert.equal(model.lanes.some((number) => number > 0), !doubts);
  }
});

test("a stretch of a recorded timeline is shown, and where two part is found", () => {
  const recorded = new Recorded(data);
  const { history, plans } = recorded;
  assert.equal(history.count, plans.length);
  assert.ok(plans.length > 10 && !recorded.cut);
  // a time between two plans belongs to the first of them; before the first there is none
  const middle = (plans[4].planned + plans[5].planned) / 2;
  assert.equal(history.step[recorded.at(middle) % CAPACITY], plans[4].step);
  assert.equal(recorded.at(plans[0].planned - 1), -1);
  assert.equal(recorded.at(plans.at(-1).planned + 1e6), -1);
  // fewer than fit are shown from the first on, whatever is asked for
  recorded.show(plans[7].planned);
  assert.equal(recorded.history.count, plans.length);
  assert.equal(firstDifference(plans, new Recorded(data).plans), null);
  const changed = plans.map((plan, i) => (i === 6 ? { ...plan, tokens: plan.tokens + 1 } : plan));
  assert.equal(firstDifference(plans, changed), plans[6].planned);
  assert.equal(firstDifference(plans, plans.slice(0, 9)), plans[9].planned);
  assert.equal(firstDifference([], []), null);
});
