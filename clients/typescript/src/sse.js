/** Server-sent events from bytes that are cut anywhere. See paceline/wire/sse.py. */

const LF = 10;
const CR = 13;
const BLANKS = /^[ \t\n\r\v\f]+|[ \t\n\r\v\f]+$/g;

/**
 * Its `data` has no blanks around it; "": none, such as a keep-alive. `isText`: it is UTF-8.
 * @typedef {{name: string, data: string, isText: boolean}} SseEvent
 */

export class SseEvents {
  /** An event was longer than it may be: those before it are good, and no more follow. */
  tooLong = false;
  #max;
  /** @type {Uint8Array[]} */
  #pending = [];
  /** @type {Uint8Array[]} */
  #data = [];
  #name = "";
  #bytes = 0;
  #skipLf = false;
  #begun = false;

  /** @param {number} maxBytes of one event, with a byte for each of its line ends */
  constructor(maxBytes) {
    this.#max = maxBytes;
  }

  /**
   * The events that end in `bytes`.
   * @param {Uint8Array} bytes
   */
  feed(bytes) {
    /** @type {SseEvent[]} */
    const out = [];
    let start = 0;
    if (this.#skipLf && bytes.length) {
      this.#skipLf = false;
      if (bytes[0] === LF) start = 1;
    }
    for (let at = start; at < bytes.length && !this.tooLong; at++) {
      const byte = bytes[at];
      if (byte !== LF && byte !== CR) continue;
      this.#keep(bytes.subarray(start, at));
      if (byte === CR) {
        if (at + 1 === bytes.length) this.#skipLf = true;
        else if (bytes[at + 1] === LF) at++;
      }
      start = at + 1;
      this.#line(out);
    }
    if (start < bytes.length) this.#keep(bytes.slice(start));
    return out;
  }

  /** @param {Uint8Array} piece */
  #keep(piece) {
    this.#bytes += piece.length;
    this.tooLong ||= this.#bytes > this.#max;
    if (!this.tooLong) this.#pending.push(piece);
  }

  /** @param {SseEvent[]} out */
  #line(out) {
    let line = joined(this.#pending);
    this.#pending = [];
    if (!this.#begun) {
      this.#begun = true;
      if (line[0] === 0xef && line[1] === 0xbb && line[2] === 0xbf) {
        this.#bytes -= 3;
        line = line.subarray(3);
      }
    }
    if (line.length) {
      this.tooLong ||= ++this.#bytes > this.#max;
      this.#field(line);
      return;
    }
    if (this.#data.length || this.#name) out.push(eventOf(this.#name, this.#data));
    this.#data = [];
    this.#name = "";
    this.#bytes = 0;
  }

  /** @param {Uint8Array} line */
  #field(line) {
    const text = new TextDecoder("utf-8", { ignoreBOM: true }).decode(line.subarray(0, 6));
    if (text.startsWith("data:")) {
      this.#data.push(line.subarray(line[5] === 32 ? 6 : 5), new Uint8Array([LF]));
    } else if (text === "event:") {
      this.#name = new TextDecoder().decode(line.subarray(6)).replace(BLANKS, "");
    }
  }
}

/**
 * @param {string} name
 * @param {Uint8Array[]} data
 * @returns {SseEvent}
 */
function eventOf(name, data) {
  const bytes = joined(data);
  const decoded = (/** @type {boolean} */ fatal) =>
    new TextDecoder("utf-8", { fatal, ignoreBOM: true }).decode(bytes).replace(BLANKS, "");
  try {
    return { name, data: decoded(true), isText: true };
  } catch {
    return { name, data: decoded(false), isText: false };
  }
}

/** @param {Uint8Array[]} pieces */
function joined(pieces) {
  if (pieces.length === 1) return pieces[0];
  let length = 0;
  for (const piece of pieces) length += piece.length;
  const whole = new Uint8Array(length);
  let at = 0;
  for (const piece of pieces) {
    whole.set(piece, at);
    at += piece.length;
  }
  return whole;
}
