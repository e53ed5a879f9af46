import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { repetition } from "../../paceline/web/static/lib/repeats.js";

const told = JSON.parse(readFileSync(new URL("../../tests/ui/vectors/repeats.json", import.meta.url), "utf8"));

test("an answer that repeats itself is told from one that goes on, however it is cut", () => {
  for (const size of [1, 7, 1000]) {
    const found = (/** @type {string} */ text) => {
      const repeats = repetition();
      let any = false;
      for (let at = 0; at < text.length; at += size) any = repeats(text.slice(at, at + size)) || any;
      return any;
    };
    assert.deepEqual(told.repeats.map(found), told.repeats.map(() => true));
    assert.deepEqual(told.goes_on.map(found), told.goes_on.map(() => false));
  }
});
