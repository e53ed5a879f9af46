/** One answer, put together from the chunks of all attempts. See paceline/client/answer.py. */
export declare class ChunkError extends Error {
}
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
