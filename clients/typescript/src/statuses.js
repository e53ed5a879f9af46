/**
 * What the status of an answer means: a copy of paceline/statuses, which a test holds to it.
 */

/**
 * @typedef {"caller" | "account" | "model" | "passing" | "engine"} Meaning
 * @typedef {"nowhere" | "elsewhere" | "anywhere"} Retry
 */

// other statuses of 400 to 499 are the caller's, and all others the engine's
/** @type {Record<string, number[]>} */
export const LISTED = {
  "account": [401, 402, 403, 407],
  "model": [404, 405, 410, 501],
  "passing": [408, 409, 420, 423, 425, 429, 498, 499, 503, 529],
  "engine": [421, 424, 426],
};

/**
 * Of an answer that is not 200.
 * @param {number} status
 * @returns {Meaning}
 */
export function meaningOf(status) {
  const listed = Object.entries(LISTED).find(([, statuses]) => statuses.includes(status));
  if (listed) return /** @type {Meaning} */ (listed[0]);
  return status >= 400 && status < 500 ? "caller" : "engine";
}

/**
 * Where a request that was refused with `status` may be answered.
 * @param {number} status
 * @param {string} [should] the answer's `x-should-retry`, which stands over the table
 * @returns {Retry}
 */
export function retryOf(status, should = "") {
  if (should === "true") return "anywhere";
  if (should === "false") return "nowhere";
  const meaning = meaningOf(status);
  if (meaning === "caller") return "nowhere";
  // a redirect, which is not followed, or a success without an answer, comes again too
  if (status < 400 || meaning === "account" || meaning === "model") return "elsewhere";
  return "anywhere";
}
