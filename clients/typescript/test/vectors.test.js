/** The transcripts that the client in Python answers, played to this one. */

import assert from "node:assert/strict";
import { readdirSync, readFileSync } from "node:fs";
import { test } from "node:test";

import { NoAnswerError, RefusedError } from "../src/errors.js";
import { Machine } from "../src/machine.js";
import { RetryBudget } from "../src/policy.js";
import { retryOf } from "../src/statuses.js";

const FOLDER = new URL("../../../tests/client/vectors/", import.meta.url);

function inputOf(given) {
  if (given.type !== "Data") return given;
  const coding = given.base64 === undefined ? "utf8" : "base64";
  const data = Buffer.from(given.base64 ?? given.text, coding);
  return { type: "Data", data: new Uint8Array(data) };
}

function actionOf(action) {
  if (action.type !== "Fail") return action;
  const { error } = action;
  const type = error.name;
  if (error instanceof RefusedError) {
    return { type: "Fail", error: { type, status: error.status, message: error.serverMessage } };
  }
  if (error instanceof NoAnswerError) {
    return { type: "Fail", error: { type, status: error.status, retry_after: error.retryAfter } };
  }
  return { type: "Fail", error: { type, partial: error.partial } };
}

test("statuses mean the same", () => {
  const told = JSON.parse(readFileSync(new URL("../statuses.json", FOLDER), "utf8"));
  assert.ok(Object.keys(told).length === 500);
  for (const [status, retry] of Object.entries(told)) {
    assert.equal(retryOf(Number(status)), retry, status);
  }
  assert.equal(retryOf(400, "true"), "anywhere");
  assert.equal(retryOf(503, "false"), "nowhere");
});

const files = readdirSync(FOLDER).filter((name) => name.endsWith(".json"));
assert.ok(files.length > 10);
for (const name of files) {
  test(name, () => {
    const vector = JSON.parse(readFileSync(new URL(name, FOLDER), "utf8"));
    const leftOut = vector.targets.map(() => new Set());
    const machine = new Machine(
      vector.request,
      vector.targets,
      vector.policy,
      new RetryBudget(vector.budget),
      () => vector.draw,
      leftOut,
    );
    vector.steps.forEach((step, number) => {
      const actions = machine.handle(inputOf(step.in), step.at).map(actionOf);
      assert.deepEqual(actions, step.out, `step ${number}`);
      assert.equal(machine.over ? null : machine.deadline, step.deadline, `step ${number}`);
    });
    assert.ok(machine.over);
  });
}
