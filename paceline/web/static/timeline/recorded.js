// A timeline that is over: all of its frames, of which a stretch is shown, as many steps as the picture holds.
import { Decoder } from "./decode.js";
import { CAPACITY, History } from "./history.js";
import { Model } from "./model.js";

export class Recorded {
  /** @param {Uint8Array} data whole frames */
  constructor(data) {
    this.frames = new Decoder().feed(data);
    /** @type {any[]} plans of all steps */
    this.plans = this.frames.filter((frame) => frame.frame === "plan");
    this.model = new Model();
    this.history = new History();
    this.show(-Infinity);
  }

  /** Seconds, of the first and the last plan. */
  get begin() { return this.plans[0]?.planned ?? 0; }
  get end() { return this.plans.at(-1)?.planned ?? 0; }
  /** Whether there are more steps than are shown. */
  get cut() { return this.plans.length > CAPACITY; }

  /** Show the steps from that second on. @param {number} from */
  show(from) {
    // not so late that fewer are shown than there is room for
    const latest = this.plans[Math.max(0, this.plans.length - CAPACITY)]?.planned ?? 0;
    const begin = Math.min(from, latest);
    const history = (this.history = new History());
    const model = (this.model = new Model({
      planned: (step) => { if (step.plan.planned >= begin && history.count < CAPACITY) history.plan(step.plan, model); },
      stepped: (step) => history.result(step),
      ended: (seen) => history.ended(seen),
    }));
    for (const frame of this.frames) model.take(frame);
  }

  /** The column of a time, or -1 before the first and behind the last. @param {number} time */
  at(time) {
    const { history } = this;
    if (!history.count || time < history.planned[0]) return -1;
    const column = history.at(time);
    return column === history.count - 1 && time > (history.done[column] || history.planned[column]) ? -1 : column;
  }
}

/**
 * When two timelines first differ: a step that one has and the other does not, or that is not the same.
 * @param {any[]} one plans @param {any[]} other
 * @returns {number | null} seconds; null: as far as both go they are equal
 */
export function firstDifference(one, other) {
  const both = Math.min(one.length, other.length);
  for (let i = 0; i < both; i++) {
    const a = one[i], b = other[i];
    const same = Math.abs(a.planned - b.planned) < 1e-6 && a.tokens === b.tokens && a.narrow === b.narrow && a.wide === b.wide && a.waiting === b.waiting;
    if (!same) return Math.min(a.planned, b.planned);
  }
  return one.length === other.length ? null : (one[both] ?? other[both]).planned;
}
