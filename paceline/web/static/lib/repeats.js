// Whether an answer repeats itself: the rule of paceline/cli/offline/repetition.py.

// a loop is one stretch of words over and over, at least four words long, eight times in a row; a longer stretch needs fewer times,
// once so many words stand where they stood before
const WORDS = 4, TIMES = 8, MANY = 100, LEAST = 4;
// characters at the end that are one unit over and over, and how often at least
const TAIL = 160, UNITS = 8;

/** @returns {(piece: string) => boolean} takes each piece of one answer, and returns whether it repeats itself by now */
export function repetition() {
  let tail = "", open = "", found = false, distance = 0, same = 0;
  /** @type {string[]} */
  const words = [];
  /** @type {Map<string, number>} where each run of four words stood last */
  const at = new Map();
  const isLoop = (/** @type {string} */ word) => {
    const here = words.push(word) - 1, run = words.slice(-WORDS).join(" ");
    if (distance && words[here - distance] === word) same++;
    else {
      distance = here - (at.get(run) ?? here);
      same = distance ? WORDS : 0;
    }
    at.set(run, here);
    const again = Math.min((TIMES - 1) * distance, Math.max(MANY, (LEAST - 1) * distance));
    return distance > 0 && same >= Math.max((TIMES - 1) * WORDS, again);
  };
  return (piece) => {
    tail = (tail + piece).slice(-TAIL);
    const ended = (open + piece).split(/\s+/u);
    open = ended.pop() ?? "";
    // words without a letter do not count: a list has its numbers, a table its bars and dashes
    for (const word of ended) if (/\p{L}/u.test(word)) found = isLoop(word) || found;
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
