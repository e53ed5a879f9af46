/** Server-sent events from bytes that are cut anywhere. See paceline/client/sse.py. */

const LF = 10;
const CR = 13;

export class SseError extends Error {}

export class SseParser {
  #max;
  /** @type {Uint8Array[]} */
  #pending = [];
  /** @type {string[]} */
  #data = [];
  #bytes = 0;
  #skipLf = false;
  #begun = false;
  #decoder = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

  /** @param {number} maxEventBytes */
  constructor(maxEventBytes) {
    this.#max = maxEventBytes;
  }

  /**
   * The data of the events that end in `bytes`.
   * @param {Uint8Array} bytes
   */
  feed(bytes) {
    /** @type {string[]} */
    const out = [];
    let start = 0;
    if (this.#skipLf && bytes.length) {
      this.#skipLf = false;
      if (bytes[0] === LF) start = 1;
    }
    for (let at = start; at < bytes.length; at++) {
      const byte = bytes[at];
      if (byte !== LF && byte !== CR) continue;
      this.#keep(bytes.subarray(start, at), 1);
      if (byte === CR) {
        if (at + 1 === bytes.length) this.#skipLf = true;
        else if (bytes[at + 1] === LF) at++;
      }
      start = at + 1;
      this.#line(out);
    }
    if (start < bytes.length) this.#keep(bytes.slice(start), 0);
    return out;
  }

  /**
   * @param {Uint8Array} piece
   * @param {number} more
   */
  #keep(piece, more) {
    this.#bytes += piece.length + more;
    if (this.#bytes > this.#max) throw new SseError(`an event has more than ${this.#max} bytes`);
    this.#pending.push(piece);
  }

  /** @param {string[]} out */
  #line(out) {
    let length = 0;
    for (const piece of this.#pending) length += piece.length;
    const joined = new Uint8Array(length);
    let at = 0;
    for (const piece of this.#pending) {
      joined.set(piece, at);
      at += piece.length;
    }
    this.#pending = [];
    let line;
    try {
      line = this.#decoder.decode(joined);
    } catch {
      throw new SseError("an event is not UTF-8");
    }
    if (!this.#begun) {
      this.#begun = true;
      if (line.startsWith("\ufeff")) line = line.slice(1);
    }
    if (line === "") {
      if (this.#data.length) out.push(this.#data.join("\n"));
      this.#data = [];
      this.#bytes = 0;
      return;
    }
    const colon = line.indexOf(":");
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1);
    if (name === "data") this.#data.push(value.startsWith(" ") ? value.slice(1) : value);
  }
}
