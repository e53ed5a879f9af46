/** Server-sent events from bytes that are cut anywhere. See paceline/wire/sse.py. */
export type SseEvent = {
    name: string;
    data: string;
    isText: boolean;
};
/**
 * Its `data` has no blanks around it; "": none, such as a keep-alive. `isText`: it is UTF-8.
 * @typedef {{name: string, data: string, isText: boolean}} SseEvent
 */
export declare class SseEvents {
    #private;
    /** An event was longer than it may be: those before it are good, and no more follow. */
    tooLong: boolean;
    /** @param {number} maxBytes of one event, with a byte for each of its line ends */
    constructor(maxBytes: number);
    /**
     * The events that end in `bytes`.
     * @param {Uint8Array} bytes
     */
    feed(bytes: Uint8Array): SseEvent[];
}
