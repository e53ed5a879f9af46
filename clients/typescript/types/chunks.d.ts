/** What an event of a stream holds. See paceline/client/chunks.py. */
export type Json = import("../types/types.js").Json;
export type SseEvent = import("./sse.js").SseEvent;
/**
 * @typedef {import("../types/types.js").Json} Json
 * @typedef {import("./sse.js").SseEvent} SseEvent
 */
export declare class ChunkError extends Error {
    constructor(why?: string);
}
/** An error that the server reports in its stream. */
export declare class Reported {
    code: number | null;
    words: string;
    /**
     * @param {number | null} code as of HTTP, where it tells one
     * @param {string} words
     */
    constructor(code: number | null, words: string);
}
/**
 * @param {unknown} value
 * @returns {value is Json}
 */
export declare const isObject: (value: unknown) => value is Json;
/**
 * Whether it holds anything: an empty list or object is nothing, as in other languages.
 * @param {unknown} value
 */
export declare const isFilled: (value: unknown) => boolean;
/**
 * A chunk with choices or counts, or an error; null: it says nothing, such as a ping. Throws
 * ChunkError for the end of the stream, and for what is no chunk.
 * @param {SseEvent} event
 * @returns {Json | Reported | null}
 */
export declare function readEvent(event: SseEvent): Json | Reported | null;
