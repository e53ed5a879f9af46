/** Server-sent events from bytes that are cut anywhere. See paceline/client/sse.py. */
export declare class SseError extends Error {
}
export declare class SseParser {
    #private;
    /** @param {number} maxEventBytes */
    constructor(maxEventBytes: number);
    /**
     * The data of the events that end in `bytes`.
     * @param {Uint8Array} bytes
     */
    feed(bytes: Uint8Array): string[];
}
