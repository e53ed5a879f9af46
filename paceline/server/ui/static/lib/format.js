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
  if (told.relegated) found.push("Demoted: its targets could not be met.");
  if (told.ttft_ms !== null) {
    const predicted = told.predicted_ttft_ms === null ? "" : `, predicted ${duration(told.predicted_ttft_ms)}`;
    const met = target === null ? "" : `, target ${duration(target)}: ${told.ttft_ms <= target ? "met" : "missed"}`;
    found.push(`First token after ${duration(told.ttft_ms)}${predicted}${met}.`);
  }
  if (told.tokens_per_second !== null) found.push(`Then ${Number(told.tokens_per_second.toPrecision(3))} tokens a second.`);
  return found;
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
