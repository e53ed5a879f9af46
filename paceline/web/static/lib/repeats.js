// Whether an answer repeats itself: the rule of paceline/cli/offline/repetition.py.

// so many words in a row, so often, make a loop
const WORDS = 4, TIMES = 8;
// characters at the end that are one unit over and over, and how often at least
const TAIL = 160, UNITS = 8;

/** @returns {(piece: string) => boolean} told each piece of one answer: whether it repeats itself by now */
export function repetition() {
  let tail = "", open = "", found = false;
  /** @type {string[]} */
  let last = [];
  /** @type {Map<string, number>} */
  const runs = new Map();
  return (piece) => {
    tail = (tail + piece).slice(-TAIL);
    const words = (open + piece).split(/\s+/u);
    open = words.pop() ?? "";
    for (const word of words) {
      if (!word) continue;
      last = [...last, word].slice(-WORDS);
      if (last.length < WORDS) continue;
      const run = last.join(" "), times = (runs.get(run) ?? 0) + 1;
      runs.set(run, times);
      found ||= times >= TIMES;
    }
    return found || (tail.length === TAIL && isOneUnit(tail));
  };
}

/** @param {string} tail */
function isOneUnit(tail) {
  for (let size = 1; size <= TAIL / UNITS; size++) {
    if (tail.slice(size) === tail.slice(0, -size) && tail.slice(-size).trim()) return true;
  }
  return false;
}
