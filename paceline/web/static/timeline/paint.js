// Draws the history on a canvas: steps, who waits, who runs, memory. One picture of cells is made and stretched; lines and
// labels go over it. It draws when asked and never by itself.
import { drawCells } from "./cells.js";
import { STATE } from "./decode.js";
import { CAPACITY, CLASSES, COLUMN, EMPTY, QUEUE, ROWS } from "./history.js";
import { BINS } from "./slack.js";
import { duration, visible } from "../lib/format.js";

export const GUTTER = 72;
const PARTS = { held: 14, tokens: 54, took: 40, gap: 8, band: 58, axis: 22 };
const NAMES = ["ground", "panel", "line", "text", "quiet", "accent", "bad", "wait", "chunk", "decode", "preempted", "swapped",
  "class0", "class1", "class2", "class3", "cached", ...BINS.map(({ colour }) => colour)];
/** What held the queue up, as a letter where there is room. */
export const REASON_COLOURS = ["quiet", "chunk", "decode", "preempted", "class1", "class2", "bad"];

/** @param {HTMLElement} element @returns {Record<string, string>} colours of the theme, as the browser computes them */
export function coloursOf(element) {
  const probe = document.createElement("span");
  element.append(probe);
  /** @type {Record<string, string>} */
  const found = {};
  for (const name of NAMES) {
    probe.style.setProperty("color", `var(--${name})`);
    found[name] = getComputedStyle(probe).color;
  }
  probe.remove();
  return found;
}

/** @param {string} colour @param {number} [alpha] @returns {number} as a pixel of image data */
function pixel(colour, alpha = 1) {
  const [r, g, b] = (colour.match(/[\d.]+/g) ?? ["0", "0", "0"]).map(Number);
  return ((Math.round(255 * alpha) << 24) | (b << 16) | (g << 8) | r) >>> 0;
}

export class Painter {
  /** @param {HTMLCanvasElement} canvas @param {import("./history.js").History} history */
  constructor(canvas, history) {
    this.canvas = canvas;
    this.history = history;
    this.context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    this.cells = document.createElement("canvas");
    /** @type {Record<string, string>} */
    this.colours = {};
    this.palette = new Uint32Array(256);
    this.faint = new Uint32Array(256);
    this.width = this.height = 0;
    // dots of the screen to a pixel of the page; 0: nothing is laid out yet
    this.ratio = 0;
    // where the parts begin, from the top
    this.y = { held: 0, tokens: 0, took: 0, queue: 0, lanes: 0, band: 0, axis: 0 };
    this.compact = false;
    this.rowHeight = 8;
    this.scale = { tokens: "", took: "" };
    this.queueRows = 1;
    this.laneRows = 8;
    /** @type {{ order: Int32Array, groups: { name: string, row: number }[] } | null} null: lane by lane */
    this.arrangement = null;
    /** @type {number[]} of classes and tenants, and of the time that is left */
    this.groupPixels = [];
    /** @type {number[]} */
    this.slackPixels = [];
    /** @type {ImageData | null} */
    this.image = null;
    this.frames = 0;
    this.milliseconds = 0;
  }

  /** The theme has changed. */
  recolour() {
    const c = (this.colours = coloursOf(document.body));
    this.groupPixels = Array.from({ length: CLASSES }, (_, i) => pixel(c[`class${i}`]));
    this.slackPixels = BINS.map(({ colour }) => pixel(c[colour]));
    for (const [palette, alpha] of /** @type {[Uint32Array, number][]} */ ([[this.palette, 1], [this.faint, 0.22]])) {
      palette.fill(0);
      palette[STATE.wait] = pixel(c.wait, alpha);
      palette[STATE.held] = pixel(c.wait, 0.45 * alpha);
      palette[STATE.chunk] = pixel(c.chunk, alpha);
      palette[STATE.decode] = pixel(c.decode, alpha);
      palette[STATE.skipped] = pixel(c.decode, 0.3 * alpha);
      palette[STATE.preempted] = pixel(c.preempted, alpha);
      palette[STATE.swapped] = pixel(c.swapped, alpha);
      palette[EMPTY] = 0;
    }
  }

