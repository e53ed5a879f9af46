/** What an event of a stream holds. See paceline/client/chunks.py. */

const PINGS = new Set(["ping", "keepalive", "keep-alive", "heartbeat"]);
const MOST_WORDS = 2000;

/**
 * @typedef {import("../types/types.js").Json} Json
 * @typedef {import("./sse.js").SseEvent} SseEvent
 */

export class ChunkError extends Error {
  constructor(why = "a chunk is malformed") {
    super(why);
  }
}

/** An error that the server reports in its stream. */
export class Reported {
  /**
   * @param {number | null} code as of HTTP, where it tells one
   * @param {string} words
   */
  constructor(code, words) {
    this.code = code;
    this.words = words;
  }
}

/**
 * @param {unknown} value
 * @returns {value is Json}
 */
export const isObject = (value) =>
  typeof value === "object" && value !== null && !Array.isArray(value);

/**
 * Whether it holds anything: an empty list or object is nothing, as in other languages.
 * @param {unknown} value
 */
export const isFilled = (value) =>
  typeof value === "object" && value !== null ? Object.keys(value).length > 0 : Boolean(value);

/**
 * A chunk with choices or counts, or an error; null: it says nothing, such as a ping. Throws
 * ChunkError for the end of the stream, and for what is no chunk.
 * @param {SseEvent} event
 * @returns {Json | Reported | null}
 */
export function readEvent(event) {
  const { name, data } = event;
  if (name.endsWith("error")) {
    const found = decoded(event);
    if (!isObject(found)) return readError(data);
    return readError(isFilled(found.error) ? found.error : found);
  }
  if (data === "" || data === "{}" || data === "null") return null;
  if (data === "[DONE]") throw new ChunkError("the stream ended early");
  const chunk = decoded(event);
  if (!isObject(chunk)) {
    // readers of chunks do not know events of other names
    if (name !== "" && name !== "message") return null;
    throw new ChunkError("an event is no JSON object");
  }
  if (isFilled(chunk.error)) return readError(chunk.error);
  const choices = chunk.choices ?? null;
  if (!isFilled(choices) && [chunk.object, chunk.type].includes("error")) return readError(chunk);
  if (PINGS.has(name) || (choices === null && !isFilled(chunk.usage))) return null;
  return chunk;
}

/** @param {SseEvent} event */
function decoded({ data, isText }) {
  try {
    return isText ? JSON.parse(data) : null;
  } catch {
    return null;
  }
}

/** @param {unknown} error */
function readError(error) {
  const words = isObject(error) ? error.message : error;
  const code = isObject(error) && Number.isInteger(error.code) ? error.code : null;
  const told = typeof words === "string" && words ? words : "an error";
  return new Reported(code, told.slice(0, MOST_WORDS));
}
