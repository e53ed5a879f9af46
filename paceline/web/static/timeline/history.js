// The steps that the page remembers, a column each, in rings of numbers: who was where, and what the step cost.
import { NO_LANE, STATE } from "./decode.js";
import { margin, note } from "./slack.js";

export const CAPACITY = 4096;
// rows of a column: the first that wait, then lanes
export const QUEUE = 64;
export const LANES = 256;
export const ROWS = QUEUE + LANES;
export const EMPTY = 255;
/** Kinds of columns. */
export const COLUMN = { step: 0, gap: 1, lost: 2, began: 3 };
// classes of requests that the band of memory tells apart
export const CLASSES = 4;

const f64 = () => new Float64Array(CAPACITY);
const f32 = () => new Float32Array(CAPACITY);
const u32 = () => new Uint32Array(CAPACITY);
const u8 = () => new Uint8Array(CAPACITY);

export class History {
  constructor() {
    // columns ever made; the newest CAPACITY are there, column c at c % CAPACITY
    this.count = 0;
    this.kind = u8(); this.step = u32(); this.planned = f64(); this.start = f64(); this.done = f64();
    this.predicted = f32(); this.backend = f32(); this.tokens = u32(); this.budget = u32(); this.free = u32(); this.waiting = u32();
    this.narrow = u32(); this.wide = u32(); this.merged = u32(); this.held = u8(); this.pressure = u8(); this.thin = u8();
    this.cached = u32(); this.queued = u32(); this.lanes = u32();
    this.blocks = Array.from({ length: CLASSES }, u32);
    this.cell = new Uint8Array(CAPACITY * ROWS);
    this.who = new Uint32Array(CAPACITY * ROWS);
    // seconds until the next token was due
    this.slack = new Float32Array(CAPACITY * ROWS);
    /** @type {Map<number, { lane: number, reason: number }[]>} who ended with a column */
    this.ends = new Map();
    /** @type {Map<number, string>} what a column that is no step says */
    this.notes = new Map();
    /** @type {string[]} */
    this.classes = [];
    // the column of a step under way
    /** @type {Map<number, number>} */
    this.open = new Map();
    this.lastDone = -1;
  }

  get first() { return Math.max(0, this.count - CAPACITY); }

  /** @param {number} column */
  has(column) { return column >= this.first && column < this.count; }

  /** @param {number} time @param {number} kind */
  add(time, kind) {
    const column = this.count++;
    const at = column % CAPACITY;
    const old = column - CAPACITY;
    if (old >= 0) {
      this.ends.delete(old);
      this.notes.delete(old);
    }
    this.kind[at] = kind;
    this.planned[at] = this.start[at] = this.done[at] = time;
    this.cell.fill(EMPTY, at * ROWS, (at + 1) * ROWS);
    this.who.fill(0, at * ROWS, (at + 1) * ROWS);
    this.slack.fill(NaN, at * ROWS, (at + 1) * ROWS);
    for (const ring of [this.tokens, this.predicted, this.backend, this.queued, this.waiting, this.narrow, this.wide, this.budget]) ring[at] = 0;
    this.held[at] = 255;
    return at;
  }

  /** A column that is no step. @param {number} kind @param {number} time @param {string} note */
  mark(kind, time, note) {
    this.add(time, kind);
    this.notes.set(this.count - 1, note);
  }

  /** A step was planned, and the model is as it left it. @param {any} plan @param {import("./model.js").Model} model */
  plan(plan, model) {
    const at = this.add(plan.planned, COLUMN.step);
    this.open.set(plan.step, this.count - 1);
    this.step[at] = plan.step;
    this.done[at] = NaN;
    this.predicted[at] = plan.predicted; this.tokens[at] = plan.tokens; this.budget[at] = plan.budget; this.free[at] = plan.free;
    this.waiting[at] = plan.waiting; this.narrow[at] = plan.narrow; this.wide[at] = plan.wide; this.merged[at] = plan.merged;
    this.held[at] = plan.blockedBy; this.pressure[at] = plan.pressure; this.thin[at] = plan.thin ? 1 : 0;
    this.cached[at] = model.gauges?.cached ?? 0;
    const base = at * ROWS;
    let row = 0;
    for (const seen of model.requests.values()) {
      if (seen.lane !== NO_LANE) continue;
      if (row === QUEUE) break;
      this.cell[base + row] = seen.state;
      this.who[base + row] = seen.number;
      note(seen, plan.planned);
      this.slack[base + row] = margin(seen, plan.planned);
      row++;
    }
    this.queued[at] = row;
    const size = model.start.block_size || 16;
    const owned = new Array(CLASSES).fill(0);
    let top = 0;
    for (let lane = 0; lane < model.lanes.length; lane++) {
      const seen = model.at(lane);
      if (!seen) continue;
      if (lane < LANES) {
        this.cell[base + QUEUE + lane] = seen.state;
        this.who[base + QUEUE + lane] = seen.number;
        note(seen, plan.planned);
        this.slack[base + QUEUE + lane] = margin(seen, plan.planned);
        top = lane + 1;
      }
      owned[this.classOf(seen.told?.slo ?? "")] += Math.ceil(seen.computed / size);
    }
    this.lanes[at] = top;
    for (let i = 0; i < CLASSES; i++) this.blocks[i][at] = owned[i];
  }

  /** @param {any} step */
  result(step) {
    const column = this.open.get(step.plan.step);
    if (column === undefined) return;
    this.open.delete(step.plan.step);
    this.lastDone = column;
    if (!this.has(column)) return;
    const at = column % CAPACITY;
    this.start[at] = step.start; this.done[at] = step.done.done; this.backend[at] = step.done.backend;
  }

  /** A request ended, most often with the newest result. @param {import("./model.js").Seen} seen */
  ended(seen) {
    if (seen.lane === NO_LANE || seen.lane >= LANES || this.lastDone < 0) return;
    const told = this.ends.get(this.lastDone) ?? [];
    told.push({ lane: seen.lane, reason: seen.ended.reason });
    this.ends.set(this.lastDone, told);
  }

  /** The steps under way are over. */
  cut() { this.open.clear(); }

  /** @param {string} name */
  classOf(name) {
    const known = this.classes.indexOf(name);
    if (known >= 0) return Math.min(known, CLASSES - 1);
    this.classes.push(name);
    return Math.min(this.classes.length - 1, CLASSES - 1);
  }

  /** The last column that was planned at that time or before. @param {number} time */
  at(time) {
    let low = this.first, high = this.count;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.planned[middle % CAPACITY] <= time) low = middle + 1;
      else high = middle;
    }
    return Math.max(this.first, low - 1);
  }

  /** What a step took: from when it could begin. @param {number} column */
  took(column) {
    const at = column % CAPACITY;
    return this.done[at] - this.start[at];
  }
}

/** Which of two states is seen where there is room for one: the rarer. */
export const RANK = new Uint8Array(256);
[STATE.decode, STATE.skipped, STATE.held, STATE.wait, STATE.chunk, STATE.swapped, STATE.preempted].forEach((state, i) => (RANK[state] = i + 1));
RANK[EMPTY] = 0;
