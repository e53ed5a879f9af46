// What became of a request, in sentences: those of the playground, from what the timeline was told.
import { duration, story, visible } from "../lib/format.js";
import { ENDS, REASONS, STATE, STATES } from "./decode.js";
import { CAPACITY, COLUMN } from "./history.js";
import { waits } from "./model.js";

/** @typedef {import("./model.js").Seen} Seen */

/** The request's name, without what the engine adds to it. @param {Seen} seen */
export const nameOf = (seen) => visible(seen.told?.id ?? `request ${seen.number}`);
/** The same where there is little room. @param {string} name */
export const short = (name) => (name.length > 26 ? `${name.slice(0, 17)}…${name.slice(-6)}` : name);

const WORDS = {
  wait: "waits", held: "waits for its first choice's prompt", chunk: "computes its prompt", decode: "writes", skipped: "runs, but got nothing in the last step",
  preempted: "was preempted and waits again", swapped: "was moved to host memory and waits", ended: "has ended",
};
/** @param {Seen} seen */
export const stateOf = (seen) =>
  seen.ended ? `ended: ${ENDS[seen.ended.reason] ?? "?"}` : WORDS[/** @type {keyof typeof WORDS} */ (STATES[seen.state])];

/** Seconds waited so far. @param {Seen} seen @param {number} now */
export const waited = (seen, now) =>
  seen.ended ? seen.ended.waits.reduce((/** @type {number} */ a, /** @type {number} */ b) => a + b, 0) : seen.waited + (waits(seen.state) ? Math.max(0, now - seen.since) : 0);

/** Seconds to the first token; null: it has not come. @param {Seen} seen */
export function firstToken(seen) {
  if (!seen.told) return null;
  if (seen.ended) return seen.ended.firstToken === null ? null : seen.ended.firstToken - seen.told.arrival;
  const written = seen.spans.find((span) => span.state === STATE.decode && span.tokens > 0);
  return written && seen.computed > seen.told.prompt ? written.start - seen.told.arrival : null;
}

/** @param {Seen} seen @returns {boolean | null} whether the target of the first token was missed; null: there is none */
export function missed(seen) {
  const target = seen.told?.ttft ?? null, first = firstToken(seen);
  return target === null || first === null ? null : first > target;
}

/** @param {Seen} seen @param {number} now seconds @returns {string[]} */
export function sentences(seen, now) {
  const told = seen.told;
  if (!told) return ["It came before this page's first news, so little is known of it.", `Now it ${stateOf(seen)}.`];
  const target = told.ttft === null ? null : 1e3 * told.ttft;
  const end = seen.ended;
  if (!end) {
    const time = waited(seen, now);
    const found = [time > 0 ? `Waited ${duration(1e3 * time)} so far.` : "Did not wait.", `Now it ${stateOf(seen)}.`];
    const left = Math.max(0, told.prompt - seen.computed);
    found.push(left ? `${seen.computed} of its prompt's ${told.prompt} tokens are computed.` : `Its prompt of ${told.prompt} tokens is computed, and ${Math.max(0, seen.computed - told.prompt)} more.`);
    if (seen.preemptions) found.push(`Preempted ${seen.preemptions === 1 ? "once" : `${seen.preemptions} times`}.`);
    if (seen.demoted) found.push("Demoted: its targets could not be met.");
    if (told.predicted !== null) found.push(`First token predicted after ${duration(1e3 * told.predicted)}${target === null ? "" : `, target ${duration(target)}`}.`);
    return found;
  }
  const ttft = end.firstToken === null ? null : 1e3 * (end.firstToken - told.arrival);
  const writing = end.firstToken === null ? 0 : end.when - end.firstToken;
  const found = story(
    {
      waited_ms: Object.fromEntries(end.waits.map((/** @type {number} */ s, /** @type {number} */ i) => [REASONS[i], 1e3 * s])),
      queued_ms: 1e3 * waited(seen, now), chunks: end.chunks, preemptions: end.preemptions, recomputed_tokens: end.recomputed,
      swapped_tokens: end.swapped, demoted: end.demoted, predicted_ttft_ms: end.predicted === null ? null : 1e3 * end.predicted,
      ttft_ms: ttft, tokens_per_second: end.output > 1 && writing > 0 ? (end.output - 1) / writing : null,
    },
    { prompt_tokens: told.prompt, prompt_tokens_details: { cached_tokens: end.cached } },
    target,
  );
  const how = { stop: "It was done", length: "It had as many tokens as it may", abort: "It was aborted", error: "It failed", expired: "It had waited as long as it may" };
  found.push(`${how[/** @type {keyof typeof how} */ (ENDS[end.reason])] ?? "It ended"} after ${end.output} tokens, ${duration(1e3 * (end.when - told.arrival))} after it came.`);
  return found;
}

/** What the queue waits for, by number. */
export const WHY = ["the step under way", "tokens of the step", "a place", "KV memory", "the targets of those running", "the policy", "memory pressure"];

/** A step in words. @param {import("./history.js").History} history @param {number} column @param {number | undefined} blocks of the KV cache */
export function wordsOf(history, column, blocks) {
  const at = column % CAPACITY;
  if (history.kind[at] !== COLUMN.step) return history.notes.get(column) ?? "";
  const took = history.took(column);
  const parts = [
    `Step ${history.step[at]}`,
    `${history.tokens[at]} of ${history.budget[at]} tokens`,
    `${history.narrow[at]} written or drafted, ${history.wide[at]} ${history.wide[at] === 1 ? "chunk" : "chunks"}`,
    Number.isNaN(took) ? "under way" : `${duration(1e3 * took)}${history.predicted[at] ? `, predicted ${duration(1e3 * history.predicted[at])}` : ""}`,
    history.waiting[at] ? `${history.waiting[at]} wait${history.held[at] < 255 ? ` for ${WHY[history.held[at]]}` : ""}` : "no request waits",
    `${history.free[at]} of ${blocks ?? "?"} blocks free`,
  ];
  if (history.merged[at] > 1) parts.push(`stands for ${history.merged[at]} steps`);
  return parts.join(" · ");
}
