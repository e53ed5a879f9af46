// Frames of the timeline, from bytes that may be cut anywhere. The format is that of
// paceline/timeline/codec.py, and tests/ui/vectors hold both to it.

export const VERSION = 3;
export const NO_LANE = 0xffff;
const HEADER = 8;
const MOST = 16 * 2 ** 20;
export const TYPES = { hello: 1, start: 2, keyframe: 3, plan: 4, done: 5, announce: 6, end: 7, gauges: 8, gap: 9, notice: 10, door: 11 };
/** @type {Record<number, string>} */
const NAMES = Object.fromEntries(Object.entries(TYPES).map(([name, type]) => [type, name]));
export const KIND = { admit: 1, found: 2, held: 3, chunk: 4, draft: 5, narrow: 6, skip: 7, preempt: 8, swap: 9, demote: 10, promote: 11, earlier: 12, wrong: 13 };
export const STATE = { wait: 0, held: 1, chunk: 2, decode: 3, skipped: 4, preempted: 5, swapped: 6, ended: 7 };
export const STATES = Object.keys(STATE);
export const REASONS = ["step", "budget", "slots", "memory", "pace", "policy", "pressure", "adapter"];
export const ENDS = ["stop", "length", "abort", "error", "expired"];
const text = new TextDecoder();

/** @typedef {{ frame: string, [name: string]: any }} Frame */

export class Decoder {
  constructor() {
    this.rest = new Uint8Array(0);
    this.unknown = 0;
    this.broken = 0;
    // a header that cannot be one came: nothing more can be read
    this.lost = false;
  }

  /** The frames that are whole by now. @param {Uint8Array} piece @returns {Frame[]} */
  feed(piece) {
    if (this.lost) return [];
    let data = piece;
    if (this.rest.length) {
      data = new Uint8Array(this.rest.length + piece.length);
      data.set(this.rest);
      data.set(piece, this.rest.length);
    }
    const view = new DataView(data.buffer, data.byteOffset, data.byteLength);
    /** @type {Frame[]} */
    const found = [];
    let at = 0;
    while (at + HEADER <= data.length) {
      const size = view.getUint32(at + 4, true);
      if (size > MOST) {
        this.lost = true;
        this.rest = new Uint8Array(0);
        return found;
      }
      if (at + HEADER + size > data.length) break;
      const frame = NAMES[data[at]];
      if (frame === undefined) this.unknown++;
      else {
        try {
          found.push(read(frame, data.subarray(at + HEADER, at + HEADER + size)));
        } catch {
          this.broken++;
        }
      }
      at += HEADER + size;
    }
    this.rest = data.slice(at);
    return found;
  }
}

/** @param {string} frame @param {Uint8Array} body @returns {Frame} */
function read(frame, body) {
  if (frame in FIELDS) return { frame, ...named(frame, new Reader(body).value()) };
  const told = JSON.parse(text.decode(body));
  if (typeof told !== "object" || told === null || Array.isArray(told)) throw new TypeError("an object was expected");
  return { frame, told };
}

/** @param {any} value */
const isNumber = (value) => typeof value === "number";
/** @param {any} value */
const isText = (value) => typeof value === "string";
/** @param {any} value */
const isFlag = (value) => typeof value === "boolean";
/** @param {any} value */
const isTime = (value) => value === null || isNumber(value);
/** What a field may be; one that is not named is a number. @type {Record<string, (value: any) => boolean>} */
const FITS = {
  thin: isFlag, bestEffort: isFlag, resumed: isFlag, demoted: isFlag, reset: isFlag, id: isText, slo: isText, tenant: isText,
  ttft: isTime, tpot: isTime, deadline: isTime, predicted: isTime, scheduled: isTime, firstToken: isTime,
  lane: (value) => Number.isInteger(value) && value >= 0 && value <= NO_LANE, events: Array.isArray, lanes: Array.isArray,
  waits: (value) => Array.isArray(value) && value.length <= REASONS.length && value.every(isNumber),
};
/** @param {string} names */
const fieldsOf = (names) => names.split(" ").map((name) => ({ name, fits: FITS[name] ?? isNumber }));
/** The fields of each frame, in the order in which they come, as in paceline/timeline/events.py. @type {Record<string, ReturnType<typeof fieldsOf>>} */
const FIELDS = {
  plan: fieldsOf("step planned predicted limit budget tokens free waiting merged narrow wide blockedBy pressure thin events"),
  done: fieldsOf("step done backend events"),
  announce: fieldsOf("number parent arrival added prompt most priority bestEffort resumed ttft tpot deadline predicted id slo tenant"),
  end: fieldsOf("number when reason demoted waits chunks preemptions recomputed swapped cached output scheduled firstToken predicted"),
  keyframe: fieldsOf("step now reset lanes"),
  // of an event, and of a running request
  events: fieldsOf("lane kind value"),
  lanes: fieldsOf("number lane state demoted computed preemptions waited since"),
};

/** @param {string} kind @param {any} values @returns {any} */
function named(kind, values) {
  /** @type {any} */
  const found = {};
  FIELDS[kind].forEach(({ name, fits }, i) => {
    const value = values[i];
    if (!fits(value)) throw new TypeError(`${kind} has another ${name}`);
    found[name] = name === "events" || name === "lanes" ? value.map((/** @type {any} */ each) => named(name, each)) : value;
  });
  return found;
}

/** MessagePack, as far as frames have it: nil, booleans, numbers, strings and arrays. */
class Reader {
  /** @param {Uint8Array} data */
  constructor(data) {
    this.data = data;
    this.view = new DataView(data.buffer, data.byteOffset, data.byteLength);
    this.at = 0;
  }

  /** @returns {any} */
  value() {
    const { view } = this;
    const tag = view.getUint8(this.skip(1));
    if (tag < 0x80) return tag;
    if (tag >= 0xe0) return tag - 0x100;
    if (tag >= 0xa0 && tag < 0xc0) return this.text(tag & 0x1f);
    if (tag >= 0x90 && tag < 0xa0) return this.array(tag & 0xf);
    switch (tag) {
      case 0xc0: return null;
      case 0xc2: return false;
      case 0xc3: return true;
      case 0xcb: return view.getFloat64(this.skip(8));
      case 0xcc: return view.getUint8(this.skip(1));
      case 0xcd: return view.getUint16(this.skip(2));
      case 0xce: return view.getUint32(this.skip(4));
      case 0xcf: return Number(view.getBigUint64(this.skip(8)));
      case 0xd0: return view.getInt8(this.skip(1));
      case 0xd1: return view.getInt16(this.skip(2));
      case 0xd2: return view.getInt32(this.skip(4));
      case 0xd3: return Number(view.getBigInt64(this.skip(8)));
      case 0xd9: return this.text(view.getUint8(this.skip(1)));
      case 0xdc: return this.array(view.getUint16(this.skip(2)));
      case 0xdd: return this.array(view.getUint32(this.skip(4)));
    }
    throw new TypeError(`no frame has ${tag}`);
  }

  /** @param {number} size @returns {number} where it began */
  skip(size) { return (this.at += size) - size; }

  /** @param {number} size */
  text(size) {
    const at = this.skip(size);
    if (this.at > this.data.length) throw new RangeError("a string is cut");
    return text.decode(this.data.subarray(at, this.at));
  }

  /** @param {number} count */
  array(count) {
    const found = [];
    for (let i = 0; i < count; i++) found.push(this.value());
    return found;
  }
}