  /** Heights of the parts, from top to bottom. @param {number} queue @param {number} lanes @param {number} width @param {boolean} compact */
  layout(queue, lanes, width, compact) {
    this.compact = compact;
    this.queueRows = compact ? 0 : queue;
    this.laneRows = compact ? 0 : lanes;
    const rows = this.queueRows + this.laneRows;
    // whole pixels, unless there are so many rows that they would not fit
    this.rowHeight = rows ? Math.min(14, rows > 215 ? Math.max(1, 430 / rows) : Math.floor(430 / rows)) : 0;
    const top = PARTS.held + PARTS.tokens + PARTS.took + PARTS.gap;
    this.y = {
      held: 2,
      tokens: 2 + PARTS.held,
      took: 2 + PARTS.held + PARTS.tokens + 4,
      queue: top + 6,
      lanes: top + 6 + (this.queueRows ? this.queueRows * this.rowHeight + PARTS.gap : 0),
      band: 0,
      axis: 0,
    };
    this.y.band = this.y.lanes + this.laneRows * this.rowHeight + PARTS.gap;
    this.y.axis = this.y.band + PARTS.band + 2;
    const height = this.y.axis + PARTS.axis;
    const ratio = globalThis.devicePixelRatio || 1;
    if (this.width !== width || this.height !== height || this.ratio !== ratio) {
      Object.assign(this, { width, height, ratio });
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
      this.canvas.style.setProperty("height", `${height}px`);
    }
  }

  /**
   * Where each column of the picture comes from. `view.end` is the column behind the right edge, `view.zoom` pixels of a step
   * (or of 10 ms).
   * @param {{ end: number, zoom: number, byTime: boolean, time: number }} view
   */
  place(view) {
    const room = this.width - GUTTER;
    const { history } = this;
    if (view.byTime) {
      const seconds = (room / view.zoom) * 0.01;
      const begin = view.time - seconds;
      const from = new Int32Array(room + 1);
      let column = history.at(begin);
      if (history.count && history.planned[column % CAPACITY] > begin) column = history.first;
      for (let x = 0; x <= room; x++) {
        const time = begin + (x / room) * seconds;
        while (column < history.count && !(endOf(history, column) > time)) column++;
        from[x] = column;
      }
      return { byTime: true, begin, seconds, room, from, first: from[0], last: Math.min(history.count, from[room] + 1), size: 1 };
    }
    const size = view.zoom;
    const first = Math.max(history.first, Math.floor(view.end - room / size));
    return { byTime: false, begin: 0, seconds: 0, room, from: null, first, last: Math.min(history.count, Math.ceil(view.end)), size };
  }

  /** The left edge of a column. @param {any} place @param {any} view @param {number} column */
  x(place, view, column) {
    if (!place.byTime) return this.width - (view.end - column) * place.size;
    const time = this.history.start[column % CAPACITY];
    return GUTTER + ((time - place.begin) / place.seconds) * place.room;
  }

  /** The right edge. @param {any} place @param {any} view @param {number} column */
  xEnd(place, view, column) {
    if (!place.byTime) return this.width - (view.end - column - 1) * place.size;
    return GUTTER + ((endOf(this.history, column) - place.begin) / place.seconds) * place.room;
  }

  /** @param {any} view @param {number} x */
  columnAt(view, x) {
    if (x < GUTTER) return -1;
    const place = this.place(view);
    const column = place.from ? place.from[Math.min(place.room, Math.max(0, Math.round(x - GUTTER)))] : Math.floor(view.end - (this.width - x) / place.size);
    return this.history.has(column) ? column : -1;
  }

