// Other ways to look at the same lanes: by class, by tenant, by the time that is left.
import { CAPACITY, CLASSES, QUEUE, ROWS } from "./history.js";

export const BY = ["lane", "class", "tenant", "slack"];
/** @typedef {(number: number) => (import("./model.js").Seen | null | undefined)} Find */

/** @param {import("./model.js").Seen | null | undefined} seen @param {string} by */
export const groupOf = (seen, by) => (by === "class" ? seen?.told?.slo : seen?.told?.tenant) ?? "";

/**
 * Which lane stands in which row, by who has it in one column: those of a group together, groups by name, free lanes last.
 * @param {import("./history.js").History} history @param {number} column @param {number} lanes @param {string} by @param {Find} find
 * @returns {{ order: Int32Array, groups: { name: string, row: number }[] } | null} null: lane by lane
 */
export function arranged(history, column, lanes, by, find) {
  if (by === "lane" || !history.has(column)) return null;
  const base = (column % CAPACITY) * ROWS + QUEUE;
  const rows = Array.from({ length: lanes }, (_, lane) => {
    const number = history.who[base + lane];
    const slack = history.slack[base + lane];
    const key = by === "slack" ? (Number.isNaN(slack) ? Infinity : slack) : groupOf(find(number), by);
    return { lane, free: !number, key };
  });
  rows.sort((a, b) => Number(a.free) - Number(b.free) || (a.key < b.key ? -1 : a.key > b.key ? 1 : a.lane - b.lane));
  /** @type {{ name: string, row: number }[]} */
  const groups = [];
  rows.forEach(({ free, key }, row) => {
    if (by !== "slack" && !free && groups.at(-1)?.name !== key) groups.push({ name: String(key), row });
  });
  return { order: Int32Array.from(rows, ({ lane }) => lane), groups };
}

// names that are remembered: callers may make them up
const MOST_NAMES = 1000;

/** Names of groups in the order of their colours: the first that came, and the last colour for all others. */
export class Names {
  constructor() {
    /** @type {Map<string, number>} with their colours */
    this.known = new Map();
  }

  /** @param {string} name */
  of(name) {
    let colour = this.known.get(name);
    if (colour === undefined) {
      colour = Math.min(this.known.size, CLASSES - 1);
      if (this.known.size < MOST_NAMES) this.known.set(name, colour);
    }
    return colour;
  }
}

/**
 * A colour for each request, at the lower half of its number.
 * @param {Iterable<import("./model.js").Seen>} everybody @param {string} by @param {Names} names @param {number[]} pixels
 */
export function tinted(everybody, by, names, pixels) {
  const found = new Uint32Array(65536);
  // by number: which name has which colour does not hang on how much was known when they were first drawn
  for (const seen of [...everybody].sort((a, b) => a.number - b.number)) found[seen.number & 0xffff] = pixels[names.of(groupOf(seen, by))];
  return found;
}
