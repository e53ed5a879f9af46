// Who runs, who waits and since when, rebuilt from frames: the same as paceline/timeline/model.py.
import { KIND, NO_LANE, STATE } from "./decode.js";

/**
 * @typedef {{ state: number, start: number, end: number, lane: number, steps: number, tokens: number }} Span
 * @typedef {{ number: number, told: any, state: number, lane: number, demoted: boolean, since: number, computed: number,
 *   preemptions: number, waited: number, steps: number, tokens: number, spans: Span[], ended: any, lastLane: number,
 *   output: number, young: boolean, firstAt: number }} Seen of the last three: see slack.js
 */

// refusals that are remembered by name
const MOST_REFUSED = 256;

/** @param {number} number @param {number} since @returns {Seen} */
const unknown = (number, since) => ({
  number, told: null, state: STATE.wait, lane: NO_LANE, demoted: false, since, computed: 0, preemptions: 0, waited: 0, steps: 0,
  tokens: 0, spans: [], ended: null, lastLane: NO_LANE, output: 0, young: false, firstAt: NaN,
});
/** @param {number} state */
export const waits = (state) => state === STATE.wait || state === STATE.preempted || state === STATE.swapped;
/** @param {number} state */
export const runs = (state) => state === STATE.chunk || state === STATE.decode || state === STATE.skipped;

export class Model {
  /** @param {{ planned?: (step: any) => void, stepped?: (step: any) => void, ended?: (seen: Seen) => void, reset?: () => void }} [tell] */
  constructor(tell = {}) {
    this.tell = tell;
    /** @type {Map<number, Seen>} */
    this.requests = new Map();
    /** @type {number[]} numbers by lane; 0: it is free */
    this.lanes = [];
    /** @type {Map<number, any>} */
    this.steps = new Map();
    this.step = -1;
    this.now = -Infinity;
    this.done = -Infinity;
    this.doubts = 0;
    this.synced = false;
    /** @type {any} */ this.start = {};
    /** @type {any} */ this.hello = {};
    /** @type {any} */ this.gauges = null;
    /** @type {any[]} */ this.gaps = [];
    /** @type {any[]} */ this.notices = [];
    // who waits for a grammar, and the last that were refused: [id, class, tenant, time], and why
    /** @type {any[][]} */ this.held = [];
    this.numHeld = 0;
    /** @type {any[][]} */ this.refused = [];
    this.numRefused = 0;
  }

  /** @param {any} frame */
  take(frame) {
    const handler = /** @type {any} */ (this)[`_${frame.frame}`];
    if (handler) handler.call(this, frame);
  }

  /** @param {any} frame */
  _announce(frame) {
    this.now = Math.max(this.now, frame.added);
    let seen = this.requests.get(frame.number);
    if (!seen) {
      seen = unknown(frame.number, frame.arrival);
      if (frame.parent) seen.state = STATE.held;
      this.requests.set(frame.number, seen);
    }
    seen.told = frame;
  }

  /** @param {any} plan */
  _plan(plan) {
    this.step = plan.step;
    this.now = Math.max(this.now, plan.planned);
    const step = { plan, done: null, start: NaN };
    this.steps.set(plan.step, step);
    /** @type {Map<number, number>} */
    const computed = new Map();
    let earlier = 0;
    for (const event of plan.events) {
      if (event.kind === KIND.admit) {
        this.admit(event, plan.planned);
        continue;
      }
      const seen = this.at(event.lane);
      if (!seen) continue;
      if (event.kind === KIND.chunk || event.kind === KIND.draft) {
        computed.set(event.lane, event.value);
        this.turn(seen, event.kind === KIND.chunk ? STATE.chunk : STATE.decode, plan.planned);
      } else if (event.kind === KIND.earlier) earlier = event.value / 1e6;
      else {
        this.event(seen, event, plan.planned - earlier);
        earlier = 0;
      }
    }
    for (let lane = 0; lane < this.lanes.length; lane++) {
      const seen = this.at(lane);
      if (!seen) continue;
      const tokens = computed.get(lane) ?? (seen.state === STATE.decode ? plan.merged : 0);
      if (!tokens) continue;
      seen.steps++;
      seen.tokens += tokens;
      seen.computed += tokens;
    }
    this.tell.planned?.(step);
  }

  /** @param {Seen} seen @param {any} event @param {number} now */
  event(seen, { kind, value }, now) {
    if (kind === KIND.found) seen.computed += value;
    else if (kind === KIND.held) this.heldBefore(seen, value / 1e6);
    else if (kind === KIND.wrong) seen.computed = Math.max(0, seen.computed - value);
    else if (kind === KIND.narrow) this.turn(seen, STATE.decode, now);
    else if (kind === KIND.skip) this.turn(seen, STATE.skipped, now);
    else if (kind === KIND.preempt || kind === KIND.swap) {
      this.turn(seen, kind === KIND.swap ? STATE.swapped : STATE.preempted, now);
      seen.preemptions++;
      seen.computed = 0;
      this.lanes[seen.lane] = 0;
      seen.lane = NO_LANE;
    } else if (kind === KIND.demote || kind === KIND.promote) seen.demoted = kind === KIND.demote;
  }

  /** @param {any} frame */
  _done(frame) {
    this.now = Math.max(this.now, frame.done);
    for (const event of frame.events) {
      const seen = this.at(event.lane);
      if (seen) this.event(seen, event, frame.done);
    }
    const step = this.steps.get(frame.step);
    if (step) {
      this.steps.delete(frame.step);
      step.done = frame;
      step.start = Math.max(step.plan.planned, this.done);
      this.tell.stepped?.(step);
    }
    this.done = frame.done;
    // their results went untold
    for (const number of this.steps.keys()) if (number < frame.step) this.steps.delete(number);
  }

