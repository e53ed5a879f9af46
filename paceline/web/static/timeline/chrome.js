// What the page remembers as a trace for Perfetto: the same as paceline/timeline/chrome.py.
import { REASONS, STATE, STATES } from "./decode.js";
import { runs } from "./model.js";

export const MOST_SLICES = 200_000;
const WORDS = { [STATE.chunk]: "prompt", [STATE.decode]: "tokens", [STATE.skipped]: "nothing" };

/** To three decimals, half of the last upwards. @param {number} value */
const round = (value) => Math.floor(value * 1e3 + 0.5) / 1e3;
/** @param {number} seconds */
const us = (seconds) => round(seconds * 1e6);
/** @param {number} seconds */
const milli = (seconds) => round(seconds * 1e3);

/** @param {number} pid @param {number | null} tid @param {string} name */
const named = (pid, tid, name) => ({ ph: "M", name: tid === null ? "process_name" : "thread_name", pid, tid: tid ?? 0, args: { name } });

/**
 * @param {any[]} steps { plan, done, start }, those whose results came
 * @param {Iterable<import("./model.js").Seen>} requests
 * @param {number} now seconds
 * @param {number} [most] slices
 */
export function traceOf(steps, requests, now, most = MOST_SLICES) {
  /** @type {any[]} */
  let slices = [];
  for (const seen of requests) {
    const spans = [...seen.spans];
    if (!seen.ended && now > seen.since) spans.push({ state: seen.state, start: seen.since, end: now, lane: seen.lane, steps: seen.steps, tokens: seen.tokens });
    spans.forEach((span, index) => { if (runs(span.state)) slices.push({ span, seen, index }); });
  }
  slices.sort((a, b) => a.span.start - b.span.start || a.seen.number - b.seen.number || a.index - b.index);
  const leftOut = Math.max(0, slices.length + steps.length - most);
  if (leftOut) {
    const kept = Math.min(steps.length, Math.floor(most / 2));
    steps = steps.slice(steps.length - kept);
    slices = slices.slice(Math.max(0, slices.length - (most - kept)));
  }
  const zero = Math.min(steps[0]?.start ?? Infinity, slices[0]?.span.start ?? Infinity);
  const from = Number.isFinite(zero) ? zero : 0;
  /** @type {any[]} */
  const events = [named(1, null, "steps"), named(2, null, "requests by lane"), named(3, null, "counters")];
  for (const lane of [...new Set(slices.map(({ span }) => span.lane))].sort((a, b) => a - b)) {
    events.push(named(2, lane, `lane ${lane}`), { ph: "M", name: "thread_sort_index", pid: 2, tid: lane, args: { sort_index: lane } });
  }
  for (const step of steps) events.push(...ofStep(step, from));
  for (const slice of slices) events.push(...ofSpan(slice, from));
  return { displayTimeUnit: "ms", otherData: { paceline_timeline: 1, left_out: leftOut, zero_seconds: from }, traceEvents: events };
}

/** @param {any} step @param {number} zero */
function ofStep({ plan, done, start }, zero) {
  const ts = us(start - zero);
  const args = {
    step: plan.step, tokens: plan.tokens, budget: plan.budget, "written or drafted": plan.narrow, chunks: plan.wide, "predicted ms": milli(plan.predicted),
    "backend ms": milli(done.backend), waiting: plan.waiting, "blocked by": REASONS[plan.blockedBy] ?? "", "steps summed": plan.merged,
  };
  const counters = {
    tokens: { tokens: plan.tokens, budget: plan.budget },
    milliseconds: { predicted: milli(plan.predicted), measured: milli(done.done - start) },
    waiting: { requests: plan.waiting }, "free blocks": { blocks: plan.free }, pressure: { level: plan.pressure },
  };
  return [
    { ph: "X", name: `${plan.tokens} tokens`, pid: 1, tid: 0, ts, dur: us(done.done - start), args },
    ...Object.entries(counters).map(([name, values]) => ({ ph: "C", name, pid: 3, tid: 0, ts, args: values })),
  ];
}

/** @param {any} slice @param {number} zero */
function ofSpan({ span, seen, index }, zero) {
  const told = seen.told;
  const request = told?.id ?? `request ${seen.number}`;
  const args = { request, state: STATES[span.state], ...(told ? { class: told.slo, tenant: told.tenant } : {}), steps: span.steps, tokens: span.tokens };
  const place = { pid: 2, tid: span.lane };
  const ts = us(span.start - zero), end = us(span.end - zero);
  /** @type {any[]} */
  const found = [{ ph: "X", name: `${WORDS[span.state]} ${request}`, ...place, ts, dur: round(end - ts), args }];
  const flow = { cat: "preemption", name: "preempted", ...place };
  const paused = (/** @type {number | undefined} */ state) => state === STATE.preempted || state === STATE.swapped;
  let after = seen.spans[index + 1]?.state;
  if (!seen.ended && index + 1 === seen.spans.length) after = seen.state;
  if (index && paused(seen.spans[index - 1]?.state)) found.push({ ph: "f", bp: "e", id: seen.number * 1000 + index - 1, ...flow, ts });
  if (paused(after)) found.push({ ph: "s", id: seen.number * 1000 + index + 1, ...flow, ts: end });
  return found;
}

/** The steps that a history still has, as they were told. @param {import("./history.js").History} history @param {number} capacity */
export function stepsOf(history, capacity) {
  const found = [];
  for (let column = history.first; column < history.count; column++) {
    const at = column % capacity;
    if (history.kind[at] !== 0 || Number.isNaN(history.done[at])) continue;
    found.push({
      start: history.start[at],
      done: { done: history.done[at], backend: history.backend[at] },
      plan: {
        step: history.step[at], tokens: history.tokens[at], budget: history.budget[at], narrow: history.narrow[at], wide: history.wide[at],
        predicted: history.predicted[at], waiting: history.waiting[at], blockedBy: history.held[at], merged: history.merged[at], free: history.free[at],
        pressure: history.pressure[at],
      },
    });
  }
  return found;
}

/** Hands the reader a file, compressed. Nothing leaves this computer. @param {any} trace @param {string} name */
export async function save(trace, name) {
  const packed = new Blob([JSON.stringify(trace)]).stream().pipeThrough(new CompressionStream("gzip"));
  const url = URL.createObjectURL(await new Response(packed).blob());
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