  /** The row of cells below a point, or -1. @param {number} y */
  rowAt(y) {
    const { queue, lanes } = this.y;
    if (y >= queue && y < queue + this.queueRows * this.rowHeight) return Math.floor((y - queue) / this.rowHeight);
    if (y >= lanes && y < lanes + this.laneRows * this.rowHeight) return QUEUE + this.laneIn(Math.floor((y - lanes) / this.rowHeight));
    return -1;
  }

  /** The lane that stands in a row of the picture. @param {number} row */
  laneIn(row) { return this.arrangement ? this.arrangement.order[row] : row; }

  /** @param {number} row of the history */
  yOf(row) {
    if (row < QUEUE) return this.y.queue + row * this.rowHeight;
    const lane = row - QUEUE;
    return this.y.lanes + (this.arrangement ? this.arrangement.order.indexOf(lane) : lane) * this.rowHeight;
  }

  /**
   * @param {any} view
   * @param {{ cursor: number, selected: number, matches: ((number: number) => boolean) | null, unix: number, blocks: number,
   *   tint: Uint32Array | null, bySlack: boolean, arrangement: any }} shown
   */
  draw(view, shown) {
    const began = performance.now();
    const { context: c, history, colours, width, height } = this;
    const place = this.place(view);
    this.arrangement = this.compact ? null : shown.arrangement;
    c.setTransform(this.ratio || 1, 0, 0, this.ratio || 1, 0, 0);
    c.fillStyle = colours.ground;
    c.fillRect(0, 0, width, height);
    this.frame(c);
    c.save();
    c.beginPath();
    c.rect(GUTTER, 0, width - GUTTER, height);
    c.clip();
    if (!this.compact) drawCells(this, c, place, view, shown);
    this.drawSteps(c, place, view);
    this.drawBand(c, place, view, shown.blocks);
    this.drawMarks(c, place, view);
    if (!this.compact) this.drawDetail(c, place, view, shown);
    this.drawAxis(c, place, view, shown.unix);
    if (history.has(shown.cursor)) {
      const x = this.x(place, view, shown.cursor);
      const w = Math.max(2, this.xEnd(place, view, shown.cursor) - x);
      c.strokeStyle = colours.text;
      c.lineWidth = 1;
      c.strokeRect(Math.round(x) - 0.5, 0.5, Math.round(w) + 1, this.y.axis - 1);
    }
    c.restore();
    this.drawScales(c);
    this.frames++;
    this.milliseconds = 0.9 * this.milliseconds + 0.1 * (performance.now() - began);
  }

  /** Names of the parts and their grounds. @param {CanvasRenderingContext2D} c */
  frame(c) {
    const { colours, width, y } = this;
    c.fillStyle = colours.panel;
    c.fillRect(GUTTER, y.tokens, width - GUTTER, PARTS.tokens);
    c.fillRect(GUTTER, y.took, width - GUTTER, PARTS.took);
    c.fillRect(GUTTER, y.band, width - GUTTER, PARTS.band);
    if (!this.compact) {
      c.fillRect(GUTTER, y.queue, width - GUTTER, this.queueRows * this.rowHeight);
      c.fillRect(GUTTER, y.lanes, width - GUTTER, this.laneRows * this.rowHeight);
    }
    c.fillStyle = colours.quiet;
    c.font = "12px system-ui, sans-serif";
    c.textBaseline = "middle";
    c.textAlign = "right";
    const label = (/** @type {string} */ text, /** @type {number} */ at) => c.fillText(text, GUTTER - 8, at);
    c.font = "11px system-ui, sans-serif";
    label("blocked by", y.held + 4);
    c.font = "12px system-ui, sans-serif";
    label("tokens", y.tokens + PARTS.tokens / 2 - 7);
    label("time", y.took + PARTS.took / 2 - 7);
    label("KV", y.band + PARTS.band / 2);
    if (!this.compact) {
      label("waiting", y.queue + (this.queueRows * this.rowHeight) / 2);
      const groups = this.arrangement?.groups ?? [];
      if (!groups.length) label("running", y.lanes + (this.laneRows * this.rowHeight) / 2);
      c.font = "11px system-ui, sans-serif";
      let free = -Infinity;
      for (const { name, row } of groups) {
        const at = y.lanes + row * this.rowHeight;
        c.fillRect(GUTTER - 6, at, 6, 1);
        if (at < free) continue;
        const shown = visible(name || "no name");
        label(shown.length > 10 ? `${shown.slice(0, 9)}…` : shown, at + 6);
        free = at + 13;
      }
    }
  }

