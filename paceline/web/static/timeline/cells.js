// The picture of who was where: a pixel a cell, made anew for each frame and stretched.
import { STATE } from "./decode.js";
import { CAPACITY, EMPTY, QUEUE, RANK, ROWS } from "./history.js";
import { binOf } from "./slack.js";

/** States that a colour of a group stands in for: those of requests that run. */
const RUNS = new Uint8Array(256);
RUNS[STATE.chunk] = RUNS[STATE.decode] = RUNS[STATE.skipped] = 1;

/**
 * @param {import("./paint.js").Painter} painter @param {CanvasRenderingContext2D} c @param {any} place @param {any} view
 * @param {{ matches: ((number: number) => boolean) | null, tint: Uint32Array | null, bySlack: boolean }} shown
 */
export function drawCells(painter, c, place, view, shown) {
  const { history, palette, faint, queueRows, laneRows } = painter;
  const { cell, who, slack } = history;
  const count = place.from || place.size < 1 ? place.room : place.last - place.first;
  const rows = queueRows + laneRows;
  if (count <= 0 || !rows) return;
  let { image } = painter;
  if (!image || image.width !== count || image.height !== rows) painter.image = image = c.createImageData(count, rows);
  const pixels = new Uint32Array(image.data.buffer);
  const { matches, tint, bySlack } = shown;
  // rows of the picture, as rows of the history
  const sources = Int32Array.from({ length: rows }, (_, row) => (row < queueRows ? row : QUEUE + painter.laneIn(row - queueRows)));
  /** @param {number} at */
  const coloured = (at) => {
    const state = cell[at];
    if (bySlack) {
      const bin = binOf(slack[at]);
      if (bin >= 0) return painter.slackPixels[bin];
    } else if (tint && RUNS[state]) return tint[who[at] & 0xffff] || palette[state];
    return palette[state];
  };
  const plain = !place.from && place.size >= 1 && !matches;
  const each = place.size < 1 ? 1 / place.size : 1;
  const left = view.end - place.room * each;
  if (plain && !tint && !bySlack) {
    for (let i = 0; i < count; i++) {
      const base = ((place.first + i) % CAPACITY) * ROWS;
      for (let row = 0, to = i; row < rows; row++, to += count) pixels[to] = palette[cell[base + sources[row]]];
    }
  } else if (plain) {
    for (let i = 0; i < count; i++) {
      const base = ((place.first + i) % CAPACITY) * ROWS;
      for (let row = 0, to = i; row < rows; row++, to += count) pixels[to] = coloured(base + sources[row]);
    }
  } else pixels.fill(0);
  for (let i = 0; i < count && !plain; i++) {
    let from = place.first + i, to = from + 1;
    if (place.from) {
      from = place.from[i];
      to = Math.max(from + 1, place.from[i + 1]);
      // nothing ran then
      if (from >= history.count || history.start[from % CAPACITY] > place.begin + ((i + 1) / place.room) * place.seconds) continue;
    } else if (place.size < 1) {
      from = Math.floor(left + i * each);
      to = Math.max(from + 1, Math.floor(left + (i + 1) * each));
    }
    from = Math.max(from, history.first);
    to = Math.min(to, history.count);
    for (let row = 0; row < rows; row++) {
      let state = EMPTY, seen = 0;
      for (let column = from; column < to; column++) {
        const at = (column % CAPACITY) * ROWS + sources[row];
        // of several steps in one place the rarest state is seen
        if (RANK[cell[at]] > RANK[state]) {
          state = cell[at];
          seen = at;
        }
      }
      if (state === EMPTY) continue;
      pixels[i + count * row] = matches && !matches(who[seen]) ? faint[state] : coloured(seen);
    }
  }
  const { cells } = painter;
  if (cells.width < count || cells.height < rows) {
    cells.width = Math.max(count, cells.width);
    cells.height = Math.max(rows, cells.height);
  }
  /** @type {CanvasRenderingContext2D} */ (cells.getContext("2d")).putImageData(image, 0, 0);
  c.imageSmoothingEnabled = false;
  const wide = place.from || place.size < 1 ? place.room : count * place.size;
  const x = place.from || place.size < 1 ? painter.width - place.room : painter.x(place, view, place.first);
  const h = painter.rowHeight;
  if (queueRows) c.drawImage(cells, 0, 0, count, queueRows, x, painter.y.queue, wide, queueRows * h);
  c.drawImage(cells, 0, queueRows, count, laneRows, x, painter.y.lanes, wide, laneRows * h);
  if (h >= 5) {
    // a line between lanes, so that neighbours are told apart
    const begin = painter.width - place.room;
    c.fillStyle = painter.colours.ground;
    for (let row = 1; row < queueRows; row++) c.fillRect(begin, painter.y.queue + row * h, place.room, 1);
    for (let row = 1; row < laneRows; row++) c.fillRect(begin, painter.y.lanes + row * h, place.room, 1);
  }
}
