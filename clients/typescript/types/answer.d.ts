/** One answer, put together from the chunks of all attempts. See paceline/client/answer.py. */
/**
 * null: there are no counts, or none that can be read, which is no reason to lose an answer.
 * @param {unknown} told
 * @returns {import("../types/types.js").Usage | null}
 */
export declare function usageOf(told: unknown): import("../types/types.js").Usage | null;
export declare class Answer {
    #private;
    /** @type {string | null} */
    reason: string | null;
    /** @type {number[]} */
    ids: number[];
    /** @type {number[] | null} */
    promptIds: number[] | null;
    idsWhole: boolean;
    told: boolean;
    get text(): string;
    get resumable(): boolean;
    /**
     * Takes in one chunk; what it makes is appended to `events`, also before an error.
     * @param {import("../types/types.js").Json} chunk
     * @param {import("../types/types.js").ClientEvent[]} events
     */
    read(chunk: import("../types/types.js").Json, events: import("../types/types.js").ClientEvent[]): void;
    /**
     * @param {number} target
     * @returns {import("../types/types.js").Finished}
     */
    finished(target: number): import("../types/types.js").Finished;
}