  /** What the tallest bars stand for. @param {CanvasRenderingContext2D} c */
  drawScales(c) {
    const { y, scale } = this;
    c.fillStyle = this.colours.text;
    c.font = "12px system-ui, sans-serif";
    c.textBaseline = "middle";
    c.textAlign = "right";
    c.fillText(scale.tokens, GUTTER - 8, y.tokens + PARTS.tokens / 2 + 8);
    c.fillText(scale.took, GUTTER - 8, y.took + PARTS.took / 2 + 8);
  }

  /** Tokens against the budget, what steps took against what was predicted, and what held the queue up. @param {CanvasRenderingContext2D} c @param {any} place @param {any} view */
  drawSteps(c, place, view) {
    const { history, colours, y } = this;
    let most = 1, longest = 1e-4;
    for (let column = place.first; column < place.last; column++) {
      const at = column % CAPACITY;
      if (history.kind[at] !== COLUMN.step) continue;
      most = Math.max(most, history.tokens[at] / Math.max(1, history.merged[at]));
      const took = history.done[at] - history.start[at];
      longest = Math.max(longest, took || 0, history.predicted[at] || 0);
    }
    const paths = { narrow: new Path2D(), wide: new Path2D(), took: new Path2D(), predicted: new Path2D(), budget: new Path2D() };
    /** @type {Map<string, Path2D>} */
    const reasons = new Map();
    for (let column = place.first; column < place.last; column++) {
      const at = column % CAPACITY;
      if (history.kind[at] !== COLUMN.step) continue;
      const x = this.x(place, view, column);
      const w = Math.max(0.6, this.xEnd(place, view, column) - x);
      const gap = w >= 4 ? 1 : 0;
      const merged = Math.max(1, history.merged[at]);
      const all = (history.tokens[at] / merged / most) * (PARTS.tokens - 4);
      const narrow = Math.min(all, (history.narrow[at] / merged / most) * (PARTS.tokens - 4));
      const ground = y.tokens + PARTS.tokens;
      paths.narrow.rect(x, ground - narrow, w - gap, narrow);
      paths.wide.rect(x, ground - all, w - gap, all - narrow);
      const budget = history.budget[at] / most;
      if (budget <= 1) paths.budget.rect(x, ground - budget * (PARTS.tokens - 4) - 1, w, 1.5);
      const took = history.done[at] - history.start[at];
      if (took > 0) {
        const tall = (took / longest) * (PARTS.took - 4);
        paths.took.rect(x, y.took + PARTS.took - tall, w - gap, tall);
      }
      if (history.predicted[at] > 0) paths.predicted.rect(x, y.took + PARTS.took - (history.predicted[at] / longest) * (PARTS.took - 4) - 1, w, 2);
      if (history.held[at] !== 255) {
        const colour = colours[REASON_COLOURS[history.held[at]] ?? "quiet"];
        let path = reasons.get(colour);
        if (!path) reasons.set(colour, (path = new Path2D()));
        path.rect(x, y.held, w, 8);
      }
    }
    const fill = (/** @type {string} */ colour, /** @type {Path2D} */ path) => { c.fillStyle = colour; c.fill(path); };
    fill(colours.decode, paths.narrow);
    fill(colours.chunk, paths.wide);
    fill(colours.text, paths.budget);
    c.globalAlpha = 0.55;
    fill(colours.quiet, paths.took);
    c.globalAlpha = 1;
    fill(colours.accent, paths.predicted);
    for (const [colour, path] of reasons) fill(colour, path);
    this.scale = { tokens: `${Math.round(most)}`, took: duration(1e3 * longest) };
  }

