// Numbers and foreign text for readers. Nothing here needs a browser.

/** @param {number} ms @returns {string} three digits, in ms or s */
export function duration(ms) {
  if (ms < 0.0005) return "0 ms";
  return ms < 999.5 ? `${Number(ms.toPrecision(3))} ms` : `${Number((ms / 1000).toPrecision(3))} s`;
}

/** Characters that draw nothing or turn the reading order are shown by number. @param {string} text */
export function visible(text) {
  return text.replace(
    /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g,
    (found) => `\u27e6U+${found.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}\u27e7`,
  );
}

/** Why requests wait, in words that follow on "waited". */
export const REASONS = {
  step: "for the step under way",
  budget: "for tokens of steps that others got",
  slots: "for a place",
  memory: "for KV memory",
  pace: "for the targets of those running",
  policy: "for the policy",
  pressure: "for memory pressure to fall",
  adapter: "for its adapter",
};

/**
 * What became of a request, as sentences.
 * @param {any} told one entry of usage.timeline
 * @param {any} usage
 * @param {number | null} target milliseconds to the first token
 * @returns {string[]}
 */
export function story(told, usage, target) {
  const waits = Object.entries(told.waited_ms).filter(([, ms]) => ms > 0);
  const parts = waits.map(
    ([why, ms]) => `${duration(ms)} ${REASONS[/** @type {keyof typeof REASONS} */ (why)] ?? why}`,
  );
  const found = [parts.length ? `Waited ${duration(told.queued_ms)}: ${parts.join(", ")}.` : "Did not wait."];
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  found.push(
    `Prompt of ${usage.prompt_tokens} tokens in ${told.chunks} chunk${told.chunks === 1 ? "" : "s"}` +
      (cached ? `, ${cached} of them from the cache.` : "."),
  );
  if (told.preemptions) {
    found.push(`Preempted ${told.preemptions === 1 ? "once" : `${told.preemptions} times`}: ${told.recomputed_tokens} tokens computed again, ${told.swapped_tokens} swapped.`);
  }
  if (told.demoted) found.push("Demoted: its targets could not be met.");
  if (told.ttft_ms !== null) {
    const predicted = told.predicted_ttft_ms === null ? "" : `, predicted ${duration(told.predicted_ttft_ms)}`;
    const met = target === null ? "" : `, target ${duration(target)}: ${told.ttft_ms <= target ? "met" : "missed"}`;
    found.push(`First token after ${duration(told.ttft_ms)}${predicted}${met}.`);
  }
  if (told.tokens_per_second !== null) found.push(`Then ${Number(told.tokens_per_second.toPrecision(3))} tokens a second.`);
  return found;
}

/**
 * The time of a request, in parts: what it waited for, reason by reason, its prompt, its tokens and the way to this browser; and
 * marks of when its first token was predicted and is due. The parts add up to `total`. A preempted request waits again, and of
 * its timeline does not say which waits came before its first token: its prompt and its tokens are one part.
 * @param {any} told one entry of usage.timeline
 * @param {number} total milliseconds from here to its end
 * @param {number | null} target milliseconds to the first token
 */
export function waterfall(told, total, target) {
  const names = Object.keys(REASONS);
  const ttft = told.ttft_ms ?? total;
  const waits = Object.entries(told.waited_ms).map(([why, ms]) => ({
    kind: `reason${Math.max(0, names.indexOf(why))}`, name: `waited ${REASONS[/** @type {keyof typeof REASONS} */ (why)] ?? why}`, ms: Number(ms),
  }));
  const worked = told.preemptions
    ? [{ kind: "decode", name: "read, wrote and sent", ms: Math.max(0, total - told.queued_ms) }]
    : [
      { kind: "chunk", name: "read the prompt", ms: Math.max(0, ttft - told.queued_ms) },
      { kind: "decode", name: "wrote and sent", ms: Math.max(0, total - Math.max(ttft, told.queued_ms)) },
    ];
  const parts = [...waits.filter(({ ms }) => ms > 0), ...worked];
  const marks = [
    { kind: "predicted", name: "first token predicted", ms: told.predicted_ttft_ms }, { kind: "due", name: "first token due", ms: target },
  ].filter(({ ms }) => ms != null);
  const sum = parts.reduce((before, { ms }) => before + ms, 0);
  // one that lies beyond the end stands at the end: the legend has its number
  return { parts, marks: marks.map((mark) => ({ ...mark, at: Math.min(1, mark.ms / Math.max(sum, 1e-9)) })) };
}

/** A function from pieces of text, cut anywhere, to the whole lines in them. */
export function lines() {
  let rest = "";
  return (/** @type {string} */ piece) => {
    const found = (rest + piece).split("\n");
    rest = found.pop() ?? "";
    return found.map((line) => line.replace(/\r$/, ""));
  };
}
