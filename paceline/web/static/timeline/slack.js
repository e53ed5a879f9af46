// How much time is left until a request's next token is due, as the engine counts it (paceline/core/slo.py).

/** Bins of that time, the latest first: seconds from which on the next one holds, its name, and its colour. */
export const BINS = [
  { below: -0.5, name: "late by more than 500 ms", colour: "slack0" },
  { below: 0, name: "late", colour: "slack1" },
  { below: 0.1, name: "due within 100 ms", colour: "slack2" },
  { below: 1, name: "due within a second", colour: "slack3" },
  { below: Infinity, name: "a second and more is left", colour: "slack4" },
];

/** The place in BINS; -1: nothing is due. @param {number} seconds */
export function binOf(seconds) {
  if (Number.isNaN(seconds)) return -1;
  let bin = 0;
  while (seconds >= BINS[bin].below) bin++;
  return bin;
}

/**
 * What `margin` needs of the past; called with each step that is planned, in order.
 * @param {import("./model.js").Seen} seen @param {number} now seconds
 */
export function note(seen, now) {
  if (!seen.told) return;
  const output = seen.computed - seen.told.prompt;
  // a page that came later does not know when the first token was
  if (output <= 0 && !seen.output) seen.young = true;
  if (output > seen.output) {
    if (!seen.output && seen.young) seen.firstAt = now;
    seen.output = output;
  }
}

/** Seconds until its next token, or its last, is due; NaN where nothing is, or it is not known. @param {import("./model.js").Seen} seen @param {number} now seconds */
export function margin(seen, now) {
  const told = seen.told;
  if (!told) return NaN;
  let due = told.deadline === null ? NaN : told.arrival + told.deadline;
  let next = NaN;
  if (!seen.output) next = told.ttft === null ? NaN : told.arrival + told.ttft;
  else if (told.tpot !== null) next = seen.firstAt + seen.output * told.tpot;
  if (!(due < next)) due = Number.isNaN(next) ? due : next;
  return due - now;
}