  /** @param {CanvasRenderingContext2D} c @param {any} place @param {any} view @param {number} blocks */
  drawBand(c, place, view, blocks) {
    if (!blocks) return;
    const { history, colours, y } = this;
    const paths = Array.from({ length: CLASSES + 1 }, () => new Path2D());
    for (let column = place.first; column < place.last; column++) {
      const at = column % CAPACITY;
      if (history.kind[at] !== COLUMN.step) continue;
      const x = this.x(place, view, column);
      const w = Math.max(0.6, this.xEnd(place, view, column) - x + 0.4);
      const used = blocks - history.free[at];
      let owned = 0;
      for (let i = 0; i < CLASSES; i++) owned += history.blocks[i][at];
      // blocks that several share were counted for each
      const scale = owned > used && owned ? used / owned : 1;
      let ground = y.band + PARTS.band;
      const tall = (/** @type {number} */ count) => (count / blocks) * PARTS.band;
      for (let i = 0; i < CLASSES; i++) {
        const h = tall(history.blocks[i][at] * scale);
        paths[i].rect(x, ground - h, w, h);
        ground -= h;
      }
      const h = tall(Math.min(history.cached[at], history.free[at]));
      paths[CLASSES].rect(x, ground - h, w, h);
    }
    for (let i = 0; i < CLASSES; i++) {
      c.fillStyle = colours[`class${i}`];
      c.fill(paths[i]);
    }
    c.fillStyle = colours.cached;
    c.fill(paths[CLASSES]);
  }

  /** Columns that are no steps: what is missing, and why. @param {CanvasRenderingContext2D} c @param {any} place @param {any} view */
  drawMarks(c, place, view) {
    const { history, colours } = this;
    for (const [column, note] of history.notes) {
      if (column < place.first || column >= place.last) continue;
      const lost = history.kind[column % CAPACITY] === COLUMN.lost;
      const x = this.x(place, view, column), w = Math.max(6, this.xEnd(place, view, column) - x);
      c.fillStyle = colours.ground;
      c.fillRect(x, 0, w, this.y.axis);
      c.strokeStyle = lost ? colours.bad : colours.quiet;
      c.lineWidth = 1;
      c.beginPath();
      for (let at = -w; at < this.y.axis; at += 6) {
        c.moveTo(x, at + w);
        c.lineTo(x + w, at);
      }
      c.stroke();
      c.fillStyle = lost ? colours.bad : colours.quiet;
      c.fillRect(x, 0, 2, this.y.axis);
      c.textAlign = "right";
      c.textBaseline = "top";
      c.font = "600 12px system-ui, sans-serif";
      c.save();
      c.translate(x - 3, this.y.queue + 4);
      c.rotate(-Math.PI / 2);
      c.fillText(note, 0, -13);
      c.restore();
    }
  }