  /** @param {any} frame */
  _end(frame) {
    this.now = Math.max(this.now, frame.when);
    const seen = this.requests.get(frame.number);
    if (!seen) return;
    this.requests.delete(frame.number);
    this.turn(seen, STATE.ended, frame.when);
    seen.ended = frame;
    if (seen.lane !== NO_LANE) this.lanes[seen.lane] = 0;
    this.tell.ended?.(seen);
  }

  /** @param {any} frame */
  _keyframe(frame) {
    if (this.synced && !frame.reset) {
      for (const lane of frame.lanes) {
        const seen = this.requests.get(lane.number);
        if (!seen || seen.lane !== lane.lane) this.doubts++;
        else seen.computed = lane.computed;
      }
      return;
    }
    this.synced = true;
    this.now = Math.max(this.now, frame.now);
    this.lanes = [];
    const told = new Set(frame.lanes.map((/** @type {any} */ lane) => lane.number));
    for (const seen of this.requests.values()) {
      if (told.has(seen.number) || seen.lane === NO_LANE) continue;
      this.turn(seen, STATE.wait, frame.now);
      seen.lane = NO_LANE;
    }
    for (const lane of frame.lanes) {
      let seen = this.requests.get(lane.number);
      if (!seen) this.requests.set(lane.number, (seen = unknown(lane.number, 0)));
      const state = lane.state <= STATE.ended ? lane.state : STATE.decode;
      if (!seen.spans.length && lane.preemptions) {
        // it ran before this page came, and what it did then is not known
        seen.state = state;
        seen.since = lane.since;
      } else this.turn(seen, state, lane.since > seen.since ? lane.since : frame.now);
      seen.lane = lane.lane;
      seen.demoted = lane.demoted;
      seen.computed = lane.computed;
      seen.preemptions = lane.preemptions;
      seen.waited = lane.waited;
      if (lane.lane !== NO_LANE) this.put(lane.lane, lane.number);
    }
  }

  /** @param {any} frame */
  _start(frame) {
    this.requests.clear();
    this.steps.clear();
    this.lanes = [];
    this.held = [];
    this.numHeld = 0;
    this.step = -1;
    this.done = -Infinity;
    this.start = frame.told;
    // one that began earlier: who runs is in the keyframe that follows
    this.synced = !frame.told.goes_on;
    this.tell.reset?.();
  }
  /** @param {any} frame */
  _hello(frame) { this.hello = frame.told; }
  /** @param {any} frame */
  _gauges(frame) { this.gauges = frame.told; }
  /** @param {any} frame */
  _gap(frame) {
    this.gaps.push(frame.told);
    // what came in between is not known
    this.synced = false;
  }
  /** @param {any} frame */
  _door({ told }) {
    this.held = Array.isArray(told.held) ? told.held : [];
    this.numHeld = Number(told.num_held) || 0;
    this.refused.push(...(Array.isArray(told.refused) ? told.refused : []));
    this.refused.splice(0, Math.max(0, this.refused.length - MOST_REFUSED));
    this.numRefused += Number(told.num_refused) || 0;
  }
  /** @param {any} frame */
  _notice(frame) { this.notices.push(frame.told); }

  /** @param {number} lane */
  at(lane) {
    const number = this.lanes[lane];
    return number ? this.requests.get(number) : undefined;
  }

  /** @param {number} lane @param {number} number */
  put(lane, number) {
    while (this.lanes.length <= lane) this.lanes.push(0);
    this.lanes[lane] = number;
  }

  /** @param {any} event @param {number} now */
  admit(event, now) {
    const before = this.at(event.lane);
    if (before) {
      this.doubts++;
      before.lane = NO_LANE;
    }
    const seen = this.requests.get(event.value);
    // it ended after the plan was made
    if (!seen) return;
    if (seen.lane !== NO_LANE) this.lanes[seen.lane] = 0;
    this.turn(seen, STATE.decode, now);
    seen.lane = seen.lastLane = event.lane;
    seen.computed = 0;
    this.put(event.lane, event.value);
  }

  /** Of the wait that has just ended, the first seconds were for its parent's prompt. @param {Seen} seen @param {number} seconds */
  heldBefore(seen, seconds) {
    const last = seen.spans.at(-1);
    if (!last || (last.state !== STATE.wait && last.state !== STATE.held)) return;
    const until = Math.min(last.end, last.start + seconds);
    seen.spans.splice(-1, 1, { ...last, state: STATE.held, end: until }, { ...last, state: STATE.wait, start: until });
    seen.waited += last.state === STATE.held ? last.end - until : last.start - until;
  }

  /** The request changes into a state. @param {Seen} seen @param {number} state @param {number} now */
  turn(seen, state, now) {
    if (seen.state === state) return;
    if (waits(seen.state)) seen.waited += Math.max(0, now - seen.since);
    const end = Math.max(now, seen.since);
    if (end > seen.since || seen.steps) {
      seen.spans.push({ state: seen.state, start: seen.since, end, lane: runs(seen.state) ? seen.lane : NO_LANE, steps: seen.steps, tokens: seen.tokens });
    }
    seen.state = state;
    seen.since = now;
    seen.steps = seen.tokens = 0;
  }
}
