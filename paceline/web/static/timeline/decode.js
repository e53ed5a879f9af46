// Frames of the timeline, from bytes that may be cut anywhere. The format is that of
// paceline/timeline/codec.py, and tests/ui/vectors hold both to it.

export const VERSION = 2;
export const NO_LANE = 0xffff;
const HEADER = 8;
const MOST = 16 * 2 ** 20;
export const TYPES = { hello: 1, start: 2, keyframe: 3, plan: 4, done: 5, announce: 6, end: 7, gauges: 8, gap: 9, notice: 10, door: 11 };
/** @type {Record<number, string>} */
const NAMES = Object.fromEntries(Object.entries(TYPES).map(([name, type]) => [type, name]));
export const KIND = { admit: 1, found: 2, held: 3, chunk: 4, draft: 5, narrow: 6, skip: 7, preempt: 8, swap: 9, demote: 10, promote: 11, earlier: 12, wrong: 13 };
export const STATE = { wait: 0, held: 1, chunk: 2, decode: 3, skipped: 4, preempted: 5, swapped: 6, ended: 7 };
export const STATES = Object.keys(STATE);
export const REASONS = ["step", "budget", "slots", "memory", "pace", "policy", "pressure"];
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
      const read = READERS[NAMES[data[at]]];
      if (read === undefined) this.unknown++;
      else {
        try {
          found.push(read(new DataView(data.buffer, data.byteOffset + at, HEADER + size), NAMES[data[at]]));
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

/** @param {DataView} view @param {number} at @param {number} count */
function events(view, at, count) {
  const found = [];
  for (let i = 0; i < count; i++, at += 8) {
    found.push({ lane: view.getUint16(at, true), kind: view.getUint8(at + 2), value: view.getUint32(at + 4, true) });
  }
  return found;
}

/** @param {DataView} view @param {number} at @param {number} count */
function strings(view, at, count) {
  const found = [];
  for (let i = 0; i < count; i++) {
    const size = view.getUint8(at);
    if (at + 1 + size > view.byteLength) throw new RangeError("a string is cut");
    found.push(text.decode(new Uint8Array(view.buffer, view.byteOffset + at + 1, size)));
    at += 1 + size;
  }
  return found;
}

/** NaN says that there is none. @param {number} value */
const orNull = (value) => (Number.isNaN(value) ? null : value);

/** @param {DataView} view @param {string} frame @returns {Frame} */
function told(view, frame) {
  const value = JSON.parse(text.decode(new Uint8Array(view.buffer, view.byteOffset + HEADER, view.byteLength - HEADER)));
  if (typeof value !== "object" || value === null || Array.isArray(value)) throw new TypeError("an object was expected");
  return { frame, told: value };
}

/** @type {Record<string, (view: DataView, frame: string) => Frame>} */
const READERS = {
  hello: told, start: told, gauges: told, gap: told, notice: told, door: told,
  plan: (v) => ({
    frame: "plan", thin: (v.getUint8(1) & 1) === 1,
    step: v.getUint32(8, true), planned: v.getFloat64(12, true), predicted: v.getFloat32(20, true), limit: v.getFloat32(24, true),
    budget: v.getUint32(28, true), tokens: v.getUint32(32, true), free: v.getUint32(36, true), waiting: v.getUint32(40, true),
    merged: v.getUint16(44, true), narrow: v.getUint16(46, true), wide: v.getUint16(48, true),
    blockedBy: v.getUint8(50), pressure: v.getUint8(51), events: events(v, 56, v.getUint16(52, true)),
  }),
  done: (v) => ({
    frame: "done", step: v.getUint32(8, true), done: v.getFloat64(16, true), backend: v.getFloat32(24, true),
    events: events(v, 28, v.getUint16(12, true)),
  }),
  announce: (v) => {
    const [id, slo, tenant] = strings(v, 62, 3);
    return {
      frame: "announce", number: v.getUint32(8, true), parent: v.getUint32(12, true),
      arrival: v.getFloat64(16, true), added: v.getFloat64(24, true), prompt: v.getUint32(32, true), most: v.getUint32(36, true),
      priority: v.getInt32(40, true), bestEffort: v.getUint8(44) === 1, resumed: v.getUint8(45) === 1,
      ttft: orNull(v.getFloat32(46, true)), tpot: orNull(v.getFloat32(50, true)), deadline: orNull(v.getFloat32(54, true)),
      predicted: orNull(v.getFloat32(58, true)), id, slo, tenant,
    };
  },
  end: (v) => ({
    frame: "end", number: v.getUint32(8, true), when: v.getFloat64(12, true), reason: v.getUint8(20), demoted: v.getUint8(21) === 1,
    chunks: v.getUint32(22, true), preemptions: v.getUint32(26, true), recomputed: v.getUint32(30, true), swapped: v.getUint32(34, true),
    cached: v.getUint32(38, true), output: v.getUint32(42, true),
    scheduled: orNull(v.getFloat64(46, true)), firstToken: orNull(v.getFloat64(54, true)), predicted: orNull(v.getFloat32(62, true)),
    waits: REASONS.map((_, i) => v.getFloat32(66 + 4 * i, true)),
  }),
  keyframe: (v) => {
    const lanes = [];
    const count = v.getUint32(8, true);
    for (let i = 0, at = 28; i < count; i++, at += 28) {
      lanes.push({
        number: v.getUint32(at, true), lane: v.getUint16(at + 4, true), state: v.getUint8(at + 6), demoted: v.getUint8(at + 7) === 1,
        computed: v.getUint32(at + 8, true), preemptions: v.getUint32(at + 12, true), waited: v.getFloat32(at + 16, true),
        since: v.getFloat64(at + 20, true),
      });
    }
    return { frame: "keyframe", step: v.getUint32(12, true), now: v.getFloat64(16, true), reset: v.getUint8(24) === 1, lanes };
  },
};
