/**
 * What the status of an answer means: a copy of paceline/statuses, which a test holds to it.
 */
export type Meaning = "caller" | "account" | "model" | "passing" | "engine";
export type Retry = "nowhere" | "elsewhere" | "anywhere";
/**
 * @typedef {"caller" | "account" | "model" | "passing" | "engine"} Meaning
 * @typedef {"nowhere" | "elsewhere" | "anywhere"} Retry
 */
/** @type {Record<string, number[]>} */
export declare const LISTED: Record<string, number[]>;
/**
 * Of an answer that is not 200.
 * @param {number} status
 * @returns {Meaning}
 */
export declare function meaningOf(status: number): Meaning;
/**
 * Where a request that was refused with `status` may be answered.
 * @param {number} status
 * @param {string} [should] the answer's `x-should-retry`, which stands over the table
 * @returns {Retry}
 */
export declare function retryOf(status: number, should?: string): Retry;