  /** What shows from some size on: patterns, ends, and the chosen request. @param {CanvasRenderingContext2D} c @param {any} place @param {any} view @param {any} shown */
  drawDetail(c, place, view, shown) {
    const { history, colours, rowHeight: h } = this;
    const wide = !place.from && place.size >= 6 && h >= 6;
    if (wide) {
      c.lineWidth = 1;
      for (let column = place.first; column < place.last; column++) {
        const base = (column % CAPACITY) * ROWS;
        const x = this.x(place, view, column), w = place.size;
        for (let row = 0; row < this.queueRows; row++) this.pattern(c, history.cell[base + row], x, this.yOf(row), w, h);
      }
    }
    if (h >= 5) {
      for (const [column, ends] of history.ends) {
        if (column < place.first || column >= place.last) continue;
        const x = this.xEnd(place, view, column);
        for (const { lane, reason } of ends) {
          if (lane >= this.laneRows) continue;
          const y = this.yOf(QUEUE + lane);
          c.strokeStyle = c.fillStyle = reason >= 2 ? colours.bad : colours.text;
          c.lineWidth = 1.5;
          c.beginPath();
          if (reason === 0) {
            // a tick: it was done
            c.moveTo(x - 5, y + h * 0.5); c.lineTo(x - 3, y + h * 0.8); c.lineTo(x, y + h * 0.2);
          } else if (reason === 1) {
            c.moveTo(x - 1, y + 1); c.lineTo(x - 1, y + h - 1);
          } else {
            c.moveTo(x - 5, y + 1); c.lineTo(x, y + h - 1); c.moveTo(x, y + 1); c.lineTo(x - 5, y + h - 1);
          }
          c.stroke();
        }
      }
    }
    if (shown.selected) this.outline(c, place, view, shown.selected);
  }

  /** @param {CanvasRenderingContext2D} c @param {number} state @param {number} x @param {number} y @param {number} w @param {number} h */
  pattern(c, state, x, y, w, h) {
    c.fillStyle = c.strokeStyle = this.colours.ground;
    if (state === STATE.wait || state === STATE.held) c.fillRect(x + w / 2 - 1, y + h / 2 - 1, 2, 2);
    else if (state === STATE.preempted) {
      c.beginPath(); c.moveTo(x + 1, y + h - 1); c.lineTo(x + w - 1, y + 1); c.stroke();
    } else if (state === STATE.swapped) c.fillRect(x + 2, y + 2, w - 4, h - 4);
  }

  /** @param {CanvasRenderingContext2D} c @param {any} place @param {any} view @param {number} number */
  outline(c, place, view, number) {
    const { history } = this;
    /** @type {{ row: number, from: number, to: number } | null} */
    let run = null;
    c.strokeStyle = this.colours.text;
    c.lineWidth = 2;
    const close = () => {
      if (!run) return;
      const x = this.x(place, view, run.from);
      c.strokeRect(x - 1, this.yOf(run.row) - 1, Math.max(2, this.xEnd(place, view, run.to) - x) + 2, this.rowHeight + 1);
      run = null;
    };
    for (let column = place.first; column < place.last; column++) {
      const base = (column % CAPACITY) * ROWS;
      let row = history.who.subarray(base, base + ROWS).indexOf(number);
      if (row >= 0 && (row < QUEUE ? row >= this.queueRows : row - QUEUE >= this.laneRows)) row = -1;
      if (run && run.row === row) run.to = column;
      else {
        close();
        if (row >= 0) run = { row, from: column, to: column };
      }
    }
    close();
  }

  /** @param {CanvasRenderingContext2D} c @param {any} place @param {any} view @param {number} unix */
  drawAxis(c, place, view, unix) {
    const { history, colours, y } = this;
    c.fillStyle = colours.quiet;
    c.textBaseline = "top";
    c.textAlign = "left";
    c.font = "11px system-ui, sans-serif";
    let free = -Infinity;
    let last = NaN;
    for (let column = place.first; column < place.last; column++) {
      const second = Math.floor(history.planned[column % CAPACITY] + unix);
      if (second === last) continue;
      const begins = !Number.isNaN(last);
      last = second;
      const x = this.x(place, view, column);
      if (!begins || x < free) continue;
      // spelling a time out takes longer than all else that is drawn
      const text = new Date(1e3 * second).toLocaleTimeString([], { hour12: false });
      c.fillRect(x, y.axis, 1, 4);
      c.fillText(text, x + 3, y.axis + 5);
      free = x + 78;
    }
  }
}

/** When a step ended; one under way, or a mark, at once. @param {import("./history.js").History} history @param {number} column */
function endOf(history, column) {
  const at = column % CAPACITY;
  return Number.isNaN(history.done[at]) ? history.planned[at] + history.predicted[at] : history.done[at];
}
